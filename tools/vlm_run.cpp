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
#include "tools/common/visual_options.h"
#include "tools/run/batch.h"
#include "tools/run/chat.h"
#include "tools/run/context.h"
#include "tools/run/options.h"
#include "tools/run/picture_hint.h"
#include "tools/run/pictures.h"
#include "tools/run/report.h"
#include "tools/run/videos.h"
#include "vision/image.h"

namespace kvlm {
namespace {

/// One conversation turn about the pictures and videos of the command line: the program's main job.
int run_once(const RunOptions& options, Session& session, std::vector<OpenPicture> pictures,
             VideoFiles videos, TerminalWatch& watch) {
  Model& model = session.model();
  const std::vector<OpenClip> open_clips =
      choose_frames(model, std::move(videos), options.sampling);
  const std::vector<Clip> clips = clips_of(open_clips);
  PictureHint hint(options);
  for (const std::string& path : options.images) hint.see(path);
  for (const std::string& path : options.videos) hint.see(path);
  GenerationRequest request = base_request(options, model);
  request.id = "the request";
  request.messages = opening(options);
  request.messages.push_back(
      user_message(options.prompt.empty() ? default_question(model, pictures.size(), clips.size())
                                          : options.prompt,
                   pictures.size(), model.image_token(), clips.size(), model.video_token()));
  const char* cure =
      pictures.size() > 1
          ? "give fewer images, or ask about each by itself: --batch FOLDER --out OUT.jsonl"
          : "give a shorter prompt";
  const int rows =
      request_rows(model, request.messages, visual_texts(model, shapes_of(pictures), clips),
                   request.max_tokens, request.id, cure_of_long_prompt(clips, cure));
  request.images = take_pictures(std::move(pictures));
  request.videos = decode_clips(open_clips);
  const std::vector<std::string> warnings = warnings_of(request.images, request.videos);
  watch.clear();
  for (const std::string& warning : warnings) print_message("vlm-run: warning: {}\n", warning);

  // Room for this prompt and its answer, and not a byte more.
  const auto cache = session.make_cache(1, rows, options.kv_memory);
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
    fmt::print("{}\n", json_line(result_json(result, session, model, cache->spec(), clips, warnings)));
  } else {
    fmt::print("\n");
    std::fflush(stdout);
    if (!options.quiet) print_message("{}", summary(result, session, model, cache->spec(), clips));
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
  std::vector<OpenPicture> pictures;
  for (const std::string& path : options.images) {
    pictures.push_back(open_picture(path, options.images.size() == 1 && !options.chat));
  }
  VideoFiles videos;
  for (const std::string& path : options.videos) videos.push_back(open_named_video(path));
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
  if (options.chat)
    return run_chat(options, session, std::move(pictures), std::move(videos), watch);
  return run_once(options, session, std::move(pictures), std::move(videos), watch);
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  return kvlm::run_program("vlm-run", [&] { return kvlm::run(argc, argv); });
}
