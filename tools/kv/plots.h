#pragma once

#include <string>

namespace kvlm {

/// What --plot of a subcommand asks for: a folder for pictures and for the figures they show, drawn
/// by a Python script beside this file.
class Plots {
 public:
  /// Makes the folder, and asks the script whether it can draw, before anything is measured. An
  /// empty `folder` asks for no pictures. Throws Error{kCorruptFile} saying why it cannot be made,
  /// Error of run_script() where Python or matplotlib is missing.
  Plots(std::string folder, std::string script);

  bool wanted() const noexcept { return !folder_.empty(); }

  /// Writes `lines`, an object each, to FOLDER/`name` and draws them. Throws Error{kCorruptFile} if
  /// they cannot be written.
  void draw(const std::string& name, const std::string& lines) const;

 private:
  std::string folder_;
  std::string script_;
};

}  // namespace kvlm
