#include "kernels/attend_packed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "tests/allocations.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Rows = std::vector<std::vector<double>>;

constexpr double kTolerance = 1e-5;
constexpr CodeFormat kEveryCode[] = {
    CodeFormat::kBits1,    CodeFormat::kBits2,  CodeFormat::kBits3, CodeFormat::kBits4,
    CodeFormat::kBits5,    CodeFormat::kBits6,  CodeFormat::kBits7, CodeFormat::kBits8,
    CodeFormat::kTrit5,    CodeFormat::kTrit2b, CodeFormat::kNf4,   CodeFormat::kLloydMax3,
    CodeFormat::kLloydMax4};

/// The integer that a stored code is read as (docs/formulas.md, "Codebooks").
int integer_of(CodeFormat format, int code) {
  constexpr int kNf4[16] = {0,   39,  60,  77,  91,  104, 115, 127,
                            137, 147, 158, 170, 183, 198, 219, 254};
  constexpr int kLloydMax3[8] = {0, 48, 82, 113, 141, 172, 206, 254};
  constexpr int kLloydMax4[16] = {0,   31,  52,  69,  83,  96,  109, 121,
                                  133, 145, 158, 171, 185, 202, 223, 254};
  if (format == CodeFormat::kLloydMax3) return kLloydMax3[code];
  if (format == CodeFormat::kLloydMax4) return kLloydMax4[code];
  return format == CodeFormat::kNf4 ? kNf4[code] : code;
}

constexpr ScaleAxis kEveryAxis[] = {ScaleAxis::kHead, ScaleAxis::kChannel, ScaleAxis::kToken};

// ----------------------------------------------------------------------------------------- packing

/// Writes code `code` as number i of a row of zeros; for kTrit5 digit by digit.
void put_code(uint8_t* row, CodeFormat format, int i, int code) {
  if (format == CodeFormat::kTrit5) {
    constexpr int kPower[] = {1, 3, 9, 27, 81};
    row[i / 5] = static_cast<uint8_t>(row[i / 5] + code * kPower[i % 5]);
    return;
  }
  for (int b = 0; b < code_bits(format); ++b) {
    const int bit = i * code_bits(format) + b;
    row[bit / 8] = static_cast<uint8_t>(row[bit / 8] | (((code >> b) & 1) << (bit % 8)));
  }
}

struct BlockSpec {
  int rows = 32;
  double dead = 0;  // share of rows
};

/// Blocks of random codes and factors with their memory, and what their live rows mean.
class Packed {
 public:
  Packed(const PackedFormat& format, const std::vector<BlockSpec>& specs, unsigned seed)
      : format_(format), rng_(seed) {
    for (const BlockSpec& spec : specs) add(spec);
  }

  const PackedFormat& format() const { return format_; }
  std::span<const PackedBlock> blocks() const { return blocks_; }
  const Rows& rows() const { return rows_; }

 private:
  void add(const BlockSpec& spec) {
    const auto rows = static_cast<size_t>(spec.rows);
    std::vector<uint64_t> live((rows + 63) / 64 + 1, 0);
    int live_rows = 0;
    for (size_t r = 0; r < rows; ++r) {
      if (spec.dead > 0 && uniform() < spec.dead) continue;
      live[r / 64] |= uint64_t{1} << (r % 64);
      ++live_rows;
    }
    const double step = 2.0 / max_code(format_.section[0].code);  // about unit numbers
    const std::vector<float> s = factors(format_.scales(spec.rows), 0.3 * step, 1.2 * step);
    const std::vector<float> z = factors(format_.zeros(spec.rows), -1.5, 0.5);
    std::vector<uint8_t> codes(rows * format_.row_bytes());
    for (size_t r = 0; r < rows; ++r) {
      std::vector<double> meaning;
      uint8_t* row = codes.data() + r * format_.row_bytes();
      size_t channel = 0;
      size_t zeros_before = 0;
      for (int i = 0; i < format_.sections; ++i) {
        const PackedSection& section = format_.section[static_cast<size_t>(i)];
        for (int c = 0; c < section.channels; ++c, ++channel) {
          const int code = static_cast<int>(uniform() * (max_code(section.code) + 1));
          put_code(row, section.code, c, code);
          size_t at = 0;
          size_t zero_at = 0;
          if (format_.axis == ScaleAxis::kChannel) {
            at = channel;
            zero_at = zeros_before + static_cast<size_t>(c);
          } else if (format_.axis == ScaleAxis::kToken) {
            at = zero_at = r * static_cast<size_t>(format_.groups()) +
                           channel / static_cast<size_t>(format_.group_size);
          }
          const double scale = s[at];
          const double zero = section.zero_stored
                                  ? static_cast<double>(z[zero_at])
                                  : static_cast<double>(section.offset_of(c)) * scale;
          meaning.push_back(
              static_cast<double>(section.slope) * scale * integer_of(section.code, code) + zero);
        }
        if (section.code == CodeFormat::kTrit5) {
          for (int c = section.channels; c % 5 != 0; ++c) put_code(row, section.code, c, 1);
        }
        row += section.row_bytes();
        if (section.zero_stored) zeros_before += static_cast<size_t>(section.channels);
      }
      if ((live[r / 64] >> (r % 64)) & 1) rows_.push_back(meaning);
    }
    std::vector<std::byte>& scale_bytes = store(s);
    std::vector<std::byte>& zero_bytes = store(z);
    if (spec.dead > 0) {
      for (size_t r = 0; r < rows; ++r) {
        if ((live[r / 64] >> (r % 64)) & 1) continue;
        std::fill_n(codes.begin() + static_cast<int64_t>(r * format_.row_bytes()),
                    format_.row_bytes(), uint8_t{0xff});
        if (format_.axis != ScaleAxis::kToken) continue;
        const size_t bytes = static_cast<size_t>(format_.groups()) * dtype_bytes(format_.meta);
        std::memset(scale_bytes.data() + r * bytes, 0xff, bytes);  // NaN
        if (!zero_bytes.empty()) std::memset(zero_bytes.data() + r * bytes, 0xff, bytes);
      }
    }
    lives_.push_back(std::move(live));
    auto& code_bytes = memory_.emplace_back(codes.size());
    if (!codes.empty()) std::memcpy(code_bytes.data(), codes.data(), codes.size());
    blocks_.push_back({code_bytes.data(), scale_bytes.data(),
                       zero_bytes.empty() ? nullptr : zero_bytes.data(), spec.rows, live_rows,
                       spec.dead > 0 ? lives_.back().data() : nullptr});
  }

  double uniform() { return std::uniform_real_distribution<double>(0, 1)(rng_); }

  /// Numbers as they are after storing.
  std::vector<float> factors(size_t count, double low, double high) {
    std::vector<float> values(count);
    for (float& x : values) {
      x = static_cast<float>(low + (high - low) * uniform());
      if (format_.meta == DType::kF16) x = to_float(to_f16(x));
    }
    return values;
  }

  std::vector<std::byte>& store(const std::vector<float>& values) {
    auto& bytes = memory_.emplace_back(values.size() * dtype_bytes(format_.meta));
    for (size_t i = 0; i < values.size(); ++i) {
      if (format_.meta == DType::kF16) {
        const f16 x = to_f16(values[i]);
        std::memcpy(bytes.data() + i * sizeof x, &x, sizeof x);
      } else {
        std::memcpy(bytes.data() + i * sizeof(float), &values[i], sizeof(float));
      }
    }
    return bytes;
  }

  PackedFormat format_;
  std::mt19937 rng_;
  std::deque<std::vector<std::byte>> memory_;  // exactly as large as stated: a sanitizer sees more
  std::deque<std::vector<uint64_t>> lives_;
  std::vector<PackedBlock> blocks_;
  Rows rows_;
};

PackedFormat one_section(CodeFormat code, ScaleAxis axis, int channels, int group_size = 32,
                         DType meta = DType::kF16) {
  PackedFormat format;
  format.axis = axis;
  format.group_size = axis == ScaleAxis::kToken ? group_size : 0;
  format.meta = meta;
  format.section[0] = section_of(code, channels);
  return format;
}

// ------------------------------------------------------------------------------------------- KV
// heads

/// A KV head under construction, with the rows that its segments mean.
class Head {
 public:
  Head(int head_dim, int q_per_kv, unsigned seed = 1)
      : head_dim_(static_cast<size_t>(head_dim)),
        queries_(static_cast<size_t>(q_per_kv)),
        seed_(seed),
        q_(testing::normal_values(head_dim_ * queries_, seed)) {}

  void add_keys(const PackedFormat& format, const std::vector<BlockSpec>& specs) {
    if (q_packed_.empty()) {
      q_packed_ = q_;
      const auto channels = static_cast<size_t>(format.channels());
      if (channels != head_dim_) {
        q_packed_ = testing::normal_values(channels * queries_, seed_ + 7);
      }
    }
    keys_.push_back(packed_segment(format, specs, keys_rows_, &key_packed_));
  }
  void add_keys(DType dtype, size_t rows) {
    keys_.push_back(row_segment(dtype, rows, keys_rows_));
    if (key_packed_.size() < keys_rows_.size()) key_packed_.resize(keys_rows_.size(), false);
  }
  void add_values(const PackedFormat& format, const std::vector<BlockSpec>& specs) {
    values_.push_back(packed_segment(format, specs, values_rows_, nullptr));
  }
  void add_values(DType dtype, size_t rows) {
    values_.push_back(row_segment(dtype, rows, values_rows_));
  }
  /// Of the next slots every `every`-th is a row of `dtype`, the rest are packed without gaps.
  void add_selected_values(DType dtype, size_t every, const PackedFormat& format,
                           const std::vector<BlockSpec>& specs) {
    Rows packed_rows;
    SlotSegment packed = packed_segment(format, specs, packed_rows, nullptr);
    const size_t ones = (packed_rows.size() + every - 2) / (every - 1);
    Rows dense_rows;
    SlotSegment dense = row_segment(dtype, ones, dense_rows);
    const size_t all = ones + packed_rows.size();
    auto& bits = selections_.emplace_back(all / 64 + 1, 0);
    size_t next_one = 0;
    size_t next_other = 0;
    for (size_t j = 0; j < all; ++j) {
      const bool one = next_other == packed_rows.size() || j % every == 0;
      if (one) bits[j / 64] |= uint64_t{1} << (j % 64);
      values_rows_.push_back(one ? dense_rows[next_one++] : packed_rows[next_other++]);
    }
    dense.selection = packed.selection = bits.data();
    dense.selected_of = packed.selected_of = static_cast<int>(all);
    dense.selected_bit = true;
    packed.selection_ends = true;
    values_.push_back(dense);
    values_.push_back(packed);
  }
  void add_remap(const ScoreRemap& remap) { remaps_.push_back(remap); }

  size_t slots() const { return keys_rows_.size(); }

  /// The KV head, with fresh rubbish where results go.
  PackedHead head() {
    weights_.assign(queries_ * slots() + 1, std::nanf(""));
    out_.assign(queries_ * head_dim_ + 1, std::nanf(""));
    out_.back() = weights_.back() = 12345;  // must survive
    PackedHead head;
    head.q = q_.data();
    for (SlotSegment& segment : keys_) {
      if (segment.format != nullptr && !q_packed_.empty()) segment.q = q_packed_.data();
    }
    head.keys = keys_;
    head.values = values_;
    head.remaps = remaps_;
    head.slots = static_cast<int>(slots());
    head.weights = weights_.data();
    head.out = out_.data();
    head.guarded_remaps = -1;
    return head;
  }

  std::vector<float> run(Stream& stream) {
    PackedHead one = head();
    attend_packed({&one, 1}, static_cast<int>(queries_), static_cast<int>(head_dim_), scale_,
                  stream);
    guarded_ = one.guarded_remaps;
    return out();
  }
  std::vector<float> out() const {
    EXPECT_EQ(out_.back(), 12345);
    EXPECT_EQ(weights_.back(), 12345);
    return {out_.begin(), out_.end() - 1};
  }
  std::vector<float> weights() const { return {weights_.begin(), weights_.end() - 1}; }
  int guarded() const { return guarded_; }
  float scale() const { return scale_; }
  void set_scale(float scale) { scale_ = scale; }
  std::vector<float>& q() { return q_; }
  std::vector<float>& q_packed() { return q_packed_; }
  const std::vector<SlotSegment>& keys() const { return keys_; }
  const std::vector<SlotSegment>& values() const { return values_; }

  /// Dequantize, softmax, multiply, in double.
  Rows expected() const {
    Rows result;
    expected_weights_.clear();
    for (size_t i = 0; i < queries_; ++i) {
      std::vector<double> s;
      for (size_t j = 0; j < slots(); ++j) {
        const bool packed = key_packed_[j];
        const size_t width = keys_rows_[j].size();
        const float* q = packed ? q_packed_.data() + i * width : q_.data() + i * head_dim_;
        double dot = 0;
        for (size_t c = 0; c < width; ++c) dot += static_cast<double>(q[c]) * keys_rows_[j][c];
        s.push_back(static_cast<double>(scale_) * dot);
      }
      for (const ScoreRemap& remap : remaps_) {
        if (remap.slots == 0) continue;
        const auto begin = s.begin() + remap.first;
        const auto end = begin + remap.slots;
        const double lo = *std::min_element(begin, end);
        const double hi = *std::max_element(begin, end);
        const double low = static_cast<double>(remap.tau_low);
        double m = hi > lo ? (hi - lo + low - static_cast<double>(remap.tau_high)) / (hi - lo) : 0;
        if (remap.guarded) m = std::max(m, 0.0);
        for (auto x = begin; x != end; ++x) *x = m * (*x - lo) + lo - low;
      }
      double max = -1e300;
      for (double x : s) max = std::max(max, x);
      double sum = 0;
      for (double& x : s) sum += x = std::exp(x - max);
      std::vector<double> out(head_dim_, 0.0);
      for (size_t j = 0; j < slots(); ++j) {
        s[j] /= sum;
        for (size_t c = 0; c < head_dim_; ++c) out[c] += s[j] * values_rows_[j][c];
      }
      result.push_back(out);
      expected_weights_.push_back(s);
    }
    return result;
  }
  const Rows& expected_weights() const { return expected_weights_; }

  double error(Stream& stream) {
    const std::vector<float> got = run(stream);
    const Rows want = expected();
    double error = 0;
    double size = 1e-30;
    for (size_t i = 0; i < queries_; ++i) {
      for (size_t c = 0; c < head_dim_; ++c) {
        const double difference = static_cast<double>(got[i * head_dim_ + c]) - want[i][c];
        error = std::isfinite(difference) ? std::max(error, std::abs(difference)) : HUGE_VAL;
        if (error == HUGE_VAL) return error;
        size = std::max(size, std::abs(want[i][c]));
      }
    }
    return error / size;
  }

 private:
  SlotSegment packed_segment(const PackedFormat& format, const std::vector<BlockSpec>& specs,
                             Rows& rows, std::vector<bool>* marks) {
    const Packed& packed = packed_.emplace_back(format, specs, ++seed_);
    rows.insert(rows.end(), packed.rows().begin(), packed.rows().end());
    if (marks != nullptr) marks->resize(rows.size(), true);
    SlotSegment segment;
    segment.slots = static_cast<int>(packed.rows().size());
    segment.format = &packed.format();
    segment.blocks = packed.blocks();
    return segment;
  }
  SlotSegment row_segment(DType dtype, size_t count, Rows& rows) {
    const Tensor& tensor = tensors_.emplace_back(testing::normal_tensor(
        dtype, {static_cast<int64_t>(std::max<size_t>(count, 1)), static_cast<int64_t>(head_dim_)},
        ++seed_));
    const reference::Values values = testing::values_of(tensor.view());
    for (size_t r = 0; r < count; ++r) {
      const auto begin = values.begin() + static_cast<int64_t>(r * head_dim_);
      rows.emplace_back(begin, begin + static_cast<int64_t>(head_dim_));
    }
    SlotSegment segment;
    segment.slots = static_cast<int>(count);
    segment.rows = tensor.view().data();
    segment.dtype = dtype;
    return segment;
  }

  size_t head_dim_;
  size_t queries_;
  unsigned seed_;
  float scale_ = 0.3f;
  std::vector<float> q_, q_packed_;
  std::deque<Packed> packed_;
  std::deque<Tensor> tensors_;
  std::deque<std::vector<uint64_t>> selections_;
  std::vector<SlotSegment> keys_, values_;
  std::vector<ScoreRemap> remaps_;
  Rows keys_rows_, values_rows_;
  std::vector<bool> key_packed_;
  std::vector<float> weights_, out_;
  int guarded_ = 0;
  mutable Rows expected_weights_;
};

class AttendPacked : public ::testing::Test {
 protected:
  ThreadPool pool_{1};
  Stream stream_{pool_};
};

/// Keys and values of one format, a few full-precision rows after them.
void expect_exact(const PackedFormat& format, int q_per_kv, const std::vector<BlockSpec>& specs,
                  Stream& stream) {
  const int head_dim = format.channels();
  Head head(head_dim, q_per_kv, static_cast<unsigned>(head_dim + q_per_kv));
  head.add_keys(format, specs);
  head.add_values(format, specs);
  size_t live = 0;  // the dead rows of keys and values are not the same: even out
  for (const SlotSegment& segment : head.values()) live += static_cast<size_t>(segment.slots);
  const size_t keys = head.slots();
  head.add_keys(DType::kF16, 5 + (live > keys ? live - keys : 0));
  head.add_values(DType::kF16, 5 + (keys > live ? keys - live : 0));
  EXPECT_LE(head.error(stream), kTolerance)
      << "code " << static_cast<int>(format.section[0].code) << " axis "
      << static_cast<int>(format.axis) << " head_dim " << head_dim << " q_per_kv " << q_per_kv
      << " group_size " << format.group_size << " meta " << dtype_name(format.meta) << " blocks "
      << specs.size() << " of " << (specs.empty() ? 0 : specs[0].rows);
}

// ------------------------------------------------------------------------------------------
// packing

TEST(PackedFormat, CodesLieLeastSignificantBitsFirst) {
  const auto packed = [](CodeFormat format, const std::vector<int>& codes) {
    std::vector<uint8_t> row(code_row_bytes(format, static_cast<int>(codes.size())), 0);
    for (int i = 0; i < static_cast<int>(codes.size()); ++i) {
      put_code(row.data(), format, i, codes[static_cast<size_t>(i)]);
    }
    if (format == CodeFormat::kTrit5) {
      for (int i = static_cast<int>(codes.size()); i % 5 != 0; ++i) {
        put_code(row.data(), format, i, 1);
      }
    }
    for (int i = 0; i < static_cast<int>(codes.size()); ++i) {
      EXPECT_EQ(code_at(row.data(), format, i), codes[static_cast<size_t>(i)]);
    }
    return row;
  };
  EXPECT_THAT(packed(CodeFormat::kBits2, {3, 0, 1, 2}), ElementsAre(0x93));
  EXPECT_THAT(packed(CodeFormat::kBits1, {1, 0, 1, 1, 0, 0, 0, 1}), ElementsAre(0x8d));
  const std::vector<int> trits = {1, 0, 2, 1, 2, 1, 0, 2};
  EXPECT_THAT(packed(CodeFormat::kTrit5, trits), ElementsAre(208, 127));
  EXPECT_THAT(packed(CodeFormat::kTrit2b, trits), ElementsAre(0x61, 0x86));
  EXPECT_THAT(packed(CodeFormat::kBits3, {7, 0, 5}), ElementsAre(0x47, 0x01));
}

TEST(PackedFormat, CodeAtReadsEveryFormat) {
  for (CodeFormat format : kEveryCode) {
    constexpr int kCount = 67;
    std::vector<uint8_t> row(code_row_bytes(format, kCount), 0);
    std::vector<int> codes;
    for (int i = 0; i < kCount; ++i) {
      codes.push_back((i * 11 + i / 7) % (max_code(format) + 1));
      put_code(row.data(), format, i, codes.back());
    }
    for (int i = 0; i < kCount; ++i) {
      ASSERT_EQ(code_at(row.data(), format, i), integer_of(format, codes[static_cast<size_t>(i)]));
    }
  }
}

// ---------------------------------------------------------------------------------- unpack_blocks

TEST(UnpackBlocks, GivesTheLiveRowsOfEveryFormat) {
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    Stream stream(pool);
    for (CodeFormat code : kEveryCode) {
      for (ScaleAxis axis : kEveryAxis) {
        for (int channels : {1, 7, 33, 64, 72, 128}) {
          const DType meta = channels % 2 == 0 ? DType::kF16 : DType::kF32;
          const PackedFormat format = one_section(code, axis, channels, 24, meta);
          const Packed packed(format, {{32, 0}, {0, 0}, {1, 0}, {70, 0.3}, {300, 0}, {9, 1}}, 5);
          std::vector<float> out(packed.rows().size() * static_cast<size_t>(channels) + 1, 77);
          unpack_blocks(packed.format(), packed.blocks(), out.data(), stream);
          EXPECT_EQ(out.back(), 77);
          for (size_t r = 0; r < packed.rows().size(); ++r) {
            for (size_t c = 0; c < static_cast<size_t>(channels); ++c) {
              const double want = packed.rows()[r][c];
              // Half an ulp of the result, or of the product where there is no fused multiply-add.
              ASSERT_NEAR(out[r * static_cast<size_t>(channels) + c], want,
                          1e-7 * (std::abs(want) + max_code(code)))
                  << static_cast<int>(code) << " " << static_cast<int>(axis) << " " << channels;
            }
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------- attend_packed

TEST_F(AttendPacked, EqualsDequantizedAttentionForEveryFormat) {
  for (CodeFormat code : kEveryCode) {
    for (ScaleAxis axis : kEveryAxis) {
      for (int head_dim : {32, 64, 80, 96, 128, 256}) {
        for (int q_per_kv : {1, 4, 7}) {
          const DType meta = head_dim % 3 == 0 ? DType::kF32 : DType::kF16;
          expect_exact(one_section(code, axis, head_dim, 32, meta), q_per_kv,
                       {{32, 0}, {32, 0}, {7, 0}}, stream_);
        }
      }
    }
  }
}

TEST_F(AttendPacked, TakesAnyHeadDim) {
  for (CodeFormat code : {CodeFormat::kBits1, CodeFormat::kBits2, CodeFormat::kBits3,
                          CodeFormat::kBits8, CodeFormat::kTrit5}) {
    for (ScaleAxis axis : kEveryAxis) {
      for (int head_dim : {1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 72, 100, 127, 129, 320}) {
        expect_exact(one_section(code, axis, head_dim), 2, {{40, 0}}, stream_);
      }
    }
  }
}

TEST_F(AttendPacked, TakesAnyNumberOfQueries) {
  for (ScaleAxis axis : kEveryAxis) {
    for (int q_per_kv : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16}) {
      expect_exact(one_section(CodeFormat::kBits2, axis, 72), q_per_kv, {{32, 0}, {5, 0}}, stream_);
    }
  }
}

TEST_F(AttendPacked, TakesGroupsThatDoNotDivideHeadDim) {
  for (CodeFormat code : {CodeFormat::kBits2, CodeFormat::kTrit5, CodeFormat::kBits5}) {
    for (int head_dim : {64, 72, 80, 128}) {
      for (int group_size : {1, 5, 8, 16, 24, 32, 48, 64, 100, 128, 500}) {
        for (int q_per_kv : {1, 3}) {
          expect_exact(one_section(code, ScaleAxis::kToken, head_dim, group_size), q_per_kv,
                       {{50, 0}, {1, 0}, {100, 0}}, stream_);
        }
      }
    }
  }
}

TEST_F(AttendPacked, TakesBlocksOfAnyNumberOfRows) {
  for (ScaleAxis axis : kEveryAxis) {
    for (int rows : {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 2500}) {
      expect_exact(one_section(CodeFormat::kBits2, axis, 64), 2, {{rows, 0}}, stream_);
    }
    expect_exact(one_section(CodeFormat::kBits2, axis, 64), 2,
                 {{1, 0}, {1, 0}, {0, 0}, {3, 0}, {1, 0}}, stream_);
  }
}

TEST_F(AttendPacked, LeavesOutDeadRows) {
  for (CodeFormat code : {CodeFormat::kBits1, CodeFormat::kBits2, CodeFormat::kBits6,
                          CodeFormat::kTrit5, CodeFormat::kTrit2b}) {
    for (ScaleAxis axis : kEveryAxis) {
      for (int head_dim : {72, 128}) {
        expect_exact(one_section(code, axis, head_dim), 3,
                     {{32, 0.5}, {32, 0}, {150, 0.1}, {40, 1}, {33, 0.9}, {700, 0.97}}, stream_);
      }
    }
  }
}

TEST_F(AttendPacked, TakesTwoSections) {
  for (const bool stored : {false, true}) {
    for (const auto& [first, second] : {std::pair{40, 88}, {1, 31}, {64, 64}, {13, 59}, {120, 8}}) {
      PackedFormat format;
      format.axis = ScaleAxis::kChannel;
      format.sections = 2;
      format.section[0] = {CodeFormat::kBits2, first, true, 1, 0, 1 << 30, 0};
      format.section[1] = {
          CodeFormat::kBits1, second, stored, stored ? 1.0f : 2.0f, -1, 1 << 30, 0};
      for (int q_per_kv : {1, 4}) {
        expect_exact(format, q_per_kv, {{32, 0}, {32, 0.3}, {11, 0}}, stream_);
      }
      std::swap(format.section[0], format.section[1]);
      expect_exact(format, 2, {{32, 0}, {32, 0.3}}, stream_);
    }
  }
}

TEST_F(AttendPacked, TakesImpliedZeroPointsThatSplit) {
  for (ScaleAxis axis : kEveryAxis) {
    for (int split : {0, 3, 40, 100}) {
      PackedFormat format = one_section(CodeFormat::kBits1, axis, 72);
      format.section[0] = {CodeFormat::kBits1, 72, false, 2, -1, split, 0.5f};
      expect_exact(format, 3, {{32, 0}, {20, 0.2}}, stream_);
    }
  }
}

TEST_F(AttendPacked, ReadsPackedKeysInAnotherBasis) {
  Head head(64, 3);
  head.add_keys(DType::kF32, 3);
  head.add_keys(one_section(CodeFormat::kBits2, ScaleAxis::kChannel, 66), {{32, 0}, {32, 0.2}});
  head.add_keys(DType::kBF16, 9);
  head.add_values(DType::kF16, head.slots());
  EXPECT_LE(head.error(stream_), kTolerance);
}

TEST_F(AttendPacked, TakesKeysAndValuesPartitionedDifferently) {
  for (int q_per_kv : {1, 4, 7}) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Head head(128, q_per_kv);
      head.add_keys(dtype, 4);
      head.add_keys(one_section(CodeFormat::kBits2, ScaleAxis::kChannel, 128),
                    std::vector<BlockSpec>(5, {32, 0}));
      head.add_keys(dtype, 0);
      head.add_keys(one_section(CodeFormat::kBits4, ScaleAxis::kToken, 128), {});
      head.add_keys(dtype, 36);  // 200 slots
      head.add_values(one_section(CodeFormat::kBits2, ScaleAxis::kToken, 128), {{64, 0}, {33, 0}});
      head.add_values(dtype, 70);
      head.add_values(one_section(CodeFormat::kTrit5, ScaleAxis::kChannel, 128), {{32, 0}});
      head.add_values(dtype, 1);
      EXPECT_LE(head.error(stream_), kTolerance) << q_per_kv << dtype_name(dtype);
    }
  }
}

TEST_F(AttendPacked, TakesSelectedValues) {
  for (ScaleAxis axis : kEveryAxis) {
    for (size_t every : {2, 5, 64}) {
      for (int q_per_kv : {1, 5}) {
        Head head(64, q_per_kv);
        head.add_values(DType::kF16, 3);
        head.add_selected_values(DType::kF16, every, one_section(CodeFormat::kTrit5, axis, 64),
                                 {{32, 0}, {32, 0.2}, {100, 0}});
        head.add_selected_values(DType::kBF16, every, one_section(CodeFormat::kBits2, axis, 64),
                                 {{7, 0}});
        head.add_values(one_section(CodeFormat::kBits2, axis, 64), {{20, 0}});
        size_t slots = 0;
        for (const SlotSegment& segment : head.values())
          slots += static_cast<size_t>(segment.slots);
        head.add_keys(DType::kF16, slots);
        EXPECT_LE(head.error(stream_), kTolerance) << every;
      }
    }
  }
}

TEST_F(AttendPacked, ReadsOneSlot) {
  for (ScaleAxis axis : kEveryAxis) {
    Head head(80, 4);
    head.add_keys(one_section(CodeFormat::kBits2, axis, 80), {{1, 0}});
    head.add_values(one_section(CodeFormat::kBits2, axis, 80), {{1, 0}});
    EXPECT_LE(head.error(stream_), kTolerance);
    EXPECT_THAT(head.weights(), ElementsAre(1, 1, 1, 1));
  }
}

TEST_F(AttendPacked, AnEmptyHeadGivesZeros) {
  Head head(20, 2);
  EXPECT_THAT(head.run(stream_), ::testing::Each(0.0f));
  head.add_keys(DType::kF16, 0);
  head.add_values(one_section(CodeFormat::kBits2, ScaleAxis::kToken, 20), {{3, 1}});
  EXPECT_THAT(head.run(stream_), ::testing::Each(0.0f));
}

TEST_F(AttendPacked, HoldsOverALongCache) {
  for (int q_per_kv : {1, 4}) {
    Head head(128, q_per_kv);
    head.add_keys(one_section(CodeFormat::kBits2, ScaleAxis::kChannel, 128),
                  std::vector<BlockSpec>(128, {32, 0}));
    head.add_keys(DType::kF16, 31);
    head.add_values(one_section(CodeFormat::kBits2, ScaleAxis::kToken, 128), {{4000, 0}});
    head.add_values(DType::kF16, 127);
    EXPECT_LE(head.error(stream_), kTolerance);
  }
}

TEST_F(AttendPacked, KeepsHugeScoresApart) {
  Head head(64, 2);
  head.set_scale(20);
  head.add_keys(one_section(CodeFormat::kBits4, ScaleAxis::kChannel, 64), {{64, 0}, {64, 0}});
  head.add_values(one_section(CodeFormat::kBits4, ScaleAxis::kToken, 64), {{128, 0}});
  // The scores reach thousands, so a float's own rounding moves a weight by their ulp.
  EXPECT_LE(head.error(stream_), 2e-3);
}

TEST_F(AttendPacked, ReturnsTheWeights) {
  Head head(64, 3);
  head.add_keys(one_section(CodeFormat::kBits3, ScaleAxis::kChannel, 64), {{100, 0.1}});
  head.add_keys(DType::kF32, 7);
  head.add_values(DType::kF32, head.slots());
  head.run(stream_);
  head.expected();
  const std::vector<float> got = head.weights();
  for (size_t i = 0; i < 3; ++i) {
    double sum = 0;
    for (size_t j = 0; j < head.slots(); ++j) {
      const double weight = static_cast<double>(got[i * head.slots() + j]);
      EXPECT_NEAR(weight, head.expected_weights()[i][j], 1e-6);
      sum += weight;
    }
    EXPECT_NEAR(sum, 1, 1e-5);
  }
}

TEST_F(AttendPacked, ScalesThatAreZeroGiveTheZeroPoint) {
  for (ScaleAxis axis : kEveryAxis) {
    Packed packed(one_section(CodeFormat::kBits2, axis, 64), {{40, 0}}, 3);
    std::vector<std::byte> zero(packed.format().meta_bytes(40));
    PackedBlock block = packed.blocks()[0];
    block.scales = zero.data();
    std::vector<float> want(40 * 64);
    unpack_blocks(packed.format(), {&block, 1}, want.data(), stream_);
    Head head(64, 1);
    PackedHead one = head.head();
    std::vector<float> weights(40);
    SlotSegment segment;
    segment.slots = 40;
    segment.format = &packed.format();
    segment.blocks = {&block, 1};
    one.slots = 40;
    one.keys = one.values = {&segment, 1};
    one.weights = weights.data();
    attend_packed({&one, 1}, 1, 64, 0.1f, stream_);
    for (size_t c = 0; c < 64; ++c) {
      double sum = 0;
      for (size_t j = 0; j < 40; ++j) {
        sum += static_cast<double>(weights[j]) * static_cast<double>(want[j * 64 + c]);
      }
      EXPECT_NEAR(one.out[c], sum, 1e-5);
    }
  }
}

// ------------------------------------------------------------------------------------------- remap

/// Weights of keys with the given scores: one channel, query 1.
std::vector<double> remapped(const std::vector<float>& scores, const ScoreRemap& remap,
                             Stream& stream, int* guarded) {
  const float q = 1;
  std::vector<float> weights(scores.size());
  float out = 0;
  SlotSegment segment;
  segment.slots = static_cast<int>(scores.size());
  segment.rows = reinterpret_cast<const std::byte*>(scores.data());
  segment.dtype = DType::kF32;
  PackedHead head;
  head.q = &q;
  head.keys = head.values = {&segment, 1};
  head.remaps = {&remap, 1};
  head.slots = segment.slots;
  head.weights = weights.data();
  head.out = &out;
  attend_packed({&head, 1}, 1, 1, 1, stream);
  *guarded = head.guarded_remaps;
  // Scores relative to the last one.
  std::vector<double> relative;
  for (const float weight : weights) {
    relative.push_back(std::log(static_cast<double>(weight) / static_cast<double>(weights.back())));
  }
  return relative;
}

TEST_F(AttendPacked, RemapsScoresAsWorkedByHand) {
  using ::testing::DoubleNear;
  const auto near = [](double x) { return DoubleNear(x, 1e-5); };
  int guarded = -1;
  // The last slot is text of score 1 and stays.
  const std::vector<float> scores = {-2, 0, 4, 1};
  EXPECT_THAT(remapped(scores, {0, 3, 0, 3, true}, stream_, &guarded),
              ElementsAre(near(-2 - 1), near(-1 - 1), near(1 - 1), near(0)));
  EXPECT_EQ(guarded, 0);
  EXPECT_THAT(remapped(scores, {0, 3, 1, 2, true}, stream_, &guarded),
              ElementsAre(near(-3 - 1), near(-4.0 / 3 - 1), near(2 - 1), near(0)));
  EXPECT_THAT(remapped(scores, {0, 3, 0, 0, true}, stream_, &guarded),
              ElementsAre(near(-3), near(-1), near(3), near(0)));
  EXPECT_EQ(guarded, 0);
  // A range in the middle.
  EXPECT_THAT(remapped({5, -2, 0, 4, 1}, {1, 3, 0, 3, true}, stream_, &guarded),
              ElementsAre(near(4), near(-3), near(-2), near(0), near(0)));
  // The slope would be negative: the order of tokens would turn.
  EXPECT_THAT(remapped({0, 1, 2, 1}, {0, 3, 0, 3, true}, stream_, &guarded),
              ElementsAre(near(-1), near(-1), near(-1), near(0)));
  EXPECT_EQ(guarded, 1);
  EXPECT_THAT(remapped({0, 1, 2, 1}, {0, 3, 0, 3, false}, stream_, &guarded),
              ElementsAre(near(-1), near(-1.5), near(-2), near(0)));
  EXPECT_EQ(guarded, 0);
  // All equal.
  EXPECT_THAT(remapped({2, 2, 2, 1}, {0, 3, 0.5f, 3, true}, stream_, &guarded),
              ElementsAre(near(0.5), near(0.5), near(0.5), near(0)));
  EXPECT_EQ(guarded, 0);
  EXPECT_THAT(remapped(scores, {1, 0, 1, 3, true}, stream_, &guarded),
              ElementsAre(near(-3), near(-1), near(3), near(0)));
}

TEST_F(AttendPacked, RemapsSeveralRangesOfEveryQuery) {
  Head head(64, 4);
  head.add_keys(DType::kF16, 10);
  head.add_keys(one_section(CodeFormat::kBits1, ScaleAxis::kChannel, 64), {{77, 0.1}});
  head.add_keys(DType::kF16, 50);
  head.add_values(one_section(CodeFormat::kBits1, ScaleAxis::kChannel, 64),
                  {{static_cast<int>(head.slots()), 0}});
  head.add_remap({10, 60, 0, 3, true});
  head.add_remap({75, 31, 1, 2, false});
  EXPECT_LE(head.error(stream_), kTolerance);
}

// ------------------------------------------------------------------------------------ independence

/// KV heads of different content.
std::deque<Head> some_heads(int q_per_kv) {
  std::deque<Head> heads;
  for (int i = 0; i < 7; ++i) {
    Head& head = heads.emplace_back(80, q_per_kv, 100 * static_cast<unsigned>(i) + 1);
    head.add_keys(one_section(CodeFormat::kBits2, kEveryAxis[i % 3], 80),
                  {{32, 0}, {32, 0.2}, {5 + 20 * i, 0}});
    head.add_keys(DType::kF16, 3 + static_cast<size_t>(i));
    head.add_values(one_section(kEveryCode[i], kEveryAxis[(i + 1) % 3], 80),
                    {{static_cast<int>(head.slots()) - 20, 0}});
    head.add_values(DType::kF16, 20);
  }
  return heads;
}

TEST_F(AttendPacked, IsBitIdenticalForAnyNumberOfThreadsAndAnyBatch) {
  for (int q_per_kv : {1, 5}) {
    std::deque<Head> heads = some_heads(q_per_kv);
    std::vector<std::vector<float>> alone;
    for (Head& head : heads) {
      head.set_scale(0.3f);
      alone.push_back(head.run(stream_));
    }
    for (int threads : {1, 3}) {
      ThreadPool pool(threads);
      Stream stream(pool);
      std::vector<PackedHead> all;
      for (Head& head : heads) all.push_back(head.head());
      attend_packed(all, q_per_kv, 80, 0.3f, stream);
      for (size_t i = 0; i < heads.size(); ++i) EXPECT_EQ(heads[i].out(), alone[i]) << i;
    }
  }
}

TEST_F(AttendPacked, AllocatesNothingOnceWarm) {
  Head head(128, 4);
  head.add_keys(one_section(CodeFormat::kBits2, ScaleAxis::kChannel, 128), {{32, 0}, {32, 0}});
  head.add_values(one_section(CodeFormat::kBits2, ScaleAxis::kToken, 128), {{64, 0}});
  PackedHead one = head.head();
  attend_packed({&one, 1}, 4, 128, 0.1f, stream_);
  const size_t before = allocations();
  attend_packed({&one, 1}, 4, 128, 0.1f, stream_);
  EXPECT_EQ(allocations(), before);
}

TEST_F(AttendPacked, RefusesWhatDoesNotAddUp) {
  Head head(64, 1);
  head.add_keys(one_section(CodeFormat::kBits2, ScaleAxis::kChannel, 64), {{32, 0}, {32, 0.3}});
  head.add_values(DType::kF16, head.slots());
  PackedHead good = head.head();
  const auto message = [&](PackedHead one, int head_dim = 64) {
    return testing::message_of(ErrorCode::kInvalidArgument, [&] {
      attend_packed({&one, 1}, 1, head_dim, 0.1f, stream_);
    });
  };
  PackedHead bad = good;
  bad.slots += 1;
  EXPECT_THAT(message(bad), HasSubstr("the keys hold"));
  bad = good;
  bad.values = {};
  EXPECT_THAT(message(bad), HasSubstr("the values hold 0 slots"));
  bad = good;
  bad.weights = nullptr;
  EXPECT_THAT(message(bad), HasSubstr("has no query, weights or output"));
  bad = good;
  std::vector<SlotSegment> keys = head.keys();
  bad.keys = keys;
  PackedFormat narrow = *keys[0].format;
  narrow.section[0].channels = 48;
  keys[0].format = &narrow;
  keys[0].q = nullptr;
  EXPECT_THAT(message(bad), HasSubstr("packed keys have 48 channels, but the query has 64"));
  bad = good;
  keys = head.keys();
  bad.keys = keys;
  keys[0].slots -= 1;
  EXPECT_THAT(message(bad), HasSubstr("the blocks of a segment hold"));
  keys = head.keys();
  std::vector<PackedBlock> blocks(keys[0].blocks.begin(), keys[0].blocks.end());
  keys[0].blocks = blocks;
  blocks[1].live_rows += 1;
  EXPECT_THAT(message(bad), HasSubstr("claims"));
  blocks[1].live_rows -= 1;
  blocks[0].zeros = nullptr;
  EXPECT_THAT(message(bad), HasSubstr("zero points"));
  // Of blocks that lie evenly the first and the last are looked at.
  keys = head.keys();
  blocks.assign(keys[0].blocks.begin(), keys[0].blocks.end());
  blocks = {blocks[0], blocks[0], blocks[0]};
  blocks[2].rows = blocks[2].live_rows = 7;
  keys[0].blocks = blocks;
  keys[0].code_stride = keys[0].scale_stride = 64;
  keys[0].slots = 2 * 32 + 8;
  EXPECT_THAT(message(bad), HasSubstr("hold 71 tokens, expected 72"));
  keys[0].slots = 71;
  EXPECT_THAT(message(bad), HasSubstr("the keys hold 71 slots"));
  blocks[2].rows = blocks[2].live_rows = 33;
  EXPECT_THAT(message(bad), HasSubstr("begin with 32 rows and end with 33"));
  blocks[2].rows = blocks[2].live_rows = 7;
  blocks[2].scales = nullptr;
  EXPECT_THAT(message(bad), HasSubstr("has no codes"));
  keys = head.keys();
  PackedFormat format = *keys[0].format;
  keys[0].format = &format;
  format.meta = DType::kBF16;
  EXPECT_THAT(message(bad), HasSubstr("bf16"));
  format.meta = DType::kF16;
  format.axis = ScaleAxis::kToken;
  EXPECT_THAT(message(bad), HasSubstr("groups of 0"));
  format.axis = ScaleAxis::kHead;
  format.sections = 2;
  EXPECT_THAT(message(bad), HasSubstr("2 sections"));
  bad = good;
  bad.values = head.keys();
  EXPECT_THAT(message(bad, 48), HasSubstr("head_dim 48"));
  bad = good;
  const ScoreRemap remap{1, good.slots, 0, 0, true};
  bad.remaps = {&remap, 1};
  EXPECT_THAT(message(bad), HasSubstr("remap"));
  bad = good;
  std::vector<SlotSegment> values = head.values();
  const std::vector<uint64_t> none(4, 0);
  values[0].selection = none.data();
  values[0].selected_of = good.slots;
  bad.values = values;
  EXPECT_THAT(message(bad), HasSubstr("the values hold"));  // does not end
  values[0].selection_ends = true;
  values[0].selected_bit = true;
  EXPECT_THAT(message(bad), HasSubstr("selects 0"));
  values[0].selected_bit = false;
  attend_packed({&bad, 1}, 1, 64, 0.1f, stream_);
  EXPECT_THAT(testing::message_of(ErrorCode::kInvalidArgument,
                                  [&] {
                                    attend_packed({&good, 1}, 0, 64, 0.1f, stream_);
                                  }),
              HasSubstr("q_per_kv 0"));
}

// -------------------------------------------------------------------------------- instruction sets

class AttendPackedOnEveryTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(AttendPackedOnEveryTarget, EqualsDequantizedAttention) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (CodeFormat code : kEveryCode) {
    for (ScaleAxis axis : kEveryAxis) {
      for (int head_dim : {3, 33, 72, 128}) {
        for (int q_per_kv : {1, 2, 3, 4, 7}) {
          expect_exact(one_section(code, axis, head_dim), q_per_kv, {{32, 0}, {37, 0.2}}, stream);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttendPackedOnEveryTarget,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return hwy::TargetName(test.param); });

}  // namespace
}  // namespace kvlm
