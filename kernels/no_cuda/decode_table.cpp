#include "kernels/decode_table.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm {

struct DecodeTable::State {};
DecodeTable::DecodeTable(const TableShape&, std::span<const std::array<RowWindow, 2>>, Device) {
  cuda::refuse("DecodeTable");
}
DecodeTable::~DecodeTable() = default;
bool DecodeTable::holds(const TableLoad&) const noexcept { return true; }
void DecodeTable::reserve(const TableLoad&) {}
void DecodeTable::set(int, int, std::span<const TableLane>, Stream&) {
  cuda::refuse("DecodeTable::set");
}
int DecodeTable::drafts() const noexcept { return 0; }
void DecodeTable::await_drafts(size_t) const {}
void DecodeTable::lay(int, int, int, std::span<const TableLane>) {
  cuda::refuse("DecodeTable::lay");
}
void DecodeTable::send(int, Stream&) { cuda::refuse("DecodeTable::send"); }
void DecodeTable::start(std::span<const TableRow>, Stream&) { cuda::refuse("DecodeTable::start"); }
void DecodeTable::store(int, const float*, const float*, Stream&) {
  cuda::refuse("DecodeTable::store");
}
void DecodeTable::attend(int, const float*, float*, float, Stream&) {
  cuda::refuse("DecodeTable::attend");
}
void DecodeTable::pack(bool, Stream&) { cuda::refuse("DecodeTable::pack"); }
void DecodeTable::evict(std::span<const int>, Stream&) { cuda::refuse("DecodeTable::evict"); }
void DecodeTable::drop_least(Stream&) { cuda::refuse("DecodeTable::drop_least"); }
std::vector<int> DecodeTable::came(int) const { return {}; }
void DecodeTable::read_placed(int, int, int, PlacedCopy&) const {}
std::vector<int64_t> DecodeTable::gained_bytes() const { return {}; }
void DecodeTable::put_weights(std::span<const float>, float*) const {}
uint64_t DecodeTable::version() const noexcept { return 0; }

bool DecodeTable::attends_in_place(int) const noexcept { return false; }
int64_t DecodeTable::guarded_remaps(int) const { return 0; }

}  // namespace kvlm
