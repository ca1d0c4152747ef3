// Several questions about one image: chat CHECKPOINT IMAGE QUESTION...
// The cache keeps the conversation: each question is prefilled alone, the image once.
#include <kvlm/kvlm.h>

#include <algorithm>
#include <cstdio>

int main(int argc, char** argv) try {
  if (argc < 4) {
    throw kvlm::Error(kvlm::ErrorCode::kInvalidArgument, "give CHECKPOINT IMAGE QUESTION...");
  }
  kvlm::Captioner captioner(argv[1]);
  kvlm::Model& model = captioner.model();
  constexpr int kConversation = 2048;  // tokens that the cache has capacity for
  const int tokens = std::min(kConversation, model.decoder().max_positions());
  const auto plan = kvlm::plan_cache(kvlm::parse_spec("f16"), model.decoder().cache_shape());
  const auto cache =
      kvlm::make_cache(plan, kvlm::session_bytes(*plan, tokens), captioner.stream().device());
  kvlm::Generator generator(model, *cache, captioner.stream());
  generator.set_session_rows(tokens);

  const auto print = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  kvlm::GenerationRequest request;  // the whole conversation so far
  request.id = "chat";
  request.images.push_back(kvlm::load_image(argv[2]));
  request.sampling.temperature = 0;
  int key = -1;
  for (int turn = 3; turn < argc; ++turn) {
    std::printf("> %s\n", argv[turn]);
    // The image belongs to the first question.
    request.messages.push_back(
        kvlm::user_message(argv[turn], turn == 3 ? 1 : 0, model.image_token()));
    if (turn == 3) {
      key = generator.admit(request, print);
    } else {
      generator.resume(key, request, print);
    }
    generator.deliver();
    while (!generator.finished(key)) {
      generator.step();
      generator.deliver();
    }
    std::puts("");
    using Item = kvlm::ContentItem;
    request.messages.push_back({"assistant", {{Item::Kind::kText, generator.result(key).text}}});
  }
} catch (const kvlm::Error& error) {
  std::fprintf(stderr, "chat: %s\n", error.what());
  return 1;
}
