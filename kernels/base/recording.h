#pragma once

#include <functional>
#include <memory>

#include "kernels/base/device.h"

namespace kvlm {

/// What a stream was given once, kept by its GPU to be run again: a CUDA graph. The addresses,
/// sizes and numbers are those of the recording; what differs from run to run must be read from the
/// GPU's memory.
class Recording {
 public:
  Recording();
  ~Recording();

  /// Calls `body`, which gives work to `stream`; none of it runs before run(). Nothing may be
  /// allocated, copied from or to the host or waited for meanwhile. False if the GPU has no memory
  /// for the recording; then, and if `body` throws, there is none and nothing has happened.
  /// Throws Error{kDevice}, Error{kUnsupported} on the CPU.
  bool make(Stream& stream, const std::function<void()>& body);
  /// There is one, of this stream, whose scratch memory is still where it was.
  bool fits(Stream& stream) const noexcept;
  void run(Stream& stream);
  void clear() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
