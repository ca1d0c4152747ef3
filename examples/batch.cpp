// Captions a folder of images, several at a time: batch CHECKPOINT FOLDER [KV [SEQUENCES]]
// One JSON object a line, in the order in which captions are finished.
#include <kvlm/kvlm.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

using Path = std::filesystem::path;

int main(int argc, char** argv) try {
  if (argc < 3) {
    throw kvlm::Error(kvlm::ErrorCode::kInvalidArgument, "give CHECKPOINT FOLDER [KV [SEQUENCES]]");
  }
  const std::string kv = argc > 3 ? argv[3] : "f16";
  const auto at_once = static_cast<size_t>(argc > 4 ? std::max(1, std::atoi(argv[4])) : 4);
  std::vector<Path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());

  kvlm::Captioner captioner(argv[1], {.kv = kv});
  kvlm::Model& model = captioner.model();
  const std::vector<kvlm::ChatMessage> question = {
      kvlm::user_message(std::string(model.caption_prompt()), 1, model.image_token())};
  const int answer_tokens = model.defaults().max_tokens;

  // The longest prompt, from the headers of the files alone: no pixel is decoded yet.
  int64_t tokens = 1;
  for (const Path& file : files) {
    const kvlm::ImageInfo info = kvlm::probe_image(file);
    const kvlm::PictureShape shape{info.height, info.width, file.string()};
    const auto visuals = kvlm::visual_texts(model, std::span(&shape, 1), {});
    tokens = std::max(tokens, kvlm::outline_prompt(model, question, visuals).rows + answer_tokens);
  }
  const auto plan = kvlm::plan_cache(kvlm::read_spec(kv), model.decoder().cache_shape());
  const size_t bytes =
      kvlm::session_bytes(*plan, static_cast<int>(tokens), static_cast<int>(at_once));
  const auto cache = kvlm::make_cache(plan, bytes, captioner.stream().device());
  kvlm::Generator generator(model, *cache, captioner.stream());

  std::map<int, Path> running;  // by the generator's key
  for (size_t next = 0; next < files.size() || !running.empty();) {
    while (next < files.size() && running.size() < at_once) {
      const Path& file = files[next++];
      kvlm::GenerationRequest request;
      request.id = file.string();
      request.messages = question;
      request.images.push_back(kvlm::load_image(file));
      request.max_tokens = answer_tokens;
      request.sampling.temperature = 0;
      running[generator.admit(std::move(request), [](std::string_view) {})] = file;
    }
    if (generator.active() > 0) generator.step();
    generator.deliver();
    std::erase_if(running, [&](const auto& item) {
      const auto& [key, file] = item;
      if (!generator.finished(key)) return false;
      const kvlm::GenerationResult result = generator.take(key);
      const nlohmann::ordered_json line = {{"id", file.filename().string()},
                                           {"text", result.text},
                                           {"stored_bits", result.cache.stored_bits}};
      std::puts(line.dump().c_str());
      return true;
    });
  }
} catch (const std::exception& error) {  // kvlm::Error, or a folder that is not there
  std::fprintf(stderr, "batch: %s\n", error.what());
  return 1;
}
