#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/kv_cache.h"
#include "kvcache/plan/cache_plan.h"
#include "runtime/generator.h"
#include "runtime/model.h"

namespace kvlm {

/// What every program needs to know before it can run a model.
struct SessionOptions {
  std::string model = "pocket";
  std::string kv = "f16";
  std::string kv_profile;  ///< file of `vlm-kv profile`, or empty
  std::string device = "auto";
  std::string dtype = "auto";
  std::string weights = "16";     ///< "16", "int8" or "int4"
  std::string lora;               ///< folder of an adapter, or empty
  std::string activations = "8";  ///< bits of activations with quantized weights on a CPU
  std::string image_backend = "auto";
  std::string image_aspect = "auto";
  std::optional<int> max_tiles;       ///< as LoadOptions'
  std::optional<int64_t> min_pixels;  ///< likewise
  std::optional<int64_t> max_pixels;  ///< likewise
  std::optional<size_t> memory;       ///< of a GPU, that may be in use at most
  size_t cache_bytes = 0;  ///< that a cache is known to take; 0 if it depends on the prompts
  int threads = 0;         ///< 0: one per core
  /// No weight is read and no device used: the model knows its prompts and shapes, and answers
  /// nothing.
  bool dry = false;
};

/// A loaded model with the threads, stream and checkpoint that it lives on.
class Session {
 public:
  /// Finds and loads the model. Before any weight is read, the cache spec is checked, and whether a
  /// GPU has room for weights and cache. `watch`, which may be null and must outlive the session,
  /// follows the loading and all that its stream does. Throws Error{kCancelled} if it cancels.
  explicit Session(const SessionOptions& options, Watch* watch = nullptr);
  /// A session of a model that somebody else put together, with its weights on options.device.
  Session(const SessionOptions& options, std::unique_ptr<Model> model);
  ~Session();

  Model& model() noexcept;
  Stream& stream() noexcept;
  /// Of the spec that was asked for, for the model's decoder: made once, when the model was opened.
  std::shared_ptr<const CachePlan> plan() const noexcept;
  double load_ms() const noexcept;
  /// Of the weights in the type that they are asked for.
  size_t weight_bytes() const noexcept;
  /// What of the checkpoint, or of it under this cache spec, is not as it should be, a sentence
  /// each.
  const std::vector<std::string>& warnings() const noexcept;
  int threads() const noexcept;
  Device device() const noexcept;
  /// Writes the checkpoint with the decoder's matrices rounded as --weights says (save_rounded()).
  /// Throws Error{kInvalidArgument} where there is nothing to round.
  void save_weights(const std::string& folder) const;
  /// A cache for `sequences` sequences of up to `rows` tokens each; with `bytes` an arena of that
  /// size.
  std::unique_ptr<KvCache> make_cache(int sequences, int rows, std::optional<size_t> bytes) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
