#include "tools/run/line_editor.h"

#include <histedit.h>
#include <langinfo.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cwchar>
#include <new>
#include <string_view>
#include <utility>

#include "kernels/base/printable.h"
#include "tools/common/program.h"

namespace kvlm {

namespace {

constexpr int kHistoryLines = 1000;

/// The library takes letters apart as the locale says; without one, lines are UTF-8 all the same.
void use_utf8() {
  std::setlocale(LC_CTYPE, "");
  if (std::string_view(nl_langinfo(CODESET)) != "UTF-8") std::setlocale(LC_CTYPE, "C.UTF-8");
}

/// One letter from the terminal: 1, at its end 0, and -1 for an interrupt, which the library's own
/// reader would try again.
int read_letter(EditLine*, wchar_t* letter) {
  std::mbstate_t state{};
  for (;;) {
    char byte = 0;
    const ssize_t count = interrupted() ? -1 : ::read(STDIN_FILENO, &byte, 1);
    if (count == 0) return 0;
    if (count < 0) {
      if (!interrupted() && errno == EINTR) continue;  // another signal, such as SIGWINCH
      return -1;
    }
    const size_t length = std::mbrtowc(letter, &byte, 1, &state);
    if (length == static_cast<size_t>(-2)) continue;  // goes on
    if (length == static_cast<size_t>(-1)) {          // not UTF-8
      state = {};
      continue;
    }
    return 1;
  }
}

}  // namespace

struct LineEditor::State {
  std::string prompt;
  Complete complete;
  EditLine* editor = nullptr;
  History* history = nullptr;

  static State& of(EditLine* editor) {
    void* state = nullptr;
    el_get(editor, EL_CLIENTDATA, &state);
    return *static_cast<State*>(state);
  }
  static char* prompt_of(EditLine* editor) { return of(editor).prompt.data(); }

  static unsigned char on_tab(EditLine* editor, int) {
    const LineInfo* line = el_line(editor);
    const Completion completion =
        of(editor).complete({line->buffer, static_cast<size_t>(line->cursor - line->buffer)});
    if (!completion.insert.empty()) {
      return el_insertstr(editor, completion.insert.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
    }
    if (completion.choices.empty()) return CC_REFRESH_BEEP;
    std::fputc('\n', stdout);
    for (const std::string& choice : completion.choices) {
      std::fprintf(stdout, "%s\n", printable(choice).c_str());
    }
    std::fflush(stdout);
    return CC_REDISPLAY;
  }
};

LineEditor::LineEditor(std::string prompt, Complete complete) : state_(std::make_unique<State>()) {
  use_utf8();
  state_->prompt = std::move(prompt);
  state_->complete = std::move(complete);
  EditLine* editor = state_->editor = el_init("vlm-run", stdin, stdout, stderr);
  if (editor == nullptr) throw std::bad_alloc();
  HistEvent event;
  state_->history = history_init();
  if (state_->history != nullptr) history(state_->history, &event, H_SETSIZE, kHistoryLines);
  el_set(editor, EL_CLIENTDATA, static_cast<void*>(state_.get()));
  el_set(editor, EL_PROMPT, &State::prompt_of);
  el_set(editor, EL_EDITOR, "emacs");
  el_set(editor, EL_HIST, history, state_->history);
  el_set(editor, EL_GETCFN, &read_letter);
  el_set(editor, EL_ADDFN, "kvlm-complete", "Completes commands and files", &State::on_tab);
  el_source(editor, nullptr);
  el_set(editor, EL_BIND, "^I", "kvlm-complete", nullptr);
}

LineEditor::~LineEditor() {
  if (state_->history != nullptr) history_end(state_->history);
  el_end(state_->editor);
}

LineEditor::End LineEditor::read(std::string& line) {
  int count = 0;
  el_resize(state_->editor);  // the user may have changed the terminal's size
  // Before the prompt: who sees it may type any key, and Ctrl+D means nothing to raw input when it
  // was typed before that.
  el_set(state_->editor, EL_PREP_TERM, 1);
  const char* text = el_gets(state_->editor, &count);
  if (text == nullptr || count <= 0) {
    el_reset(state_->editor);
    return interrupted() ? End::kInterrupted : End::kClosed;
  }
  line.assign(text, static_cast<size_t>(count));
  if (line.ends_with('\n')) line.pop_back();
  HistEvent event;
  if (!line.empty() && state_->history != nullptr) {
    history(state_->history, &event, H_ENTER, line.c_str());
  }
  return End::kLine;
}

}  // namespace kvlm
