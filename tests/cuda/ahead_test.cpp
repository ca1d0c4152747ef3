// Pictures that are encoded behind the prompt of the request before theirs.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "runtime/family.h"
#include "runtime/generator.h"
#include "runtime/prompt.h"
#include "runtime/synthetic.h"
#include "tests/cuda/fixture.h"

namespace kvlm::testing {
namespace {

class Ahead : public Cuda {
 protected:
  static constexpr int kTokens = 6;

  static Image picture(uint32_t seed) {
    Image image{50, 70, std::vector<uint8_t>(50 * 70 * 3)};
    std::mt19937 rng(seed);
    for (uint8_t& x : image.rgb) x = static_cast<uint8_t>(rng() % 256);
    return image;
  }

  static PreparedRequest prepare(Model& model, uint32_t seed) {
    GenerationRequest request;
    request.id = "a picture";
    request.images.push_back(picture(seed));
    request.messages.push_back(user_message("What is it?", 1, model.image_token()));
    request.max_tokens = kTokens;
    request.ignore_eos = true;
    return prepare_request(model, std::move(request), model.decoder().max_positions(), nullptr);
  }

  /// What four requests answer, of which each is told of the next if `ahead`.
  std::vector<std::vector<int32_t>> answers(Model& model, const char* spec, bool ahead) {
    const auto plan = plan_cache(parse_spec(spec), model.decoder().cache_shape());
    std::vector<PreparedRequest> requests;
    for (uint32_t i = 0; i < 4; ++i) requests.push_back(prepare(model, i));
    const auto rows = static_cast<int>(requests[0].prompt.ids.size()) + kTokens;
    const auto cache = make_cache(plan, session_bytes(*plan, rows, 4), kGpu);
    Generator generator(model, *cache, *gpu_);
    std::vector<int> keys;
    for (size_t i = 0; i < requests.size(); ++i) {
      const bool known = ahead && i + 1 < requests.size();
      EXPECT_EQ(requests[i].encoded.has_value(), ahead && i > 0) << spec << " " << i;
      keys.push_back(
          generator.admit(std::move(requests[i]), {}, known ? &requests[i + 1] : nullptr));
      EXPECT_GT(generator.result(keys.back()).timings.vision_ms, 0) << spec << " " << i;
    }
    while (generator.active() > 0) generator.step();
    generator.deliver();
    std::vector<std::vector<int32_t>> found;
    for (const int key : keys) found.push_back(generator.take(key).tokens);
    return found;
  }
};

TEST_F(Ahead, EncodingThePicturesOfTheNextRequestChangesNoToken) {
  for (const char* name : {"llava-tinyllama-1.1b,layers=2", "internvl2.5-8b,layers=1"}) {
    ModelSource source = synthetic_source(name, DType::kBF16, *gpu_);
    const Family& family = family_of(source.config, source.name);
    const auto model = family.load(std::move(source), {}, *gpu_);
    for (const char* spec : {"f16", "prefixkv,keep=0.5", "h2o,keep=0.5", "vidkv,protect=0.2"}) {
      EXPECT_EQ(answers(*model, spec, true), answers(*model, spec, false)) << name << " " << spec;
    }
  }
}

}  // namespace
}  // namespace kvlm::testing
