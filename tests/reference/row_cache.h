#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "tests/reference/attention.h"
#include "tests/reference/half.h"

namespace kvlm::reference {

/// One layer of one sequence of the plain cache, in scalar double: what attend() must compute.
class RowLayer {
 public:
  RowLayer(DType format, size_t q_heads, size_t kv_heads, size_t head_dim)
      : format_(format), q_heads_(q_heads), kv_heads_(kv_heads), head_dim_(head_dim) {}

  size_t rows() const noexcept { return past_k_.size() / width(); }

  /// Attention of `rows` new rows, then appends them. A prompt sees its own rows as given and the
  /// past from storage; a generated row sees itself from storage too. Only query rows r for which
  /// wanted(r) are computed; the others stay empty.
  template <class Wanted>
  std::vector<std::vector<double>> attend(const float* q, const float* k, const float* v,
                                          size_t rows, bool prompt, double scale, Wanted wanted) {
    const size_t past = this->rows();
    const auto keep = [&](const float* x, std::vector<float>& all) {
      std::transform(x, x + rows * width(), std::back_inserter(all),
                     [&](float value) { return stored(value, format_); });
    };
    keep(k, past_k_);
    keep(v, past_v_);
    std::vector<std::vector<double>> out(rows);
    for (size_t r = 0; r < rows; ++r) {
      if (!wanted(r)) continue;
      for (size_t head = 0; head < q_heads_; ++head) {
        const size_t kv_head = head / (q_heads_ / kv_heads_);
        std::vector<const float*> keys;
        std::vector<const float*> values;
        for (size_t j = 0; j < past + r + 1; ++j) {
          const bool given = prompt && j >= past;
          const size_t at = (given ? j - past : j) * width() + kv_head * head_dim_;
          keys.push_back((given ? k : past_k_.data()) + at);
          values.push_back((given ? v : past_v_.data()) + at);
        }
        const auto head_out =
            attend_one(q + (r * q_heads_ + head) * head_dim_, keys, values, head_dim_, scale);
        out[r].insert(out[r].end(), head_out.begin(), head_out.end());
      }
    }
    return out;
  }

 private:
  size_t width() const noexcept { return kv_heads_ * head_dim_; }

  DType format_;
  size_t q_heads_, kv_heads_, head_dim_;
  std::vector<float> past_k_;  // (rows, kv_heads, head_dim), as stored
  std::vector<float> past_v_;
};

}  // namespace kvlm::reference
