#include "kernels/base/queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/base/buffer.h"
#include "kernels/base/driver_facts.h"
#include "kernels/base/error.h"
#include "kernels/cuda/device/cublaslt.h"
#include "kernels/cuda/device/status.h"

// All that the project asks of the CUDA runtime beside kernels: devices and their memory, with an
// account of what the driver takes beside our own allocations; a queue (a stream with its scratch,
// its ring of pinned host memory for uploads, its events); and captured graphs. While a thread
// records, whatever could not be replayed is refused.
namespace kvlm::cuda {

void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // an error that is not sticky ends here
  if (status == cudaErrorMemoryAllocation) {
    size_t free = 0;
    size_t total = 0;
    const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;  // not without a context
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorCode::kOutOfMemory,
                known ? fmt::format("{}: the GPU has {} of {} bytes free, which is not enough; use "
                                    "a smaller model, batch or cache",
                                    what, free, total)
                      : fmt::format("{}: the GPU has too little free memory to start; wait for "
                                    "other programs on it, or use --device cpu",
                                    what));
  }
  throw Error(ErrorCode::kDevice,
              fmt::format("{}: the GPU reports \"{}\"; its results are lost, start again", what,
                          cudaGetErrorString(status)));
}

int device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

std::string why_none() {
  DriverFacts facts;
  if (cudaDriverGetVersion(&facts.driver) != cudaSuccess) facts.driver = 0;
  facts.needed = CUDART_VERSION;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());
  facts.too_old = status == cudaErrorInsufficientDriver;
  if (status != cudaSuccess) facts.failure = cudaGetErrorString(status);
  return why_none(facts);
}

namespace {

/// The driver's figures of one GPU around our own allocations. It loads kernels when they are first
/// launched, and tells nobody how large they are: that is what grows in between.
struct Figures {
  size_t context = 0;
  size_t seen = 0;   // after the last allocation or release
  size_t grown = 0;  // from one to the next
};

struct Account {
  std::mutex mutex;
  std::map<int, Figures> gpus;
};

Account& account() {
  static Account account;
  return account;
}

/// Of the selected GPU; what it was before if the driver does not say.
size_t used_bytes(size_t before) noexcept {
  size_t free = 0;
  size_t total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? total - free : before;
}

/// Calls `change`, which allocates or releases on the selected GPU.
template <class Change>
void accounted(int index, const Change& change) {
  const std::lock_guard lock(account().mutex);
  Figures& figures = account().gpus[index];
  const size_t before = used_bytes(figures.seen);
  figures.grown += before - std::min(before, figures.seen);
  change();
  figures.seen = used_bytes(before);
}

void select(int index) {
  const int count = device_count();
  if (index < 0 || index >= count) {
    throw Error(
        ErrorCode::kUnsupported,
        count == 0 ? fmt::format("there is no GPU: {}; use --device cpu", why_none())
                   : fmt::format("there is no GPU {}; choose cuda:0 to cuda:{}", index, count - 1));
  }
  check(cudaSetDevice(index), fmt::format("cuda:{}", index));
  const std::lock_guard lock(account().mutex);
  const auto [gpu, first] = account().gpus.try_emplace(index);
  if (first) gpu->second.context = gpu->second.seen = used_bytes(0);
}

constexpr size_t kUploadBytes = size_t{8} << 20;  // of each half of the ring

/// A queue of this thread records: what it is given is to be run again.
thread_local bool recording = false;

void refuse_while(bool recorded, std::string_view what) {
  if (!recorded) return;
  throw Error(ErrorCode::kDevice, fmt::format("{}: not allowed while a graph is recorded; this is "
                                              "an error of the program, please report it",
                                              what));
}
constexpr size_t kUploadAlignment = 256;

}  // namespace

DeviceFacts device_facts(int index) {
  select(index);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  DeviceFacts facts;
  facts.name = properties.name;
  check(cudaMemGetInfo(&facts.free_bytes, &facts.total_bytes), "cudaMemGetInfo");
  return facts;
}

DeviceUse device_use(int index) {
  select(index);
  const std::lock_guard lock(account().mutex);
  const Figures& figures = account().gpus[index];
  const size_t now = used_bytes(figures.seen);
  return {figures.context, figures.grown + now - std::min(now, figures.seen), now};
}

std::byte* allocate(int index, size_t bytes) {
  refuse_while(recording, "an allocation");
  select(index);
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  cudaError_t status = cudaSuccess;
  accounted(index, [&] { status = cudaMalloc(&data, bytes); });
  check(status, fmt::format("{} bytes on cuda:{}", bytes, index));
  return static_cast<std::byte*>(data);
}

void release(int index, std::byte* data) noexcept {
  if (data == nullptr) return;
  // At the end of a program the driver may be gone already.
  if (cudaSetDevice(index) == cudaSuccess) {
    accounted(index, [data] { static_cast<void>(cudaFree(data)); });
  }
  static_cast<void>(cudaGetLastError());
}

void copy_now(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy");
  // From memory that is not pinned it returns when all is staged, and queues do not wait for it.
  check(cudaStreamSynchronize(nullptr), "copy");
}

void copy_rows_now(void* to, size_t stride, const void* from, size_t bytes, size_t rows) {
  check(cudaMemcpy2D(to, stride, from, bytes, bytes, rows, cudaMemcpyDefault), "copy");
  check(cudaStreamSynchronize(nullptr), "copy");  // as in copy_now()
}

void clear_now(void* data, size_t bytes) {
  check(cudaMemset(data, 0, bytes), "clear");
  check(cudaStreamSynchronize(nullptr), "clear");
}

struct Queue::State {
  /// Pinned host memory and its copy on the GPU, used in turn; a half is written again only when
  /// what was queued before it was left is done.
  struct Ring {
    std::byte* host = nullptr;
    Buffer device;
    size_t half_bytes = 0;
    size_t used = 0;  // of the current half
    int half = 0;
    std::array<cudaEvent_t, 2> left{};
  };

  /// Pinned memory that a copy to the host comes to where more is queued before the host waits for
  /// it: of such memory alone a copy can be waited for by itself.
  struct Fetched {
    std::byte* host = nullptr;
    size_t bytes = 0;
    cudaEvent_t there = nullptr;
  };

  explicit State(int at) : index(at) {}
  ~State() {
    static_cast<void>(cudaSetDevice(index));
    static_cast<void>(cudaStreamSynchronize(stream));
    static_cast<void>(cudaFreeHost(ring.host));
    static_cast<void>(cudaFreeHost(fetched.host));
    for (cudaEvent_t event : {ring.left[0], ring.left[1], fetched.there, clock[0], clock[1]}) {
      static_cast<void>(cudaEventDestroy(event));
    }
    static_cast<void>(cudaStreamDestroy(stream));
    static_cast<void>(cudaGetLastError());
  }

  /// On failure the ring is as it was.
  void make_ring(size_t half_bytes) {
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    Buffer device({DeviceKind::kCuda, index}, 2 * half_bytes);
    void* host = nullptr;
    check(cudaMallocHost(&host, 2 * half_bytes), "pinned host memory");
    static_cast<void>(cudaFreeHost(ring.host));
    ring.host = static_cast<std::byte*>(host);
    retired = std::exchange(ring.device, std::move(device));
    ring.half_bytes = half_bytes;
    ring.used = 0;
  }

  /// Whether there is pinned memory for a copy of so many bytes; what is done meanwhile can be left
  /// out where there is none.
  bool can_fetch(size_t bytes) noexcept {
    if (fetched.bytes >= bytes) return true;
    static_cast<void>(cudaFreeHost(fetched.host));
    fetched.host = nullptr;
    fetched.bytes = 0;
    void* host = nullptr;
    if (cudaMallocHost(&host, bytes) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    fetched.host = static_cast<std::byte*>(host);
    fetched.bytes = bytes;
    return true;
  }

  void do_meanwhile() {
    if (meanwhile != nullptr) (*std::exchange(meanwhile, nullptr))();
  }

  /// Copies to the host, and does what is to be done meanwhile. If can_fetch().
  void fetch(void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(fetched.host, from, bytes, cudaMemcpyDeviceToHost, stream), "copy");
    check(cudaEventRecord(fetched.there, stream), "copy");
    do_meanwhile();
    check(cudaEventSynchronize(fetched.there), "copy");
    std::memcpy(to, fetched.host, bytes);
  }

  int index;
  int multiprocessors = 0;
  int generation = 0;  // the major number of the compute capability
  bool recording = false;
  uint64_t memory_version = 0;
  cudaStream_t stream = nullptr;
  std::array<Buffer, kScratchSlots> scratch;
  Ring ring;
  Fetched fetched;
  std::function<void()>* meanwhile = nullptr;
  std::array<cudaEvent_t, 2> clock{};
  Buffer retired;  // the smaller ring before: uploads that nothing has used yet
};

Queue::Queue(int index) : state_(std::make_unique<State>(index)) {
  select(index);
  static_cast<void>(cublaslt());  // products need it; refused here, before anything is read
  check(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaDeviceGetAttribute(&state_->multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&state_->generation, cudaDevAttrComputeCapabilityMajor, index),
        "cudaDeviceGetAttribute");
  for (cudaEvent_t* event :
       {&state_->ring.left[0], &state_->ring.left[1], &state_->fetched.there}) {
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
  }
  for (cudaEvent_t& event : state_->clock) check(cudaEventCreate(&event), "cudaEventCreate");
  state_->make_ring(kUploadBytes);
}

Queue::~Queue() = default;

void* Queue::native() const noexcept { return state_->stream; }

int Queue::multiprocessors() const noexcept { return state_->multiprocessors; }

bool Queue::overlaps_kernels() const noexcept {
  return KVLM_EARLY_STARTS != 0 && state_->generation >= 9;
}

std::byte* Queue::scratch(int slot, size_t bytes) {
  Buffer& buffer = state_->scratch[static_cast<size_t>(slot)];
  if (buffer.bytes() < bytes) {
    refuse_while(state_->recording, "more scratch memory");
    synchronize();
    ++state_->memory_version;
    buffer = Buffer();  // first, so that not both are held
    buffer = Buffer({DeviceKind::kCuda, state_->index}, bytes);
  }
  return buffer.data();
}

const std::byte* Queue::upload(const void* from, size_t bytes) {
  const UploadRange all{from, bytes, 0};
  return upload_ranges({&all, 1}, bytes);
}

size_t Queue::take(size_t bytes) {
  refuse_while(state_->recording, "an upload");
  State::Ring& ring = state_->ring;
  const size_t taken = (bytes + kUploadAlignment - 1) / kUploadAlignment * kUploadAlignment;
  if (taken > ring.half_bytes) state_->make_ring(2 * taken);  // waits: earlier uploads are used
  if (ring.used + taken > ring.half_bytes) {
    check(cudaEventRecord(ring.left[static_cast<size_t>(ring.half)], state_->stream), "upload");
    ring.half ^= 1;
    ring.used = 0;
    check(cudaEventSynchronize(ring.left[static_cast<size_t>(ring.half)]), "upload");
  }
  const size_t at = static_cast<size_t>(ring.half) * ring.half_bytes + ring.used;
  ring.used += taken;
  return at;
}

const std::byte* Queue::upload_ranges(std::span<const UploadRange> ranges, size_t bytes) {
  const size_t at = take(bytes);
  State::Ring& ring = state_->ring;
  for (const UploadRange& range : ranges) {
    if (range.bytes > 0) std::memcpy(ring.host + at + range.at, range.from, range.bytes);
  }
  std::byte* placed = ring.device.data() + at;
  check(cudaMemcpyAsync(placed, ring.host + at, bytes, cudaMemcpyHostToDevice, state_->stream),
        "upload");
  return placed;
}

std::byte* Queue::stage(size_t bytes) {
  const size_t at = take(bytes);
  return state_->ring.host + at;
}

void Queue::send(std::byte* to, const std::byte* staged, size_t bytes) {
  check(cudaMemcpyAsync(to, staged, bytes, cudaMemcpyHostToDevice, state_->stream), "upload");
}

void Queue::copy(void* to, bool to_gpu, const void* from, bool from_gpu, size_t bytes) {
  if (bytes == 0) return;
  if (!to_gpu || !from_gpu) refuse_while(state_->recording, "a copy from or to the host");
  if (to_gpu && !from_gpu && bytes <= state_->ring.half_bytes / 4) {  // small: do not wait
    from = upload(from, bytes);
    from_gpu = true;
  }
  if (!to_gpu && state_->meanwhile != nullptr && state_->can_fetch(bytes)) {
    return state_->fetch(to, from, bytes);
  }
  const cudaMemcpyKind kind = to_gpu
                                  ? (from_gpu ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                                  : cudaMemcpyDeviceToHost;
  check(cudaMemcpyAsync(to, from, bytes, kind, state_->stream), "copy");
  if (!to_gpu || !from_gpu) synchronize();
}

void Queue::enter_thread() const { select(state_->index); }
void Queue::set_meanwhile(std::function<void()>* work) noexcept { state_->meanwhile = work; }

void Queue::do_meanwhile() { state_->do_meanwhile(); }

void Queue::start_clock() { check(cudaEventRecord(state_->clock[0], state_->stream), "a clock"); }

void Queue::stop_clock() { check(cudaEventRecord(state_->clock[1], state_->stream), "a clock"); }

double Queue::clocked_ms() const {
  float ms = 0;
  if (cudaEventElapsedTime(&ms, state_->clock[0], state_->clock[1]) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // a clock that nobody started fails nothing
    return 0;
  }
  return std::max(0.0, static_cast<double>(ms));
}

void Queue::start_recording() {
  check(cudaStreamBeginCapture(state_->stream, cudaStreamCaptureModeThreadLocal), "recording");
  state_->recording = recording = true;
}

bool Queue::is_recording() const noexcept { return state_->recording; }

void* Queue::end_recording(bool wanted) {
  state_->recording = recording = false;
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(state_->stream, &graph);
  if (wanted) {
    check(status, "recording");
    return graph;
  }
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  static_cast<void>(cudaGetLastError());
  return nullptr;
}

uint64_t Queue::memory_version() const noexcept { return state_->memory_version; }

void Queue::synchronize() {
  refuse_while(state_->recording, "waiting");
  check(cudaStreamSynchronize(state_->stream), "the queue");
}

}  // namespace kvlm::cuda
