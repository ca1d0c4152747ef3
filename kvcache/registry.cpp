#include "kvcache/registry.h"

#include <array>

#include "kvcache/policies.h"
#include "kvcache/words.h"

namespace kvlm {

namespace {

/// A plain format: rows of one float type.
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

// A new policy is one line here (and its name in policies.h).
constexpr std::array kQuantizers = {
    &quantizers::int8,          &quantizers::int4,       &quantizers::kivi,   &quantizers::asymkv,
    &quantizers::head_quantile, &quantizers::calibquant, &quantizers::xquant, &quantizers::vidkv,
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

}  // namespace

std::vector<const PolicyInfo*> policies() {
  std::vector<const PolicyInfo*> infos;
  for (const Format& format : kFormats) infos.push_back(&format.info);
  for (const QuantizerEntry* entry : kQuantizers) infos.push_back(&entry->info);
  for (const RetentionEntry* entry : kRetentions) infos.push_back(&entry->info);
  infos.push_back(&kShare);
  return infos;
}

std::vector<std::string_view> part_names() {
  std::vector<std::string_view> names;
  for (const PolicyInfo* info : policies()) names.push_back(info->name);
  return names;
}

const PolicyInfo* find_policy(std::string_view name) noexcept {
  for (const Format& format : kFormats) {
    if (format.info.name == name) return &format.info;
  }
  if (const QuantizerEntry* entry = find_quantizer(name)) return &entry->info;
  if (const RetentionEntry* entry = find_retention(name)) return &entry->info;
  return name == kShare.name ? &kShare : nullptr;
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
  return nullptr;
}

std::optional<DType> find_format(std::string_view name) noexcept {
  for (const Format& format : kFormats) {
    if (format.info.name == name) return format.dtype;
  }
  return std::nullopt;
}

}  // namespace kvlm
