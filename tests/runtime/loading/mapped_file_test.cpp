#include "runtime/loading/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::TempFolder;
using test::write_file;

/// What a handler of SIGBUS asks; that programs end with the sentence is
/// tests/tools/cut_weights_test.py's business.
TEST(MappedFile, IsFoundByTheAddressesThatItHas) {
  const TempFolder folder;
  write_file(folder / "a", std::string(10000, 'a'));
  write_file(folder / "b", "b");
  const std::byte* gone = nullptr;
  {
    const MappedFile a(folder / "a", "folder/a");
    const MappedFile b(folder / "b", "b\x1b");
    gone = a.bytes().data();
    for (const size_t offset : {size_t{0}, size_t{4096}, size_t{9999}}) {
      EXPECT_STREQ(mapped_file_at(a.bytes().data() + offset), "folder/a") << offset;
    }
    EXPECT_STREQ(mapped_file_at(b.bytes().data()), "b\\x1b");
    EXPECT_EQ(mapped_file_at(b.bytes().data() + 1), nullptr);
  }
  EXPECT_EQ(mapped_file_at(gone), nullptr);
  EXPECT_EQ(mapped_file_at(&folder), nullptr);
  EXPECT_EQ(mapped_file_at(nullptr), nullptr);
  // An empty file has no mapping.
  write_file(folder / "empty", "");
  EXPECT_TRUE(MappedFile(folder / "empty", "empty").bytes().empty());
}

}  // namespace
}  // namespace kvlm
