#include "kernels/cpu/stream_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kvlm {
namespace {

/// From any address, and of bytes that are no whole vectors: what is beside them stays.
TEST(StreamCopy, CopiesWhatItIsGiven) {
  std::vector<std::byte> from(5000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  constexpr std::byte kBeside{0xa5};
  for (const size_t bytes : {0, 1, 15, 16, 63, 64, 65, 127, 1000, 4096, 4999}) {
    for (const size_t first : {0, 1}) {
      struct alignas(64) Line {
        std::byte bytes[64];
      };
      std::vector<Line> to(80);
      std::byte* at = to.front().bytes;
      std::fill_n(at, to.size() * 64, kBeside);
      cpu::stream_copy(at, from.data() + first, bytes);
      EXPECT_TRUE(std::equal(at, at + bytes, from.data() + first)) << bytes << " bytes";
      EXPECT_EQ(at[bytes], kBeside) << bytes << " bytes";
    }
  }
}

}  // namespace
}  // namespace kvlm
