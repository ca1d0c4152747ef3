#include "tools/run/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/visual_options.h"
#include "tools/run/chat_line.h"
#include "tools/run/line_editor.h"
#include "tools/run/picture_hint.h"
#include "vision/image.h"

// `vlm-run --chat`: a conversation with one cached sequence. Lines that begin with '/' are commands
// (chat_line.h); Ctrl+C ends an answer or clears the line, and the conversation goes on.
namespace kvlm {

namespace {

constexpr int kSessionRows = 8192;  // tokens that one conversation may hold
constexpr int kRowsOfTurns = 4096;  // of them at least for what comes after its beginning

/// One conversation and what it has in the cache.
class Chat {
 public:
  Chat(const RunOptions& options, Session& session, std::vector<OpenPicture> pictures,
       const std::vector<OpenClip>& clips, TerminalWatch& watch)
      : options_(options),
        session_(session),
        watch_(watch),
        hint_(options),
        rows_(rows_of_session(session.model(),
                              visual_texts(session.model(), shapes_of(pictures), clips_of(clips)))),
        cache_(session.make_cache(1, rows_, options.kv_memory)),
        generator_(session.model(), *cache_, session.stream()) {
    generator_.set_session_rows(rows_);
    clear();
    std::vector<Image> images = take_pictures(std::move(pictures));
    for (size_t i = 0; i < images.size(); ++i) add_image(options.images[i], std::move(images[i]));
    for (size_t i = 0; i < clips.size(); ++i) add_clip(options.videos[i], clips[i]);
  }

  void clear() {
    if (key_ >= 0) generator_.take(key_);
    key_ = -1;
    messages_ = opening(options_);
    images_.clear();
    clips_.clear();
    fresh_images_ = fresh_clips_ = 0;
  }

  void add_image(const std::string& path) { add_image(path, read_picture_file(path)); }

  void add_video(const std::string& path) {
    add_clip(path,
             choose_frames(session_.model(), open_video(video_file_path(path)), options_.sampling));
  }

  void ask(const std::string& text) {
    GenerationRequest request = base_request(options_, session_.model());
    request.id = "chat";
    request.messages = messages_;
    request.messages.push_back(next_message(text, fresh_clips_));
    request.images = images_;
    request.videos = clips_;
    const std::vector<ChatMessage> asked = request.messages;
    const auto print = [](std::string_view piece) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
    try {
      if (key_ < 0) {
        key_ = generator_.admit(std::move(request), print);
      } else {
        generator_.resume(key_, std::move(request), print);
      }
    } catch (const Error&) {
      watch_.clear();
      forget_fresh_visuals();
      throw;
    }
    watch_.clear();
    generator_.deliver();
    while (!generator_.finished(key_)) {
      if (interrupted()) generator_.cancel(key_);
      generator_.step();
      generator_.deliver();
    }
    const GenerationResult result = generator_.result(key_);
    if (result.tokens.empty()) {  // given up before its first word: as if never asked
      if (!options_.quiet) print_message("(stopped; the question is dropped)\n");
      return;
    }
    std::fputc('\n', stdout);
    std::fflush(stdout);
    if (result.finish_reason == "cancelled" && !options_.quiet) print_message("(stopped)\n");
    messages_ = asked;
    fresh_images_ = fresh_clips_ = 0;
    messages_.push_back({"assistant", {{ContentItem::Kind::kText, result.text}}});
  }

 private:
  /// Room for what the conversation begins with and for turns after it, within the context.
  static int rows_of_session(Model& model, const PromptVisuals& visuals) {
    int64_t rows = kRowsOfTurns;
    for (const VisualText& picture : visuals.pictures) rows += picture.rows();
    for (const VisualText& clip : visuals.clips) rows += clip.rows();
    return static_cast<int>(
        std::min<int64_t>(std::max<int64_t>(rows, kSessionRows), model.decoder().max_positions()));
  }

  /// The user's next turn, with the pictures that are new to it and so many clips.
  ChatMessage next_message(const std::string& text, size_t clips) const {
    const Model& model = session_.model();
    return user_message(text, fresh_images_, model.image_token(), clips, model.video_token());
  }

  void add_image(const std::string& path, Image image) {
    for (const std::string& warning : image.warnings) {
      print_message("vlm-run: warning: {}\n", warning);
    }
    images_.push_back(std::move(image));
    hint_.see(path);
    ++fresh_images_;
    if (options_.quiet) return;
    print_message("image {}: {}, {} x {}\n", images_.size(), printable(path), images_.back().width,
                  images_.back().height);
  }

  /// Its frames are decoded once it is known that the conversation holds them.
  void add_clip(const std::string& path, const OpenClip& open) {
    Model& model = session_.model();
    std::vector<PictureShape> shapes;
    for (const Image& image : images_) shapes.push_back({image.height, image.width, image.name});
    std::vector<Clip> clips;
    for (const DecodedClip& clip : clips_) clips.push_back(clip.clip);
    clips.push_back(open.clip);
    std::vector<ChatMessage> messages = messages_;
    messages.push_back(next_message("", fresh_clips_ + 1));
    require_context(
        outline_prompt(model, messages, visual_texts(model, shapes, clips)), "chat", model, rows_,
        cure_of_long_prompt({&open.clip, 1}, "start over with /clear, or give a shorter video"));
    clips_.push_back(open.decode());
    for (const std::string& warning : clips_.back().clip.info.warnings) {
      print_message("vlm-run: warning: {}\n", warning);
    }
    hint_.see(path);
    ++fresh_clips_;
    if (options_.quiet) return;
    print_message("video {}: {}\n", clips_.size(), describe_clip(open.clip));
  }

  /// A question that was refused leaves the conversation as it was, without its pictures and
  /// videos.
  void forget_fresh_visuals() {
    const auto some = [](size_t count, const char* noun) {
      return count == 0 ? std::string() : fmt::format("{}{}", noun, count == 1 ? "" : "s");
    };
    const std::string pictures = some(fresh_images_, "image");
    const std::string videos = some(fresh_clips_, "video");
    if (fresh_images_ + fresh_clips_ > 0) {
      print_message("vlm-run: the {}{}{} given since the last answer {} dropped\n", pictures,
                    pictures.empty() || videos.empty() ? "" : " and ", videos,
                    fresh_images_ + fresh_clips_ == 1 ? "is" : "are");
    }
    images_.resize(images_.size() - fresh_images_);
    clips_.resize(clips_.size() - fresh_clips_);
    fresh_images_ = fresh_clips_ = 0;
  }

  const RunOptions& options_;
  Session& session_;
  TerminalWatch& watch_;
  PictureHint hint_;
  int rows_;  // that the conversation may hold
  std::unique_ptr<KvCache> cache_;
  Generator generator_;
  int key_ = -1;
  std::vector<ChatMessage> messages_;
  std::vector<Image> images_;
  std::vector<DecodedClip> clips_;
  size_t fresh_images_ = 0;  // given since the last question
  size_t fresh_clips_ = 0;   // likewise
};

/// Runs one line; false ends the chat.
bool obey(Chat& chat, const std::string& line) {
  const ChatLine wanted = parse_chat_line(line);
  switch (wanted.kind) {
    case ChatLine::Kind::kQuit:
      return false;
    case ChatLine::Kind::kClear:
      chat.clear();
      break;
    case ChatLine::Kind::kImage:
      chat.add_image(wanted.text);
      break;
    case ChatLine::Kind::kVideo:
      chat.add_video(wanted.text);
      break;
    case ChatLine::Kind::kQuestion:
      chat.ask(wanted.text);
      break;
    case ChatLine::Kind::kNothing:
      break;
  }
  return true;
}

/// obey(), with mistakes reported; the exit status if the chat is over.
std::optional<int> obey_or_report(Chat& chat, const std::string& line, bool terminal) {
  try {
    if (!obey(chat, line)) return 0;
  } catch (const Error& error) {  // the conversation goes on
    print_message("vlm-run: {}\n", error.what());
    if (error.code() == ErrorCode::kDevice) return kExitFailed;  // but not without its device
    if (!terminal) return error.code() == ErrorCode::kInvalidArgument ? 2 : kExitFailed;
  }
  return std::nullopt;
}

/// A conversation with somebody at the keys: Ctrl+C stops an answer or clears the line, and only a
/// second one in a row ends the chat.
int converse(Chat& chat, const RunOptions& options) {
  if (!options.quiet) print_message("{}\n", kChatHelp);
  if (!options.prompt.empty()) {
    if (const auto status = obey_or_report(chat, options.prompt, true)) return *status;
    if (interrupted() && !forget_interrupts()) return kExitInterrupted;
  }
  LineEditor editor("> ", &complete_chat_line);
  std::string line;
  for (bool once = false;;) {
    switch (editor.read(line)) {
      case LineEditor::End::kClosed:
        fmt::print("\n");
        return 0;
      case LineEditor::End::kInterrupted:
        fmt::print("\n");
        std::fflush(stdout);
        if (once || !forget_interrupts()) return kExitInterrupted;
        once = true;
        if (!options.quiet) print_message("(Ctrl+C again, Ctrl+D or /quit ends the chat)\n");
        break;
      case LineEditor::End::kLine:
        once = false;
        if (const auto status = obey_or_report(chat, line, true)) return *status;
        if (interrupted() && !forget_interrupts()) return kExitInterrupted;
    }
  }
}

}  // namespace

int run_chat(const RunOptions& options, Session& session, std::vector<OpenPicture> pictures,
             VideoFiles videos, TerminalWatch& watch) {
  Chat chat(options, session, std::move(pictures),
            choose_frames(session.model(), std::move(videos), options.sampling), watch);
  if (is_terminal(0) && is_terminal(1)) return converse(chat, options);
  std::string line = options.prompt;  // -p is the first question
  for (bool first = !line.empty(); !interrupted(); first = false) {
    if (!first && !std::getline(std::cin, line)) break;
    if (const auto status = obey_or_report(chat, line, false)) return *status;
  }
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace kvlm
