#include "tools/run/operands.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "vision/frame_folder.h"

namespace kvlm {

namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 16> kVideoSuffixes = {
    ".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi",  ".mpg", ".mpeg",
    ".ts",  ".mts", ".ogv", ".flv",  ".wmv", ".m2ts", ".3gp", ".y4m"};

/// Files that another option takes: "{0}" is the name.
struct OtherFile {
  std::string_view suffix;
  const char* written;
};
constexpr std::array kOtherFiles = {
    OtherFile{".jsonl", "--batch {0} --out answers.jsonl"},
    OtherFile{".json", "--batch {0} --out answers.jsonl"},
    OtherFile{".csv", "--batch {0} --out answers.jsonl"},
    OtherFile{".tsv", "--batch {0} --out answers.jsonl"},
    OtherFile{".txt", "-p @{0}"},
    OtherFile{".md", "-p @{0}"},
    OtherFile{".safetensors", "-m with its folder"},
    OtherFile{".gguf", "-m with the folder of a safetensors checkpoint"},
};

std::string suffix_of(const std::string& name) {
  std::string suffix = fs::path(name).extension().string();
  std::ranges::transform(suffix, suffix.begin(), [](unsigned char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 32)
                                          : static_cast<char>(letter);
  });
  return suffix;
}

bool is_video(const std::string& name) {
  return std::ranges::find(kVideoSuffixes, suffix_of(name)) != kVideoSuffixes.end();
}

bool is_address(std::string_view word) {
  return word.starts_with("http://") || word.starts_with("https://") ||
         word.starts_with("file://") || word.starts_with("data:image/");
}

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

void require_visual(const std::string& name) {
  std::error_code unknown;
  const std::string shown = printable(name);
  if (fs::exists(fs::path(name) / "config.json", unknown)) {
    refuse(fmt::format("{0} is the folder of a checkpoint; did you mean -m {0}?", shown));
  }
  const auto other = std::ranges::find(kOtherFiles, suffix_of(name), &OtherFile::suffix);
  if (other != kOtherFiles.end()) {
    refuse(fmt::format("{} is no image; did you mean {}?", shown,
                       fmt::format(fmt::runtime(other->written), shown)));
  }
}

}  // namespace

Operands read_operands(std::span<const std::string> words) {
  Operands operands;
  std::vector<std::string> questions;
  for (const std::string& word : words) {
    std::error_code unknown;
    if (is_address(word)) {
      operands.images.push_back(word);
    } else if (fs::exists(word, unknown)) {
      require_visual(word);
      (is_video(word) ? operands.videos : operands.images).push_back(word);
    } else if (word.find(' ') == std::string::npos &&
               (is_video(word) || has_picture_suffix(word))) {
      refuse(fmt::format("{0} does not exist; did you mean {1} {0} with another path?",
                         printable(word), is_video(word) ? "--video" : "--image"));
    } else {
      questions.push_back(word);
    }
  }
  if (questions.empty()) return operands;
  operands.question = questions.front();
  if (questions.size() > 1) {
    std::string all;
    for (const std::string& word : questions) all += (all.empty() ? "" : " ") + word;
    refuse(fmt::format("there are {} words outside of options; put a question in quotes: \"{}\"",
                       questions.size(), printable(all)));
  }
  if (operands.question.empty()) refuse("the question is empty; give it a text or leave it out");
  return operands;
}

}  // namespace kvlm
