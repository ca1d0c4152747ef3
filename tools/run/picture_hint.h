#pragma once

#include <string>

#include "tools/run/options.h"

namespace kvlm {

/// Says once, on stderr, that the bundled model knows nothing of the user's own pictures.
class PictureHint {
 public:
  /// `options` must outlive it; -q silences.
  explicit PictureHint(const RunOptions& options) : options_(options) {}

  /// Whether asking the model about this picture, named as in read_picture(), deserves the hint:
  /// the model is a bundled one, the picture is there and none of the bundled ones, and nothing has
  /// been said yet.
  bool wants(const std::string& picture);
  void say();
  /// Both.
  void see(const std::string& picture) {
    if (wants(picture)) say();
  }

 private:
  const RunOptions& options_;
  bool said_ = false;
};

}  // namespace kvlm
