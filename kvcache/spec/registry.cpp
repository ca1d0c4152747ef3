// Names that a spec may use: tables of built-in policies, and an append-only list of rules that a
// program registered.

#include "kvcache/spec/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/policies.h"
#include "kvcache/spec/words.h"

namespace kvlm {

namespace {

/// A plain format: unpacked tokens of one float type.
struct Format {
  PolicyInfo info;
  DType dtype;
};

constexpr std::string_view kPlainComposes = "any retention rule; a quantizer with the other scope";

constexpr std::array kFormats = {
    Format{{"f16",
            PartKind::kQuantizer,
            "plain",
            "every token as 16-bit floats (IEEE half)",
            kPlainComposes,
            {},
            "f16"},
           DType::kF16},
    Format{{"bf16",
            PartKind::kQuantizer,
            "plain",
            "every token as 16-bit floats (bfloat16)",
            kPlainComposes,
            {},
            "bf16"},
           DType::kBF16},
    Format{{"f32",
            PartKind::kQuantizer,
            "plain",
            "every token as 32-bit floats",
            kPlainComposes,
            {},
            "f32"},
           DType::kF32},
};

// To add a policy, add a line here (and its name in policies.h).
constexpr std::array kQuantizers = {
    &quantizers::int8,       &quantizers::int4,   &quantizers::nf4,
    &quantizers::kivi,       &quantizers::asymkv, &quantizers::head_quantile,
    &quantizers::calibquant, &quantizers::xquant, &quantizers::vidkv,
};

constexpr std::array kRetentions = {
    &retention::uniform, &retention::prefixkv,     &retention::streaming,
    &retention::h2o,     &retention::snapkv,       &retention::pyramidkv,
    &retention::elastic, &retention::vlcache,      &retention::tova,
    &retention::knorm,   &retention::keydiff,      &retention::expected_attention,
    &retention::random,  &retention::pyramidinfer,
};

constexpr OptionInfo kShareOptions[] = {
    {.key = "what",
     .choices = "codes",
     .standard = "codes",
     .help = "codes: layers share codes; each keeps its own scales and zero points"},
    {.key = "from",
     .type = OptionInfo::Type::kStartLayers,
     .low = 0,
     .high = kMaxSpecLayers - 1,
     .standard = "0:0",
     .help = "first layer that shares, of keys and of values: from there on, odd layers use the "
             "codes of the layer below; off: none"},
};

constexpr PolicyInfo kShare{
    "share",
    PartKind::kSharing,
    "generalises XQuant, section 3.3",
    "codes once for two layers; each layer has its own scales and zero points",
    "a quantizer that packs both layers of a pair alike; retention rules with one set of tokens "
    "per layer",
    kShareOptions,
    "kivi + share=codes",
    "2510.11236"};

// ------------------------------------------------------------------------------------- registering

constexpr size_t kLongestWord = 64;

/// A registered rule, with copies of its texts.
struct Registered {
  std::deque<std::string> text;  // strings never move
  std::vector<OptionInfo> options;
  RetentionEntry entry;

  std::string_view copy(std::string_view words) { return text.emplace_back(words); }
};

/// Append-only, so references stay valid.
struct Registrations {
  std::shared_mutex mutex;
  std::deque<Registered> rules;
};

/// Never destroyed: a rule may hold objects of an interpreter that ends before the process.
Registrations& registrations() {
  static auto* const all = new Registrations;
  return *all;
}

/// The built-in policy of a name, or null.
const PolicyInfo* find_built_in(std::string_view name) noexcept {
  for (const Format& format : kFormats) {
    if (format.info.name == name) return &format.info;
  }
  for (const QuantizerEntry* entry : kQuantizers) {
    if (entry->info.name == name) return &entry->info;
  }
  for (const RetentionEntry* entry : kRetentions) {
    if (entry->info.name == name) return &entry->info;
  }
  return name == kShare.name ? &kShare : nullptr;
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

/// A legal name: [a-z][a-z0-9_]*.
bool is_word(std::string_view word) {
  const auto letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto inner = [&](char c) { return letter(c) || (c >= '0' && c <= '9') || c == '_'; };
  return !word.empty() && word.size() <= kLongestWord && letter(word[0]) &&
         std::all_of(word.begin(), word.end(), inner);
}

void check_name(std::string_view name) {
  if (!is_word(name) || name == "visual" || name == "text") {
    refuse(fmt::format(
        "\"{}\" cannot name a policy; give a word [a-z][a-z0-9_]* of at most {} letters "
        "that is not visual or text",
        printable(name), kLongestWord));
  }
}

void check_options(const PolicyInfo& info) {
  const std::vector<const OptionInfo*> options = options_of(info);
  for (auto option = options.begin(); option != options.end(); ++option) {
    const std::string_view key = (*option)->key;
    if (!is_word(key)) {
      refuse(fmt::format("policy {} cannot have an option \"{}\"; give a word [a-z][a-z0-9_]*",
                         info.name, printable(key)));
    }
    if (std::any_of(options.begin(), option, [&](auto* other) { return other->key == key; })) {
      refuse(fmt::format("policy {} has the option {} twice; every rule has profile of itself",
                         info.name, key));
    }
    if (key == "keep" && (*option)->type != OptionInfo::Type::kReal) {
      refuse(fmt::format("policy {} has keep=, which is no fraction; give it the type kReal",
                         info.name));
    }
    checked_value(info.name, **option, (*option)->standard);
    for (const std::string_view value : {(*option)->official, (*option)->paper}) {
      if (!value.empty()) checked_value(info.name, **option, value);
    }
  }
}

/// A copy of `rule` that owns its texts.
Registered copy_of(RetentionEntry rule) {
  Registered copy;
  for (OptionInfo option : rule.info.options) {
    for (std::string_view* words : {&option.key, &option.choices, &option.standard,
                                    &option.official, &option.paper, &option.help}) {
      *words = copy.copy(*words);
    }
    copy.options.push_back(option);
  }
  const auto text = [&](std::string_view words, std::string_view standard) {
    return copy.copy(words.empty() ? standard : words);
  };
  copy.entry.info = {.name = copy.copy(rule.info.name),
                     .kind = PartKind::kRetention,
                     .source = text(rule.info.source, "registered, not built in"),
                     .stores = text(rule.info.stores, "the tokens that the rule selects"),
                     .composes = text(rule.info.composes, "any quantizer"),
                     .options = copy.options,
                     .example = text(rule.info.example, rule.info.name),
                     .arxiv = copy.copy(rule.info.arxiv)};
  copy.entry.make = std::move(rule.make);
  copy.entry.checked = true;
  return copy;
}

}  // namespace

void register_retention(RetentionEntry rule) {
  const std::string name(rule.info.name);
  rule.info.kind = PartKind::kRetention;
  check_name(name);
  check_options(rule.info);
  if (!rule.make)
    refuse(fmt::format("policy {} has no make function; set RetentionEntry::make", name));
  Registered copy = copy_of(std::move(rule));
  Registrations& all = registrations();
  const std::unique_lock lock(all.mutex);
  const bool taken = find_built_in(name) != nullptr ||
                     std::any_of(all.rules.begin(), all.rules.end(), [&](const Registered& other) {
                       return other.entry.info.name == name;
                     });
  if (taken) {
    refuse(fmt::format(
        "the policy name \"{}\" is taken; register the rule once, under another name", name));
  }
  all.rules.push_back(std::move(copy));
}

std::vector<const PolicyInfo*> policies() {
  std::vector<const PolicyInfo*> infos;
  for (const Format& format : kFormats) infos.push_back(&format.info);
  for (const QuantizerEntry* entry : kQuantizers) infos.push_back(&entry->info);
  for (const RetentionEntry* entry : kRetentions) infos.push_back(&entry->info);
  Registrations& all = registrations();
  const std::shared_lock lock(all.mutex);
  for (const Registered& rule : all.rules) infos.push_back(&rule.entry.info);
  infos.push_back(&kShare);
  return infos;
}

std::vector<std::string_view> part_names() {
  std::vector<std::string_view> names;
  for (const PolicyInfo* info : policies()) names.push_back(info->name);
  return names;
}

const PolicyInfo* find_policy(std::string_view name) noexcept {
  if (const PolicyInfo* info = find_built_in(name)) return info;
  const RetentionEntry* entry = find_retention(name);
  return entry == nullptr ? nullptr : &entry->info;
}

const QuantizerEntry* find_quantizer(std::string_view name) noexcept {
  for (const QuantizerEntry* entry : kQuantizers) {
    if (entry->info.name == name) return entry;
  }
  return nullptr;
}

const RetentionEntry* find_retention(std::string_view name) noexcept {
  for (const RetentionEntry* entry : kRetentions) {
    if (entry->info.name == name) return entry;
  }
  Registrations& all = registrations();
  const std::shared_lock lock(all.mutex);
  for (const Registered& rule : all.rules) {
    if (rule.entry.info.name == name) return &rule.entry;
  }
  return nullptr;
}

std::optional<DType> find_format(std::string_view name) noexcept {
  for (const Format& format : kFormats) {
    if (format.info.name == name) return format.dtype;
  }
  return std::nullopt;
}

}  // namespace kvlm
