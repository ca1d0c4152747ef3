#include "tools/kv/plots.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/program.h"

namespace kvlm {

void add_plot_options(CLI::App& app, PlotOptions& options) {
  CLI::Option* plot = app.add_option(
      "--plot", options.target,
      "Folder for plots, or a file name whose suffix .pdf, .svg or .png chooses their format "
      "(needs Python with matplotlib)");
  app.add_option("--style", options.style,
                 "screen, or paper: one column wide, letters of 8 pt, no title")
      ->check(CLI::IsMember({"screen", "paper"}))
      ->needs(plot)
      ->capture_default_str();
}

Plots::Plots(PlotOptions options, std::string script)
    : options_(std::move(options)), script_(std::move(script)) {
  if (!wanted()) return;
  const std::filesystem::path target = options_.target;
  const std::string suffix = target.extension().string();
  std::error_code error;
  const bool file = (suffix == ".pdf" || suffix == ".svg" || suffix == ".png") &&
                    !std::filesystem::is_directory(target, error);
  folder_ = file ? target.parent_path().string() : target.string();
  if (folder_.empty()) folder_ = ".";
  if (file) prefix_ = target.stem().string() + "-";
  std::filesystem::create_directories(folder_, error);
  if (error || !std::filesystem::is_directory(folder_)) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--plot {} cannot be made a folder: {}; give a writable folder",
                            printable(folder_), error ? error.message() : "it is a file"));
  }
  run_script(script_, {"--check", options_.target});
}

void Plots::draw(const std::string& name, const std::string& lines) const {
  const std::string path = (std::filesystem::path(folder_) / (prefix_ + name)).string();
  std::ofstream file(path);
  file << lines;
  file.close();
  if (!file) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--plot {}: {} cannot be written; give a writable folder",
                            printable(options_.target), printable(path)));
  }
  run_script(script_, {path, options_.target, "--style", options_.style});
}

}  // namespace kvlm
