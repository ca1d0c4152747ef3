#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "runtime/prompt.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/session.h"
#include "tools/run/batch.h"
#include "tools/run/chat.h"
#include "tools/run/context.h"
#include "tools/run/options.h"
#include "tools/run/picture_hint.h"
#include "tools/run/pictures.h"
#include "tools/run/report.h"
#include "vision/image.h"

namespace kvlm {
namespace {

std::vector<Image> load_images(const std::vector<std::string>& paths) {
  std::vector<Image> images;
  for (const std::string& path : paths) images.push_back(read_picture(path));
  return images;
}

/// One conversation turn about the pictures of the command line: the program's main job. `images`
/// are those that are decoded already: all, or none.
int run_once(const RunOptions& options, Session& session, std::vector<Image> images,
             TerminalWatch& watch) {
  Model& model = session.model();
  const size_t pictures = options.images.size();
  PictureHint hint(options);
  for (const std::string& path : options.images) hint.see(path);
  GenerationRequest request = base_request(options, model);
  request.id = "the request";
  request.messages = opening(options);
  request.messages.push_back(
      user_message(options.prompt.empty() ? std::string(model.caption_prompt()) : options.prompt,
                   static_cast<int>(pictures), model.image_token()));
  fewest_prompt_rows(model, request.messages, pictures, request.id,
                     pictures > 1 ? "give fewer pictures, or ask about each by itself: --batch "
                                    "FOLDER --out OUT.jsonl"
                                  : "give a shorter prompt");
  request.images = images.empty() ? load_images(options.images) : std::move(images);

  // Room for this prompt and its answer, and not a byte more.
  const int64_t rows = std::min(
      prompt_rows(model, request.messages, pictures, model.max_image_tokens()) + request.max_tokens,
      static_cast<int64_t>(model.decoder().max_positions()));
  const auto cache = session.make_cache(1, static_cast<int>(rows), options.kv_memory);
  Generator generator(model, *cache, session.stream());
  const int key = generator.admit(std::move(request), [&](std::string_view piece) {
    if (options.json) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  });
  watch.clear();
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
  options.prompt = read_prompt(options.prompt);
  // A wrong picture is the cheapest mistake to report, so it comes first. Of many only the headers
  // are read, until it is known that the context holds them.
  for (const std::string& path : options.images) require_picture(path);
  std::vector<Image> images;
  if (options.images.size() == 1 && !options.chat) {
    images = load_images(options.images);
  } else {
    for (const std::string& path : options.images) {
      if (path != kStandardInput) static_cast<void>(probe_image(picture_path(path)));
    }
  }
  // Mistakes in files are found before the model is read.
  std::function<int(Session&)> batch;
  if (!options.batch_in.empty()) {
    batch = prepare_batch(options);
    if (!batch) return 0;
  }
  TerminalWatch watch(options.quiet);
  Session session(options.session, &watch);
  if (interrupted()) return kExitInterrupted;
  if (batch) return batch(session);
  if (options.chat) return run_chat(options, session, watch);
  return run_once(options, session, std::move(images), watch);
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  return kvlm::run_program("vlm-run", [&] { return kvlm::run(argc, argv); });
}
