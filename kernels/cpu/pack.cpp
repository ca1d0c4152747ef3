#include "kernels/cpu/pack.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kernels/cpu/elementwise.h"
#include "kernels/quantize.h"

// Packs jobs on the CPU, one a task. A Packer gathers a job's codes, a byte each, group by group
// along the format's scale axis, then lays them out as bits. The CUDA kernels of pack.cu give the
// same codes.
namespace kvlm::cpu {

namespace {

using quantize::AffineMeta;
using quantize::AffineRange;

/// Element number p of the sorted values, p between two of them interpolated linearly.
float quantile(std::span<float> values, float alpha) {
  const double at = static_cast<double>(values.size() - 1) * static_cast<double>(alpha);
  const auto below = static_cast<size_t>(std::floor(at));
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(below);
  std::nth_element(values.begin(), nth, values.end());
  const float low = *nth;
  if (below + 1 >= values.size()) return low;
  const float high = *std::min_element(nth + 1, values.end());
  return low + static_cast<float>(at - static_cast<double>(below)) * (high - low);
}

/// The range of a group in `values`, which quantiles put in another order; NaN is passed over.
AffineRange range_of(std::span<float> values, const PackRule& rule, int levels) {
  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  if (rule.alpha == 0) {
    for (const float x : values) {
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    return quantize::affine_range(low, high, levels, rule.kappa);
  }
  const auto numbers =
      std::remove_if(values.begin(), values.end(), [](float x) { return std::isnan(x); });
  values = values.first(static_cast<size_t>(numbers - values.begin()));
  if (!values.empty()) {
    low = quantile(values, rule.alpha);
    high = quantile(values, 1 - rule.alpha);
  }
  return quantize::affine_range(low, high, levels, rule.kappa);
}

/// One job: its rows, where its codes are gathered, and its metadata.
class Packer {
 public:
  /// Floats to put a group in, and rows that are none; and a byte for each code.
  static size_t scratch_bytes(const PackedFormat& format, const PackJob& job, DType dtype) {
    const size_t floats = dtype == DType::kF32 ? 1 : 2;
    return static_cast<size_t>(job.rows) * static_cast<size_t>(format.channels()) *
           (floats * sizeof(float) + 1);
  }

  Packer(const PackedFormat& format, const std::array<PackRule, 2>& rules, const PackJob& job,
         DType dtype, std::byte* scratch)
      : format_(format),
        rules_(rules),
        job_(job),
        rows_(static_cast<size_t>(job.rows)),
        width_(static_cast<size_t>(format.channels())),
        x_(static_cast<const float*>(job.x)),
        values_(reinterpret_cast<float*>(scratch)) {
    float* end = values_ + rows_ * width_;
    if (dtype != DType::kF32) {
      convert_elements(reinterpret_cast<std::byte*>(end), DType::kF32,
                       static_cast<const std::byte*>(job.x), dtype, rows_ * width_);
      x_ = end;
      end += rows_ * width_;
    }
    codes_ = reinterpret_cast<uint8_t*>(end);
  }

  /// `shared` is the range of a job that shares one (kHead).
  void run(const AffineRange* shared) {
    switch (format_.axis) {
      case ScaleAxis::kHead:
        pack_head(shared);
        break;
      case ScaleAxis::kToken:
        pack_tokens();
        break;
      case ScaleAxis::kChannel:
        pack_channels();
        break;
    }
    if (job_.codes != nullptr) write_codes();
  }

 private:
  void put_meta(size_t scale, size_t zero, const AffineRange& range, const PackRule& rule) {
    const AffineMeta meta = quantize::affine_meta(range, rule);
    quantize::store_meta(job_.scales, format_.meta, scale, meta.scale);
    quantize::store_meta(job_.zeros, format_.meta, zero, meta.zero);
  }

  void pack_head(const AffineRange* shared) {
    const PackRule& rule = rules_[0];
    AffineRange range;
    if (shared != nullptr) {
      range = *shared;
    } else {
      std::copy_n(x_, rows_ * width_, values_);
      range = range_of({values_, rows_ * width_}, rule, max_code(format_.section[0].code));
    }
    put_meta(0, 0, range, rule);
    for (size_t i = 0; i < rows_ * width_; ++i) {
      codes_[i] = static_cast<uint8_t>(range.code(x_[i], rule.rounding));
    }
  }

  void pack_tokens() {
    const PackRule& rule = rules_[0];
    const auto group = static_cast<size_t>(format_.group_size);
    const auto groups = static_cast<size_t>(format_.groups());
    for (size_t row = 0; row < rows_; ++row) {
      for (size_t g = 0; g < groups; ++g) {
        const size_t first = row * width_ + g * group;
        const size_t n = std::min(group, width_ - g * group);
        if (rule.rule != CodeRule::kAffine) {
          const std::span<const float> numbers(x_ + first, n);
          const float scale =
              rule.rule == CodeRule::kTernary    ? code_ternary(numbers, rule, codes_ + first, 1)
              : rule.rule == CodeRule::kCodebook ? code_by_codebook(numbers, codes_ + first)
                                                 : code_by_norm(numbers, rule, codes_ + first);
          quantize::store_meta(job_.scales, format_.meta, row * groups + g, scale);
          continue;
        }
        std::copy_n(x_ + first, n, values_);
        const AffineRange range = range_of({values_, n}, rule, max_code(format_.section[0].code));
        put_meta(row * groups + g, row * groups + g, range, rule);
        for (size_t i = first; i < first + n; ++i) {
          codes_[i] = static_cast<uint8_t>(range.code(x_[i], rule.rounding));
        }
      }
    }
  }

  void pack_channels() {
    size_t channel = 0;
    size_t zero = 0;
    const std::span<float> column(values_, rows_);
    for (int s = 0; s < format_.sections; ++s) {
      const PackedSection& section = format_.section[static_cast<size_t>(s)];
      const PackRule& rule = rules_[static_cast<size_t>(s)];
      for (int c = 0; c < section.channels; ++c, ++channel) {
        for (size_t row = 0; row < rows_; ++row) column[row] = x_[row * width_ + channel];
        switch (rule.rule) {
          case CodeRule::kAffine:
            pack_affine_channel(channel, zero++, section, rule, column);
            break;
          case CodeRule::kTernary:
            quantize::store_meta(job_.scales, format_.meta, channel,
                                 code_ternary(column, rule, codes_ + channel, width_));
            break;
          case CodeRule::kSign:
            pack_sign_channel(channel, column);
            break;
          case CodeRule::kCodebook:  // scales per token alone
          case CodeRule::kNormCodebook:
            break;
        }
      }
    }
  }

  void pack_affine_channel(size_t channel, size_t zero, const PackedSection& section,
                           const PackRule& rule, std::span<float> column) {
    const AffineRange range = range_of(column, rule, max_code(section.code));
    put_meta(channel, zero, range, rule);
    for (size_t row = 0; row < rows_; ++row) {
      const float x = x_[row * width_ + channel];  // quantiles have mixed up the column
      codes_[row * width_ + channel] = static_cast<uint8_t>(range.code(x, rule.rounding));
    }
  }

  /// The digits of a group, `stride` apart, and its scale.
  static float code_ternary(std::span<const float> group, const PackRule& rule, uint8_t* codes,
                            size_t stride) {
    double sum = 0;
    for (const float x : group) sum += std::isnan(x) ? 0 : static_cast<double>(std::abs(x));
    const auto mean = static_cast<float>(sum / static_cast<double>(group.size()));
    const float threshold = rule.gamma * mean;
    double beyond = 0;
    int count = 0;
    for (size_t i = 0; i < group.size(); ++i) {
      const int digit = quantize::ternary_digit(group[i], threshold);
      codes[i * stride] = static_cast<uint8_t>(digit);
      if (digit != 1) {
        beyond += static_cast<double>(std::abs(group[i]));
        ++count;
      }
    }
    if (rule.ternary_scale == TernaryScale::kUnit) return 1;
    if (rule.ternary_scale == TernaryScale::kMean) return mean;
    return count == 0 ? 0 : static_cast<float>(beyond / count);
  }

  /// The codes of a group, and its scale.
  float code_by_codebook(std::span<const float> group, uint8_t* codes) const {
    float most = 0;
    for (const float x : group) most = std::abs(x) > most ? std::abs(x) : most;
    const float scale = quantize::codebook_scale(most);
    for (const float x : group) {
      *codes++ = static_cast<uint8_t>(quantize::codebook_code(format_.section[0].code, x, scale));
    }
    return scale;
  }

  /// The same of a row that is scaled by its norm.
  float code_by_norm(std::span<const float> row, const PackRule& rule, uint8_t* codes) const {
    const CodeFormat format = format_.section[0].code;
    const auto channels = static_cast<int>(row.size());
    double squares = 0;
    for (const float x : row) {
      squares += std::isnan(x) ? 0 : static_cast<double>(x) * static_cast<double>(x);
    }
    const float unit = quantize::norm_unit(squares, channels);
    unsigned code_squares = 0;
    for (const float x : row) {
      const int code = quantize::codebook_code(format, x, unit);
      *codes++ = static_cast<uint8_t>(code);
      code_squares += quantize::square_of(format, code);
    }
    return quantize::norm_scale(format, rule, squares, code_squares, channels);
  }

  void pack_sign_channel(size_t channel, std::span<const float> column) {
    double sum = 0;
    for (size_t row = 0; row < rows_; ++row) {
      const float x = column[row];
      sum += std::isnan(x) ? 0 : static_cast<double>(std::abs(x));
      codes_[row * width_ + channel] = x >= 0 ? 1 : 0;
    }
    quantize::store_meta(job_.scales, format_.meta, channel,
                         static_cast<float>(sum / static_cast<double>(rows_)));
  }

  void write_codes() {
    const size_t row_bytes = format_.row_bytes();
    for (size_t row = 0; row < rows_; ++row) {
      auto* to = reinterpret_cast<uint8_t*>(job_.codes) + row * row_bytes;
      uint8_t* from = codes_ + row * width_;
      for (int s = 0; s < format_.sections; ++s) {
        const PackedSection& section = format_.section[static_cast<size_t>(s)];
        if (const uint32_t merge = rules_[static_cast<size_t>(s)].merge; merge != 0) {
          quantize::merge_codes(merge, to, section.code, from, 0, section.channels);
        }
        pack_row(to, section.code, from, section.channels);
        to += section.row_bytes();
        from += section.channels;
      }
    }
  }

  const PackedFormat& format_;
  const std::array<PackRule, 2>& rules_;
  const PackJob& job_;
  size_t rows_;
  size_t width_;
  const float* x_;  // (rows, channels)
  float* values_;   // (rows * channels,) at most
  uint8_t* codes_;  // (rows, channels)
};

/// The range of all rows of some jobs.
AffineRange joint_range(const PackedFormat& format, const PackRule& rule,
                        std::span<const PackJob> jobs, DType dtype) {
  std::vector<float> all;
  const auto width = static_cast<size_t>(format.channels());
  for (const PackJob& job : jobs) {
    const size_t first = all.size();
    all.resize(first + static_cast<size_t>(job.rows) * width);
    convert_elements(reinterpret_cast<std::byte*>(all.data() + first), DType::kF32,
                     static_cast<const std::byte*>(job.x), dtype, all.size() - first);
  }
  return range_of(all, rule, max_code(format.section[0].code));
}

/// (jobs,) the ranges of jobs that share one, made once for all that do; empty if none does.
std::vector<AffineRange> shared_ranges(const PackedFormat& format, const PackRule& rule,
                                       std::span<const PackJob> jobs, DType dtype, Stream& stream) {
  if (std::none_of(jobs.begin(), jobs.end(), [](const PackJob& job) { return job.joins_last; })) {
    return {};
  }
  std::vector<size_t> first;  // of those that share a range, with the end of the last
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!jobs[i].joins_last) first.push_back(i);
  }
  first.push_back(jobs.size());
  std::vector<AffineRange> ranges(jobs.size());
  stream.pool().parallel_for(first.size() - 1, [&](size_t i, int) {
    const auto sharing = jobs.subspan(first[i], first[i + 1] - first[i]);
    std::fill_n(ranges.begin() + static_cast<std::ptrdiff_t>(first[i]), sharing.size(),
                joint_range(format, rule, sharing, dtype));
  });
  return ranges;
}

}  // namespace

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, DType dtype, Stream& stream) {
  // Every worker at once, so that it does not matter which of them gets the first large job.
  size_t bytes = 0;
  for (const PackJob& job : jobs) {
    bytes = std::max(bytes, Packer::scratch_bytes(format, job, dtype));
  }
  for (int worker = 0; worker < stream.pool().threads(); ++worker) stream.scratch(worker, bytes);
  const std::vector<AffineRange> ranges = shared_ranges(format, rules[0], jobs, dtype, stream);
  stream.pool().parallel_for(jobs.size(), [&](size_t job, int worker) {
    Packer(format, rules, jobs[job], dtype, stream.scratch(worker, bytes))
        .run(ranges.empty() ? nullptr : &ranges[job]);
  });
}

}  // namespace kvlm::cpu
