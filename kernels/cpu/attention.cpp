#include "kernels/cpu/attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace {

// Prefill works on transposed tiles: a vector holds one number of kLanes different queries. Keys
// and values are then read by broadcast and need no packing, the softmax is vertical, and any
// head_dim and any number of queries waste at most a few lanes.
//
//   scores  S^T (keys, queries)      = K (keys, head_dim)    x Q^T (head_dim, queries)
//   output  O^T (head_dim, queries) += V^T (head_dim, keys)  x P^T (keys, queries)
//
// Both products are one micro-kernel of kBlock rows by up to kPanel lanes of queries.
constexpr size_t kBlock = kLanes == 8 ? 4 : 8;  // AVX2 has 16 registers, the others 32
constexpr size_t kPanelVectors = 3;
constexpr size_t kPanel = kPanelVectors * kLanes;
constexpr size_t kQueryRows = 192;  // queries that share one conversion of a tile; panels divide it
constexpr size_t kKeyRows = 64;     // a multiple of kBlock
static_assert(kQueryRows % kPanel == 0 && kKeyRows % kBlock == 0);

/// c[r][:] = c[r][:] * factor + sum_k a(r, k) * b[k][:] for r < kBlock, or without c when kFresh,
/// where a(r, k) = a[r * row_stride + k * depth_stride] and rows of b and c are kVectors vectors.
template <size_t kVectors, bool kFresh>
HWY_INLINE void multiply_block(size_t depth, const float* a, size_t row_stride, size_t depth_stride,
                               const float* b, float* c, const float* factor) {
  const Floats d;
  FloatVec sum[kBlock][kVectors];
  HWY_UNROLL(8)
  for (size_t r = 0; r < kBlock; ++r) {
    HWY_UNROLL(3)
    for (size_t v = 0; v < kVectors; ++v) {
      sum[r][v] = kFresh ? hn::Zero(d)
                         : hn::Mul(hn::Load(d, c + (r * kVectors + v) * kLanes),
                                   hn::Load(d, factor + v * kLanes));
    }
  }
  for (size_t k = 0; k < depth; ++k) {
    FloatVec x[kVectors];
    HWY_UNROLL(3)
    for (size_t v = 0; v < kVectors; ++v) x[v] = hn::Load(d, b + (k * kVectors + v) * kLanes);
    HWY_UNROLL(8)
    for (size_t r = 0; r < kBlock; ++r) {
      const FloatVec y = hn::Set(d, a[r * row_stride + k * depth_stride]);
      HWY_UNROLL(3)
      for (size_t v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(x[v], y, sum[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kBlock; ++r) {
    HWY_UNROLL(3)
    for (size_t v = 0; v < kVectors; ++v) {
      hn::Store(sum[r][v], d, c + (r * kVectors + v) * kLanes);
    }
  }
}

// Queries come and outputs go in rows, four at a time where a vector holds as many.
constexpr size_t kGroup = std::min<size_t>(4, kLanes);

#if HWY_TARGET == HWY_SCALAR

void rows_to_columns(const float* const (&row)[kGroup], size_t count, float factor, float* column,
                     size_t width) {
  for (size_t c = 0; c < count; ++c) column[c * width] = row[0][c] * factor;
}

void columns_to_rows(const float* column, size_t width, const float* sum, size_t count,
                     float* const (&row)[kGroup]) {
  for (size_t c = 0; c < count; ++c) row[0][c] = column[c * width] / sum[0];
}

#else

using Quad = hn::FixedTag<float, kGroup>;

HWY_INLINE void transpose(hn::Vec<Quad> (&x)[kGroup]) {
  const Quad d;
  const auto lower01 = hn::InterleaveLower(d, x[0], x[1]);
  const auto lower23 = hn::InterleaveLower(d, x[2], x[3]);
  const auto upper01 = hn::InterleaveUpper(d, x[0], x[1]);
  const auto upper23 = hn::InterleaveUpper(d, x[2], x[3]);
  x[0] = hn::ConcatLowerLower(d, lower23, lower01);
  x[1] = hn::ConcatUpperUpper(d, lower23, lower01);
  x[2] = hn::ConcatLowerLower(d, upper23, upper01);
  x[3] = hn::ConcatUpperUpper(d, upper23, upper01);
}

/// column[c * width + r] = row[r][c] * factor.
void rows_to_columns(const float* const (&row)[kGroup], size_t count, float factor, float* column,
                     size_t width) {
  const Quad d;
  const auto factors = hn::Set(d, factor);
  size_t c = 0;
  for (; c + kGroup <= count; c += kGroup) {
    hn::Vec<Quad> x[kGroup];
    HWY_UNROLL(4)
    for (size_t r = 0; r < kGroup; ++r) x[r] = hn::Mul(hn::LoadU(d, row[r] + c), factors);
    transpose(x);
    HWY_UNROLL(4)
    for (size_t i = 0; i < kGroup; ++i) hn::Store(x[i], d, column + (c + i) * width);
  }
  for (; c < count; ++c) {
    for (size_t r = 0; r < kGroup; ++r) column[c * width + r] = row[r][c] * factor;
  }
}

/// row[r][c] = column[c * width + r] / sum[r]; rows may be the same if their columns are.
void columns_to_rows(const float* column, size_t width, const float* sum, size_t count,
                     float* const (&row)[kGroup]) {
  const Quad d;
  const auto inverse = hn::Div(hn::Set(d, 1.0f), hn::Load(d, sum));
  size_t c = 0;
  for (; c + kGroup <= count; c += kGroup) {
    hn::Vec<Quad> x[kGroup];
    HWY_UNROLL(4)
    for (size_t i = 0; i < kGroup; ++i) {
      x[i] = hn::Mul(hn::Load(d, column + (c + i) * width), inverse);
    }
    transpose(x);
    HWY_UNROLL(4)
    for (size_t r = 0; r < kGroup; ++r) hn::StoreU(x[r], d, row[r] + c);
  }
  for (; c < count; ++c) {
    for (size_t r = 0; r < kGroup; ++r) row[r][c] = column[c * width + r] * (1.0f / sum[r]);
  }
}

#endif

/// Rows of one kv_head at any stride: the tile source of prefill.
struct StridedRows {
  const std::byte* keys;
  const std::byte* values;
  size_t stride_bytes;
  DType dtype;
  size_t rows;

  /// Writes rows [first, first + count) as floats, row_floats apart.
  HWY_INLINE void load(size_t first, size_t count, size_t head_dim, size_t row_floats, float* k,
                       float* v) const {
    for (size_t r = 0; r < count; ++r, k += row_floats, v += row_floats) {
      load_row(keys + (first + r) * stride_bytes, head_dim, k);
      load_row(values + (first + r) * stride_bytes, head_dim, v);
    }
  }

 private:
  HWY_INLINE void load_row(const std::byte* row, size_t head_dim, float* out) const {
    if (dtype == DType::kF16) return widen(reinterpret_cast<const f16*>(row), head_dim, out);
    if (dtype == DType::kBF16) return widen(reinterpret_cast<const bf16*>(row), head_dim, out);
    widen(reinterpret_cast<const float*>(row), head_dim, out);
  }
};

/// Up to kQueryRows query rows of one kv_head on their way through the keys. Row r is query
/// (begin + r) / q_per_kv: the heads that share a kv_head are rows of one matrix.
class QueryTile {
 public:
  static size_t scratch_bytes(size_t head_dim) {
    return sizeof(float) * (2 * kQueryRows * padded(head_dim) + 2 * kKeyRows * padded(head_dim) +
                            kKeyRows * kPanel + 3 * kQueryRows + kPanel);
  }

  QueryTile(std::byte* scratch, size_t head_dim, size_t rows)
      : dim_(head_dim),
        dim_padded_(padded(head_dim)),
        rows_(rows),
        q_(reinterpret_cast<float*>(scratch)),
        out_(q_ + kQueryRows * dim_padded_),
        keys_(out_ + kQueryRows * dim_padded_),
        values_(keys_ + kKeyRows * dim_padded_),
        scores_(values_ + kKeyRows * dim_padded_),
        max_(scores_ + kKeyRows * kPanel),
        sum_(max_ + kQueryRows),
        query_(sum_ + kQueryRows),
        factor_(query_ + kQueryRows) {
    std::fill(out_, out_ + kQueryRows * dim_padded_, 0.0f);
    std::fill(max_, max_ + kQueryRows, -std::numeric_limits<float>::infinity());
    std::fill(sum_, sum_ + kQueryRows, 0.0f);
    // Rows up to a multiple of kBlock and columns beyond head_dim enter products whose results are
    // not used; they are zeroed so that no stale NaN or subnormal slows them down.
    std::fill(keys_, keys_ + 2 * kKeyRows * dim_padded_, 0.0f);
  }

  /// Takes rows [r, r + kGroup), row r + i being of query number query[i].
  HWY_INLINE void set_queries(size_t r, const float* const (&row)[kGroup],
                              const size_t (&query)[kGroup], float scale) {
    const size_t panel = r / kPanel;
    rows_to_columns(row, dim_, scale, q_ + panel * kPanel * dim_ + r % kPanel, panel_width(panel));
    for (size_t i = 0; i < kGroup; ++i) query_[r + i] = static_cast<float>(query[i]);
  }

  /// Attends rows [0, source.rows), all of them or, when causal, query i the rows up to i.
  template <class Source>
  HWY_INLINE void attend(const Source& source, bool causal) {
    for (size_t first = 0; first < source.rows; first += kKeyRows) {
      if (causal && static_cast<float>(first) > query_[rows_ - 1]) break;
      const size_t rows = std::min(kKeyRows, source.rows - first);
      source.load(first, rows, dim_, dim_padded_, keys_, values_);
      for (size_t panel = 0; panel * kPanel < rows_; ++panel) {
        switch (panel_width(panel) / kLanes) {
          case 1:
            attend_panel<1>(panel, first, rows, causal);
            break;
          case 2:
            attend_panel<2>(panel, first, rows, causal);
            break;
          default:
            attend_panel<3>(panel, first, rows, causal);
        }
      }
    }
  }

  /// Writes the normalised outputs of rows [r, r + kGroup); pointers of the same query may be the
  /// same.
  HWY_INLINE void get_outputs(size_t r, float* const (&row)[kGroup]) const {
    const size_t panel = r / kPanel;
    columns_to_rows(out_ + panel * kPanel * dim_padded_ + r % kPanel, panel_width(panel), sum_ + r,
                    dim_, row);
  }

 private:
  static size_t padded(size_t head_dim) {
    return hwy::RoundUpTo(head_dim, std::max(kLanes, kBlock));
  }
  size_t panel_width(size_t panel) const {
    return std::min(kPanel, hwy::RoundUpTo(rows_ - panel * kPanel, kLanes));
  }

  template <size_t kVectors>
  HWY_INLINE void attend_panel(size_t panel, size_t first, size_t rows, bool causal) {
    constexpr size_t kWidth = kVectors * kLanes;
    const float* query = query_ + panel * kPanel;
    bool mask = false;
    if (causal) {
      const float newest = query[std::min(kWidth, rows_ - panel * kPanel) - 1];
      if (static_cast<float>(first) > newest) return;
      rows = std::min(rows, static_cast<size_t>(newest) - first + 1);
      mask = static_cast<float>(first + rows - 1) > query[0];
    }
    const float* q = q_ + panel * kPanel * dim_;
    for (size_t r = 0; r < rows; r += kBlock) {
      multiply_block<kVectors, true>(dim_, keys_ + r * dim_padded_, dim_padded_, 1, q,
                                     scores_ + r * kWidth, nullptr);
    }
    for (size_t v = 0; v < kVectors; ++v) {
      float* max = max_ + panel * kPanel + v * kLanes;
      float* sum = sum_ + panel * kPanel + v * kLanes;
      softmax_column(scores_ + v * kLanes, kWidth, rows, mask ? query + v * kLanes : nullptr,
                     static_cast<float>(first), max, sum, factor_ + v * kLanes);
    }
    float* out = out_ + panel * kPanel * dim_padded_;
    for (size_t c = 0; c < dim_; c += kBlock) {
      multiply_block<kVectors, false>(rows, values_ + c, 1, dim_padded_, scores_, out + c * kWidth,
                                      factor_);
    }
  }

  /// One vector of queries: scores to weights; query is null when every row is seen.
  static HWY_INLINE void softmax_column(float* scores, size_t width, size_t rows,
                                        const float* query, float first, float* max, float* sum,
                                        float* factor) {
    const Floats d;
    const FloatVec nothing = hn::Set(d, -std::numeric_limits<float>::infinity());
    const FloatVec old_max = hn::Load(d, max);
    FloatVec new_max = old_max;
    if (query != nullptr) {
      const FloatVec newest = hn::Load(d, query);
      for (size_t r = 0; r < rows; ++r) {
        const FloatVec key = hn::Set(d, first + static_cast<float>(r));
        const FloatVec s =
            hn::IfThenElse(hn::Le(key, newest), hn::Load(d, scores + r * width), nothing);
        hn::Store(s, d, scores + r * width);
        new_max = hn::Max(new_max, s);
      }
    } else {
      for (size_t r = 0; r < rows; ++r) new_max = hn::Max(new_max, hn::Load(d, scores + r * width));
    }
    const FloatVec rescale = softmax_weight(d, hn::Sub(old_max, new_max));
    FloatVec new_sum = hn::Mul(hn::Load(d, sum), rescale);
    for (size_t r = 0; r < rows; ++r) {
      const FloatVec w = softmax_weight(d, hn::Sub(hn::Load(d, scores + r * width), new_max));
      hn::Store(w, d, scores + r * width);
      new_sum = hn::Add(new_sum, w);
    }
    hn::Store(new_max, d, max);
    hn::Store(new_sum, d, sum);
    hn::Store(rescale, d, factor);
  }

  size_t dim_;
  size_t dim_padded_;
  size_t rows_;
  float* q_;       // panels of (head_dim, panel width), scaled
  float* out_;     // panels of (dim_padded, panel width)
  float* keys_;    // (kKeyRows, dim_padded)
  float* values_;  // (kKeyRows, dim_padded)
  float* scores_;  // (kKeyRows, panel width) of the panel at hand
  float* max_;     // (kQueryRows,)
  float* sum_;     // (kQueryRows,)
  float* query_;   // (kQueryRows,) number of the query; floats are exact up to 2^24
  float* factor_;  // (kPanel,) what the output so far is multiplied by
};

/// Rows that attend to each other, and who else is seen by all of them.
struct Attention {
  TensorView out;
  ConstTensorView q, k, v;
  std::span<const KeyValueRows> past;
  bool causal;
  float scale;

  size_t rows() const { return static_cast<size_t>(q.shape()[0]); }
  size_t q_heads() const { return static_cast<size_t>(q.shape()[1]); }
  size_t kv_heads() const { return static_cast<size_t>(k.shape()[1]); }
  size_t q_per_kv() const { return q_heads() / kv_heads(); }
  /// Of the queries of one kv_head.
  size_t tiles() const { return (rows() * q_per_kv() + kQueryRows - 1) / kQueryRows; }

  void run(size_t head, size_t tile, std::byte* scratch) const;
};

void Attention::run(size_t head, size_t tile, std::byte* scratch) const {
  const auto head_dim = static_cast<size_t>(q.shape()[2]);
  const size_t n = rows();
  const size_t per_kv = q_per_kv();
  const size_t runs = past.size() / kv_heads();
  const size_t begin = tile * kQueryRows;
  const size_t count = std::min(kQueryRows, n * per_kv - begin);
  // Row r of the tile; those past the last are the last once more, which wastes lanes only.
  const auto query_of = [&](size_t r) { return (begin + std::min(r, count - 1)) / per_kv; };
  const auto offset_of = [&](size_t r) {
    const size_t within = (begin + std::min(r, count - 1)) % per_kv;
    return (query_of(r) * q_heads() + head * per_kv + within) * head_dim;
  };
  QueryTile block(scratch, head_dim, count);
  const size_t lanes = hwy::RoundUpTo(count, kLanes);
  for (size_t r = 0; r < lanes; r += kGroup) {
    const float* row[kGroup];
    size_t query[kGroup];
    for (size_t i = 0; i < kGroup; ++i) {
      row[i] = q.as<float>() + offset_of(r + i);
      query[i] = query_of(r + i);
    }
    block.set_queries(r, row, query, scale);
  }
  for (const KeyValueRows& run : past.subspan(head * runs, runs)) {
    block.attend(StridedRows{run.keys, run.values, head_dim * dtype_bytes(run.dtype), run.dtype,
                             static_cast<size_t>(run.rows)},
                 false);
  }
  const size_t offset_bytes = head * head_dim * sizeof(float);
  block.attend(StridedRows{k.data() + offset_bytes, v.data() + offset_bytes,
                           kv_heads() * head_dim * sizeof(float), DType::kF32, n},
               causal);
  for (size_t r = 0; r < count; r += kGroup) {
    float* row[kGroup];
    for (size_t i = 0; i < kGroup; ++i) row[i] = out.as<float>() + offset_of(r + i);
    block.get_outputs(r, row);
  }
}

}  // namespace

void attention_kernel(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                      std::span<const KeyValueRows> past, bool causal, float scale,
                      Stream& stream) {
  const Attention all{out, q, k, v, past, causal, scale};
  const auto head_dim = static_cast<size_t>(q.shape()[2]);
  const size_t tiles = all.tiles();
  const size_t heads = all.kv_heads();
  stream.pool().parallel_for(heads * tiles, [&](size_t task, int worker) {
    // The longest first: late queries see most.
    all.run(task % heads, tiles - 1 - task / heads,
            stream.scratch(worker, QueryTile::scratch_bytes(head_dim)));
  });
}

void segment_attention_kernel(TensorView out, ConstTensorView q, ConstTensorView k,
                              ConstTensorView v, std::span<const int32_t> bounds, float scale,
                              Stream& stream) {
  const auto head_dim = static_cast<size_t>(q.shape()[2]);
  const auto heads = static_cast<size_t>(k.shape()[1]);
  stream.pool().parallel_for(heads * (bounds.size() - 1), [&](size_t task, int worker) {
    const int64_t first = bounds[task / heads];
    const int64_t rows = bounds[task / heads + 1] - first;
    const Attention segment{out.slice(first, rows),
                            q.slice(first, rows),
                            k.slice(first, rows),
                            v.slice(first, rows),
                            {},
                            false,
                            scale};
    std::byte* scratch = stream.scratch(worker, QueryTile::scratch_bytes(head_dim));
    for (size_t tile = 0; tile < segment.tiles(); ++tile) {
      segment.run(task % heads, tile, scratch);
    }
  });
}

void attend_rows_kernel(const DecodeSplit& piece, int q_per_kv, size_t head_dim, float scale) {
  const auto rows = static_cast<size_t>(piece.cached.rows);
  switch (piece.cached.dtype) {
    case DType::kF16:
      return attend(RowSource<f16>(piece.cached, head_dim), rows, piece.q, q_per_kv, head_dim,
                    scale, piece.state);
    case DType::kBF16:
      return attend(RowSource<bf16>(piece.cached, head_dim), rows, piece.q, q_per_kv, head_dim,
                    scale, piece.state);
    default:
      return attend(RowSource<float>(piece.cached, head_dim), rows, piece.q, q_per_kv, head_dim,
                    scale, piece.state);
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(attention_kernel);
HWY_EXPORT(segment_attention_kernel);
HWY_EXPORT(attend_rows_kernel);

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, Stream& stream) {
  HWY_DYNAMIC_DISPATCH(attention_kernel)(out, q, k, v, past, causal, scale, stream);
}

void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       std::span<const int32_t> bounds, float scale, Stream& stream) {
  if (bounds.size() == 2) return attention(out, q, k, v, {}, /*causal=*/false, scale, stream);
  HWY_DYNAMIC_DISPATCH(segment_attention_kernel)(out, q, k, v, bounds, scale, stream);
}

void attend_rows(std::span<const DecodeSplit> pieces, int q_per_kv, int head_dim, float scale,
                 Stream& stream) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(attend_rows_kernel);
  stream.pool().parallel_for(pieces.size(), [&](size_t task, int) {
    kernel(pieces[task], q_per_kv, static_cast<size_t>(head_dim), scale);
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
