#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

// GPUs and their queues. A build without CUDA links no_cuda/queue.cpp instead, where there is no
// GPU and everything else throws Error{kUnsupported}.
namespace kvlm::cuda {

/// GPUs that the driver shows; 0 without a driver.
int device_count() noexcept;

/// Why device_count() is 0, as a clause: "no CUDA driver is installed".
std::string why_none();

/// What a GPU is and has.
struct DeviceFacts {
  std::string name;  ///< "NVIDIA H100 80GB HBM3"
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

/// Throws Error{kUnsupported} naming the GPUs there are, Error{kDevice} if it does not answer.
DeviceFacts device_facts(int index);

/// What the driver counts on a GPU, other processes' use included.
struct DeviceUse {
  size_t context_bytes = 0;  ///< when this process had a context there, and nothing else yet
  size_t code_bytes = 0;     ///< what was added outside of our allocations: kernels at first use
  size_t device_bytes = 0;   ///< now
};

/// Throws like device_facts().
DeviceUse device_use(int index);

/// `bytes` on GPU `index`, 256-byte aligned. Throws Error{kOutOfMemory} naming both figures,
/// Error{kDevice}.
std::byte* allocate(int index, size_t bytes);
void release(int index, std::byte* data) noexcept;

/// Copies between any two addresses of host or GPU and waits for it.
void copy_now(void* to, const void* from, size_t bytes);

/// copy_now() of rows of `bytes` bytes that follow each other, to rows `stride` bytes apart.
void copy_rows_now(void* to, size_t stride, const void* from, size_t bytes, size_t rows);
/// Makes bytes of a GPU zero and waits for it.
void clear_now(void* data, size_t bytes);

/// Host bytes, and where they go within an upload.
struct UploadRange {
  const void* from = nullptr;
  size_t bytes = 0;
  size_t at = 0;
};

/// The queue of one Stream: everything given to it runs in order.
class Queue {
 public:
  /// Throws like device_facts().
  explicit Queue(int index);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// Makes its GPU that of the calling thread.
  void enter_thread() const;
  /// cudaStream_t.
  void* native() const noexcept;
  int multiprocessors() const noexcept;
  /// Whether a kernel may start while the one before it ends: from Hopper on.
  bool overlaps_kernels() const noexcept;
  /// Scratch number `slot`, grown as needed; its contents are lost when it grows. What was queued
  /// before may still be using the same bytes, in order.
  std::byte* scratch(int slot, size_t bytes);
  /// Copies host bytes to the GPU; the address is valid for what is queued before the next call
  /// but a few. `from` may be reused at once.
  const std::byte* upload(const void* from, size_t bytes);
  /// The same of several ranges, in `bytes` bytes side by side.
  const std::byte* upload_ranges(std::span<const UploadRange> ranges, size_t bytes);
  /// Host memory of `bytes` bytes that send() takes. What is in it stays until the next call but a
  /// few, for which the host waits if it is still on its way.
  std::byte* stage(size_t bytes);
  /// Copies staged bytes, or those of a PinnedMemory, to the GPU, in the queue's order, without
  /// waiting.
  void send(std::byte* to, const std::byte* staged, size_t bytes);
  /// Copies between two addresses, of which at least one is on the GPU, in the queue's order. Host
  /// memory may be reused, or read, when it returns.
  void copy(void* to, bool to_gpu, const void* from, bool from_gpu, size_t bytes);
  /// What the next copy() to the host calls, once, when the copy is queued and before it waits, or
  /// null; it may queue more, which is not waited for.
  void set_meanwhile(std::function<void()>* work) noexcept;
  /// Calls it, if there is any and no copy has.
  void do_meanwhile();
  /// Waits. Throws Error{kDevice} if anything queued has failed.
  void synchronize();
  /// Marks where the queue's clock starts and where it stops; milliseconds between the two, when
  /// both have been waited for.
  void start_clock();
  void stop_clock();
  double clocked_ms() const;

  /// What is queued from now on is kept instead (kernels/base/recording.h).
  void start_recording();
  bool is_recording() const noexcept;
  /// Ends that. Returns a cudaGraph_t, which the caller must destroy; null if it is not `wanted`.
  void* end_recording(bool wanted);
  /// Changes whenever scratch memory moves, so that what was recorded must not be run again.
  uint64_t memory_version() const noexcept;

 private:
  struct State;
  /// Where in the ring for uploads `bytes` have room.
  size_t take(size_t bytes);
  std::unique_ptr<State> state_;
};

}  // namespace kvlm::cuda
