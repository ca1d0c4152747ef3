#include "kvcache/spec/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/registry.h"

// Parses the text of --kv: parts at '+', options at ',', values after '='. Checks names and values
// against the policies' tables, makes them canonical and sorts the parts. Refuses combinations that
// no decoder can have. Errors suggest the nearest legal text.
namespace kvlm {

namespace {

constexpr size_t kMaxText = 4096;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "--kv " + message);
}

bool blank(char c) { return c == ' ' || c == '\t'; }

/// The text without blanks around '+', ',' and '='. Every other sequence of blanks becomes one
/// space, which separates words.
std::string without_loose_blanks(std::string_view text) {
  const auto joins = [](char c) { return c == '+' || c == ',' || c == '='; };
  std::string tight;
  bool pending = false;
  for (const char c : text) {
    if (blank(c)) {
      pending = true;
      continue;
    }
    if (pending && !tight.empty() && !joins(c) && !joins(tight.back())) tight += ' ';
    pending = false;
    tight += c;
  }
  return tight;
}

bool is_scope(std::string_view word) { return word == "visual" || word == "text"; }

/// KEY=VALUE, both not empty.
std::pair<std::string_view, std::string_view> key_and_value(std::string_view part,
                                                            std::string_view word) {
  const size_t equals = word.find('=');
  const std::string_view key = word.substr(0, equals);
  const std::string_view value =
      equals == std::string_view::npos ? std::string_view() : word.substr(equals + 1);
  if (key.empty() || value.empty()) {
    refuse(fmt::format("{} has the option \"{}\"; write it as KEY=VALUE", printable(part),
                       printable(word)));
  }
  return {key, value};
}

/// Parses NAME,KEY=VALUE,... and resolves visual=NAME and share=codes.
SpecPart words_of(std::string_view text, std::string_view whole) {
  const std::vector<std::string_view> words = split_words(text, ',');
  SpecPart part;
  const size_t equals = words[0].find('=');
  part.name = words[0].substr(0, equals);
  if (equals != std::string_view::npos) {
    const std::string_view value = words[0].substr(equals + 1);
    if (is_scope(part.name) && !value.empty()) {
      part.options.emplace_back("scope", part.name);
      part.name = value;
    } else if (part.name == "share" && !value.empty()) {
      part.options.emplace_back("what", value);
    } else {
      refuse(fmt::format("\"{}\" begins with \"{}\" where a name is expected; write NAME,KEY=VALUE",
                         printable(whole), printable(words[0])));
    }
  } else if (part.name == "share") {
    refuse("share needs a value; write share=codes");
  }
  if (part.name.empty()) {
    refuse(
        fmt::format("\"{}\" has an empty part; write NAME or NAME,KEY=VALUE, joined by '+' "
                    "(names: {})",
                    printable(whole), fmt::join(part_names(), ", ")));
  }
  for (const std::string_view word : std::span(words).subspan(1)) {
    const auto [key, value] = key_and_value(part.name, word);
    part.options.emplace_back(key, value);
  }
  return part;
}

/// Names of formats in other programs, and the nearest ones here.
constexpr std::pair<std::string_view, std::string_view> kElsewhere[] = {
    {"q8_0", "int8"},
    {"q8", "int8"},
    {"8bit", "int8"},
    {"fp8", "int8"},
    {"fp8_e4m3", "int8"},
    {"fp8_e5m2", "int8"},
    {"q5_0", "int8"},
    {"q5_1", "int8"},
    {"q4_0", "int4"},
    {"q4_1", "int4"},
    {"q4", "int4"},
    {"4bit", "int4"},
    {"iq4_nl", "int4"},
    {"fp4", "nf4"},
    {"fp16", "f16"},
    {"float16", "f16"},
    {"half", "f16"},
    {"bfloat16", "bf16"},
    {"fp32", "f32"},
    {"float32", "f32"},
    {"float", "f32"},
    {"int2", "kivi,bits=2"},
    {"2bit", "kivi,bits=2"},
    {"int3", "kivi,bits=3"},
    {"quarot", "int4,rotate=hadamard"},
    {"spinquant", "int4,rotate=hadamard"},
    {"turboquant_k8v4", "turboquant,key_bits=8"},
    {"turboquant_4bit_nc", "turboquant"},
    {"turboquant_k3v4_nc", "turboquant,key_bits=3"},
    {"turboquant_3bit_nc", "turboquant,key_bits=3,value_bits=3"},
    {"turbo4", "turboquant,values=table"},
    {"turbo3", "turboquant,key_bits=3,value_bits=3,values=table"},
};

/// Published policies that we did not build, and the reasons (docs/formulas.md, "Not built").
constexpr std::string_view kNoSharedRows =
    "merged layers would need their own length for every KV entry in every format; share codes "
    "between layers with share=codes";
constexpr std::string_view kNoPruning =
    "it drops visual tokens while the prompt is computed; rules here drop cached ones, for example "
    "snapkv or prefixkv";
constexpr std::string_view kNoCodebooks =
    "it needs learned codebooks, sketches or sparse outliers, which no format here has; "
    "the nearest are kivi, nf4 and turboquant";
constexpr std::string_view kNoSparseReading =
    "it keeps every token and reads some of them a step; rules here evict, for example snapkv";
constexpr std::pair<std::string_view, std::string_view> kNotBuilt[] = {
    {"minicache", kNoSharedRows}, {"slerp", kNoSharedRows},         {"fastv", kNoPruning},
    {"sparsevlm", kNoPruning},    {"visionzip", kNoPruning},        {"pyramiddrop", kNoPruning},
    {"kvquant", kNoCodebooks},    {"gear", kNoCodebooks},           {"qjl", kNoCodebooks},
    {"quest", kNoSparseReading},  {"minference", kNoSparseReading},
};

std::string lower_case(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char letter) {
    return static_cast<char>(letter >= 'A' && letter <= 'Z' ? letter - 'A' + 'a' : letter);
  });
  return lower;
}

std::string_view nearest_policy(std::string_view name, const std::vector<std::string_view>& names) {
  const std::string lower = lower_case(name);
  for (const auto& [other, ours] : kElsewhere) {
    if (lower == other) return ours;
  }
  return nearest_spelling(lower, names);
}

[[noreturn]] void refuse_name(std::string_view name) {
  for (const auto& [other, why] : kNotBuilt) {
    if (lower_case(name) == other) refuse(fmt::format("{} is not built: {}", other, why));
  }
  const std::vector<std::string_view> names = part_names();
  const std::string_view nearest = nearest_policy(name, names);
  refuse(fmt::format("has no policy \"{}\"{} (policies: {})", printable(name),
                     nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest),
                     fmt::join(names, ", ")));
}

/// Checks the names and makes the values canonical.
SpecPart checked_part(SpecPart part) {
  const PolicyInfo* info = find_policy(part.name);
  if (info == nullptr) refuse_name(part.name);
  part.name = info->name;
  std::sort(part.options.begin(), part.options.end());
  for (size_t i = 1; i < part.options.size(); ++i) {
    if (part.options[i].first == part.options[i - 1].first) {
      refuse(
          fmt::format("{} gives {} twice; keep one", part.name, printable(part.options[i].first)));
    }
  }
  const OptionValues values(*info, part);
  for (auto& [key, value] : part.options) value = values.text(key);
  // Default scopes and profiles are omitted, so that visual=calibquant and calibquant are one spec.
  // Other values stay as written, so that a stored spec keeps its meaning when defaults change.
  for (const OptionInfo* option : options_of(*info)) {
    if (option->key != "scope" && option->key != "profile") continue;
    std::erase_if(part.options, [&](const auto& given) {
      return given.first == option->key && given.second == option->standard;
    });
  }
  return part;
}

SpecPart parse_part(std::string_view text, std::string_view whole) {
  return checked_part(words_of(text, whole));
}

/// "kivi bits=2": a blank before options should be a comma.
void refuse_blanks_for_commas(const std::vector<std::string_view>& words, std::string_view whole) {
  const std::string_view name = words[0].substr(0, words[0].find(','));
  const bool options = find_policy(name) != nullptr &&
                       std::all_of(words.begin() + 1, words.end(), [](std::string_view word) {
                         return word.find('=') != std::string_view::npos &&
                                !is_scope(word.substr(0, word.find('=')));
                       });
  if (!options) return;
  const std::string meant = fmt::format("{}", fmt::join(words, ","));
  refuse(fmt::format("\"{}\" has options after a space; did you mean {}?", printable(whole),
                     printable(meant)));
}

/// One element of a spec: a part, or several words visual=NAME text=NAME.
void parse_parts(std::string_view text, std::string_view whole, std::vector<SpecPart>& parts) {
  if (text.find(' ') == std::string_view::npos) {
    parts.push_back(parse_part(text, whole));
    return;
  }
  const std::vector<std::string_view> words = split_words(text, ' ');
  refuse_blanks_for_commas(words, whole);
  for (const std::string_view word : words) {
    if (!is_scope(word.substr(0, word.find('=')))) {
      refuse(fmt::format("\"{}\" has \"{}\" after a space; join parts by '+', as in {} + {}",
                         printable(whole), printable(word == words[0] ? words[1] : word),
                         printable(words[0]), printable(words[1])));
    }
  }
  for (const std::string_view word : words) parts.push_back(parse_part(word, whole));
}

PartKind kind_of(const SpecPart& part) { return find_policy(part.name)->kind; }

/// A plain format for some layers gets the scope of the quantizers in the spec: with calibquant,
/// f16,layers=0-1 becomes f16,layers=0-1,scope=visual.
void narrow_plain_parts(std::vector<SpecPart>& parts) {
  std::vector<std::string> scopes;
  for (const SpecPart& part : parts) {
    if (kind_of(part) != PartKind::kQuantizer || find_format(part.name)) continue;
    const OptionValues values(*find_policy(part.name), part);
    const std::string scope(values.text("scope"));
    if (std::find(scopes.begin(), scopes.end(), scope) == scopes.end()) scopes.push_back(scope);
  }
  if (scopes.empty() || std::find(scopes.begin(), scopes.end(), "all") != scopes.end()) return;
  std::vector<SpecPart> narrowed;
  for (SpecPart& part : parts) {
    if (!find_format(part.name) || part.find("layers") == nullptr ||
        part.find("scope") != nullptr) {
      narrowed.push_back(std::move(part));
      continue;
    }
    for (const std::string& scope : scopes) {
      SpecPart copy = part;
      copy.options.emplace_back("scope", scope);
      narrowed.push_back(std::move(copy));
    }
  }
  parts = std::move(narrowed);
}

/// Order: retention, quantizers, sharing. Quantizers: visual before text, all layers before some.
void put_in_order(std::vector<SpecPart>& parts) {
  const auto rank = [](const SpecPart& part) {
    int kind = 1;
    if (kind_of(part) == PartKind::kRetention) kind = 0;
    if (kind_of(part) == PartKind::kSharing) kind = 2;
    int scope = 0;
    LayerRanges layers;
    if (kind_of(part) == PartKind::kQuantizer) {
      const OptionValues values(*find_policy(part.name), part);
      if (values.text("scope") == "text") scope = 1;
      if (const std::string* text = part.find("layers")) layers = *parse_layer_ranges(*text);
    }
    return std::tuple(kind, scope, layers, part.name, part.options);
  };
  std::sort(parts.begin(), parts.end(),
            [&](const SpecPart& a, const SpecPart& b) { return rank(a) < rank(b); });
}

CacheSpec assemble(std::vector<SpecPart> parts) {
  CacheSpec spec{std::move(parts)};
  narrow_plain_parts(spec.parts);
  put_in_order(spec.parts);
  if (const auto conflict = conflict_without_decoder(spec)) {
    refuse(fmt::format("\"{}\" {}", canonical(spec), conflict->text));
  }
  if (canonical(spec).size() > kMaxText) {
    refuse(fmt::format("expands to more than {} characters; name fewer layers", kMaxText));
  }
  return spec;
}

std::vector<SpecPart> parts_in(std::string_view text) {
  if (text.size() > kMaxText) {
    refuse(fmt::format("is {} characters long; a spec has at most {}", text.size(), kMaxText));
  }
  const std::string tight = without_loose_blanks(text);
  std::vector<SpecPart> parts;
  for (const std::string_view part : split_words(tight, '+')) parse_parts(part, text, parts);
  return parts;
}

/// Runs `body`; its errors are prefixed with `place`.
template <class Body>
auto at_place(const std::string& place, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", place, error.what()));
  }
}

std::vector<std::string> scopes_of(const std::vector<SpecPart>& parts) {
  std::vector<std::string> scopes;
  for (const SpecPart& part : parts) {
    if (kind_of(part) != PartKind::kQuantizer) continue;
    scopes.emplace_back(OptionValues(*find_policy(part.name), part).text("scope"));
  }
  std::sort(scopes.begin(), scopes.end());
  return scopes;
}

}  // namespace

CacheSpec parse_spec(std::string_view text) { return assemble(parts_in(text)); }

CacheSpec layered_spec(std::string_view every_layer,
                       const std::vector<std::pair<std::string, std::string>>& layers) {
  std::vector<SpecPart> parts =
      at_place("default", [&] { return assemble(parts_in(every_layer)); }).parts;
  const std::vector<std::string> scopes = scopes_of(parts);
  for (const std::pair<std::string, std::string>& piece : layers) {
    const std::string& numbers = piece.first;  // clang 14 captures no structured binding
    at_place(fmt::format("layers \"{}\"", printable(numbers)), [&] {
      const std::optional<LayerRanges> ranges =
          parse_layer_ranges(numbers, numbers.find(',') == std::string::npos ? '/' : ',');
      if (!ranges) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("not a list of layers from 0 to {}, each once; write for example "
                                "\"0-1,30\"",
                                kMaxSpecLayers - 1));
      }
      CacheSpec here = assemble(parts_in(piece.second));
      for (const SpecPart& part : here.parts) {
        if (kind_of(part) != PartKind::kQuantizer) {
          refuse(
              fmt::format("{} is not a quantizer, and only quantizers can differ by layer; move it "
                          "to \"default\"",
                          part_text(part)));
        }
        if (part.find("layers") != nullptr) {
          refuse(fmt::format("{} names its own layers; drop layers=", part_text(part)));
        }
      }
      // "f16" means unpacked tokens for every scope of the spec.
      const bool plain = here.parts.size() == 1 && find_format(here.parts[0].name) &&
                         here.parts[0].find("scope") == nullptr;
      if (!plain && !scopes.empty() && scopes_of(here.parts) != scopes) {
        refuse(fmt::format(
            "{} packs {} tokens where \"default\" packs {}; name a quantizer (or f16) for each",
            canonical(here), fmt::join(scopes_of(here.parts), " and "),
            fmt::join(scopes, " and ")));
      }
      for (SpecPart& part : here.parts) {
        part.options.emplace_back("layers", layer_ranges_text(*ranges));
        std::sort(part.options.begin(), part.options.end());
        parts.push_back(std::move(part));
      }
    });
  }
  return assemble(std::move(parts));
}

}  // namespace kvlm
