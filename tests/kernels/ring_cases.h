#pragma once

#include <vector>

#include "kernels/elementwise.h"
#include "kernels/pack.h"
#include "tests/kernels/values.h"

namespace kvlm::testing {

/// Rows that pass through a ring and are packed one by one, and the same rows packed at once.
struct RingCase {
  int bits = 4;
  int channels = 128;
  int group_size = 32;
  int places = 5;
  int before = 0;  ///< rows in blocks when the packer is described
  DType dtype = DType::kF16;

  static constexpr int kBlockRows = 32;
  static constexpr int kRows = 75;

  PackedFormat format() const {
    PackedFormat made;
    made.axis = ScaleAxis::kToken;
    made.group_size = group_size;
    made.section[0] = {.code = static_cast<CodeFormat>(bits), .channels = channels};
    return made;
  }
  size_t code_bytes() const { return kBlockRows * format().row_bytes(); }
  size_t meta_bytes() const { return format().meta_bytes(kBlockRows) / 2; }
  size_t block_bytes() const { return (code_bytes() + 2 * meta_bytes() + 15) / 16 * 16; }
  int64_t memory_bytes() const {
    return static_cast<int64_t>((kRows + kBlockRows - 1) / kBlockRows * block_bytes());
  }
  Tensor rows() const {
    return normal_tensor(dtype, {kRows, channels}, static_cast<uint32_t>(bits), 2.0f);
  }

  /// The bytes of all blocks after `packs` rows were packed one by one.
  std::vector<uint8_t> one_by_one(int packs, Device device, Stream& stream) const {
    const Tensor x = rows();
    Tensor ring_rows(dtype, {places, channels}, device);
    Tensor memory = zeros(device, stream);
    const auto put = [&](int row) {
      copy(ring_rows.view().slice(row % places, 1), x.view().slice(row, 1), stream);
    };
    for (int i = 0; i < places; ++i) put(before + i);
    PackedRing ring;
    ring.rows = ring_rows.view().data();
    ring.places = places;
    ring.oldest = before % places;
    ring.codes = memory.view().data();
    ring.scales = ring.codes + code_bytes();
    ring.zeros = ring.scales + meta_bytes();
    ring.code_stride = ring.scale_stride = static_cast<std::ptrdiff_t>(block_bytes());
    ring.block_rows = kBlockRows;
    ring.packed = before;
    RingPacker packer(device);
    packer.describe(format(), {}, dtype, {&ring, 1}, stream);
    for (int i = 0; i < packs; ++i) {
      packer.run(stream);
      if (before + i + places < kRows) put(before + i + places);
    }
    return bytes_of(memory, stream);
  }
  /// The same by pack().
  std::vector<uint8_t> at_once(int packs, Stream& stream) const {
    Tensor memory = zeros({}, stream);
    Tensor x(DType::kF32, {kRows, channels});
    convert(x, rows(), stream);
    for (int row = before; row < before + packs; ++row) {
      std::byte* block =
          memory.view().data() + static_cast<size_t>(row / kBlockRows) * block_bytes();
      const auto at = static_cast<size_t>(row % kBlockRows);
      const size_t meta = meta_bytes() / kBlockRows * at;
      const PackJob job{x.view().slice(row, 1).as<float>(), 1, block + at * format().row_bytes(),
                        block + code_bytes() + meta, block + code_bytes() + meta_bytes() + meta};
      pack(format(), {}, {&job, 1}, stream);
    }
    return bytes_of(memory, stream);
  }

 private:
  Tensor zeros(Device device, Stream& stream) const {
    Tensor none(DType::kU8, {memory_bytes()});
    std::fill_n(none.as<uint8_t>(), memory_bytes(), uint8_t{0});
    Tensor placed(DType::kU8, none.shape(), device);
    copy(placed, none, stream);
    return placed;
  }
  static std::vector<uint8_t> bytes_of(const Tensor& memory, Stream& stream) {
    Tensor host(DType::kU8, memory.shape());
    copy(host, memory, stream);
    return {host.as<uint8_t>(), host.as<uint8_t>() + host.shape().elements()};
  }
};

inline std::vector<RingCase> ring_cases() {
  std::vector<RingCase> cases;
  for (const int bits : {1, 2, 3, 4, 8}) {
    for (const auto& [channels, group] :
         {std::pair(128, 32), std::pair(128, 128), std::pair(20, 7), std::pair(80, 80)}) {
      cases.push_back({bits, channels, group, 5, 0, DType::kF16});
      cases.push_back({bits, channels, group, 1, 31, DType::kBF16});
      cases.push_back({bits, channels, group, 33, 5, DType::kF32});
    }
  }
  return cases;
}

}  // namespace kvlm::testing
