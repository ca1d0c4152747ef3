// Refused combinations, as tables. A row is a predicate, which returns the names for its message
// and cure. Each table is about one subject: the spec, a pair of packers, one packer, the plan, a
// layer that shares codes. To add a conflict, add a row.

#include "kvcache/plan/conflicts.h"

#include <fmt/args.h>
#include <fmt/format.h>

#include <algorithm>

#include "kvcache/spec/registry.h"

namespace kvlm {

namespace {

using Packer = CachePlan::Packer;
/// Values of {0}, {1}, ...; nothing if there is no conflict.
using Names = std::optional<std::vector<std::string>>;

template <class Subject>
struct Check {
  Names (*find)(const Subject&);
  std::string_view sentence;
  std::string_view cure;
};

struct PackerPair {
  const Packer& a;
  const Packer& b;
};

struct PackerOfPlan {
  const CachePlan& plan;
  const Packer& packer;
};

/// The keys or values of some tokens of `layer`, with the codes of `owner`.
struct SharedLayer {
  const CachePlan& plan;
  KvSide side;
  int layer;
  int owner;
  const Packer* here;   // packer in `layer`; null: unpacked
  const Packer* there;  // packer in `owner`
};

// ------------------------------------------------------------------------------------------ names

std::string_view slots_of(Scope scope) {
  if (scope == Scope::kVisual) return "visual tokens";
  return scope == Scope::kText ? "text tokens" : "all tokens";
}

/// The part with one option changed, as text; `otherwise` if its policy has no such value.
std::string with_option(SpecPart part, std::string_view key, std::string_view value,
                        std::string_view otherwise) {
  for (const OptionInfo* option : options_of(*find_policy(part.name))) {
    if (option->key != key) continue;
    const std::vector<std::string_view> choices = split_words(option->choices, '|');
    if (std::find(choices.begin(), choices.end(), value) == choices.end()) break;
    std::erase_if(part.options, [&](const auto& given) { return given.first == key; });
    part.options.emplace_back(key, value);
    std::sort(part.options.begin(), part.options.end());
    return part_text(part);
  }
  return std::string(otherwise);
}

std::string nouns(const PackerPair& pair) {
  return pair.a.format && pair.b.format ? "formats" : "quantizers";
}

/// Alternative to a rule that keeps different slots per kv_head.
std::string with_one_set(const SpecPart& retention) {
  return with_option(retention, "head_shared", "on", "uniform");
}

// ------------------------------------------------------------------------------- a spec, its words

/// The first part of a kind and the second.
Names two_of(const CacheSpec& spec, PartKind kind) {
  const SpecPart* first = nullptr;
  for (const SpecPart& part : spec.parts) {
    if (find_policy(part.name)->kind != kind) continue;
    if (first != nullptr) return {{first->name, part.name}};
    first = &part;
  }
  return std::nullopt;
}

Names two_retentions(const CacheSpec& spec) { return two_of(spec, PartKind::kRetention); }
Names two_sharings(const CacheSpec& spec) { return two_of(spec, PartKind::kSharing); }
Names two_simulations(const CacheSpec& spec) { return two_of(spec, PartKind::kSimulation); }

// --------------------------------------------------------------------- a pair of packers, by words

/// A layer in both, or -1.
int common_layer(const LayerRanges& a, const LayerRanges& b) {
  for (const auto& [first, last] : a) {
    for (const auto& [begin, end] : b) {
      if (std::max(first, begin) <= std::min(last, end)) return std::max(first, begin);
    }
  }
  return -1;
}

Names same_slots(const PackerPair& pair) {
  const auto& [a, b] = pair;
  if (a.scope != b.scope || !a.layers.empty() || !b.layers.empty()) return std::nullopt;
  return {{nouns(pair), a.part.name, b.part.name}};
}

Names same_layer(const PackerPair& pair) {
  const auto& [a, b] = pair;
  const int layer = common_layer(a.layers, b.layers);
  if (a.scope != b.scope || layer < 0) return std::nullopt;
  return {{nouns(pair), part_text(a.part), part_text(b.part), fmt::format("{}", layer)}};
}

Names all_slots_beside_some(const PackerPair& pair) {
  const auto& [a, b] = pair;
  if (a.scope == b.scope || (a.scope != Scope::kAll && b.scope != Scope::kAll)) return std::nullopt;
  const Packer& wide = a.scope == Scope::kAll ? a : b;
  const Packer& narrow = a.scope == Scope::kAll ? b : a;
  const std::string_view rest = narrow.scope == Scope::kVisual ? "text" : "visual";
  return {{wide.part.name, narrow.part.name, std::string(slots_of(narrow.scope)),
           part_text(narrow.part), with_option(wide.part, "scope", rest, wide.part.name)}};
}

Names two_formats(const PackerPair& pair) {
  const auto& [a, b] = pair;
  if (!a.format || !b.format || *a.format == *b.format) return std::nullopt;
  return {{a.part.name, b.part.name}};
}

Names simulates_beside_another(const CachePlan& plan) {
  if (!plan.simulation_part || !plan.packs()) return std::nullopt;
  const auto other =
      std::ranges::find_if(plan.packers, [](const Packer& packer) { return !packer.format; });
  return {{plan.simulation_part->name, other->part.name}};
}

Names shares_nothing(const CachePlan& plan) {
  if (!plan.sharing_part || plan.packs()) return std::nullopt;
  return std::vector<std::string>();
}

// ------------------------------------------------------------------- a quantizer that shares codes

/// The first quantizer that shares codes, or null.
const Packer* sharer(const CachePlan& plan) {
  const auto found = std::ranges::find_if(plan.packers, [](const Packer& packer) {
    return packer.quantizer != nullptr && packer.quantizer->share().any();
  });
  return found == plan.packers.end() ? nullptr : &*found;
}

Names shares_twice(const CachePlan& plan) {
  const Packer* packer = sharer(plan);
  if (packer == nullptr || !plan.sharing_part) return std::nullopt;
  return {{part_text(packer->part)}};
}

Names shares_in_some_layers(const CachePlan& plan) {
  const Packer* packer = sharer(plan);
  if (packer == nullptr || packer->layers.empty()) return std::nullopt;
  return {{packer->part.name, layer_ranges_text(packer->layers)}};
}

Names shares_beside_another(const CachePlan& plan) {
  const Packer* packer = sharer(plan);
  const auto quantizers =
      std::ranges::count_if(plan.packers, [](const Packer& other) { return !other.format; });
  if (packer == nullptr || quantizers < 2) return std::nullopt;
  return {{packer->part.name}};
}

// ------------------------------------------------------------------- a pair of packers, by objects

/// Some tokens are packed once at the end of a prompt, others by age; layers must not mix both.
Names once_and_by_age(const PackerPair& pair) {
  const auto& [a, b] = pair;
  if (a.quantizer == nullptr || b.quantizer == nullptr || a.scope != b.scope ||
      a.quantizer->visual_only() == b.quantizer->visual_only()) {
    return std::nullopt;
  }
  const bool first = a.quantizer->visual_only();
  return {{a.part.name, b.part.name, (first ? a : b).part.name, (first ? b : a).part.name}};
}

// ------------------------------------------------------------------------------------- one packer

Names protects_in_a_scope(const PackerOfPlan& subject) {
  const Packer& packer = subject.packer;
  if (packer.quantizer->protected_values() == nullptr || packer.scope == Scope::kAll) {
    return std::nullopt;
  }
  return {{part_text(packer.part), packer.part.name}};
}

Names basis_beside_uneven_heads(const PackerOfPlan& subject) {
  const auto& [plan, packer] = subject;
  if (packer.quantizer->key_basis() == nullptr || !plan.split || plan.retention == nullptr ||
      !plan.retention->per_head()) {
    return std::nullopt;
  }
  return {{packer.part.name, part_text(*plan.retention_part), with_one_set(*plan.retention_part)}};
}

Names turned_in_part(const CachePlan& plan) {
  for (int layer = 0; layer < plan.shape.layers && plan.split; ++layer) {
    const Packer* a = plan.packer(Scope::kVisual, layer);
    const Packer* b = plan.packer(Scope::kText, layer);
    if (a == nullptr || b == nullptr || a->quantizer == nullptr || b->quantizer == nullptr)
      continue;
    if (a->rotated == b->rotated) continue;
    if (a->rotated < b->rotated) std::swap(a, b);
    return {
        {a->part.name, b->part.name,
         with_option(b->part, "rotate", a->rotated == Rotated::kKeys ? "keys" : "hadamard", "")}};
  }
  return std::nullopt;
}

// -------------------------------------------------------------------------------------- retention

Names scores_turned_keys(const CachePlan& plan) {
  if (plan.retention == nullptr || !plan.retention->needs().queries) return std::nullopt;
  const auto rotated = std::ranges::find_if(
      plan.packers, [](const Packer& packer) { return packer.rotated != Rotated::kNothing; });
  if (rotated == plan.packers.end()) return std::nullopt;
  return {{part_text(rotated->part), part_text(*plan.retention_part),
           with_option(rotated->part, "rotate", "off", "")}};
}

Names turns_packed_keys(const CachePlan& plan) {
  if (plan.retention == nullptr || !plan.retention->rerotates() || !plan.packs()) {
    return std::nullopt;
  }
  const SpecPart& part = *plan.retention_part;
  return {{part_text(part), with_option(part, "rerotate", "off", part.name)}};
}

Names shares_beside_uneven_heads(const CachePlan& plan) {
  if (!plan.share.any() || plan.retention == nullptr || !plan.retention->per_head()) {
    return std::nullopt;
  }
  return {{part_text(plan.sharing_part ? *plan.sharing_part : sharer(plan)->part),
           part_text(*plan.retention_part), with_one_set(*plan.retention_part)}};
}

// ----------------------------------------------------------------------- a layer that shares codes

bool same_codes(const PackedFormat& a, const PackedFormat& b) {
  bool same = a.axis == b.axis && a.sections == b.sections && a.block_rows == b.block_rows &&
              a.group_size == b.group_size;
  for (size_t i = 0; i < static_cast<size_t>(a.sections) && same; ++i) {
    same = a.section[i].code == b.section[i].code && a.section[i].channels == b.section[i].channels;
  }
  return same;
}

Names packed_differently(const SharedLayer& shared) {
  const auto& [plan, side, layer, owner, here, there] = shared;
  if (here != nullptr && there != nullptr && here->rotated == there->rotated &&
      same_codes(here->quantizer->packing(side, layer).format,
                 there->quantizer->packing(side, owner).format)) {
    return std::nullopt;
  }
  return {{side == KvSide::kKeys ? "keys" : "values", fmt::format("{}", owner),
           fmt::format("{}", layer)}};
}

Names not_packed(const SharedLayer& shared) {
  if (shared.here->quantizer->packs(shared.side)) return std::nullopt;
  const bool keys = shared.side == KvSide::kKeys;
  return {{keys ? "keys" : "values", part_text(shared.here->part), keys ? "off:0" : "0:off"}};
}

Names channels_of_a_layer(const SharedLayer& shared) {
  const Quantizer& quantizer = *shared.here->quantizer;
  const bool differ =
      quantizer.facts_bytes(shared.plan.shape.kv_heads) > 0 || quantizer.key_basis() != nullptr;
  if (shared.side != KvSide::kKeys || !differ) return std::nullopt;
  return {{shared.here->part.name}};
}

Names packed_again(const SharedLayer& shared) {
  const Packer& packer = *shared.here;
  if (!packer.quantizer->repacks(shared.side)) return std::nullopt;
  return {{part_text(packer.part), with_option(packer.part, "flush", "append", "kivi")}};
}

// -------------------------------------------------------------------- the tables, in their order

// Checks of the spec's words, before policy objects exist.

constexpr Check<CacheSpec> kSpecChecks[] = {
    {two_retentions, "has two retention rules, {0} and {1};", "keep one"},
    {two_sharings, "has two sharing parts;", "keep one share=codes"},
    {two_simulations, "has two simulated quantizers, {0} and {1};", "keep one"},
};

constexpr Check<PackerPair> kPairChecks[] = {
    {same_slots, "has two {0} for the same tokens, {1} and {2};", "keep one"},
    {same_layer, "has two {0} for layer {3}, {1} and {2};", "keep one"},
    {all_slots_beside_some, "has {0} for all tokens and {1} for {2};", "did you mean {3} + {4}?"},
    {two_formats, "has two formats for unquantized tokens, {0} and {1};", "keep one"},
};

constexpr Check<CachePlan> kPlanWordChecks[] = {
    {simulates_beside_another, "has {0}, which simulates a quantizer, and the quantizer {1};",
     "keep one"},
    {shares_nothing, "shares codes, but no quantizer makes any;",
     "add a quantizer, for example kivi + share=codes"},
};

// Checks of policy objects.

constexpr Check<CachePlan> kSharerChecks[] = {
    {shares_twice, "has share=codes and {0}, which shares codes itself;", "did you mean {0}?"},
    {shares_in_some_layers, "has {0},layers={1}, but {0} pairs layers itself;", "drop layers={1}"},
    {shares_beside_another,
     "has another quantizer next to {0}, whose codes are shared between layers;", "keep {0} alone"},
};

constexpr Check<PackerPair> kMadePairChecks[] = {
    {once_and_by_age,
     "has {0} in some layers and {1} in others, but {2} packs once, at the end of the prompt, and "
     "{3} packs tokens as they age;",
     "keep one of them"},
};

constexpr Check<PackerOfPlan> kPackerChecks[] = {
    {protects_in_a_scope,
     "has {0}, which protects a share of all visual tokens, for some tokens only;",
     "did you mean {1} for all tokens?"},
    {basis_beside_uneven_heads,
     "has {0} for some tokens and {1}, which keeps a different number of tokens in each KV head; "
     "the channel mask of {0} is computed over all heads:",
     "did you mean {2}?"},
};

constexpr Check<CachePlan> kTurnedChecks[] = {
    {turned_in_part,
     "rotates tokens for {0} but not for {1}; all tokens of a layer must be rotated alike;",
     "did you mean {2}?"},
};

constexpr Check<CachePlan> kRetentionChecks[] = {
    {scores_turned_keys,
     "has {0}, which stores keys rotated, and {1}, which scores them as they were before the "
     "rotation;",
     "use {2} or another retention rule"},
    {turns_packed_keys,
     "has a quantizer and {0}, which rotates kept keys again; packed keys cannot be rotated:",
     "did you mean {1}?"},
    {shares_beside_uneven_heads,
     "has {0} and {1}, which keeps different tokens in each KV head; layers that share codes must "
     "keep the same tokens:",
     "did you mean {2}?"},
};

constexpr Check<SharedLayer> kSharedLayerChecks[] = {
    {packed_differently,
     "shares codes of {0} between layers {1} and {2}, which are packed differently;",
     "give both layers of each pair the same options"},
    {not_packed, "shares codes of {0}, which {1} does not pack;",
     "did you mean share=codes,from={2}?"},
    {channels_of_a_layer, "shares key codes of {0}, whose 2-bit channels differ by layer;",
     "did you mean {0} + share=codes,from=off:0?"},
    {packed_again, "shares codes of {0}, which packs old tokens again;", "did you mean {1}?"},
};

// ------------------------------------------------------------------------------------ asking them

/// The first row that applies. Rows may rely on the ones before them.
template <class Subject, size_t rows>
std::optional<Conflict> first_of(const Check<Subject> (&table)[rows], const Subject& subject) {
  for (const Check<Subject>& check : table) {
    const Names names = check.find(subject);
    if (!names) continue;
    fmt::dynamic_format_arg_store<fmt::format_context> blanks;
    for (const std::string& name : *names) blanks.push_back(name);
    return Conflict{check.sentence,
                    fmt::vformat(check.sentence, blanks) + " " + fmt::vformat(check.cure, blanks)};
  }
  return std::nullopt;
}

template <size_t rows>
std::optional<Conflict> first_of_pairs(const Check<PackerPair> (&table)[rows],
                                       const std::vector<Packer>& packers) {
  for (size_t i = 0; i < packers.size(); ++i) {
    for (size_t j = i + 1; j < packers.size(); ++j) {
      if (auto found = first_of(table, PackerPair{packers[i], packers[j]})) return found;
    }
  }
  return std::nullopt;
}

std::optional<Conflict> first_of_packers(const CachePlan& plan) {
  for (const Packer& packer : plan.packers) {
    if (packer.quantizer == nullptr) continue;
    if (auto found = first_of(kPackerChecks, PackerOfPlan{plan, packer})) return found;
  }
  return std::nullopt;
}

std::optional<Conflict> first_of_shared_layers(const CachePlan& plan) {
  if (!plan.share.any()) return std::nullopt;
  const std::vector<Scope> scopes =
      plan.split ? std::vector{Scope::kVisual, Scope::kText} : std::vector{Scope::kAll};
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    const auto& owners = side == KvSide::kKeys ? plan.share.key_owner : plan.share.value_owner;
    for (int layer = 0; layer < plan.shape.layers; ++layer) {
      const int owner = owners[static_cast<size_t>(layer)];
      if (owner == layer) continue;
      for (const Scope scope : scopes) {
        const Packer* here = plan.packer(scope, layer);
        const Packer* there = plan.packer(scope, owner);
        if (here == nullptr && there == nullptr) continue;
        const SharedLayer subject{plan, side, layer, owner, here, there};
        if (auto found = first_of(kSharedLayerChecks, subject)) return found;
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Conflict> conflict_of_words(const CacheSpec& spec, const CachePlan& plan) {
  if (auto found = first_of(kSpecChecks, spec)) return found;
  if (auto found = first_of_pairs(kPairChecks, plan.packers)) return found;
  return first_of(kPlanWordChecks, plan);
}

std::optional<Conflict> conflict_of_objects(const CachePlan& plan) {
  if (auto found = first_of(kSharerChecks, plan)) return found;
  if (auto found = first_of_pairs(kMadePairChecks, plan.packers)) return found;
  if (auto found = first_of_packers(plan)) return found;
  if (auto found = first_of(kTurnedChecks, plan)) return found;
  if (auto found = first_of(kRetentionChecks, plan)) return found;
  return first_of_shared_layers(plan);
}

std::vector<std::string_view> conflict_rows() {
  std::vector<std::string_view> rows;
  const auto add = [&](const auto& table) {
    for (const auto& check : table) rows.push_back(check.sentence);
  };
  add(kSpecChecks);
  add(kPairChecks);
  add(kPlanWordChecks);
  add(kSharerChecks);
  add(kMadePairChecks);
  add(kPackerChecks);
  add(kTurnedChecks);
  add(kRetentionChecks);
  add(kSharedLayerChecks);
  return rows;
}

}  // namespace kvlm
