#pragma once

#include <string>

namespace CLI {
class App;
}

namespace kvlm {

/// The options --plot and --style of a subcommand.
struct PlotOptions {
  std::string target;  ///< a folder, or a file whose suffix chooses the format; empty: no plots
  std::string style = "screen";
};

void add_plot_options(CLI::App& app, PlotOptions& options);

/// What --plot of a subcommand asks for: plots and the figures they show in a folder, drawn by a
/// Python script beside this file.
class Plots {
 public:
  /// Makes the folder, and asks the script whether it can draw, before anything is measured. Throws
  /// Error{kCorruptFile} saying why it cannot be made, Error of run_script() where Python or
  /// matplotlib is missing.
  Plots(PlotOptions options, std::string script);

  bool wanted() const noexcept { return !options_.target.empty(); }

  /// Writes `lines`, an object each, to `name` in the folder and draws them. Throws
  /// Error{kCorruptFile} if they cannot be written.
  void draw(const std::string& name, const std::string& lines) const;

 private:
  PlotOptions options_;
  std::string script_;
  std::string folder_;
  std::string prefix_;  // of file names: FILE- where the target is a file
};

}  // namespace kvlm
