#include "tools/run/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/run/chat_line.h"
#include "tools/run/line_editor.h"
#include "tools/run/picture_hint.h"
#include "tools/run/pictures.h"
#include "vision/image.h"

namespace kvlm {

namespace {

constexpr int kSessionRows = 4096;  // tokens that one conversation may hold

/// One conversation and what it has in the cache.
class Chat {
 public:
  Chat(const RunOptions& options, Session& session, TerminalWatch& watch)
      : options_(options),
        session_(session),
        watch_(watch),
        hint_(options),
        cache_(session.make_cache(1, session_rows(), options.kv_memory)),
        generator_(session.model(), *cache_, session.stream()) {
    generator_.set_session_rows(session_rows());
    clear();
    for (const std::string& image : options.images) add_image(image);
  }

  void clear() {
    if (key_ >= 0) generator_.take(key_);
    key_ = -1;
    messages_ = opening(options_);
    images_.clear();
    fresh_images_ = 0;
  }

  void add_image(const std::string& path) {
    images_.push_back(read_picture_file(path));
    hint_.see(path);
    ++fresh_images_;
    if (options_.quiet) return;
    print_message("picture {}: {}, {} x {}\n", images_.size(), printable(path),
                  images_.back().width, images_.back().height);
  }

  void ask(const std::string& text) {
    GenerationRequest request = base_request(options_, session_.model());
    request.id = "chat";
    request.messages = messages_;
    request.messages.push_back(user_message(text, fresh_images_, session_.model().image_token()));
    request.images = images_;
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
      forget_fresh_images();
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
      if (!options_.quiet) print_message("(stopped; the question is left out)\n");
      return;
    }
    std::fputc('\n', stdout);
    std::fflush(stdout);
    if (result.finish_reason == "cancelled" && !options_.quiet) print_message("(stopped)\n");
    messages_ = asked;
    fresh_images_ = 0;
    messages_.push_back({"assistant", {{ContentItem::Kind::kText, result.text}}});
  }

 private:
  /// A question that was refused leaves the conversation as it was, without its pictures.
  void forget_fresh_images() {
    if (fresh_images_ > 0) {
      print_message("vlm-run: the {} given since the last answer {} left out\n",
                    fresh_images_ == 1 ? "picture" : "pictures", fresh_images_ == 1 ? "is" : "are");
    }
    images_.resize(images_.size() - fresh_images_);
    fresh_images_ = 0;
  }

  int session_rows() const {
    return std::min(kSessionRows, session_.model().decoder().max_positions());
  }

  const RunOptions& options_;
  Session& session_;
  TerminalWatch& watch_;
  PictureHint hint_;
  std::unique_ptr<KvCache> cache_;
  Generator generator_;
  int key_ = -1;
  std::vector<ChatMessage> messages_;
  std::vector<Image> images_;
  size_t fresh_images_ = 0;  // given since the last question
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
        if (!options.quiet) print_message("(Ctrl+C again, Ctrl+D or /quit leaves)\n");
        break;
      case LineEditor::End::kLine:
        once = false;
        if (const auto status = obey_or_report(chat, line, true)) return *status;
        if (interrupted() && !forget_interrupts()) return kExitInterrupted;
    }
  }
}

}  // namespace

int run_chat(const RunOptions& options, Session& session, TerminalWatch& watch) {
  Chat chat(options, session, watch);
  if (is_terminal(0) && is_terminal(1)) return converse(chat, options);
  std::string line = options.prompt;  // -p is the first question
  for (bool first = !line.empty(); !interrupted(); first = false) {
    if (!first && !std::getline(std::cin, line)) break;
    if (const auto status = obey_or_report(chat, line, false)) return *status;
  }
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace kvlm
