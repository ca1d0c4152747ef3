// Cache specs as hostile text: every text is refused with one readable sentence or is a spec whose
// printed form parses to the same spec, fits a decoder or not with a reason, and takes as many
// bytes as its parts. The same text is tried as a spec file.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/plan/formula.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "runtime/spec_file.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void require_sentence(std::string_view message) {
  require(message.size() < 20'000);
  for (const char c : message) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
}

void require_sound(const kvlm::CacheSpec& spec) {
  const std::string text = kvlm::canonical(spec);
  require(kvlm::parse_spec(text) == spec);

  for (const kvlm::CacheShape& shape :
       {kvlm::CacheShape{1, 1, 1, 20, {}},
        kvlm::CacheShape{5, 8, 2, 64, std::vector<float>(32, 1.0f)}}) {
    std::shared_ptr<const kvlm::CachePlan> plan;
    try {
      plan = kvlm::plan_cache(spec, shape);
    } catch (const kvlm::Error& error) {
      require_sentence(error.what());
      continue;
    }
    const std::vector<kvlm::LayerCounts> counts(static_cast<size_t>(shape.layers),
                                                {300, 200, 2, 7});
    const size_t f32_bytes = 4 * 2 * 307 * static_cast<size_t>(shape.kv_heads * shape.head_dim);
    for (const kvlm::PartBytes& layer : kvlm::formula(*plan, counts)) {
      // Scales of tiny groups may take more than rows did, but there is a limit.
      require(layer.total() > 0 && layer.total() <= 4 * f32_bytes);
    }
  }
}

template <class Read>
void attempt(const Read& read, kvlm::ErrorCode code) {
  try {
    require_sound(read());
  } catch (const kvlm::Error& error) {
    require(error.code() == code);
    require_sentence(error.what());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] { return kvlm::parse_spec(text); }, kvlm::ErrorCode::kInvalidArgument);
  attempt([&] { return kvlm::spec_of_json(text, "kv.json"); }, kvlm::ErrorCode::kCorruptFile);
  return 0;
}
