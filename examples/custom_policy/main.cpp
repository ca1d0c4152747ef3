// Captions an image under a rule of its own: custom_policy CHECKPOINT IMAGE [KV]
#include <kvlm/kvlm.h>

#include <cstdio>

#include "mynorm.h"

int main(int argc, char** argv) try {
  if (argc < 3) {
    throw kvlm::Error(kvlm::ErrorCode::kInvalidArgument, "give CHECKPOINT IMAGE [KV]");
  }
  register_mynorm();  // before a spec names it
  kvlm::Captioner captioner(argv[1], {.kv = argc > 3 ? argv[3] : "mynorm,keep=0.5 + int4"});
  std::puts(captioner.describe(kvlm::load_image(argv[2])).c_str());
  const kvlm::CacheReport& cache = captioner.last().cache;
  std::printf("stored bits: %.2f\ntokens held: %.1f\n", cache.stored_bits, cache.slots);
} catch (const kvlm::Error& error) {
  std::fprintf(stderr, "custom_policy: %s\n", error.what());
  return 1;
}
