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
                fmt::format("a sequence of {} tokens cannot take {} more: {} were reserved for it",
                            sequence.rows, rows.rows, sequence.size.max_rows));
  }
  if (!sequence.prompted && sequence.rows + rows.rows > sequence.size.prompt_rows) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a prompt of {} tokens was announced and {} came",
                            sequence.size.prompt_rows, sequence.rows + rows.rows));
  }
}

/// A prompt on top of another.
void check_later_prompt(const CacheTraits& traits, const StepRows& rows) {
  const CacheNeeds& needs = traits.needs();
  if (rows.prompt && needs.one_prompt) {
    unsupported(fmt::format("--kv {} takes no second prompt: {}; prefill the conversation anew",
                            traits.plan().spec, why_one_prompt(traits.plan(), traits.device())));
  }
  if (needs.pictures_first && std::any_of(rows.modality.begin(), rows.modality.end(),
                                          [](int16_t tag) { return tag != kTextRow; })) {
    unsupported(
        fmt::format("--kv {} packs pictures when the first prompt ends and takes no "
                    "further ones; prefill the conversation anew",
                    traits.plan().spec));
  }
}

void check_pictures(const CacheTraits& traits, const StepRows& rows) {
  const auto last = std::max_element(rows.modality.begin(), rows.modality.end());
  if (last == rows.modality.end() || *last < Layouts::kMaxImages) return;
  if (!traits.layouts().per_image()) return;
  unsupported(
      fmt::format("--kv {} gives each picture scales of its own, for up to {} pictures "
                  "of a prompt; drop span=per_image or give fewer pictures",
                  traits.plan().spec, Layouts::kMaxImages));
}

}  // namespace

std::string_view why_one_prompt(const CachePlan& plan, Device device) noexcept {
  if (plan.retention == nullptr) return {};
  // A layer that uses another's codes must drop rows in the same step, which a prompt that passes
  // layer by layer does not.
  if (plan.share.any()) return "its layers share codes and drop rows";
  if (device.kind != DeviceKind::kCpu &&
      plan.retention->needs().decode_weights != ImportanceNeeds::DecodeWeights::kNone) {
    return "its weights of attention are on the GPU, and those of later prompts come from the host";
  }
  return {};
}

void check_rows(const CacheTraits& traits, const Sequence& sequence, const StepRows& rows) {
  check_size(sequence, rows);
  if (sequence.prompted) check_later_prompt(traits, rows);
  check_pictures(traits, rows);
  const bool in_parts = traits.layouts().joint() || !traits.layouts().stages();
  if (!sequence.prompted && !in_parts && !rows.ends_prompt) {
    unsupported(
        fmt::format("--kv {} packs each layer as soon as it is read: the first prompt "
                    "must come in one pass, and a part of {} rows came",
                    traits.plan().spec, rows.rows));
  }
}

void check_fork(bool prompted, int rows, int max_rows) {
  if (!prompted) {
    throw Error(ErrorCode::kInvalidArgument,
                "a sequence cannot be forked before its first prompt has ended, nor when it is "
                "closed; fork it between the two");
  }
  if (max_rows < rows) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a fork of at most {} tokens cannot go on from {}; give it room for "
                            "these and its own",
                            max_rows, rows));
  }
}

}  // namespace kvlm
