#include "kvcache/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kvcache/row_cache.h"

namespace kvlm {

namespace {

/// A plain format: rows of one float type.
struct Format {
  std::string_view name;
  DType dtype;
};

constexpr std::array kFormats = {
    Format{"f16", DType::kF16},
    Format{"bf16", DType::kBF16},
    Format{"f32", DType::kF32},
};

DType format_of(const CacheSpec& spec) {
  const auto found = std::find_if(kFormats.begin(), kFormats.end(), [&](const Format& format) {
    return format.name == spec.parts.at(0).name;
  });
  return found->dtype;
}

}  // namespace

std::vector<std::string_view> part_names() {
  std::vector<std::string_view> names;
  for (const Format& format : kFormats) names.push_back(format.name);
  return names;
}

std::optional<std::string> unsupported(const CacheSpec& spec, const CacheShape&, Device device) {
  if (device.kind != DeviceKind::kCpu) {
    return fmt::format("--kv {} is not built for {}; use --device cpu", canonical(spec),
                       device_name(device));
  }
  return std::nullopt;
}

size_t formula_bytes(const CacheSpec& spec, const CacheShape& shape, int tokens) {
  return shape.elements_per_token() * static_cast<size_t>(tokens) * dtype_bytes(format_of(spec));
}

size_t reserved_bytes(const CacheSpec& spec, const CacheShape& shape, const SequenceSize& size) {
  return row_cache_reserved_bytes(format_of(spec), shape, size.max_rows);
}

std::unique_ptr<KvCache> make_cache(const CacheSpec& spec, const CacheShape& shape,
                                    size_t arena_bytes, Device device) {
  if (const auto reason = unsupported(spec, shape, device)) {
    throw Error(ErrorCode::kUnsupported, *reason);
  }
  return make_row_cache(format_of(spec), shape, arena_bytes, device);
}

}  // namespace kvlm
