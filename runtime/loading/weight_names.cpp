#include "runtime/loading/weight_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

struct Alias {
  std::string_view found;
  std::string_view becomes;
};

// The first match of a group applies; the groups apply one after the other.
constexpr std::array kRoots = {
    Alias{"language_model.lm_head.", "lm_head."},
    Alias{"language_model.model.", "model.language_model."},
    Alias{"language_model.", "model.language_model."},
    Alias{"vision_tower.", "model.vision_tower."},
    Alias{"multi_modal_projector.", "model.multi_modal_projector."},
    Alias{"image_newline", "model.image_newline"},
    Alias{"model.embed_tokens.", "model.language_model.embed_tokens."},
    Alias{"model.layers.", "model.language_model.layers."},
    Alias{"model.norm.", "model.language_model.norm."},
    Alias{"model.mm_projector.0.", "model.multi_modal_projector.linear_1."},
    Alias{"model.mm_projector.2.", "model.multi_modal_projector.linear_2."},
};
constexpr std::array kNestedTower = {
    Alias{"model.vision_tower.vision_tower.", "model.vision_tower."},
};
constexpr std::array kTowerModel = {
    Alias{"model.vision_tower.vision_model.", "model.vision_tower."},
};

template <size_t N>
void apply(const std::array<Alias, N>& group, std::string& name) {
  for (const Alias& alias : group) {
    if (name.starts_with(alias.found)) {
      name.replace(0, alias.found.size(), alias.becomes);
      return;
    }
  }
}

bool is_ignorable(std::string_view name) {
  constexpr std::array<std::string_view, 4> kSuffixes = {
      ".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".position_ids"};
  constexpr std::array<std::string_view, 4> kPrefixes = {
      "model.vision_tower.post_layernorm.", "model.vision_tower.head.",
      "model.vision_tower.visual_projection.", "visual_projection."};
  for (const std::string_view suffix : kSuffixes) {
    if (name.ends_with(suffix)) return true;
  }
  for (const std::string_view prefix : kPrefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

}  // namespace

std::string canonical_llava_name(std::string_view name) {
  std::string canonical(name);
  // An identity module that some original checkpoints wrap around the projector.
  constexpr std::string_view kResampler = ".vision_resampler.";
  if (const size_t at = canonical.find(kResampler); at != std::string::npos) {
    canonical.erase(at, kResampler.size() - 1);  // keeps the second dot
  }
  apply(kRoots, canonical);
  apply(kNestedTower, canonical);
  apply(kTowerModel, canonical);
  return is_ignorable(canonical) ? std::string() : canonical;
}

void refuse_leftovers(const WeightMap& weights, std::span<const std::string_view> unread) {
  for (const std::string& name : weights.remaining()) {
    if (std::any_of(unread.begin(), unread.end(),
                    [&](std::string_view prefix) { return name.starts_with(prefix); })) {
      continue;
    }
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("the weights hold tensor {}, which config.json does not describe; the "
                            "weights and the configuration do not belong together",
                            name));
  }
  const std::vector<std::string> updates = weights.unused_updates();
  if (updates.empty()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("--lora: the model has no matrix {}, of {} of the adapter that it has not; "
                  "give the model that the adapter was trained on",
                  updates.front(), updates.size()));
}

}  // namespace kvlm
