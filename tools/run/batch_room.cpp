#include "tools/run/batch_room.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/queue.h"
#include "kvcache/make_cache.h"
#include "tools/common/room.h"
#include "vision/encoder.h"

// How much memory a batch may have. The cache is one reservation; sequences of any length share it,
// so no record has to be known before another one is answered.
namespace kvlm {

namespace {

// More sequences at once make a step longer and the whole no faster (docs/data/batch_size.csv).
constexpr size_t kGpuAtOnce = 256;
constexpr size_t kCpuAtOnce = 4;
// Kernels that are loaded when they are first launched, and libraries' own buffers.
constexpr size_t kOfTheDriver = size_t{512} << 20;

size_t at_once(const Session& session, const RunOptions& options, std::optional<size_t> total) {
  const bool gpu = session.device().kind != DeviceKind::kCpu;
  const size_t most = options.batch_size ? static_cast<size_t>(*options.batch_size)
                      : gpu              ? kGpuAtOnce
                                         : kCpuAtOnce;
  return std::clamp<size_t>(total.value_or(most), 1, most);
}

}  // namespace

size_t activation_bytes(Model& model, int64_t prompt_tokens, DeviceKind device) {
  const size_t tower = tower_workspace_bytes({device, 0});
  return model.decoder().workspace_bytes(prompt_tokens) + 2 * tower +
         (device == DeviceKind::kCpu ? 0 : kOfTheDriver);
}

BatchRoom::BatchRoom(Session& session, const RunOptions& options, std::optional<size_t> total)
    : session_(session),
      fixed_bytes_(options.kv_memory),
      memory_(options.session.memory),
      most_(at_once(session, options, total)),
      limit_(most_) {}

void BatchRoom::begin(int prompt_tokens) {
  if (cache_) return;
  if (fixed_bytes_) return make(*fixed_bytes_);
  const Decoder& decoder = session_.model().decoder();
  const size_t wanted =
      session_bytes(*session_.plan(), decoder.max_positions(), static_cast<int>(most_));
  size_t free = 0;
  if (session_.device().kind == DeviceKind::kCpu) {
    free = available_memory() / 4 * 3;
  } else {
    // Others of the batch may be longer; if they are much longer, shrink() helps.
    const int64_t rows = std::min<int64_t>(2 * int64_t{prompt_tokens}, decoder.max_positions());
    const size_t activations = activation_bytes(session_.model(), rows, session_.device().kind);
    const size_t all = facts_within(session_.device(), memory_).free_bytes;
    free = all > activations ? all - activations : all / 2;
  }
  for (size_t bytes = std::min(wanted, free);; bytes /= 2) {
    try {
      return make(bytes);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory || bytes < one(prompt_tokens, 1)) throw;
    }
  }
}

void BatchRoom::make(size_t bytes) {
  generator_.reset();
  cache_.reset();
  bytes_ = bytes;
  cache_ = make_cache(session_.plan(), bytes, session_.device());
  generator_ = std::make_unique<Generator>(session_.model(), *cache_, session_.stream());
}

size_t BatchRoom::one(int prompt_tokens, int max_tokens) const {
  return session_bytes(*session_.plan(), prompt_tokens + max_tokens);
}

bool BatchRoom::shrink(int prompt_tokens, int max_tokens) {
  const size_t smaller = bytes_ / 4 * 3;
  // On the CPU what the cache does not use takes no memory.
  if (session_.device().kind == DeviceKind::kCpu) return false;
  if (fixed_bytes_ || smaller < one(prompt_tokens, max_tokens)) return false;
  make(smaller);
  return true;
}

std::string BatchRoom::describe(int prompt_tokens, int max_tokens) const {
  SequenceSize size;
  size.prompt_rows = size.visual_rows = prompt_tokens;
  size.max_rows = prompt_tokens + max_tokens;
  const Reservation each = reservation(*session_.plan(), size);
  const size_t fitting =
      bytes_ > each.staging ? (bytes_ - each.staging) / std::max<size_t>(each.kept, 1) : 0;
  return fmt::format("--batch-size auto: {} at once of records of {} tokens (cache of {}, {} each)",
                     std::clamp<size_t>(fitting, 1, most_), size.max_rows, human_bytes(bytes_),
                     human_bytes(each.kept));
}

}  // namespace kvlm
