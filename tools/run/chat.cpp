#include "tools/run/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/placeholders.h"
#include "runtime/prompt.h"
#include "tools/common/lines.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/visual_options.h"
#include "tools/run/chat_line.h"
#include "tools/run/line_editor.h"
#include "tools/run/picture_hint.h"
#include "tools/run/report.h"
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
    print_warnings(foreign_placeholders(session_.model(), {&request.messages.back(), 1}));
    const std::vector<ChatMessage> asked = request.messages;
    const auto print = [](std::string_view piece) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
    try {
      require_room(asked, held_clips(), "start over with /clear, or ask a shorter question");
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
    if (result.finish_reason == "length" &&
        std::cmp_greater_equal(result.prompt_tokens + result.tokens.size(), rows_)) {
      print_message(
          "vlm-run: warning: the answer is cut, since the conversation fills its {} tokens; start "
          "over with /clear\n",
          rows_);
    }
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

  std::vector<Clip> held_clips() const {
    std::vector<Clip> clips;
    for (const DecodedClip& clip : clips_) clips.push_back(clip.clip);
    return clips;
  }

  /// Throws Error{kInvalidArgument} with the cure unless the conversation may hold these messages.
  void require_room(const std::vector<ChatMessage>& messages, const std::vector<Clip>& clips,
                    std::string_view cure) const {
    Model& model = session_.model();
    std::vector<PictureShape> shapes;
    for (const Image& image : images_) shapes.push_back({image.height, image.width, image.name});
    require_context(outline_prompt(model, messages, visual_texts(model, shapes, clips)), "chat",
                    model, rows_, cure);
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
    std::vector<Clip> clips = held_clips();
    clips.push_back(open.clip);
    std::vector<ChatMessage> messages = messages_;
    messages.push_back(next_message("", fresh_clips_ + 1));
    require_room(
        messages, clips,
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

std::string refusal_of_long_line() {
  return fmt::format("a line of the chat has more than {} MiB; ask a shorter question",
                     kMaxChatLine >> 20);
}

/// What a person typed, pasted or piped.
struct Entry {
  std::string text;
  bool question = false;  ///< whatever it starts with
};

/// Runs one entry; false ends the chat.
bool obey(Chat& chat, const Entry& entry) {
  const ChatLine wanted = entry.question ? ChatLine{ChatLine::Kind::kQuestion, entry.text}
                                         : parse_chat_line(entry.text);
  switch (wanted.kind) {
    case ChatLine::Kind::kQuit:
      return false;
    case ChatLine::Kind::kClear:
      chat.clear();
      break;
    case ChatLine::Kind::kHelp:
      print_message("{}", kChatCommands);
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
std::optional<int> obey_or_report(Chat& chat, const Entry& entry) {
  try {
    if (!obey(chat, entry)) return 0;
  } catch (const Error& error) {  // the conversation goes on
    print_error("vlm-run", error.what());
    if (error.code() == ErrorCode::kDevice) return kExitFailed;  // but not without its device
  }
  return std::nullopt;
}

/// Pasted lines: the commands that they begin with, each by itself, and all the others, which are
/// one question.
std::vector<Entry> entries_of(std::string_view pasted) {
  std::vector<Entry> entries;
  while (is_chat_command(pasted) && pasted.find('\n') != std::string_view::npos) {
    const size_t end = pasted.find('\n');
    entries.push_back({std::string(pasted.substr(0, end))});
    pasted.remove_prefix(end + 1);
  }
  entries.push_back({std::string(pasted)});
  return entries;
}

/// A conversation with somebody at the keys: Ctrl+C stops an answer or clears the line, and only a
/// second one in a row ends the chat.
int converse(Chat& chat, const RunOptions& options) {
  if (!options.quiet) print_message("{}\n", kChatHelp);
  if (!options.prompt.empty()) {
    if (const auto status = obey_or_report(chat, {options.prompt, true})) return *status;
    if (interrupted() && !forget_interrupts()) return kExitInterrupted;
  }
  LineEditor editor(kMaxChatLine, &complete_chat_line);
  ChatBlock block;
  std::string line;
  for (bool once = false;;) {
    switch (editor.read(line, block.open() ? "... " : "> ")) {
      case LineEditor::End::kClosed:
        fmt::print("\n");
        return 0;
      case LineEditor::End::kInterrupted:
        fmt::print("\n");
        std::fflush(stdout);
        block.forget();
        if (once || !forget_interrupts()) return kExitInterrupted;
        once = true;
        if (!options.quiet) print_message("(Ctrl+C again, Ctrl+D or /quit ends the chat)\n");
        break;
      case LineEditor::End::kTooLong:
        fmt::print("\n");
        std::fflush(stdout);
        print_error("vlm-run", refusal_of_long_line());
        break;
      case LineEditor::End::kLine:
        once = false;
        std::vector<Entry> entries;
        try {
          bool joined = false;
          if (!block.take(line, joined)) break;
          entries = joined ? std::vector{Entry{line, true}} : entries_of(line);
        } catch (const Error& error) {
          print_error("vlm-run", error.what());
        }
        for (const Entry& entry : entries) {
          if (const auto status = obey_or_report(chat, entry)) return *status;
          if (interrupted() && !forget_interrupts()) return kExitInterrupted;
        }
    }
  }
}

/// A conversation whose lines come from a file or another program. A question that is refused, for
/// example beyond the context, is reported, and the next line may be /clear; then the exit status
/// is 1. A command that fails ends the chat: what follows relies on it.
int follow(Chat& chat, const RunOptions& options) {
  int status = 0;
  TextLines lines(0, "--chat's input");
  const auto ended_by = [&](const Entry& entry) -> std::optional<int> {
    const bool command = !entry.question && is_chat_command(entry.text);
    try {
      if (!obey(chat, entry)) return status;
    } catch (const Error& error) {
      const bool ends = command || error.code() == ErrorCode::kDevice;
      print_error("vlm-run", fmt::format("line {}: {}{}", lines.number(), error.what(),
                                         ends ? "; the chat ends here" : ""));
      status = kExitFailed;
      if (ends) return error.code() == ErrorCode::kInvalidArgument ? 2 : kExitFailed;
    }
    return std::nullopt;
  };
  if (!options.prompt.empty()) {  // -p is the first question
    if (const auto end = ended_by({options.prompt, true})) return *end;
  }
  ChatBlock block;
  size_t opened = 0;
  for (std::string line; !interrupted() && lines.next(line);) {
    if (!block.open()) opened = lines.number();
    bool joined = false;
    if (!block.take(line, joined)) continue;
    if (const auto end = ended_by({line, joined})) return *end;
  }
  if (interrupted()) return kExitInterrupted;
  if (block.open()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("line {} begins a question with \"\"\" that never ends; close it with "
                            "\"\"\"",
                            opened));
  }
  return status;
}

}  // namespace

int run_chat(const RunOptions& options, Session& session, std::vector<OpenPicture> pictures,
             VideoFiles videos, TerminalWatch& watch) {
  Chat chat(options, session, std::move(pictures),
            choose_frames(session.model(), std::move(videos), options.sampling), watch);
  return is_terminal(0) && is_terminal(1) ? converse(chat, options) : follow(chat, options);
}

}  // namespace kvlm
