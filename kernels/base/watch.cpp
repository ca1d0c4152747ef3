#include "kernels/base/watch.h"

#include "kernels/base/error.h"

namespace kvlm {

void give_up_if_cancelled(const Watch* watch) {
  if (watch != nullptr && watch->cancelled()) throw Error(ErrorCode::kCancelled, "interrupted");
}

void report_progress(Watch* watch, std::string_view phase, size_t done, size_t total) {
  if (watch == nullptr) return;
  watch->progress(phase, done, total);
  give_up_if_cancelled(watch);
}

}  // namespace kvlm
