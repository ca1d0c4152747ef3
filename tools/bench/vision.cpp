#include "tools/bench/vision.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/bench/statistics.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"

// `vlm-bench vision`: how long pictures take from file to patches on all threads, and from patches
// to visual rows through the tower and projector.
namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

struct PictureSize {
  int height = 0;
  int width = 0;
};

std::optional<int> side_of(std::string_view text) {
  int side = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), side);
  constexpr int kLargest = 65535;  // of a file's pictures too
  if (error != std::errc() || end != text.data() + text.size() || side < 1 || side > kLargest) {
    return std::nullopt;
  }
  return side;
}

PictureSize parse_size(const std::string& text) {
  const size_t cross = text.find('x');
  const auto height = side_of(text.substr(0, cross));
  const auto width = cross == std::string::npos ? std::nullopt : side_of(text.substr(cross + 1));
  if (!height || !width) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "--size {} is not an image size; write HEIGHTxWIDTH in pixels, for example 960x1280",
            printable(text)));
  }
  return {*height, *width};
}

/// A picture of noise: nothing in it is like anything else.
Image noise(PictureSize size) {
  Image image{size.height, size.width, {}};
  image.rgb.resize(static_cast<size_t>(size.height) * static_cast<size_t>(size.width) * 3);
  uint32_t state = 1;
  for (uint8_t& byte : image.rgb) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return image;
}

/// What the repetitions measured, of a batch.
struct Samples {
  std::vector<double> read_ms;      // a file
  std::vector<double> prepare_ms;   // a picture
  std::vector<double> ready_per_s;  // files read and cut by all threads
  std::vector<double> encode_ms;
  std::vector<double> pictures_per_s;  // of encoding
  std::vector<double> tokens_per_s;
  int64_t tokens = 0;  // of a picture

  size_t repeats() const { return std::max(encode_ms.size(), ready_per_s.size()); }
};

/// What a batch does before the tower: every thread reads and cuts a picture of its own.
void measure_files(const std::string& path, size_t repeats, Session& session, Samples& samples) {
  const Model& model = session.model();
  constexpr size_t kPicturesOfThread = 4;
  const auto pictures = kPicturesOfThread * static_cast<size_t>(session.threads());
  samples.tokens = model.prepare(load_image(path), 1).rows;
  for (size_t i = 0; i <= repeats && !interrupted(); ++i) {
    Clock::time_point start = Clock::now();
    static_cast<void>(load_image(path));
    const double read_ms = ms_since(start);
    start = Clock::now();
    session.stream().pool().parallel_for(
        pictures, [&](size_t, int) { static_cast<void>(model.prepare(load_image(path), 1)); });
    const double ready_ms = ms_since(start);
    if (i == 0) continue;  // brings the file to memory
    samples.read_ms.push_back(read_ms);
    samples.ready_per_s.push_back(1000 * static_cast<double>(pictures) / ready_ms);
  }
}

Samples measure(const Image& image, const VisionOptions& options, Session& session,
                TerminalWatch& watch) {
  Model& model = session.model();
  Stream& stream = session.stream();
  Samples samples;
  const std::string phase = fmt::format("vision {}x{}", image.height, image.width);
  const auto repeats = static_cast<size_t>(options.repeats);
  try {
    if (!options.image.empty()) measure_files(options.image, repeats, session, samples);
    for (size_t i = 0; i <= repeats && !interrupted(); ++i) {
      watch.progress(phase, i, repeats + 1);
      Clock::time_point start = Clock::now();
      const VisualInput input = model.prepare(image, 1);
      const double prepare_ms = ms_since(start);
      // The tower asks no picture whether it is another: one, given several times, costs as much.
      const std::vector<const VisualInput*> pictures(static_cast<size_t>(options.batch), &input);
      start = Clock::now();
      const VisualRows rows = model.encode(pictures, stream, {});
      stream.synchronize();
      const double encode_ms = ms_since(start);
      samples.tokens = input.rows;
      if (i == 0) continue;  // warms workspaces
      samples.prepare_ms.push_back(prepare_ms);
      samples.encode_ms.push_back(encode_ms);
      samples.pictures_per_s.push_back(1000 * options.batch / encode_ms);
      samples.tokens_per_s.push_back(1000 * static_cast<double>(options.batch * input.rows) /
                                     encode_ms);
    }
  } catch (const Error& error) {  // what was measured until then is shown
    if (error.code() != ErrorCode::kCancelled) throw;
  }
  watch.clear();
  return samples;
}

struct Figure {
  const char* name;
  const char* unit;
  std::vector<double> Samples::*values;
};

constexpr Figure kFigures[] = {
    {"read", "ms", &Samples::read_ms},
    {"prepare", "ms", &Samples::prepare_ms},
    {"ready", "pictures/s", &Samples::ready_per_s},
    {"encode", "ms", &Samples::encode_ms},
    {"pictures", "images/s", &Samples::pictures_per_s},
    {"visual_tokens", "tokens/s", &Samples::tokens_per_s},
};

nlohmann::ordered_json to_json(const Image& image, const Samples& samples,
                               const VisionOptions& options, Session& session) {
  nlohmann::ordered_json json{{"model", session.model().name()},
                              {"device", device_name(session.device())},
                              {"dtype", dtype_name(session.model().dtype())},
                              {"threads", session.threads()},
                              {"height", image.height},
                              {"width", image.width},
                              {"batch", options.batch},
                              {"tokens", samples.tokens},
                              {"repeats", samples.repeats()}};
  for (const Figure& figure : kFigures) {
    if ((samples.*figure.values).empty()) continue;
    const Spread spread = spread_of(samples.*figure.values);
    json[figure.name] = {
        {"unit", figure.unit}, {"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
  }
  json["version"] = version_line();
  return json;
}

void print_table(const Image& image, const Samples& samples, const VisionOptions& options,
                 Session& session) {
  fmt::print(
      "{} on {} in {}, {} threads: {} x {} pixels, {} tokens an image, {} together, {} repeats; "
      "median (min to max)\n",
      printable(session.model().name()), device_name(session.device()),
      dtype_name(session.model().dtype()), session.threads(), image.height, image.width,
      samples.tokens, options.batch, samples.repeats());
  for (const Figure& figure : kFigures) {
    if ((samples.*figure.values).empty()) continue;
    const Spread spread = spread_of(samples.*figure.values);
    fmt::print("  {:<14} {:>10.2f} {:<10} ({:.2f} to {:.2f})\n", figure.name, spread.median,
               figure.unit, spread.min, spread.max);
  }
}

}  // namespace

int run_vision(const VisionOptions& options) {
  std::vector<Image> images;
  if (!options.image.empty()) {
    images.push_back(load_image(options.image));
  } else {
    for (const std::string& text : options.sizes) images.push_back(noise(parse_size(text)));
  }
  TerminalWatch watch(/*quiet=*/false);
  Session session(options.session, &watch);
  TerminalWatch timed(/*quiet=*/true);  // drawing is no part of what is measured
  const WatchScope scope(session.stream(), &timed);
  for (const Image& image : images) {
    const Samples samples = measure(image, options, session, watch);
    if (samples.repeats() == 0) break;  // interrupted before anything was measured
    if (options.json) {
      fmt::print("{}\n", to_json(image, samples, options, session).dump());
    } else {
      print_table(image, samples, options, session);
    }
  }
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace kvlm
