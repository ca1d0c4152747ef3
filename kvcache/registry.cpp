#include "kvcache/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kvcache/composition.h"
#include "kvcache/policies.h"
#include "kvcache/row_cache.h"

namespace kvlm {

namespace {

/// A plain format: rows of one float type.
struct Format {
  PolicyInfo info;
  DType dtype;
};

constexpr std::string_view kPlainComposes = "any retention rule; a quantizer of the other scope";

constexpr std::array kFormats = {
    Format{{"f16",
            PartKind::kQuantizer,
            "plain",
            "every row as 16-bit floats (IEEE half)",
            kPlainComposes,
            {}},
           DType::kF16},
    Format{{"bf16",
            PartKind::kQuantizer,
            "plain",
            "every row as 16-bit floats (bfloat16)",
            kPlainComposes,
            {}},
           DType::kBF16},
    Format{{"f32", PartKind::kQuantizer, "plain", "every row as 32-bit floats", kPlainComposes, {}},
           DType::kF32},
};

// A new policy is one line here (and its name in policies.h).
constexpr std::array kQuantizers = {
    &quantizers::int8,          &quantizers::int4,       &quantizers::kivi,   &quantizers::asymkv,
    &quantizers::head_quantile, &quantizers::calibquant, &quantizers::xquant, &quantizers::vidkv,
};

constexpr std::array kRetentions = {
    &retention::uniform, &retention::prefixkv,  &retention::streaming, &retention::h2o,
    &retention::snapkv,  &retention::pyramidkv, &retention::elastic,   &retention::vlcache,
    &retention::tova,    &retention::random,
};

constexpr OptionInfo kShareOptions[] = {
    {.key = "what",
     .choices = "codes",
     .standard = "codes",
     .help = "what layers share; scales and zero points stay their own"},
    {.key = "from",
     .type = OptionInfo::Type::kStartLayers,
     .low = 0,
     .high = kMaxSpecLayers - 1,
     .standard = "0:0",
     .help = "first layer of keys and of values: odd layers from there on use the codes of the "
             "layer below"},
};

constexpr PolicyInfo kShare{
    "share",
    PartKind::kSharing,
    "XQuant, 3.3 (its map is one instance)",
    "codes once for two layers; each layer has scales and zero points of its own",
    "a quantizer that packs both layers of a pair alike; retention that keeps one set of slots a "
    "layer",
    kShareOptions};

/// Nothing is dropped and nothing packed.
bool is_plain(const CacheParts& parts) {
  return parts.quantizers.empty() && parts.retention == nullptr;
}

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

std::optional<std::string> unsupported(const CacheSpec& spec, const CacheShape& shape,
                                       const PolicyProfile* profile) {
  const Composition composition = compose(spec);
  try {
    if (auto reason = conflict(composition, make_parts(composition, shape, profile), shape)) {
      return fmt::format("--kv \"{}\" {}", canonical(spec), *reason);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

CacheParts parts_of(const CacheSpec& spec, const CacheShape& shape, const PolicyProfile* profile) {
  const Composition composition = compose(spec);
  ComposedParts made = make_parts(composition, shape, profile);
  if (const auto reason = conflict(composition, made, shape)) {
    throw Error(ErrorCode::kUnsupported, fmt::format("--kv \"{}\" {}", canonical(spec), *reason));
  }
  CacheParts parts;
  parts.spec = canonical(spec);
  parts.rows = composition.rows;
  parts.split = composition.split;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const int visual = composition.split ? composition.packer(Scope::kVisual, layer) : -1;
    const int rest = composition.packer(composition.split ? Scope::kText : Scope::kAll, layer);
    for (const auto& [store, packer] : {std::pair(kVisual, visual), std::pair(kRest, rest)}) {
      parts.packers[store].push_back(
          packer < 0 ? nullptr : made.quantizers[static_cast<size_t>(packer)].get());
    }
  }
  parts.quantizers = std::move(made.quantizers);
  std::erase(parts.quantizers, nullptr);
  parts.retention = std::move(made.retention);
  parts.share = std::move(made.share);
  parts.pairs = std::move(made.pairs);
  return parts;
}

Reservation reservation(const CacheSpec& spec, const CacheShape& shape, const SequenceSize& size,
                        const PolicyProfile* profile) {
  const CacheParts parts = parts_of(spec, shape, profile);
  if (is_plain(parts)) return {row_cache_reserved_bytes(parts.rows, shape, size.max_rows), 0};
  const size_t staging = PolicyCache::staging_bytes(parts, shape, size);
  return {PolicyCache::reserved_bytes(parts, shape, size) - staging, staging};
}

size_t reserved_bytes(const CacheSpec& spec, const CacheShape& shape, const SequenceSize& size,
                      const PolicyProfile* profile) {
  return reservation(spec, shape, size, profile).bytes();
}

size_t session_bytes(const CacheSpec& spec, const CacheShape& shape, int max_rows,
                     const PolicyProfile* profile) {
  const CacheParts parts = parts_of(spec, shape, profile);
  if (is_plain(parts)) return row_cache_reserved_bytes(parts.rows, shape, max_rows);
  return PolicyCache::session_bytes(parts, shape, max_rows);
}

std::unique_ptr<KvCache> make_cache(const CacheSpec& spec, const CacheShape& shape,
                                    size_t arena_bytes, Device device,
                                    const PolicyProfile* profile) {
  if (const auto reason = unsupported(spec, shape, profile)) {
    throw Error(ErrorCode::kUnsupported, *reason);
  }
  CacheParts parts = parts_of(spec, shape, profile);
  if (is_plain(parts)) return make_row_cache(parts.rows, shape, arena_bytes, device);
  return make_policy_cache(std::move(parts), shape, arena_bytes, device);
}

}  // namespace kvlm
