#include "tools/run/picture_hint.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "kernels/base/error.h"
#include "runtime/model_path.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/run/pictures.h"

namespace kvlm {

namespace {

namespace fs = std::filesystem;

bool is_bundled(const fs::path& path) {
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(bundled_models(), error);
  const fs::path file = fs::weakly_canonical(path, error);
  return !error && std::ranges::mismatch(folder, file).in1 == folder.end();
}

bool is_bundled_model(const std::string& model) {
  try {
    return is_bundled(find_model(model, bundled_models(), &environment));
  } catch (const Error&) {  // random weights, which nobody takes at their word
    return false;
  }
}

}  // namespace

bool PictureHint::wants(const std::string& picture) {
  if (said_ || options_.quiet) return false;
  if (picture != kStandardInput && is_bundled(picture_path(picture))) return false;
  if (is_bundled_model(options_.session.model)) return true;
  said_ = true;  // nor for any other picture
  return false;
}

void PictureHint::say() {
  said_ = true;
  std::error_code ignored;
  const fs::path examples = bundled_models() / "heldout";  // not part of an installation
  print_message(
      "note: the bundled model knows only drawn scenes and documents{}; for photographs give -m a "
      "LLaVA-1.5 checkpoint\n",
      fs::is_directory(examples, ignored) ? " such as those in " + examples.string() : "");
}

}  // namespace kvlm
