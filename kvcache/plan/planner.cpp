// Makes a plan in two steps: sorts a spec's parts by kind, then makes the policy objects for one
// decoder. After each step the tables of conflicts are checked.

#include "kvcache/plan/planner.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kvcache/spec/registry.h"

namespace kvlm {

namespace {

Scope scope_of(const OptionValues& options) {
  if (options.text("scope") == "visual") return Scope::kVisual;
  return options.text("scope") == "text" ? Scope::kText : Scope::kAll;
}

/// What option rotate says; "auto" leaves it to the quantizer.
Rotated rotated_of(const OptionValues& options, const Quantizer& quantizer) {
  const std::string_view text = options.text("rotate");
  if (text == "auto") return quantizer.rotated();
  if (text == "keys") return Rotated::kKeys;
  return text == "hadamard" ? Rotated::kKeysAndValues : Rotated::kNothing;
}

/// A plan without policy objects.
std::shared_ptr<CachePlan> sorted_words(const CacheSpec& spec, const CacheShape& shape) {
  auto plan = std::make_shared<CachePlan>();
  plan->spec = canonical(spec);
  plan->shape = shape;
  for (const SpecPart& part : spec.parts) {
    const PolicyInfo& info = *find_policy(part.name);
    if (info.kind == PartKind::kRetention) {
      plan->retention_part = part;
      continue;
    }
    if (info.kind == PartKind::kSharing) {
      plan->sharing_part = part;
      continue;
    }
    if (info.kind == PartKind::kSimulation) {
      plan->simulation_part = part;
      continue;
    }
    CachePlan::Packer packer{
        part, find_format(part.name), scope_of(OptionValues(info, part)), {}, {}, {}};
    if (const std::string* layers = part.find("layers")) {
      packer.layers = *parse_layer_ranges(*layers);
    }
    if (packer.format) plan->rows = *packer.format;
    if (packer.scope != Scope::kAll && !packer.format) plan->split = true;
    plan->packers.push_back(std::move(packer));
  }
  return plan;
}

/// share=codes: odd layers from `from` on use the codes of the layer below.
ShareMap share_map(const SpecPart& part, int layers) {
  const auto [keys_from, values_from] =
      OptionValues(*find_policy(part.name), part).start_layers("from");
  ShareMap share;
  for (int layer = 0; layer < layers; ++layer) {
    const bool odd = layer % 2 == 1;
    share.key_owner.push_back(odd && layer >= keys_from ? layer - 1 : layer);
    share.value_owner.push_back(odd && layer >= values_from ? layer - 1 : layer);
  }
  return share;
}

/// Some layer uses another layer's keys or values.
bool shares(const ShareMap& share) {
  const auto other = [](const std::vector<int>& owners) {
    for (size_t layer = 0; layer < owners.size(); ++layer) {
      if (owners[layer] != static_cast<int>(layer)) return true;
    }
    return false;
  };
  return other(share.key_owner) || other(share.value_owner);
}

/// With keep=1 the plan has no retention, so results equal those without the part, bit for bit. A
/// quantizer then reserves no window for eviction either.
bool drops_rows(const CachePlan& plan) {
  if (!plan.retention_part) return false;
  const OptionValues options(*find_policy(plan.retention_part->name), *plan.retention_part);
  return !options.has("keep") || options.real("keep") < 1;
}

void require_layers(const CachePlan& plan, const CachePlan::Packer& packer) {
  if (packer.layers.empty() || packer.layers.back().second < plan.shape.layers) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("--kv {} names layer {}, but this decoder has layers 0 to {}; name only those",
                  part_text(packer.part), packer.layers.back().second, plan.shape.layers - 1));
}

void make_quantizers(CachePlan& plan, const PolicyContext& context) {
  if (plan.sharing_part) plan.share = share_map(*plan.sharing_part, plan.shape.layers);
  for (CachePlan::Packer& packer : plan.packers) {
    require_layers(plan, packer);
    if (packer.format) continue;
    const QuantizerEntry& entry = *find_quantizer(packer.part.name);
    const OptionValues options(entry.info, packer.part);
    packer.quantizer = entry.make(options, context);
    packer.rotated = rotated_of(options, *packer.quantizer);
    ShareMap share = packer.quantizer->share();
    if (share.any() && !plan.share.any()) plan.share = std::move(share);
  }
  if (shares(plan.share)) return;
  if (plan.sharing_part) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--kv {} shares nothing on a decoder of {} layers; name lower layers "
                            "in from=, or drop the part",
                            part_text(*plan.sharing_part), plan.shape.layers));
  }
  plan.share = {};
}

void make_retention(CachePlan& plan, const PolicyContext& context) {
  const RetentionEntry& entry = *find_retention(plan.retention_part->name);
  plan.retention = entry.make(OptionValues(entry.info, *plan.retention_part), context);
  plan.checks_selections = entry.checked;
  if (plan.retention == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--kv {} was registered with a make() that makes no rule",
                            part_text(*plan.retention_part)));
  }
  if (!plan.share.any() || plan.retention->same_in_all_layers()) return;
  for (size_t layer = 0; layer < plan.share.key_owner.size(); ++layer) {
    plan.pairs.push_back(std::min(plan.share.key_owner[layer], plan.share.value_owner[layer]));
  }
}

/// Sets the quantizer of each store and layer.
void place_quantizers(CachePlan& plan) {
  for (int layer = 0; layer < plan.shape.layers; ++layer) {
    const auto place = [&](StoreIndex store, const CachePlan::Packer* packer) {
      plan.quantizers[store].push_back(packer == nullptr ? nullptr : packer->quantizer.get());
    };
    place(kVisual, plan.split ? plan.packer(Scope::kVisual, layer) : nullptr);
    place(kRest, plan.packer(plan.split ? Scope::kText : Scope::kAll, layer));
  }
}

/// Makes the policy objects, once. With `known_decoder` false they only serve to find conflicts;
/// then tables report what retention would refuse, with the cure.
void make_objects(CachePlan& plan, const PolicyProfile* profile, bool known_decoder) {
  PolicyContext context;
  context.shape = &plan.shape;
  context.profile = profile;
  context.with_quantizer = plan.packs();
  context.with_retention = drops_rows(plan);
  context.with_sharing = plan.sharing_part.has_value();
  make_quantizers(plan, context);
  if (context.with_retention) {
    context.with_sharing = plan.share.any();
    context.with_quantizer = context.with_quantizer && known_decoder;
    make_retention(plan, context);
  }
  if (plan.simulation_part) {
    const SimulationEntry& entry = *find_simulation(plan.simulation_part->name);
    plan.simulation = entry.make(OptionValues(entry.info, *plan.simulation_part), context);
  }
  place_quantizers(plan);
}

}  // namespace

std::shared_ptr<CachePlan> plan_cache(const CacheSpec& spec, const CacheShape& shape,
                                      const PolicyProfile* profile) {
  std::shared_ptr<CachePlan> plan = sorted_words(spec, shape);
  std::optional<Conflict> conflict = conflict_of_words(spec, *plan);
  if (!conflict) {
    make_objects(*plan, profile, /*known_decoder=*/true);
    conflict = conflict_of_objects(*plan);
  }
  if (conflict) {
    throw Error(ErrorCode::kUnsupported, fmt::format("--kv \"{}\" {}", plan->spec, conflict->text));
  }
  return plan;
}

std::optional<Conflict> conflict_without_decoder(const CacheSpec& spec) {
  // Many conflicts are known to policy objects only, and these need a number of layers. So this
  // decoder is one that fits most specs: the number of layers that thresholds were published for,
  // or all that are named, rounded up to a pair. The rest is checked when the decoder is known.
  CacheShape shape{32, 32, 8, 128, std::vector<float>(64, 1.0f)};
  const std::shared_ptr<CachePlan> plan = sorted_words(spec, shape);
  if (auto conflict = conflict_of_words(spec, *plan)) return conflict;
  for (const CachePlan::Packer& packer : plan->packers) {
    if (packer.layers.empty()) continue;
    plan->shape.layers = std::max(plan->shape.layers, packer.layers.back().second + 2);
  }
  try {
    make_objects(*plan, nullptr, /*known_decoder=*/false);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw;
    return std::nullopt;
  }
  return conflict_of_objects(*plan);
}

}  // namespace kvlm
