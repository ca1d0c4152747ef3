#include "runtime/loading/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::raw_safetensors;
using testing::HasSubstr;

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "m.safetensors");
}

std::string failure(const std::string& file) {
  std::string message = test::failure([&] { parse(file); });
  EXPECT_THAT(message, testing::StartsWith("m.safetensors: "));
  return message;
}

std::string failure(std::string_view header, size_t data_bytes) {
  return failure(raw_safetensors(header, std::string(data_bytes, '\0')));
}

/// A header with the one tensor "t".
std::string one(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"({{"t":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})", dtype, shape,
                     offsets);
}

std::string f32_entry(std::string_view name, size_t begin, size_t end) {
  return fmt::format(R"("{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}})", name,
                     (end - begin) / 4, begin, end);
}

std::string file_with_length(uint64_t length, std::string_view rest) {
  std::string file = raw_safetensors("", rest);
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>((length >> (8 * i)) & 0xff);
  return file;
}

TEST(Safetensors, ReadsEntriesInTheOrderOfTheirData) {
  const SafetensorsHeader header =
      parse(raw_safetensors("{" + f32_entry("a", 8, 24) + "," + f32_entry("b", 0, 8) +
                                R"(,"__metadata__":{"format":"pt"}}   )",
                            std::string(24, '\0')));
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.entries[0].name, "b");
  EXPECT_EQ(header.entries[1].name, "a");
  EXPECT_EQ(header.entries[1].dtype, "F32");
  EXPECT_EQ(header.entries[1].shape, std::vector<int64_t>{4});
  EXPECT_EQ(header.entries[1].begin, 8u);
  EXPECT_EQ(header.entries[1].end, 24u);
}

TEST(Safetensors, EveryDTypeHasItsSize) {
  const std::vector<std::pair<std::string, size_t>> bytes_of_24 = {
      {"BOOL", 24},        {"U8", 24},          {"I8", 24},   {"F8_E4M3", 24}, {"F8_E5M2", 24},
      {"F8_E8M0", 24},     {"F8_E4M3FNUZ", 24}, {"I16", 48},  {"U16", 48},     {"F16", 48},
      {"F8_E5M2FNUZ", 24}, {"BF16", 48},        {"I32", 96},  {"U32", 96},     {"F32", 96},
      {"I64", 192},        {"U64", 192},        {"F64", 192}, {"C64", 192},    {"F4", 12},
      {"F6_E2M3", 18},     {"F6_E3M2", 18}};
  for (const auto& [dtype, bytes] : bytes_of_24) {
    const std::string header = one(dtype, "[4,6]", fmt::format("[0,{}]", bytes));
    EXPECT_NO_THROW(parse(raw_safetensors(header, std::string(bytes, '\0')))) << dtype;
  }
}

TEST(Safetensors, EmptyAndScalarAndManyDimensionsAreLegal) {
  EXPECT_TRUE(parse(raw_safetensors("{}", "")).entries.empty());
  EXPECT_NO_THROW(parse(raw_safetensors(one("F32", "[]", "[0,4]"), "abcd")));
  EXPECT_NO_THROW(parse(raw_safetensors(one("F32", "[3,0]", "[0,0]"), "")));
  EXPECT_NO_THROW(parse(raw_safetensors(one("F4", "[0]", "[0,0]"), "")));
  EXPECT_NO_THROW(parse(raw_safetensors(one("U8", "[1,1,2,1,1,2]", "[0,4]"), "abcd")));
  // Empty tensors between, before and after others; two at one place.
  EXPECT_NO_THROW(parse(raw_safetensors(
      "{" + f32_entry("a", 4, 8) + "," + f32_entry("b", 4, 4) + "," + f32_entry("c", 0, 4) + "," +
          f32_entry("d", 0, 0) + "," + f32_entry("e", 8, 8) + "," + f32_entry("f", 4, 4) + "}",
      "abcdefgh")));
}

TEST(Safetensors, NeedsEightBytes) {
  EXPECT_THAT(failure(""), HasSubstr("0 bytes long"));
  EXPECT_THAT(failure(std::string(7, '\0')), HasSubstr("7 bytes long, shorter than the 8"));
}

TEST(Safetensors, BoundsTheHeaderLength) {
  EXPECT_THAT(failure(file_with_length(100'000'001, "{}")),
              HasSubstr("header of 100000001 bytes; at most 100000000"));
  EXPECT_THAT(failure(file_with_length(3, "{}")), HasSubstr("only 2 follow"));
  EXPECT_THAT(failure(file_with_length(100'000'000, "{}")), HasSubstr("only 2 follow"));
  for (const uint64_t length : {~uint64_t{0}, ~uint64_t{0} - 7, uint64_t{1} << 63}) {
    EXPECT_THAT(failure(file_with_length(length, "{}")), HasSubstr("claims a header of"));
  }
}

TEST(Safetensors, TheHeaderIsOneJsonObject) {
  EXPECT_THAT(failure("", 0), HasSubstr("does not start with '{'"));
  EXPECT_THAT(failure(" {}", 0), HasSubstr("does not start with '{'"));
  EXPECT_THAT(failure("[]", 0), HasSubstr("does not start with '{'"));
  EXPECT_THAT(failure("{} x", 0), HasSubstr("expected end of input"));
  EXPECT_THAT(failure("{}{}", 0), HasSubstr("expected end of input"));
  EXPECT_THAT(failure(std::string_view("{}\0\0", 4), 0), HasSubstr("NUL byte"));
  EXPECT_THAT(failure("{", 0), HasSubstr("header: line 1, column"));
  EXPECT_THAT(failure("{\"\xff\":1}", 0), HasSubstr("UTF-8"));
  std::string deep = "{\"t\":";
  deep += std::string(100'000, '[');
  EXPECT_THAT(failure(deep, 0), HasSubstr("nest deeper"));
}

TEST(Safetensors, RefusesDuplicates) {
  EXPECT_THAT(failure("{" + f32_entry("a", 0, 4) + "," + f32_entry("a", 0, 4) + "}", 4),
              HasSubstr("key \"a\" appears twice"));
  EXPECT_THAT(failure(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("key \"dtype\" in a appears twice"));
  EXPECT_THAT(failure(R"({"__metadata__":{"x":"1","x":"2"}})", 0), HasSubstr("appears twice"));
}

TEST(Safetensors, EntriesHaveExactlyThreeFields) {
  EXPECT_THAT(failure(R"({"t":[]})", 0), HasSubstr("tensor t is not an object"));
  EXPECT_THAT(failure(R"({"t":{"shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("no field \"dtype\""));
  EXPECT_THAT(failure(R"({"t":{"dtype":"F32","data_offsets":[0,4]}})", 4),
              HasSubstr("no field \"shape\""));
  EXPECT_THAT(failure(R"({"t":{"dtype":"F32","shape":[1]}})", 4),
              HasSubstr("no field \"data_offsets\""));
  EXPECT_THAT(failure(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}})", 4),
              HasSubstr("unknown field \"strides\""));
  EXPECT_THAT(failure(R"({"t":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("dtype that is not a string"));
  EXPECT_THAT(failure(one("F33", "[1]", "[0,4]"), 4), HasSubstr("unknown dtype \"F33\""));
  EXPECT_THAT(failure(one("f32", "[1]", "[0,4]"), 4), HasSubstr("unknown dtype \"f32\""));
}

TEST(Safetensors, MetadataMapsStringsToStrings) {
  EXPECT_THAT(failure(R"({"__metadata__":[]})", 0), HasSubstr("__metadata__ is not an object"));
  EXPECT_THAT(failure(R"({"__metadata__":null})", 0), HasSubstr("__metadata__ is not an object"));
  EXPECT_THAT(failure(R"({"__metadata__":{"n":1}})", 0), HasSubstr("\"n\" is not a string"));
}

TEST(Safetensors, DimensionsAreNonNegativeIntegers) {
  for (const char* shape : {"[-1]", "[1.0]", "[1.5]", "[\"1\"]", "[null]", "[[1]]", "[true]",
                            "[18446744073709551616]", "[9223372036854775808]", "[1e3]"}) {
    EXPECT_THAT(failure(one("F32", shape, "[0,4]"), 4), HasSubstr("a dimension that is not"))
        << shape;
  }
  EXPECT_THAT(failure(one("F32", "1", "[0,4]"), 4), HasSubstr("shape that is not a list"));
}

TEST(Safetensors, SizesDoNotOverflow) {
  for (const char* shape :
       {"[4294967296,4294967296]", "[9223372036854775807]", "[9223372036854775807,2]",
        "[2305843009213693952,8]", "[65536,65536,65536,65536]",
        "[0,9223372036854775807,9223372036854775807]",  // the strides would overflow
        "[1073741824,1073741824,4,0]"}) {
    EXPECT_THAT(failure(one("F32", shape, "[0,0]"), 0), HasSubstr("overflows")) << shape;
  }
}

TEST(Safetensors, SubByteTensorsFillWholeBytes) {
  EXPECT_NO_THROW(parse(raw_safetensors(one("F4", "[2]", "[0,1]"), "a")));
  EXPECT_THAT(failure(one("F4", "[3]", "[0,2]"), 2),
              HasSubstr("12 bits of F4, which is not a whole number of bytes"));
  EXPECT_THAT(failure(one("F6_E2M3", "[2]", "[0,2]"), 2), HasSubstr("whole number of bytes"));
}

TEST(Safetensors, OffsetsMatchTheSize) {
  EXPECT_THAT(failure(one("F32", "[1]", "[4,0]"), 4), HasSubstr("begins at 4 after its end 0"));
  EXPECT_THAT(failure(one("F32", "[1]", "[0,8]"), 4), HasSubstr("ends at 8 of a data buffer of 4"));
  EXPECT_THAT(failure(one("F32", "[1]", "[18446744073709551612,18446744073709551615]"), 4),
              HasSubstr("of a data buffer of 4"));
  EXPECT_THAT(failure(one("F32", "[1]", "[0,3]"), 4),
              HasSubstr("spans 3 bytes, but its dtype and shape need 4"));
  EXPECT_THAT(failure(one("F32", "[2]", "[0,4]"), 4), HasSubstr("need 8"));
  for (const char* offsets : {"[0]", "[0,4,4]", "[0,4.0]", "[-4,0]", "4", "[\"0\",\"4\"]", "null",
                              "[0,18446744073709551616]"}) {
    EXPECT_THAT(failure(one("F32", "[1]", offsets), 4), HasSubstr("not two non-negative integers"))
        << offsets;
  }
}

TEST(Safetensors, TensorsTileTheData) {
  EXPECT_THAT(failure("{" + f32_entry("a", 0, 4) + "," + f32_entry("b", 8, 12) + "}", 12),
              HasSubstr("tensor b begins at 8, expected 4: a hole"));
  EXPECT_THAT(failure("{" + f32_entry("a", 0, 8) + "," + f32_entry("b", 4, 12) + "}", 12),
              HasSubstr("tensor b begins at 4, expected 8: tensors overlap"));
  EXPECT_THAT(failure("{" + f32_entry("a", 0, 8) + "," + f32_entry("b", 0, 8) + "}", 8),
              HasSubstr("overlap"));
  EXPECT_THAT(failure("{" + f32_entry("a", 0, 8) + "," + f32_entry("b", 4, 4) + "}", 8),
              HasSubstr("overlap"));
  EXPECT_THAT(failure(one("F32", "[1]", "[4,8]"), 8), HasSubstr("begins at 4, expected 0"));
  EXPECT_THAT(failure(one("F32", "[1]", "[0,4]"), 7), HasSubstr("3 bytes trail the last tensor"));
  EXPECT_THAT(failure("{}", 1), HasSubstr("1 bytes trail"));
}

TEST(Safetensors, NamesHaveNoNul) {
  EXPECT_THAT(failure("{" + f32_entry("a\\u0000b", 0, 4) + "}", 4),
              HasSubstr("tensor name a\\x00b holds a NUL"));
  EXPECT_NO_THROW(
      parse(raw_safetensors("{" + f32_entry("../\\u00e9\\u0001 ", 0, 4) + "}", "abcd")));
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string file =
      raw_safetensors("{" + f32_entry("a", 0, 4) + "," + f32_entry("b", 4, 8) + "}", "abcdefgh");
  ASSERT_NO_THROW(parse(file));
  for (size_t length = 0; length < file.size(); ++length) failure(file.substr(0, length));
}

}  // namespace
}  // namespace kvlm
