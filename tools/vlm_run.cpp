#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/session.h"
#include "tools/run/batch.h"
#include "tools/run/chat.h"
#include "tools/run/options.h"
#include "tools/run/report.h"
#include "vision/image.h"

namespace kvlm {
namespace {

/// One conversation turn about the given pictures: the program's main job.
int run_once(const RunOptions& options, Session& session, std::vector<Image> images) {
  Model& model = session.model();
  GenerationRequest request = base_request(options, model);
  request.id = "the request";
  request.messages = opening(options);
  request.messages.push_back(
      user_message(options.prompt.empty() ? std::string(model.caption_prompt()) : options.prompt,
                   static_cast<int>(images.size()), model.image_token()));
  request.images = std::move(images);
  const auto max_tokens = static_cast<size_t>(request.max_tokens);

  // Room for this prompt and its answer, and not a byte more.
  const std::vector<int> image_tokens(request.images.size(), model.max_image_tokens());
  const size_t prompt_rows = make_prompt(model, request.messages, image_tokens).ids.size();
  const size_t rows =
      std::min(prompt_rows + max_tokens, static_cast<size_t>(model.decoder().max_positions()));
  const auto cache = session.make_cache(1, static_cast<int>(rows), options.kv_memory);
  Generator generator(model, *cache, session.stream());
  const int key = generator.admit(std::move(request), [&](std::string_view piece) {
    if (options.json) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  });
  generator.deliver();
  while (!generator.finished(key)) {
    if (interrupted()) generator.cancel(key);
    generator.step();
    generator.deliver();
  }
  const GenerationResult result = generator.take(key);
  if (options.json) {
    fmt::print("{}\n", json_line(result_json(result, session, model, cache->spec())));
  } else {
    fmt::print("\n");
    std::fflush(stdout);
    if (!options.quiet) print_message("{}", summary(result, session, model, cache->spec()));
  }
  return interrupted() ? kExitInterrupted : 0;
}

int run(int argc, char** argv) {
  RunOptions options;
  if (const auto status = parse_options(argc, argv, options)) return *status;
  catch_interrupts();
  std::vector<Image> images;  // first, because a wrong path is the cheapest mistake to report
  if (!options.chat) {
    for (const std::string& path : options.images) images.push_back(load_image(path));
  }
  // Mistakes in files are found before the model is read.
  std::function<int(Session&)> batch;
  if (!options.batch_in.empty()) batch = prepare_batch(options);
  Session session(options.session);
  if (interrupted()) return kExitInterrupted;
  if (batch) return batch(session);
  if (options.chat) return run_chat(options, session);
  return run_once(options, session, std::move(images));
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  return kvlm::run_program("vlm-run", [&] { return kvlm::run(argc, argv); });
}
