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
    &quantizers::int8,   &quantizers::int4,   &quantizers::nf4,           &quantizers::turboquant,
    &quantizers::kivi,   &quantizers::asymkv, &quantizers::head_quantile, &quantizers::calibquant,
    &quantizers::xquant, &quantizers::vidkv,
};

constexpr std::array kRetentions = {
    &retention::uniform,   &retention::prefixkv,
    &retention::streaming, &retention::h2o,
    &retention::snapkv,    &retention::pyramidkv,
    &retention::elastic,   &retention::vlcache,
    &retention::tova,      &retention::knorm,
    &retention::keydiff,   &retention::mixkv,
    &retention::tgv,       &retention::expected_attention,
    &retention::random,    &retention::pyramidinfer,
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

/// A registered policy, with copies of its texts.
template <class Entry>
struct Registered {
  std::deque<std::string> text;  // strings never move
  std::vector<OptionInfo> options;
  Entry entry;

  std::string_view copy(std::string_view words) { return text.emplace_back(words); }
};

/// Append-only, so references stay valid.
struct Registrations {
  std::shared_mutex mutex;
  std::deque<Registered<RetentionEntry>> rules;
  std::deque<Registered<SimulationEntry>> simulations;
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

/// The name without its origin: "vnorm" of "python:vnorm".
std::string_view short_name(std::string_view name) { return name.substr(name.rfind(':') + 1); }

void check_name(std::string_view name) {
  bool words = true;
  for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + 1) {
    end = name.find(':', begin);
    words = words && is_word(name.substr(begin, end - begin));
  }
  if (!words || short_name(name) == "visual" || short_name(name) == "text") {
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

/// The entry of a name, whole or short, in a list of registered ones, or null.
template <class Entry>
const Entry* find_in(const std::deque<Registered<Entry>>& list, std::string_view name) {
  const auto found = std::ranges::find_if(list, [&](const Registered<Entry>& other) {
    return other.entry.info.name == name || short_name(other.entry.info.name) == name;
  });
  return found == list.end() ? nullptr : &found->entry;
}

/// A copy of `entry` that owns its texts.
template <class Entry>
Registered<Entry> copy_of(Entry entry, const PolicyInfo& standard) {
  Registered<Entry> copy;
  for (OptionInfo option : entry.info.options) {
    for (std::string_view* words : {&option.key, &option.choices, &option.standard,
                                    &option.official, &option.paper, &option.help}) {
      *words = copy.copy(*words);
    }
    copy.options.push_back(option);
  }
  const auto text = [&](std::string_view words, std::string_view otherwise) {
    return copy.copy(words.empty() ? otherwise : words);
  };
  copy.entry.info = {.name = copy.copy(entry.info.name),
                     .kind = standard.kind,
                     .source = text(entry.info.source, "registered, not built in"),
                     .stores = text(entry.info.stores, standard.stores),
                     .composes = text(entry.info.composes, standard.composes),
                     .options = copy.options,
                     .example = text(entry.info.example, entry.info.name),
                     .arxiv = copy.copy(entry.info.arxiv)};
  entry.info = copy.entry.info;
  copy.entry = std::move(entry);
  return copy;
}

/// Adds an entry to one of the lists of registered ones.
template <class Entry>
void add(Entry entry, std::deque<Registered<Entry>>& list, const PolicyInfo& standard) {
  const std::string name(entry.info.name);
  entry.info.kind = standard.kind;
  check_name(name);
  check_options(entry.info);
  if (!entry.make) refuse(fmt::format("policy {} has no make function; set its make", name));
  Registered<Entry> copy = copy_of(std::move(entry), standard);
  Registrations& all = registrations();
  const std::unique_lock lock(all.mutex);
  const std::string_view word = short_name(name);
  if (find_built_in(word) != nullptr || find_in(all.rules, word) != nullptr ||
      find_in(all.simulations, word) != nullptr) {
    refuse(fmt::format(
        "the policy name \"{}\" is taken; register the policy once, under another name", word));
  }
  list.push_back(std::move(copy));
}

}  // namespace

void register_retention(RetentionEntry rule) {
  rule.checked = true;
  add(std::move(rule), registrations().rules,
      {.kind = PartKind::kRetention,
       .stores = "the tokens that the rule selects",
       .composes = "any quantizer"});
}

void register_simulation(SimulationEntry simulation) {
  add(std::move(simulation), registrations().simulations,
      {.kind = PartKind::kSimulation,
       .stores = "every token unpacked, as its codes would give it back",
       .composes = "any retention rule"});
}

std::vector<const PolicyInfo*> policies() {
  std::vector<const PolicyInfo*> infos;
  for (const Format& format : kFormats) infos.push_back(&format.info);
  for (const QuantizerEntry* entry : kQuantizers) infos.push_back(&entry->info);
  for (const RetentionEntry* entry : kRetentions) infos.push_back(&entry->info);
  Registrations& all = registrations();
  const std::shared_lock lock(all.mutex);
  for (const auto& rule : all.rules) infos.push_back(&rule.entry.info);
  for (const auto& simulation : all.simulations) infos.push_back(&simulation.entry.info);
  infos.push_back(&kShare);
  return infos;
}

std::vector<std::string_view> part_names() {
  std::vector<std::string_view> names;
  for (const PolicyInfo* info : policies()) names.push_back(short_name(info->name));
  return names;
}

const PolicyInfo* find_policy(std::string_view name) noexcept {
  if (const PolicyInfo* info = find_built_in(name)) return info;
  if (const RetentionEntry* entry = find_retention(name)) return &entry->info;
  const SimulationEntry* entry = find_simulation(name);
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
  return find_in(all.rules, name);
}

const SimulationEntry* find_simulation(std::string_view name) noexcept {
  Registrations& all = registrations();
  const std::shared_lock lock(all.mutex);
  return find_in(all.simulations, name);
}

std::optional<DType> find_format(std::string_view name) noexcept {
  for (const Format& format : kFormats) {
    if (format.info.name == name) return format.dtype;
  }
  return std::nullopt;
}

}  // namespace kvlm
