#include "tools/run/line_editor.h"

#include <histedit.h>
#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cwchar>
#include <new>
#include <string_view>
#include <utility>

#include "kernels/base/printable.h"
#include "tools/common/program.h"

// libedit as a chat needs it: UTF-8 in every locale, Ctrl+C that gives a line up, Tab, pasted text,
// and bounds on lines and on the size of the terminal.
namespace kvlm {

namespace {

constexpr int kHistoryLines = 1000;

/// The library takes letters apart as the locale says; without one, lines are UTF-8 all the same.
void use_utf8() {
  std::setlocale(LC_CTYPE, "");
  if (std::string_view(nl_langinfo(CODESET)) != "UTF-8") std::setlocale(LC_CTYPE, "C.UTF-8");
}

/// The library has several bytes for every cell of the terminal, which may claim any size.
void bound_terminal() noexcept {
  constexpr int kMostCells = 1000000, kMostRows = 1000;
  winsize size{};
  if (ioctl(STDIN_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row * size.ws_col <= kMostCells) {
    return;
  }
  size.ws_row = static_cast<unsigned short>(std::min<int>(size.ws_row, kMostRows));
  size.ws_col = static_cast<unsigned short>(kMostCells / size.ws_row);
  ioctl(STDIN_FILENO, TIOCSWINSZ, &size);
}

/// Asks the terminal to put marks around what is pasted, or no longer to.
void mark_pastes(bool on) noexcept {
  std::fputs(on ? "\033[?2004h" : "\033[?2004l", stdout);
  std::fflush(stdout);
}

/// One letter from the terminal: 1, at its end 0, and -1 for an interrupt, which the library's own
/// reader would try again.
int read_letter(wchar_t* letter) {
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
  size_t most;
  Complete complete;
  size_t letters = 0;  // read for this line
  EditLine* editor = nullptr;
  History* history = nullptr;

  static State& of(EditLine* editor) {
    void* state = nullptr;
    el_get(editor, EL_CLIENTDATA, &state);
    return *static_cast<State*>(state);
  }
  static char* prompt_of(EditLine* editor) { return of(editor).prompt.data(); }

  static int on_letter(EditLine* editor, wchar_t* letter) {
    State& state = of(editor);
    return ++state.letters > state.most ? -1 : read_letter(letter);
  }

  /// What is between the marks goes into the line: line ends as they are, but for the last ones,
  /// and no other controls.
  static unsigned char on_paste(EditLine* editor, int) {
    constexpr std::wstring_view kEnd = L"\033[201~";
    State& state = of(editor);
    std::wstring text, last;
    wchar_t letter = 0;
    while (last != kEnd) {
      if (read_letter(&letter) != 1) return CC_EOF;
      last += letter;
      if (last.size() > kEnd.size()) last.erase(0, 1);
      ++state.letters;
      const bool ends = letter == L'\r' || letter == L'\n';
      const bool shows = letter >= 0x20 && letter != 0x7f;
      if ((ends || shows || letter == L'\t') && state.letters <= state.most) {
        text += ends ? L'\n' : letter;
      }
    }
    if (state.letters > state.most) return CC_EOF;
    text.erase(text.size() - (kEnd.size() - 1));  // whose Escape was left out
    while (text.ends_with(L'\n')) text.pop_back();
    return text.empty() || el_winsertstr(editor, text.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
  }

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

LineEditor::LineEditor(size_t most, Complete complete) : state_(std::make_unique<State>()) {
  use_utf8();
  bound_terminal();
  state_->most = most;
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
  el_set(editor, EL_GETCFN, &State::on_letter);
  el_set(editor, EL_ADDFN, "kvlm-complete", "Completes commands and files", &State::on_tab);
  el_set(editor, EL_ADDFN, "kvlm-paste", "Takes pasted text", &State::on_paste);
  el_source(editor, nullptr);
  el_set(editor, EL_BIND, "^I", "kvlm-complete", nullptr);
  el_set(editor, EL_BIND, "\\e[200~", "kvlm-paste", nullptr);
}

LineEditor::~LineEditor() {
  if (state_->history != nullptr) history_end(state_->history);
  el_end(state_->editor);
}

LineEditor::End LineEditor::read(std::string& line, std::string prompt) {
  int count = 0;
  state_->prompt = std::move(prompt);
  state_->letters = 0;
  bound_terminal();
  el_resize(state_->editor);  // the user may have changed the terminal's size
  // Before the prompt: who sees it may type any key, and Ctrl+D means nothing to raw input when it
  // was typed before that.
  el_set(state_->editor, EL_PREP_TERM, 1);
  mark_pastes(true);
  const char* text = el_gets(state_->editor, &count);
  mark_pastes(false);
  if (text == nullptr || count <= 0) {
    el_reset(state_->editor);
    if (state_->letters > state_->most) return End::kTooLong;
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
