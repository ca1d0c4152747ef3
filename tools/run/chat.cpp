#include "tools/run/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>

#include "kernels/base/error.h"
#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/run/picture_hint.h"
#include "tools/run/pictures.h"
#include "vision/image.h"

namespace kvlm {

namespace {

constexpr int kSessionRows = 4096;  // tokens that one conversation may hold
constexpr const char* kHelp = "/image FILE adds a picture, /clear starts over, /quit ends";

/// One conversation and what it has in the cache.
class Chat {
 public:
  Chat(const RunOptions& options, Session& session)
      : options_(options),
        session_(session),
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
    images_.push_back(read_picture(path));
    hint_.see(path);
    ++fresh_images_;
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
      forget_fresh_images();
      throw;
    }
    generator_.deliver();
    while (!generator_.finished(key_)) {
      if (interrupted()) generator_.cancel(key_);
      generator_.step();
      generator_.deliver();
    }
    std::fputc('\n', stdout);
    std::fflush(stdout);
    messages_ = asked;
    fresh_images_ = 0;
    std::string answer = generator_.result(key_).text;
    messages_.push_back({"assistant", {{ContentItem::Kind::kText, std::move(answer)}}});
  }

 private:
  /// A question that was refused leaves the conversation as it was, without its pictures.
  void forget_fresh_images() {
    if (fresh_images_ > 0) {
      print_message("vlm-run: the {} given since the last answer {} left out\n",
                    fresh_images_ == 1 ? "picture" : "pictures", fresh_images_ == 1 ? "is" : "are");
    }
    images_.resize(images_.size() - static_cast<size_t>(fresh_images_));
    fresh_images_ = 0;
  }

  int session_rows() const {
    return std::min(kSessionRows, session_.model().decoder().max_positions());
  }

  const RunOptions& options_;
  Session& session_;
  PictureHint hint_;
  std::unique_ptr<KvCache> cache_;
  Generator generator_;
  int key_ = -1;
  std::vector<ChatMessage> messages_;
  std::vector<Image> images_;
  int fresh_images_ = 0;  // given since the last question
};

/// Runs one line; false ends the chat.
bool obey(Chat& chat, const std::string& line) {
  if (line == "/quit" || line == "/exit") return false;
  if (line.empty()) return true;
  if (line == "/clear") {
    chat.clear();
  } else if (line.starts_with("/image ")) {
    chat.add_image(line.substr(7));
  } else if (line[0] == '/') {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is not a command; {}", line, kHelp));
  } else {
    chat.ask(line);
  }
  return true;
}

}  // namespace

int run_chat(const RunOptions& options, Session& session) {
  Chat chat(options, session);
  const bool terminal = is_terminal(0) && is_terminal(1);
  if (terminal && !options.quiet) print_message("{}\n", kHelp);
  std::string line = options.prompt;  // -p is the first question
  for (bool first = !line.empty(); !interrupted(); first = false) {
    if (terminal && !first) {
      fmt::print("> ");
      std::fflush(stdout);
    }
    if (!first && !std::getline(std::cin, line)) break;
    try {
      if (!obey(chat, line)) return 0;
    } catch (const Error& error) {  // the conversation goes on
      print_message("vlm-run: {}\n", error.what());
      if (error.code() == ErrorCode::kDevice) return kExitFailed;  // but not without its device
      if (!terminal) return error.code() == ErrorCode::kInvalidArgument ? 2 : kExitFailed;
    }
  }
  if (terminal) fmt::print("\n");
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace kvlm
