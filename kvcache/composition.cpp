#include "kvcache/composition.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kvcache/registry.h"

namespace kvlm {

namespace {

std::string_view slots_of(Scope scope) {
  if (scope == Scope::kVisual) return "visual slots";
  return scope == Scope::kText ? "text slots" : "all slots";
}

std::string_view word_of(Scope scope) {
  if (scope == Scope::kVisual) return "visual";
  return scope == Scope::kText ? "text" : "all";
}

/// The part with one option set, as text; nothing if its policy has no such value.
std::optional<std::string> with_option(SpecPart part, std::string_view key,
                                       std::string_view value) {
  const PolicyInfo& info = *find_policy(part.name);
  for (const OptionInfo* option : options_of(info)) {
    if (option->key != key) continue;
    const std::vector<std::string_view> choices = split_words(option->choices, '|');
    if (std::find(choices.begin(), choices.end(), value) == choices.end()) return std::nullopt;
    std::erase_if(part.options, [&](const auto& given) { return given.first == key; });
    part.options.emplace_back(key, value);
    std::sort(part.options.begin(), part.options.end());
    return part_text(part);
  }
  return std::nullopt;
}

/// A layer that both serve, or -1.
int common_layer(const LayerRanges& a, const LayerRanges& b) {
  for (const auto& [first, last] : a) {
    for (const auto& [begin, end] : b) {
      if (std::max(first, begin) <= std::min(last, end)) return std::max(first, begin);
    }
  }
  return -1;
}

/// Why two packers cannot stand in one spec, by their words.
std::optional<std::string> conflict_of(const Composition::Packer& a, const Composition::Packer& b) {
  const auto noun = [&] { return a.format && b.format ? "formats" : "quantizers"; };
  if (a.scope == b.scope) {
    if (a.layers.empty() && b.layers.empty()) {
      return fmt::format("names two {}, {} and {}, for the same slots; keep one", noun(),
                         a.part->name, b.part->name);
    }
    const int layer = common_layer(a.layers, b.layers);
    if (layer >= 0) {
      return fmt::format("names two {}, {} and {}, for layer {}; keep one", noun(),
                         part_text(*a.part), part_text(*b.part), layer);
    }
  } else if (a.scope == Scope::kAll || b.scope == Scope::kAll) {
    const Composition::Packer& wide = a.scope == Scope::kAll ? a : b;
    const Composition::Packer& narrow = a.scope == Scope::kAll ? b : a;
    const Scope rest = narrow.scope == Scope::kVisual ? Scope::kText : Scope::kVisual;
    const std::optional<std::string> cure = with_option(*wide.part, "scope", word_of(rest));
    return fmt::format("has {} for all slots beside {} for {}; {}", wide.part->name,
                       narrow.part->name, slots_of(narrow.scope),
                       cure ? fmt::format("did you mean {} + {}?", part_text(*narrow.part), *cure)
                            : std::string("keep one"));
  }
  if (a.format && b.format && *a.format != *b.format) {
    return fmt::format("names two formats, {} and {}; rows that nothing packs have one, keep one",
                       a.part->name, b.part->name);
  }
  return std::nullopt;
}

/// What depends on the words alone.
std::optional<std::string> conflict_of_parts(const CacheSpec& spec, const Composition& composed) {
  const SpecPart* retention = nullptr;
  const SpecPart* sharing = nullptr;
  for (const SpecPart& part : spec.parts) {
    const PartKind kind = find_policy(part.name)->kind;
    if (kind == PartKind::kRetention) {
      if (retention != nullptr) {
        return fmt::format("has two retention parts, {} and {}; keep one", retention->name,
                           part.name);
      }
      retention = &part;
    } else if (kind == PartKind::kSharing) {
      if (sharing != nullptr) return "has two sharing parts; keep one share=codes";
      sharing = &part;
    }
  }
  for (size_t i = 0; i < composed.packers.size(); ++i) {
    for (size_t j = i + 1; j < composed.packers.size(); ++j) {
      if (auto reason = conflict_of(composed.packers[i], composed.packers[j])) return reason;
    }
  }
  if (sharing != nullptr && !composed.packs()) {
    return "shares codes, and nothing makes any; add a quantizer, for example kivi + share=codes";
  }
  return std::nullopt;
}

/// The first layer of a share map that uses another layer's keys or values, or -1.
int first_shared(const std::vector<int>& owners) {
  for (size_t layer = 0; layer < owners.size(); ++layer) {
    if (owners[layer] != static_cast<int>(layer)) return static_cast<int>(layer);
  }
  return -1;
}

bool same_codes(const PackedFormat& a, const PackedFormat& b) {
  bool same = a.axis == b.axis && a.sections == b.sections && a.block_rows == b.block_rows &&
              a.group_size == b.group_size;
  for (size_t i = 0; i < static_cast<size_t>(a.sections) && same; ++i) {
    same = a.section[i].code == b.section[i].code && a.section[i].channels == b.section[i].channels;
  }
  return same;
}

/// share=codes: odd layers from `from` on use the codes of the layer below (specs 6.3).
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

/// All rows kept is no retention, to the bit: a quantizer beside it holds nothing back either.
bool drops_rows(const Composition& composition) {
  if (composition.retention == nullptr) return false;
  const OptionValues options(*find_policy(composition.retention->name), *composition.retention);
  return !options.has("keep") || options.real("keep") < 1;
}

/// Which packer packs what, of every layer and scope.
template <class Visit>
void for_each_packer(const Composition& composition, int layer, const Visit& visit) {
  const std::initializer_list<Scope> split = {Scope::kVisual, Scope::kText};
  const std::initializer_list<Scope> whole = {Scope::kAll};
  for (const Scope scope : composition.split ? split : whole) {
    visit(scope, composition.packer(scope, layer));
  }
}

}  // namespace

int Composition::packer(Scope scope, int layer) const noexcept {
  int found = -1;
  for (size_t i = 0; i < packers.size(); ++i) {
    if (packers[i].scope != scope) continue;
    if (contains(packers[i].layers, layer)) {
      found = static_cast<int>(i);
      break;
    }
    if (packers[i].layers.empty()) found = static_cast<int>(i);
  }
  if (found >= 0 && packers[static_cast<size_t>(found)].format) return -1;
  return found;
}

bool Composition::packs() const noexcept {
  return std::any_of(packers.begin(), packers.end(),
                     [](const Packer& packer) { return !packer.format; });
}

Composition compose(const CacheSpec& spec) {
  Composition composition;
  for (const SpecPart& part : spec.parts) {
    const PolicyInfo& info = *find_policy(part.name);
    if (info.kind == PartKind::kRetention) {
      composition.retention = &part;
      continue;
    }
    if (info.kind == PartKind::kSharing) {
      composition.sharing = &part;
      continue;
    }
    const OptionValues options(info, part);
    Composition::Packer packer{&part, find_format(part.name), Scope::kAll, {}};
    if (options.text("scope") == "visual") packer.scope = Scope::kVisual;
    if (options.text("scope") == "text") packer.scope = Scope::kText;
    if (const std::string* layers = part.find("layers")) {
      packer.layers = *parse_layer_ranges(*layers);
    }
    if (packer.format) composition.rows = *packer.format;
    if (packer.scope != Scope::kAll && !packer.format) composition.split = true;
    composition.packers.push_back(std::move(packer));
  }
  return composition;
}

ComposedParts make_parts(const Composition& composition, const CacheShape& shape,
                         const PolicyProfile* profile, bool words_only) {
  PolicyContext context;
  context.shape = &shape;
  context.profile = profile;
  context.with_quantizer = composition.packs();
  context.with_retention = drops_rows(composition);
  context.with_sharing = composition.sharing != nullptr;
  ComposedParts parts;
  if (composition.sharing != nullptr) parts.share = share_map(*composition.sharing, shape.layers);
  for (const Composition::Packer& packer : composition.packers) {
    if (!packer.layers.empty() && packer.layers.back().second >= shape.layers) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("--kv {} names layer {}, and this decoder has layers 0 to {}; name "
                      "those alone",
                      part_text(*packer.part), packer.layers.back().second, shape.layers - 1));
    }
    parts.quantizers.emplace_back();
    if (packer.format) continue;
    const QuantizerEntry& entry = *find_quantizer(packer.part->name);
    parts.quantizers.back() = entry.make(OptionValues(entry.info, *packer.part), context);
    ShareMap share = parts.quantizers.back()->share();
    if (share.any() && !parts.share.any()) parts.share = std::move(share);
  }
  const bool shares =
      first_shared(parts.share.key_owner) >= 0 || first_shared(parts.share.value_owner) >= 0;
  if (!shares && composition.sharing != nullptr) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--kv {} shares no code on a decoder of {} layers; let from= name "
                            "layers below that, or drop the part",
                            part_text(*composition.sharing), shape.layers));
  }
  if (!shares) parts.share = {};
  context.with_sharing = shares;
  if (context.with_retention) {
    const RetentionEntry& entry = *find_retention(composition.retention->name);
    // What it says to a quantizer beside it, conflict() says with the cure.
    context.with_quantizer = context.with_quantizer && !words_only;
    parts.retention = entry.make(OptionValues(entry.info, *composition.retention), context);
    if (shares && !parts.retention->same_in_all_layers()) {
      for (int layer = 0; layer < shape.layers; ++layer) {
        const auto at = static_cast<size_t>(layer);
        parts.pairs.push_back(std::min(parts.share.key_owner[at], parts.share.value_owner[at]));
      }
    }
  }
  return parts;
}

std::optional<std::string> conflict(const Composition& composition, const ComposedParts& parts,
                                    const CacheShape& shape) {
  const SpecPart* sharing = composition.sharing;
  const SpecPart* retention = composition.retention;
  // Which part shares, for messages.
  const SpecPart* sharer = sharing;
  const bool others = std::ranges::count_if(composition.packers,
                                            [](const auto& packer) { return !packer.format; }) > 1;
  for (size_t i = 0; i < parts.quantizers.size(); ++i) {
    const Quantizer* quantizer = parts.quantizers[i].get();
    if (quantizer == nullptr || !quantizer->share().any()) continue;
    const Composition::Packer& packer = composition.packers[i];
    if (sharing != nullptr) {
      return fmt::format("has share=codes beside {0}, which shares codes itself; did you mean {0}?",
                         part_text(*packer.part));
    }
    if (!packer.layers.empty()) {
      return fmt::format("has {0},layers={1}, and {0} pairs layers itself; drop layers={1}",
                         packer.part->name, layer_ranges_text(packer.layers));
    }
    if (others) {
      return fmt::format(
          "has another quantizer beside {0}, whose codes layers share; keep {0} alone",
          packer.part->name);
    }
    sharer = packer.part;
  }

  // Slots are packed once, when a prompt ends, or as they age, in every layer alike.
  for (size_t i = 0; i < parts.quantizers.size(); ++i) {
    for (size_t j = i + 1; j < parts.quantizers.size(); ++j) {
      const Quantizer* a = parts.quantizers[i].get();
      const Quantizer* b = parts.quantizers[j].get();
      if (a == nullptr || b == nullptr || a->visual_only() == b->visual_only() ||
          composition.packers[i].scope != composition.packers[j].scope) {
        continue;
      }
      const size_t once = a->visual_only() ? i : j;
      return fmt::format(
          "has {} in some layers and {} in others, and {} packs once where {} packs as rows age; "
          "keep one of them",
          composition.packers[i].part->name, composition.packers[j].part->name,
          composition.packers[once].part->name, composition.packers[i + j - once].part->name);
    }
  }

  for (size_t i = 0; i < parts.quantizers.size(); ++i) {
    const Quantizer* quantizer = parts.quantizers[i].get();
    if (quantizer == nullptr) continue;
    const Composition::Packer& packer = composition.packers[i];
    if (quantizer->protected_values() != nullptr && packer.scope != Scope::kAll) {
      return fmt::format(
          "has {}, which protects visual rows among all, in a scope; did you mean {} for all rows?",
          part_text(*packer.part), packer.part->name);
    }
    if (quantizer->key_basis() != nullptr && composition.split && parts.retention != nullptr &&
        parts.retention->per_head()) {
      return fmt::format(
          "has {} for some rows beside {}, of which every kv_head keeps another number; its mask "
          "is "
          "learned from all heads alike: did you mean {}?",
          packer.part->name, part_text(*retention),
          with_option(*retention, "head_shared", "on").value_or("uniform"));
    }
  }

  if (parts.retention != nullptr && parts.retention->rerotates()) {
    if (composition.packs()) {
      return fmt::format(
          "has a quantizer beside {}, which turns keys again; packed keys cannot "
          "be turned: did you mean {}?",
          part_text(*retention),
          with_option(*retention, "rerotate", "off").value_or(retention->name));
    }
    if (shape.rope_frequencies.empty()) {
      return fmt::format(
          "has {}, which turns keys again, and this decoder's positions are not one "
          "number; did you mean {}?",
          part_text(*retention),
          with_option(*retention, "rerotate", "off").value_or(retention->name));
    }
  }
  if (!parts.share.any()) return std::nullopt;

  const std::string shared = part_text(*sharer);
  if (parts.retention != nullptr && parts.retention->per_head()) {
    const std::optional<std::string> cure = with_option(*retention, "head_shared", "on");
    return fmt::format(
        "has {} beside {}, which keeps other slots in every kv_head; shared codes "
        "need one set of slots: did you mean {}?",
        shared, part_text(*retention), cure.value_or("uniform"));
  }
  for (const Part part : {Part::kKeys, Part::kValues}) {
    const bool keys = part == Part::kKeys;
    const std::vector<int>& owners = keys ? parts.share.key_owner : parts.share.value_owner;
    for (int layer = 0; layer < shape.layers; ++layer) {
      const int owner = owners[static_cast<size_t>(layer)];
      if (owner == layer) continue;
      std::optional<std::string> reason;
      for_each_packer(composition, layer, [&](Scope scope, int here) {
        const int there = composition.packer(scope, owner);
        if (reason || (here < 0 && there < 0)) return;
        const Quantizer* a = here < 0 ? nullptr : parts.quantizers[static_cast<size_t>(here)].get();
        const Quantizer* b =
            there < 0 ? nullptr : parts.quantizers[static_cast<size_t>(there)].get();
        const std::string_view noun = keys ? "keys" : "values";
        if (a == nullptr || b == nullptr ||
            !same_codes(a->plan(part, layer).format, b->plan(part, owner).format)) {
          reason = fmt::format(
              "shares codes of {} between layers {} and {}, which pack them differently; let each "
              "pair of layers be packed alike",
              noun, owner, layer);
        } else if (keys && (a->facts_bytes(shape.kv_heads) > 0 || a->key_basis() != nullptr)) {
          reason = fmt::format(
              "shares keys of {0}, whose channels differ by layer; did you mean {0} + "
              "share=codes,from=off:0?",
              composition.packers[static_cast<size_t>(here)].part->name);
        } else if (a->repacks(part)) {
          reason = fmt::format(
              "shares codes of {}, which packs old rows again; did you mean {}?",
              part_text(*composition.packers[static_cast<size_t>(here)].part),
              with_option(*composition.packers[static_cast<size_t>(here)].part, "flush", "append")
                  .value_or("kivi"));
        }
      });
      if (reason) return reason;
    }
  }
  return std::nullopt;
}

std::optional<std::string> conflict_of_words(const CacheSpec& spec) {
  const Composition composition = compose(spec);
  if (auto reason = conflict_of_parts(spec, composition)) return reason;
  // Most of what parts can do is known to their objects, and most objects fit this decoder. Those
  // that do not are checked when the decoder is known.
  int layers = 32;  // or all that are named, with the other of a pair
  for (const Composition::Packer& packer : composition.packers) {
    if (!packer.layers.empty()) layers = std::max(layers, packer.layers.back().second + 2);
  }
  const CacheShape shape{layers, 32, 8, 128, std::vector<float>(64, 1.0f)};
  try {
    return conflict(composition, make_parts(composition, shape, nullptr, true), shape);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw;
    return std::nullopt;
  }
}

}  // namespace kvlm
