// Captions an image: caption CHECKPOINT IMAGE [QUESTION]
#include <kvlm/kvlm.h>

#include <cstdio>

int main(int argc, char** argv) try {
  if (argc < 3)
    throw kvlm::Error(kvlm::ErrorCode::kInvalidArgument, "give CHECKPOINT IMAGE [QUESTION]");
  kvlm::Captioner captioner(argv[1]);
  std::puts(captioner.describe(kvlm::load_image(argv[2]), argc > 3 ? argv[3] : "").c_str());
} catch (const kvlm::Error& error) {
  std::fprintf(stderr, "caption: %s\n", error.what());
  return 1;
}
