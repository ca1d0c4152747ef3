#pragma once

#include <memory>
#include <string>
#include <utility>

#include "kvcache/policy_cache.h"

namespace kvlm::test {

/// Serves as the cache that it has; tests derive from it to see what passes.
class WatchedCache : public KvCache {
 public:
  explicit WatchedCache(std::unique_ptr<PolicyCache> cache) : cache_(std::move(cache)) {}

  const CacheShape& shape() const noexcept override { return cache_->shape(); }
  const std::string& spec() const noexcept override { return cache_->spec(); }
  CacheNeeds needs() const noexcept override { return cache_->needs(); }
  bool fits(const SequenceSize& size) const override { return cache_->fits(size); }
  SequenceId open(const SequenceSize& size, const std::string& who) override {
    return cache_->open(size, who);
  }
  SequenceId fork(SequenceId parent, int max_rows, const std::string& who,
                  Stream& stream) override {
    return cache_->fork(parent, max_rows, who, stream);
  }
  void close(SequenceId sequence) noexcept override { cache_->close(sequence); }
  void begin(std::span<const StepRows> step, Stream& stream) override {
    cache_->begin(step, stream);
  }
  void give_embeddings(ConstTensorView embeddings, Stream& stream) override {
    cache_->give_embeddings(embeddings, stream);
  }
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override {
    cache_->attend(layer, q, k, v, out, scale, stream);
  }
  void pause() override { cache_->pause(); }
  void resume() override { cache_->resume(); }
  void end(Stream& stream) override { cache_->end(stream); }
  CachedLayer cached_prompt(SequenceId sequence, int layer, Stream& stream) override {
    return cache_->cached_prompt(sequence, layer, stream);
  }
  int tokens(SequenceId sequence) const noexcept override { return cache_->tokens(sequence); }
  size_t bytes() const noexcept override { return cache_->bytes(); }
  CacheReport report(SequenceId sequence) const noexcept override {
    return cache_->report(sequence);
  }

 protected:
  PolicyCache& cache() noexcept { return *cache_; }
  const PolicyCache& cache() const noexcept { return *cache_; }

 private:
  std::unique_ptr<PolicyCache> cache_;
};

}  // namespace kvlm::test
