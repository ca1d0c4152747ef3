#include "tools/run/picture_hint.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include "kernels/base/error.h"
#include "runtime/loading/model_path.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/run/pictures.h"

namespace kvlm {

namespace {

namespace fs = std::filesystem;

/// Whether a picture is one that comes with the model, of this installation or of another.
bool is_held_out(const fs::path& picture) {
  constexpr std::array kFolders = {"pocket", "heldout"};
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(picture, error).parent_path();
  return !error && !std::ranges::search(folder, kFolders).empty();
}

bool is_bundled_model(const std::string& model) {
  try {
    std::error_code error;
    const fs::path bundled = fs::weakly_canonical(bundled_models(), error);
    const fs::path folder =
        fs::weakly_canonical(find_model(model, bundled_models(), &environment), error);
    return !error && std::ranges::mismatch(bundled, folder).in1 == bundled.end();
  } catch (const Error&) {  // random weights, which nobody takes at their word
    return false;
  }
}

}  // namespace

bool PictureHint::wants(const std::string& picture) {
  if (said_ || options_.quiet) return false;
  if (picture != kStandardInput) {
    const fs::path path = picture_path(picture);
    std::error_code ignored;
    if (!fs::exists(path, ignored) || is_held_out(path)) return false;
  }
  if (is_bundled_model(options_.session.model)) return true;
  said_ = true;  // nor for any other picture
  return false;
}

void PictureHint::say() {
  said_ = true;
  std::error_code ignored;
  const fs::path examples = bundled_models() / "heldout";  // KVLM_HOME may hold models alone
  print_message(
      "note: the bundled models know only drawn scenes and documents{}; for photographs give -m a "
      "published checkpoint\n",
      fs::is_directory(examples, ignored) ? " such as those in " + examples.string() : "");
}

}  // namespace kvlm
