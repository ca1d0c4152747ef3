#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <regex>

#include "kernels/base/error.h"
#include "kvcache/spec/spec.h"
#include "python/src/cached.h"
#include "python/src/engine.h"
#include "python/src/outside.h"
#include "python/src/rules.h"
#include "runtime/policy_profile.h"
#include "runtime/spec_file.h"
#include "tools/common/model_shape.h"
#include "tools/common/program.h"
#include "tools/kv/estimate_json.h"
#include "tools/kv/vlm_kv.h"
#include "tools/run/vlm_run.h"

// kvlm._core: the engine, as the classes of kvlm/__init__.py use it. What it returns that is more
// than a number or a text is JSON, the objects that the programs print.
namespace nb = nanobind;
using namespace nb::literals;

namespace kvlm::python {

namespace {

const char* code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kCorruptFile:
      return "corrupt_file";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kOutOfMemory:
      return "out_of_memory";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kCancelled:
      return "cancelled";
  }
  return "";
}

/// A message of the programs with the keywords of kvlm.Model in place of their options.
std::string with_keywords(std::string message) {
  static const std::regex option(
      "(^|[ (])--(kv-memory|kv-profile|kv|device|dtype|weights|activations|lora|tiles|frames|"
      "threads|image-aspect|image-backend|min-pixels|max-pixels)(?![-a-z])");
  std::string made;
  for (std::smatch found; std::regex_search(message, found, option); message = found.suffix()) {
    std::string keyword = found[2];
    std::ranges::replace(keyword, '-', '_');
    made +=
        found.prefix().str() + found[1].str() + (keyword == "kv_memory" ? "cache_memory" : keyword);
  }
  return made + message;
}

/// Calls a function of Python's with what is being loaded; an exception of it cancels.
class PythonWatch final : public Watch {
 public:
  explicit PythonWatch(nb::object progress) : progress_(std::move(progress)) {}

  void progress(std::string_view phase, size_t done, size_t total) override {
    const nb::gil_scoped_acquire acquire;
    if (cancelled_) return;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (!progress_.is_none()) progress_(nb::str(phase.data(), phase.size()), done, total);
    } catch (nb::python_error& error) {
      failure_.emplace(std::move(error));
      cancelled_ = true;
    }
  }
  bool cancelled() const noexcept override { return cancelled_; }
  /// Throws what ended the loading.
  void rethrow() {
    if (failure_) throw nb::python_error(std::move(*failure_));
  }

 private:
  nb::object progress_;
  std::optional<nb::python_error> failure_;
  std::atomic<bool> cancelled_ = false;
};

using Pixels = nb::ndarray<const uint8_t, nb::shape<-1, -1, 3>, nb::device::cpu>;

SentImage image_of(const Pixels& pixels) {
  const size_t height = pixels.shape(0);
  const size_t width = pixels.shape(1);
  constexpr size_t kMostSide = 65535;
  if (height == 0 || width == 0 || height > kMostSide || width > kMostSide) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an image is {} x {}; expected 1 to {} pixels on a side", width, height,
                            kMostSide));
  }
  std::vector<uint8_t> rgb;
  rgb.reserve(pixels.size());
  const auto all = pixels.view();
  for (size_t y = 0; y < height; ++y) {
    for (size_t x = 0; x < width; ++x) {
      for (size_t channel = 0; channel < 3; ++channel) rgb.push_back(all(y, x, channel));
    }
  }
  return SentImage::from_pixels(static_cast<int>(height), static_cast<int>(width), std::move(rgb));
}

std::vector<std::byte> bytes_of(const nb::bytes& bytes) {
  std::vector<std::byte> copy(bytes.size());
  if (!copy.empty()) std::memcpy(copy.data(), bytes.data(), copy.size());
  return copy;
}

/// (text, tokens, (logprob, ((token, logprob), ...)) of each, done) since the last call.
nb::tuple wait(Answer& answer, int milliseconds) {
  Ticket::News news;
  {
    const ReleasedGil release;
    news = answer.ticket().wait(std::chrono::milliseconds(milliseconds));
  }
  nb::list logprobs;
  for (const TokenLogprobs& each : news.logprobs) {
    nb::list top;
    for (const auto& [token, logprob] : each.top) top.append(nb::make_tuple(token, logprob));
    logprobs.append(nb::make_tuple(each.logprob, nb::tuple(top)));
  }
  return nb::make_tuple(news.text, news.tokens, nb::tuple(logprobs), news.done);
}

std::string explain(const std::string& kv, const std::string& model, int tokens, int visual,
                    const std::string& profile_path) {
  const CacheSpec spec = read_spec(kv);
  if (tokens < 1 || visual < 0 || visual > tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("tokens is {} and visual {}; expected a prompt of at least one token, "
                            "with 0 to all of them visual",
                            tokens, visual));
  }
  const CacheShape shape = model_shape(model);
  PolicyProfile profile;
  if (!profile_path.empty()) {
    profile = read_profile(profile_path);
    require_profile_of(profile, model);
  }
  const PromptSize prompt{tokens, visual};
  return estimate_json(canonical(spec), model, shape, prompt,
                       estimate(spec, shape, prompt, &profile))
      .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string info_of(const Engine& engine) {
  const CacheShape shape = engine.session().plan()->shape;
  return nlohmann::ordered_json{{"name", engine.model().name()},
                                {"family", engine.model().family()},
                                {"device", device_name(engine.session().device())},
                                {"dtype", dtype_name(engine.model().dtype())},
                                {"weights", engine.model().weight_format()},
                                {"weight_bytes", engine.session().weight_bytes()},
                                {"context", engine.model().decoder().max_positions()},
                                {"layers", shape.layers},
                                {"q_heads", shape.q_heads},
                                {"kv_heads", shape.kv_heads},
                                {"head_dim", shape.head_dim},
                                {"cache_bytes", engine.cache_bytes()},
                                {"warnings", engine.session().warnings()}}
      .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

/// vlm-run or vlm-kv in this process, whose rules they know. Returns the exit status.
///   files  made the rules
int run_program_of(const std::vector<std::string>& words, const std::vector<std::string>& files) {
  std::vector<std::string> kept = words;
  std::vector<char*> argv;
  for (std::string& word : kept) argv.push_back(word.data());
  argv.push_back(nullptr);
  const int argc = static_cast<int>(kept.size());
  const ReleasedGil release;
  return kept.at(0) == "vlm-kv" ? vlm_kv(argc, argv.data()) : vlm_run(argc, argv.data(), {}, files);
}

}  // namespace

// NOLINTNEXTLINE
NB_MODULE(_core, m) {
  m.doc() = "The engine of kvlm.";
  nb::set_leak_warnings(false);  // a model of a script's own lives until the process ends
  static nb::object error = nb::steal(PyErr_NewExceptionWithDoc(
      "kvlm.Error", "What cannot be done, and what to do next, in a sentence; .code says its kind.",
      PyExc_RuntimeError, nullptr));
  m.attr("Error") = error;
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const RuleFailure& failure) {
      failure.set();
    } catch (const Error& failure) {
      nb::object made = error(with_keywords(failure.what()));
      made.attr("code") = code_name(failure.code());
      PyErr_SetObject(error.ptr(), made.ptr());
    }
  });
  add_rules(m);
  add_simulations(m);
  add_cached_prompt(m);

  nb::class_<SentImage>(m, "Image")
      .def_static(
          "from_file",
          [](const nb::bytes& path) {
            const std::string name(path.c_str(), path.size());
            const ReleasedGil release;
            return SentImage::from_file(name);
          },
          "path"_a)
      .def_static(
          "from_bytes",
          [](const nb::bytes& bytes) { return SentImage::from_bytes(bytes_of(bytes)); }, "bytes"_a)
      .def_static("from_pixels", &image_of, nb::arg("pixels").noconvert());
  nb::class_<SentVideo>(m, "Video")
      .def_static(
          "from_file",
          [](const nb::bytes& path) {
            return SentVideo::from_file(std::string(path.c_str(), path.size()));
          },
          "path"_a)
      .def_static("from_frames", &SentVideo::from_frames, "frames"_a, "fps"_a);

  nb::class_<SessionOptions>(m, "Options")
      .def(nb::init<>())
      .def_rw("model", &SessionOptions::model)
      .def_rw("kv", &SessionOptions::kv)
      .def_rw("kv_profile", &SessionOptions::kv_profile)
      .def_rw("device", &SessionOptions::device)
      .def_rw("dtype", &SessionOptions::dtype)
      .def_rw("weights", &SessionOptions::weights)
      .def_rw("lora", &SessionOptions::lora)
      .def_rw("activations", &SessionOptions::activations)
      .def_rw("image_backend", &SessionOptions::image_backend)
      .def_rw("image_aspect", &SessionOptions::image_aspect)
      .def_rw("max_tiles", &SessionOptions::max_tiles)
      .def_rw("min_pixels", &SessionOptions::min_pixels)
      .def_rw("max_pixels", &SessionOptions::max_pixels)
      .def_rw("threads", &SessionOptions::threads);

  nb::class_<Question>(m, "Question")
      .def(nb::init<>())
      .def(
          "add_message",
          [](Question& to, const std::string& role,
             const std::vector<std::pair<std::string, std::string>>& parts) {
            ChatMessage message{role, {}};
            for (const auto& [kind, text] : parts) {
              using Kind = ContentItem::Kind;
              message.content.push_back({kind == "image"   ? Kind::kImage
                                         : kind == "video" ? Kind::kVideo
                                                           : Kind::kText,
                                         text});
            }
            to.messages.push_back(std::move(message));
          },
          "role"_a, "parts"_a)
      .def(
          "add_image", [](Question& to, const SentImage& image) { to.images.push_back(image); },
          "image"_a)
      .def(
          "add_video", [](Question& to, const SentVideo& video) { to.videos.push_back(video); },
          "video"_a)
      .def(
          "set_frames",
          [](Question& to, std::optional<double> fps, std::optional<int64_t> frames) {
            to.frames = {fps, frames};
          },
          "fps"_a.none(), "frames"_a.none())
      .def_rw("system", &Question::system)
      .def_rw("prompt", &Question::prompt)
      .def_rw("kv", &Question::kv)
      .def_rw("max_tokens", &Question::max_tokens)
      .def_rw("temperature", &Question::temperature)
      .def_rw("top_p", &Question::top_p)
      .def_rw("top_k", &Question::top_k)
      .def_rw("repetition_penalty", &Question::repetition_penalty)
      .def_rw("seed", &Question::seed)
      .def_rw("stop", &Question::stop)
      .def_rw("logprobs", &Question::logprobs)
      .def_rw("records", &Question::records);

  nb::class_<Answer>(m, "Answer")
      .def("wait", &wait, "milliseconds"_a,
           nb::sig("def wait(self, milliseconds: int) -> tuple[str, list[int], tuple[tuple[float, "
                   "tuple[tuple[int, float], ...]], ...], bool]"))
      .def("cached", &Answer::cached)
      .def("cancel", [](Answer& answer) { answer.ticket().cancel(); });

  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, const SessionOptions& options, std::optional<size_t> cache_memory,
             nb::object progress) {
            PythonWatch watch(std::move(progress));
            try {
              const ReleasedGil release;
              new (self) Engine(options, cache_memory, &watch);
            } catch (const Error&) {
              watch.rethrow();
              throw;
            }
          },
          "options"_a, "cache_memory"_a.none(), "progress"_a.none())
      .def(
          "ask",
          [](Engine& engine, const Question& question) {
            engine.service();  // refuses with the GIL: Python may be about to end
            const ReleasedGil release;
            return engine.ask(question);
          },
          "question"_a)
      .def(
          "result", [](const Engine& engine, Answer& answer) { return engine.result_json(answer); },
          "answer"_a)
      .def(
          "token_bytes",
          [](const Engine& engine, int32_t token) {
            const std::string bytes = engine.token_bytes(token);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "token"_a)
      .def("info", &info_of)
      .def("require_open", [](const Engine& engine) { engine.service(); })
      .def("close", &Engine::close, nb::call_guard<ReleasedGil>());

  m.def("explain", &explain, "kv"_a, "model"_a, "tokens"_a, "visual"_a, "kv_profile"_a);
  m.def(
      "list_policies", [](const std::string& name) { return policies_json(name).dump(); },
      "name"_a);
  m.def(
      "canonical", [](const std::string& kv) { return canonical(read_spec(kv)); }, "kv"_a);
  m.def(
      "parse_bytes",
      [](const std::string& name, const std::string& text) {
        return parse_bytes(name.c_str(), text);
      },
      "name"_a, "text"_a);
  m.def("run_program", &run_program_of, "words"_a, "files"_a);
  m.def("version", &version_line);
  m.def("settle", &settle);
}

}  // namespace kvlm::python
