#include "tools/common/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "runtime/family.h"
#include "runtime/key_biases.h"
#include "runtime/loading/checkpoint.h"
#include "runtime/loading/lora.h"
#include "runtime/loading/model_path.h"
#include "runtime/policy_profile.h"
#include "runtime/saving/rounded_checkpoint.h"
#include "runtime/spec_file.h"
#include "runtime/synthetic.h"
#include "tools/common/model_shape.h"
#include "tools/common/program.h"
#include "tools/common/room.h"
#include "tools/common/weight_options.h"

// What every program does before its own work: finds the model, picks device and threads, checks
// the spec against the decoder before a weight is read, loads, and sizes caches.
namespace kvlm {

namespace {

constexpr std::string_view kSynthetic = "synthetic:";
constexpr int kMostTiles = 1024;
constexpr int64_t kMostPixels = int64_t{1} << 28;  // of a picture that is decoded

[[noreturn]] void refuse(const char* flag, const std::string& value, const char* expected) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is \"{}\"; expected {}", flag, value, expected));
}

std::optional<int64_t> pixels(const char* flag, std::optional<int64_t> count) {
  if (count && (*count < 1 || *count > kMostPixels)) {
    refuse(flag, fmt::format("{}", *count), "1 to 268435456");
  }
  return count;
}

/// The kind of device that --device names, without touching one.
DeviceKind planned_kind(const std::string& device) {
  const bool gpu = device == "auto" ? cuda::device_count() > 0 : device != "cpu";
  return gpu ? DeviceKind::kCuda : DeviceKind::kCpu;
}

LoadOptions load_options(const SessionOptions& options) {
  LoadOptions load;
  if (options.dtype != "auto") {
    load.dtype = parse_float_dtype(options.dtype);
    if (!load.dtype) refuse("--dtype", options.dtype, "auto, f32, f16 (half) or bf16");
  }
  load.rounding = parse_weights(options.weights);
  load.exact_activations = parse_activations(options.activations) == 16;
  if (options.image_backend == "pil") {
    load.image_backend = ResizeBackend::kPil;
  } else if (options.image_backend == "torchvision") {
    load.image_backend = ResizeBackend::kTorchvision;
  } else if (options.image_backend != "auto") {
    refuse("--image-backend", options.image_backend, "auto, torchvision or pil");
  }
  if (options.image_aspect == "pad") {
    load.image_aspect = ImageAspect::kPad;
  } else if (options.image_aspect == "crop") {
    load.image_aspect = ImageAspect::kCrop;
  } else if (options.image_aspect == "anyres") {
    load.image_aspect = ImageAspect::kAnyres;
  } else if (options.image_aspect != "auto") {
    refuse("--image-aspect", options.image_aspect, "auto, crop, pad or anyres");
  }
  if (options.max_tiles && (*options.max_tiles < 1 || *options.max_tiles > kMostTiles)) {
    refuse("--tiles", fmt::format("{}", *options.max_tiles), "1 to 1024");
  }
  load.max_tiles = options.max_tiles;
  load.min_pixels = pixels("--min-pixels", options.min_pixels);
  load.max_pixels = pixels("--max-pixels", options.max_pixels);
  if (load.min_pixels && load.max_pixels && *load.min_pixels > *load.max_pixels) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--min-pixels is {} and --max-pixels {}; expected the smaller number first",
                    *load.min_pixels, *load.max_pixels));
  }
  return load;
}

}  // namespace

struct Session::State {
  State(const SessionOptions& options, Device at)
      : device(at), pool(options.threads), stream(pool, at), spec(read_spec(options.kv)) {
    if (options.kv_profile.empty()) return;
    profile = read_profile(options.kv_profile);
    require_profile_of(profile, options.model);
  }

  Device device;
  ThreadPool pool;
  Stream stream;
  CacheSpec spec;
  PolicyProfile profile;
  std::optional<Checkpoint> checkpoint;
  std::map<std::string, WeightMap::Rounded> rounded;
  std::shared_ptr<CachePlan> plan;
  std::unique_ptr<Model> model;
  double load_ms = 0;
  size_t weight_bytes = 0;
  std::vector<std::string> warnings;
};

Session::Session(const SessionOptions& options, std::unique_ptr<Model> model)
    : state_(std::make_unique<State>(options, parse_device(options.device))) {
  state_->model = std::move(model);
  state_->plan = plan_cache(state_->spec, state_->model->decoder().cache_shape(), &state_->profile);
}

Session::Session(const SessionOptions& options, Watch* watch) {
  const auto start = std::chrono::steady_clock::now();
  if (options.threads < 0 || options.threads > 1024) {
    refuse("--threads", fmt::format("{}", options.threads), "1 to 1024, or 0 for one per core");
  }
  LoadOptions load = load_options(options);
  state_ = std::make_unique<State>(options, options.dry ? Device{} : parse_device(options.device));

  load.rounded = &state_->rounded;
  state_->stream.set_watch(watch);
  state_->stream.set_rounds_rows(load.dtype == DType::kBF16);

  // What the spec asks for is checked before any weight is looked at.
  state_->plan = plan_cache(state_->spec, model_shape(options.model), &state_->profile);
  const auto require = [&](size_t weight_bytes, size_t mapped_bytes) {
    state_->weight_bytes = weight_bytes;
    if (options.dry) return;
    if (state_->device.kind == DeviceKind::kCpu) {
      require_memory({options.model, weight_bytes - mapped_bytes, options.cache_bytes},
                     memory_limit());
      return;
    }
    require_room({options.model, weight_bytes, options.cache_bytes}, state_->device,
                 facts_within(state_->device, options.memory));
  };
  const bool synthetic = options.model.starts_with(kSynthetic);
  const std::string_view shape =
      synthetic ? std::string_view(options.model).substr(kSynthetic.size()) : std::string_view();
  const DType dtype = load.dtype.value_or(DType::kBF16);
  if (!synthetic) {
    state_->checkpoint.emplace(find_model(options.model, bundled_models(), &environment));
  }
  // The same model without its weights, which says what it will take.
  const DeviceKind kind = options.dry ? planned_kind(options.device) : state_->device.kind;
  Stream apart(state_->pool);
  Stream& planning = options.dry ? state_->stream : apart;
  const auto plan_model = [&] {
    ModelSource source = synthetic ? synthetic_source(shape, dtype, planning)
                                   : plan_source(*state_->checkpoint, options.model, kind);
    if (synthetic) {
      source.weights = blank_weights(dtype);
      source.weights.plan(kind);
    }
    if (!options.lora.empty()) add_lora(source.weights, options.lora);
    const Family& family = family_of(source.config, options.model);
    return family.load(std::move(source), load, planning);
  };
  const bool quantized =
      load.rounding.decoder || (!synthetic && state_->checkpoint->is_quantized());
  if (!synthetic && state_->checkpoint->is_quantized()) {
    if (!options.lora.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--lora: the weights of {} are quantized; merge the adapter into the "
                              "16-bit model, with --weights int4",
                              options.model));
    }
    if (load.rounding.decoder == WeightCode::kU4) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--weights is {}, but the weights of {} are quantized already; "
                              "int8 rounds what is not, the embeddings and the head",
                              options.weights, options.model));
    }
  }
  if (options.dry) {
    state_->model = plan_model();
    require(state_->model->weight_bytes(), 0);
  } else if (quantized) {
    require(plan_model()->weight_bytes(), 0);
  } else if (synthetic) {
    require(synthetic_weight_bytes(shape, dtype), 0);
  } else {
    const size_t weight_bytes = state_->checkpoint->weight_bytes(load.dtype);
    // A file is mapped unless it is converted; a type of the same width is not told from the
    // file's.
    const bool mapped = weight_bytes == state_->checkpoint->weight_bytes(std::nullopt);
    require(weight_bytes, mapped ? weight_bytes : 0);
  }
  if (!options.dry) {
    ModelSource source = synthetic ? synthetic_source(shape, dtype, state_->stream)
                                   : open_source(*state_->checkpoint, options.model);
    if (!synthetic) {
      state_->warnings = state_->checkpoint->warnings();
      std::string bias = loud_key_bias(source.weights, *state_->plan);
      if (!bias.empty()) state_->warnings.push_back(std::move(bias));
    }
    if (!options.lora.empty()) add_lora(source.weights, options.lora);
    const Family& family = family_of(source.config, options.model);
    source.weights.follow(watch, state_->weight_bytes);
    state_->model = family.load(std::move(source), load, state_->stream);
  }
  // What no config says: the type of the weights.
  state_->plan->shape.multiply = state_->model->decoder().cache_shape().multiply;
  report_progress(watch, "loading", state_->weight_bytes, state_->weight_bytes);
  state_->load_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

Session::~Session() = default;

Model& Session::model() noexcept { return *state_->model; }
Stream& Session::stream() noexcept { return state_->stream; }
std::shared_ptr<const CachePlan> Session::plan() const noexcept { return state_->plan; }
double Session::load_ms() const noexcept { return state_->load_ms; }
size_t Session::weight_bytes() const noexcept { return state_->weight_bytes; }
const std::vector<std::string>& Session::warnings() const noexcept { return state_->warnings; }
Device Session::device() const noexcept { return state_->device; }
int Session::threads() const noexcept { return state_->pool.threads(); }

void Session::save_weights(const std::string& folder) const {
  if (!state_->checkpoint) {
    throw Error(ErrorCode::kInvalidArgument,
                "--save-weights: a synthetic model has no checkpoint; give one with -m");
  }
  save_rounded(*state_->checkpoint, state_->rounded, folder, state_->pool);
}

std::unique_ptr<KvCache> Session::make_cache(int sequences, int rows,
                                             std::optional<size_t> bytes) const {
  const size_t needed = session_bytes(*state_->plan, rows, sequences);
  return kvlm::make_cache(state_->plan, bytes.value_or(needed), state_->device);
}

}  // namespace kvlm
