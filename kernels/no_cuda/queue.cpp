#include "kernels/base/queue.h"

#include "kernels/base/error.h"

namespace kvlm::cuda {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported,
              "this build has no CUDA; use --device cpu, or build with -DKVLM_CUDA=ON");
}

}  // namespace

int device_count() noexcept { return 0; }

std::string why_none() { return "this build has no CUDA"; }

DeviceFacts device_facts(int) { refuse(); }

DeviceUse device_use(int) { refuse(); }

std::byte* allocate(int, size_t) { refuse(); }

void release(int, std::byte*) noexcept {}

void copy_now(void*, const void*, size_t) { refuse(); }

void copy_rows_now(void*, size_t, const void*, size_t, size_t) { refuse(); }

void clear_now(void*, size_t) { refuse(); }

struct Queue::State {};

Queue::Queue(int) { refuse(); }

Queue::~Queue() = default;

void* Queue::native() const noexcept { return nullptr; }

int Queue::multiprocessors() const noexcept { return 0; }

std::byte* Queue::scratch(int, size_t) { refuse(); }

const std::byte* Queue::upload(const void*, size_t) { refuse(); }
const std::byte* Queue::upload_ranges(std::span<const UploadRange>, size_t) { refuse(); }

std::byte* Queue::stage(size_t) { refuse(); }

void Queue::send(std::byte*, const std::byte*, size_t) { refuse(); }

void Queue::copy(void*, bool, const void*, bool, size_t) { refuse(); }

void Queue::enter_thread() const {}
void Queue::set_meanwhile(std::function<void()>*) noexcept {}
void Queue::do_meanwhile() {}

void Queue::synchronize() { refuse(); }

void Queue::start_clock() { refuse(); }
void Queue::stop_clock() { refuse(); }
double Queue::clocked_ms() const { refuse(); }

void Queue::start_recording() { refuse(); }
bool Queue::is_recording() const noexcept { return false; }
void* Queue::end_recording(bool) { refuse(); }
uint64_t Queue::memory_version() const noexcept { return 0; }

}  // namespace kvlm::cuda
