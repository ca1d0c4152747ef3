#include "tools/run/vlm_run.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "kernels/base/error.h"
#include "runtime/placeholders.h"
#include "runtime/prompt.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/session.h"
#include "tools/common/visual_options.h"
#include "tools/run/batch.h"
#include "tools/run/batch_devices.h"
#include "tools/run/dry_run.h"
#include "tools/run/options.h"
#include "tools/run/picture_hint.h"
#include "tools/run/pictures.h"
#include "tools/run/report.h"
#include "tools/run/requests.h"
#include "tools/run/videos.h"
#include "vision/image.h"

// vlm-run: one answer about the images and videos of the command line. --batch, --chat and
// --dry-run have files of their own in tools/run.
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
  const Requests requests(options, model);
  const int rows = requests.rows(requests.outline(shapes_of(pictures), clips));
  GenerationRequest request = base_request(options, model);
  request.id = "the request";
  request.messages = requests.conversation({}, pictures.size(), clips.size());
  request.images = take_pictures(std::move(pictures));
  request.videos = decode_clips(open_clips);
  std::vector<std::string> warnings = warnings_of(request.images, request.videos);
  std::ranges::move(foreign_placeholders(model, request.messages), std::back_inserter(warnings));
  watch.clear();
  print_warnings(warnings);

  // Room for this prompt and its answer, and not a byte more.
  const auto cache = session.make_cache(1, rows, options.kv_memory);
  Generator generator(model, *cache, session.stream());
  const int max_tokens = request.max_tokens;
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
  const std::vector<std::string> full = full_context_warning(result, model, max_tokens);
  warnings.insert(warnings.end(), full.begin(), full.end());
  if (interrupted() && result.tokens.empty()) throw Error(ErrorCode::kCancelled, "interrupted");
  if (options.json) {
    fmt::print("{}\n",
               json_line(result_json(result, session, model, cache->spec(), clips, warnings)));
  } else {
    fmt::print("\n");
    std::fflush(stdout);
    if (!options.quiet) print_message("{}", summary(result, session, model, cache->spec(), clips));
  }
  print_warnings(full);
  return interrupted() ? kExitInterrupted : 0;
}

/// Whether standard input is a pipe with something in it, or a file from its beginning: a question
/// that somebody meant to give. Not what a loop of a shell reads lines from.
bool has_unread_input() {
  struct stat status {};
  if (fstat(STDIN_FILENO, &status) != 0) return false;
  if (S_ISREG(status.st_mode)) return status.st_size > 0 && lseek(STDIN_FILENO, 0, SEEK_CUR) == 0;
  int bytes = 0;
  return S_ISFIFO(status.st_mode) && ioctl(STDIN_FILENO, FIONREAD, &bytes) == 0 && bytes > 0;
}

/// It is not read by itself: a program that a loop starts would take the loop's own lines.
void tell_unread_input(const RunOptions& options) {
  const bool image = std::ranges::find(options.images, kStandardInput) != options.images.end();
  if (image || !has_unread_input()) return;
  print_message(
      "vlm-run: warning: standard input is not read; add -p - to take the question from it, or "
      "</dev/null to leave it\n");
}

int run(int argc, char** argv, const RunChat& chat, const std::vector<std::string>& policy_files) {
  RunOptions options;
  options.policy_files = policy_files;
  if (const auto status = parse_options(argc, argv, options)) return *status;
  catch_interrupts();
  if (!options.save_weights.empty()) {
    SessionOptions session = options.session;
    session.dry = true;
    Session(session).save_weights(options.save_weights);
    print_message("vlm-run: wrote {}\n", options.save_weights);
    return 0;
  }
  const bool asked = !options.prompt.empty();
  options.prompt = read_prompt(options.prompt);
  options.system = read_prompt(options.system, "--system");
  // A wrong picture is the cheapest mistake to report, so it comes first. Of many only the headers
  // are read, until it is known that the context holds them.
  for (const std::string& path : options.images) require_picture(path);
  std::vector<OpenPicture> pictures;
  for (const std::string& path : options.images) {
    pictures.push_back(open_picture(path, options.images.size() == 1 && !options.chat));
  }
  VideoFiles videos;
  for (const std::string& path : options.videos) videos.push_back(open_named_video(path));
  if (options.chat && !chat) {
    throw Error(ErrorCode::kUnsupported, "--chat needs the program vlm-run; start that");
  }
  if (options.dry) return dry_run(options, pictures, std::move(videos));
  // Mistakes in files are found before the model is read.
  std::optional<BatchJob> job;
  if (!options.batch_in.empty()) {
    job = open_batch(options);
    if (!job) return 0;
    if (options.devices.size() > 1) return run_batch_on_devices(options, *job);
  }
  TerminalWatch watch(options.quiet);
  Session session(options.session, &watch);
  if (interrupted()) return kExitInterrupted;
  print_warnings(session.warnings());
  if (job) return run_batch(options, *job, session);
  if (options.chat) return chat(options, session, std::move(pictures), std::move(videos), watch);
  if (!asked) tell_unread_input(options);
  return run_once(options, session, std::move(pictures), std::move(videos), watch);
}

}  // namespace

int vlm_run(int argc, char** argv, const RunChat& chat,
            const std::vector<std::string>& policy_files) {
  return run_program("vlm-run", [&] { return run(argc, argv, chat, policy_files); });
}

}  // namespace kvlm
