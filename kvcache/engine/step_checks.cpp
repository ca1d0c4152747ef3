#include "kvcache/engine/step_checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

namespace {

[[noreturn]] void unsupported(const std::string& message) {
  throw Error(ErrorCode::kUnsupported, message);
}

void check_size(const Sequence& sequence, const StepRows& rows) {
  if (sequence.rows + rows.rows > sequence.size.max_rows) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a sequence of {} tokens cannot grow by {}: {} tokens were reserved "
                            "for it; reserve more",
                            sequence.rows, rows.rows, sequence.size.max_rows));
  }
  if (!sequence.prompted && sequence.rows + rows.rows > sequence.size.prompt_rows) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "a prompt of {} tokens was announced, but {} were passed; pass the announced number",
            sequence.size.prompt_rows, sequence.rows + rows.rows));
  }
}

/// Checks a prompt after the first.
void check_later_prompt(const CacheTraits& traits, const StepRows& rows) {
  const CacheNeeds& needs = traits.needs();
  if (rows.prompt && needs.one_prompt) {
    unsupported(
        fmt::format("--kv {} takes no second prompt: {}; prefill the whole conversation again",
                    traits.plan().spec, why_one_prompt(traits.plan(), traits.device())));
  }
  if (needs.images_first && std::any_of(rows.modality.begin(), rows.modality.end(),
                                        [](int16_t tag) { return tag != kTextRow; })) {
    unsupported(
        fmt::format("--kv {} packs images at the end of the first prompt and takes no later ones; "
                    "prefill the whole conversation again",
                    traits.plan().spec));
  }
}

void check_images(const CacheTraits& traits, const StepRows& rows) {
  const auto last = std::max_element(rows.modality.begin(), rows.modality.end());
  if (last == rows.modality.end() || *last < Layouts::kMaxImages) return;
  if (!traits.layouts().per_image()) return;
  unsupported(
      fmt::format("--kv {} stores scales for each image, for at most {} images in a prompt; drop "
                  "span=per_image or give fewer images",
                  traits.plan().spec, Layouts::kMaxImages));
}

}  // namespace

std::string_view why_one_prompt(const CachePlan& plan, Device device) noexcept {
  if (plan.retention == nullptr) return {};
  // A layer that shares another's codes must evict in the same step. A later prompt is processed
  // layer by layer, so it cannot.
  if (plan.share.any()) return "its layers share codes and it evicts tokens";
  if (device.kind != DeviceKind::kCpu &&
      plan.retention->needs().decode_weights != ImportanceNeeds::DecodeWeights::kNone) {
    return "it needs attention weights, which are on the GPU, but those of a later prompt are "
           "computed on the host";
  }
  return {};
}

void check_rows(const CacheTraits& traits, const Sequence& sequence, const StepRows& rows) {
  check_size(sequence, rows);
  if (sequence.prompted) check_later_prompt(traits, rows);
  check_images(traits, rows);
  const bool in_parts = traits.layouts().joint() || !traits.layouts().stages();
  if (!sequence.prompted && !in_parts && !rows.ends_prompt) {
    unsupported(
        fmt::format("--kv {} packs each layer as soon as it is computed: pass the first prompt in "
                    "one call, not a part of {} tokens",
                    traits.plan().spec, rows.rows));
  }
}

void check_fork(bool prompted, int rows, int max_rows) {
  if (!prompted) {
    throw Error(ErrorCode::kInvalidArgument,
                "a sequence can be forked only after its first prompt and before it is closed; "
                "fork it between the two");
  }
  if (max_rows < rows) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a fork with a limit of {} tokens cannot continue a sequence of {}; "
                            "reserve tokens for these and for its own",
                            max_rows, rows));
  }
}

}  // namespace kvlm
