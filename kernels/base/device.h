#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/base/thread_pool.h"

namespace kvlm {

namespace cuda {
class Queue;
}

enum class DeviceKind : uint8_t { kCpu, kCuda };

/// Where bytes live and arithmetic runs.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:0".
std::string device_name(Device device);

/// The queue every operation is given: which device computes, in which order, with which threads
/// and scratch memory. On the CPU an operation is done when its call returns; on CUDA it is queued.
/// One thread at a time may use a stream.
class Stream {
 public:
  /// A CPU stream that runs its parallel loops on `pool`, which must outlive it.
  explicit Stream(ThreadPool& pool);
  /// A stream on `device`; `pool` serves what is done on the host. Throws Error{kUnsupported} if
  /// there is no such GPU, or none in this build.
  Stream(ThreadPool& pool, Device device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device device() const noexcept { return device_; }
  ThreadPool& pool() const noexcept { return *pool_; }
  /// Who follows what is done here, or null. The host's loops ask it through pool(); what is queued
  /// on a GPU already is not given up.
  Watch* watch() const noexcept { return pool_->watch(); }
  void set_watch(Watch* watch) noexcept { pool_->set_watch(watch); }
  /// The device's own handle (a cudaStream_t on CUDA, null on the CPU).
  void* native() const noexcept;
  /// What a stream has on a GPU; only on CUDA.
  cuda::Queue& queue() const noexcept { return *queue_; }
  /// Scratch of at least `bytes` for one worker of pool(), 64-byte aligned, kept and grown between
  /// calls, so that a warmed-up loop allocates nothing. Worker w may be asked for only by the task
  /// that runs as w; the contents are lost at the next call for w.
  std::byte* scratch(int worker, size_t bytes);
  /// The same, one for all workers together; only the thread that starts a loop may ask for it.
  std::byte* shared_scratch(size_t bytes);
  /// Whether the CPU may round the rows of a product of more than kMaxDecodeRows (kernels/gemm.h)
  /// to bf16, which transformers does where a model is bf16: AMX then multiplies once in place of
  /// three times.
  bool rounds_rows() const noexcept { return rounds_rows_; }
  void set_rounds_rows(bool rounds) noexcept { rounds_rows_ = rounds; }
  /// Makes its GPU the calling thread's, which has not used it before; nothing on the CPU.
  void enter_thread() const;
  /// Waits for everything queued; throws Error{kDevice} if something queued has failed.
  void synchronize();

 private:
  struct Scratch;
  Device device_{};
  ThreadPool* pool_;
  std::unique_ptr<cuda::Queue> queue_;
  std::unique_ptr<Scratch> scratch_;
  bool rounds_rows_ = false;
};

/// Work that a GPU is given when something is first copied to its host (Queue::copy), or when
/// Queue::do_meanwhile() says so: it is queued behind all there is, so that the GPU goes on while
/// the host does what it waited for to do. Done at most once, while this lives; on the CPU,
/// where nobody waits, never.
class Meanwhile {
 public:
  /// `work` must not throw. One at a time.
  Meanwhile(Stream& stream, std::function<void()> work);
  ~Meanwhile();
  Meanwhile(const Meanwhile&) = delete;
  Meanwhile& operator=(const Meanwhile&) = delete;

 private:
  Stream& stream_;
  std::function<void()> work_;
};

/// While it lives, `watch` follows a stream in the place of whoever did.
class WatchScope {
 public:
  WatchScope(Stream& stream, Watch* watch) noexcept : stream_(stream), outer_(stream.watch()) {
    stream.set_watch(watch);
  }
  ~WatchScope() { stream_.set_watch(outer_); }
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;

 private:
  Stream& stream_;
  Watch* outer_;
};

}  // namespace kvlm
