#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "kvcache/kv_cache.h"
#include "runtime/generator.h"
#include "tools/common/session.h"
#include "tools/run/options.h"

namespace kvlm {

/// What prompts of so many tokens need on a device beside weights and cache: an estimate from
/// above.
size_t activation_bytes(Model& model, int64_t prompt_tokens, DeviceKind device);

/// The cache and the generator of a batch: how many records run at once, and in how much memory.
class BatchRoom {
 public:
  /// `total`: records in all, if that is known.
  BatchRoom(Session& session, const RunOptions& options, std::optional<size_t> total);

  /// Makes the cache, which prompts of so many tokens are going to fill. Its size: --kv-memory;
  /// else what --batch-size sequences of the model's whole context take, or, where that is more,
  /// what is free, within --memory, and not needed for activations. Does nothing the second time.
  /// Throws Error{kOutOfMemory}.
  void begin(int prompt_tokens);
  Generator& generator() noexcept { return *generator_; }
  std::string spec() const { return cache_->spec(); }
  /// Of the cache, in use.
  size_t used_bytes() const noexcept { return cache_ ? cache_->bytes() : 0; }

  /// Records at once: by the command line, or what a batch gains from.
  size_t most() const noexcept { return most_; }
  /// The same, as far as memory is known to suffice.
  size_t limit() const noexcept { return limit_; }
  /// There was no memory for one more than `running`.
  void wait_for_one_of(size_t running) noexcept { limit_ = running; }
  /// One has ended: its memory is free.
  void one_left() noexcept { limit_ = most_; }
  /// With no record running, makes a smaller cache, so that more is left for activations. False if
  /// that cannot help a record of so many tokens.
  bool shrink(int prompt_tokens, int max_tokens);

  /// "up to 118 of such records at once (cache 41.2 GB, 1.2 GB of it free for ...)".
  std::string describe(int prompt_tokens, int max_tokens) const;

 private:
  void make(size_t bytes);
  size_t one(int prompt_tokens, int max_tokens) const;

  Session& session_;
  std::optional<size_t> fixed_bytes_;
  std::optional<size_t> memory_;
  size_t most_;
  size_t limit_;
  size_t bytes_ = 0;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Generator> generator_;
};

}  // namespace kvlm
