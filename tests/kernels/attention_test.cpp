#include "kernels/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/base/error.h"
#include "tests/allocations.h"
#include "tests/reference/attention.h"

namespace kvlm {
namespace {

void merge_one(float* out, std::span<const SoftmaxState> parts, int queries, int head_dim) {
  const MergeJob job{out, parts};
  merge_states({&job, 1}, queries, head_dim);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kTolerance = 1e-5;

std::vector<float> normal_values(size_t count, unsigned seed, float deviation = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& x : values) x = normal(rng);
  return values;
}

/// Values stored in a dtype, and what they are worth in float.
struct Stored {
  std::vector<std::byte> bytes;
  std::vector<float> floats;
};

Stored store(std::vector<float> values, DType dtype) {
  Stored stored;
  stored.bytes.resize(values.size() * dtype_bytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    std::byte* p = stored.bytes.data() + i * dtype_bytes(dtype);
    if (dtype == DType::kF16) {
      const f16 x = to_f16(values[i]);
      std::memcpy(p, &x, sizeof x);
      values[i] = to_float(x);
    } else if (dtype == DType::kBF16) {
      const bf16 x = to_bf16(values[i]);
      std::memcpy(p, &x, sizeof x);
      values[i] = to_float(x);
    } else {
      std::memcpy(p, &values[i], sizeof(float));
    }
  }
  stored.floats = std::move(values);
  return stored;
}

/// max |got - expected| / max |expected|; NaN counts as infinite.
double normalised_error(const std::vector<float>& got, const std::vector<double>& expected) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - expected[i]);
    if (!(difference <= std::numeric_limits<double>::max())) return difference + kInfinity;
    error = std::max(error, difference);
    size = std::max(size, std::abs(expected[i]));
  }
  return error / std::max(size, 1e-30);
}

// ---------------------------------------------------------------------------------------- prefill

struct PrefillCase {
  size_t n = 1;
  size_t kv_heads = 2;
  size_t q_per_kv = 1;
  size_t head_dim = 64;
  bool causal = true;
  DType past_dtype = DType::kF32;
  std::vector<size_t> past_rows = {};  // one entry per run
  float deviation = 1;
};

struct Prefill {
  explicit Prefill(const PrefillCase& c) : shape(c) {
    const size_t q_heads = c.kv_heads * c.q_per_kv;
    q = normal_values(c.n * q_heads * c.head_dim, 1, c.deviation);
    k = normal_values(c.n * c.kv_heads * c.head_dim, 2, c.deviation);
    v = normal_values(c.n * c.kv_heads * c.head_dim, 3);
    unsigned seed = 10;
    for (size_t head = 0; head < c.kv_heads; ++head) {
      for (size_t rows : c.past_rows) {
        past_keys.push_back(store(normal_values(rows * c.head_dim, ++seed), c.past_dtype));
        past_values.push_back(store(normal_values(rows * c.head_dim, ++seed), c.past_dtype));
      }
    }
    for (size_t i = 0; i < past_keys.size(); ++i) {
      past.push_back({past_keys[i].bytes.data(), past_values[i].bytes.data(), c.past_dtype,
                      static_cast<int64_t>(c.past_rows[i % c.past_rows.size()])});
    }
    scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  }

  Shape q_shape() const {
    return {static_cast<int64_t>(shape.n), static_cast<int64_t>(shape.kv_heads * shape.q_per_kv),
            static_cast<int64_t>(shape.head_dim)};
  }
  Shape k_shape() const {
    return {static_cast<int64_t>(shape.n), static_cast<int64_t>(shape.kv_heads),
            static_cast<int64_t>(shape.head_dim)};
  }

  std::vector<float> run(Stream& stream, bool in_place = false) const {
    std::vector<float> out = q;
    if (!in_place) std::fill(out.begin(), out.end(), std::nanf(""));
    attention({out.data(), DType::kF32, q_shape()},
              {in_place ? out.data() : q.data(), DType::kF32, q_shape()},
              {k.data(), DType::kF32, k_shape()}, {v.data(), DType::kF32, k_shape()}, past,
              shape.causal, scale, DType::kF32, stream);
    return out;
  }

  std::vector<double> expected() const {
    const size_t q_heads = shape.kv_heads * shape.q_per_kv;
    const size_t dim = shape.head_dim;
    const size_t runs = shape.past_rows.size();
    std::vector<double> out;
    for (size_t i = 0; i < shape.n; ++i) {
      for (size_t hq = 0; hq < q_heads; ++hq) {
        const size_t h = hq / shape.q_per_kv;
        std::vector<const float*> keys;
        std::vector<const float*> values;
        for (size_t run = 0; run < runs; ++run) {
          for (size_t j = 0; j < shape.past_rows[run]; ++j) {
            keys.push_back(past_keys[h * runs + run].floats.data() + j * dim);
            values.push_back(past_values[h * runs + run].floats.data() + j * dim);
          }
        }
        for (size_t j = 0; j < (shape.causal ? i + 1 : shape.n); ++j) {
          keys.push_back(k.data() + (j * shape.kv_heads + h) * dim);
          values.push_back(v.data() + (j * shape.kv_heads + h) * dim);
        }
        const std::vector<double> row = reference::attend_one(
            q.data() + (i * q_heads + hq) * dim, keys, values, dim, static_cast<double>(scale));
        out.insert(out.end(), row.begin(), row.end());
      }
    }
    return out;
  }

  PrefillCase shape;
  std::vector<float> q, k, v;
  std::vector<Stored> past_keys, past_values;
  std::vector<KeyValueRows> past;
  float scale;
};

void expect_parity(const PrefillCase& c) {
  ThreadPool pool(2);
  Stream stream(pool);
  const Prefill prefill(c);
  EXPECT_LE(normalised_error(prefill.run(stream), prefill.expected()), kTolerance)
      << "n " << c.n << " kv_heads " << c.kv_heads << " q_per_kv " << c.q_per_kv << " head_dim "
      << c.head_dim << " causal " << c.causal << " past runs " << c.past_rows.size() << " of "
      << dtype_name(c.past_dtype);
}

TEST(Attention, EqualsTheReferenceForEveryHeadDim) {
  for (size_t head_dim : {1, 2, 15, 16, 17, 32, 33, 48, 64, 72, 80, 96, 128, 256}) {
    for (bool causal : {false, true}) {
      expect_parity({.n = 65, .q_per_kv = 2, .head_dim = head_dim, .causal = causal});
    }
  }
}

TEST(Attention, EqualsTheReferenceForEveryNumberOfQueries) {
  for (size_t n : {1, 2, 31, 32, 33, 63, 64, 65, 191, 192, 193, 257, 577}) {
    for (bool causal : {false, true}) {
      expect_parity({.n = n, .kv_heads = 1, .head_dim = 64, .causal = causal});
      if (n < 500) expect_parity({.n = n, .kv_heads = 1, .q_per_kv = 3, .causal = causal});
    }
  }
}

TEST(Attention, EqualsTheReferenceForEverySharing) {
  for (size_t q_per_kv : {1, 2, 4, 7}) {
    for (size_t n : {1, 33, 65}) {
      for (bool causal : {false, true}) {
        expect_parity({.n = n, .kv_heads = 3, .q_per_kv = q_per_kv, .causal = causal});
      }
    }
  }
}

TEST(Attention, SeesThePastInEveryDType) {
  const std::vector<std::vector<size_t>> pasts = {{0}, {1}, {64}, {100}, {1, 65, 7}, {0, 63, 129}};
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::vector<size_t>& past : pasts) {
      for (size_t head_dim : {33, 72, 128}) {
        for (size_t n : {1, 5, 64}) {
          expect_parity({.n = n,
                         .q_per_kv = n == 5 ? 4u : 1u,
                         .head_dim = head_dim,
                         .causal = head_dim != 72,
                         .past_dtype = dtype,
                         .past_rows = past});
        }
      }
    }
  }
}

TEST(Attention, KeepsHugeScoresApart) {
  // Whole numbers: every score is exact in float, however it is summed.
  Prefill prefill({.n = 130, .head_dim = 64, .causal = true});
  for (std::vector<float>* x : {&prefill.q, &prefill.k}) {
    for (float& e : *x) e = std::round(e * 12);
  }
  prefill.scale = 1;
  ThreadPool pool(1);
  Stream stream(pool);
  EXPECT_LE(normalised_error(prefill.run(stream), prefill.expected()), kTolerance);
}

TEST(Attention, HasNoSubnormalWeights) {
  // A score 90 below the highest: exp(-90) is subnormal, and only a huge value shows that it is 0.
  Prefill prefill({.n = 70, .kv_heads = 1, .q_per_kv = 1, .head_dim = 16, .causal = false});
  std::fill(prefill.q.begin(), prefill.q.end(), 1.0f);
  std::fill(prefill.v.begin(), prefill.v.end(), 1e38f);
  for (size_t i = 0; i < prefill.k.size(); ++i) prefill.k[i] = i < 16 ? 90.0f / 16 : 0.0f;
  std::fill(prefill.v.begin(), prefill.v.begin() + 16, 0.0f);
  prefill.scale = 1;
  ThreadPool pool(1);
  Stream stream(pool);
  EXPECT_THAT(prefill.run(stream), testing::Each(0.0f));
}

TEST(Attention, AveragesValuesWhenAllScoresAreEqual) {
  Prefill prefill({.n = 100, .head_dim = 48, .causal = false});
  std::fill(prefill.k.begin(), prefill.k.end(), 1.0f);
  ThreadPool pool(1);
  Stream stream(pool);
  EXPECT_LE(normalised_error(prefill.run(stream), prefill.expected()), kTolerance);
}

TEST(Attention, MayOverwriteItsQueries) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (size_t q_per_kv : {1, 4}) {
    const Prefill prefill({.n = 200, .q_per_kv = q_per_kv, .head_dim = 72, .causal = true});
    EXPECT_EQ(prefill.run(stream), prefill.run(stream, /*in_place=*/true));
  }
}

TEST(Attention, IsBitIdenticalForAnyNumberOfThreads) {
  const Prefill prefill({.n = 300, .kv_heads = 3, .q_per_kv = 2, .past_rows = {70}});
  ThreadPool one(1);
  Stream stream(one);
  const std::vector<float> expected = prefill.run(stream);
  for (int threads : {2, 3}) {
    ThreadPool pool(threads);
    Stream wide(pool);
    EXPECT_EQ(prefill.run(wide), expected) << threads;
  }
}

TEST(Attention, RefusesWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  std::vector<float> data(4096);
  std::vector<float> result(4096);
  const auto view = [&](Shape shape, DType dtype = DType::kF32) {
    return ConstTensorView(data.data(), dtype, shape);
  };
  const auto out = [&](Shape shape) { return TensorView(result.data(), DType::kF32, shape); };
  const auto code = [&](TensorView o, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                        std::span<const KeyValueRows> past = {}, DType multiply = DType::kF32) {
    try {
      attention(o, q, k, v, past, true, 1, multiply, stream);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  const Shape q{3, 4, 8};
  const Shape k{3, 2, 8};
  EXPECT_EQ(code(out(q), view(q), view(k), view(k)), "no error");
  EXPECT_THAT(code(out(k), view(q), view(k), view(k)),
              testing::HasSubstr("out has shape (3, 2, 8)"));
  EXPECT_THAT(code(out(q), view(q), view({3, 3, 8}), view({3, 3, 8})),
              testing::HasSubstr("are not a multiple of"));
  EXPECT_THAT(code(out(q), view(q), view({2, 2, 8}), view(k)), testing::HasSubstr("k has shape"));
  EXPECT_THAT(code(out(q), view(q), view(k), view({3, 2, 9})), testing::HasSubstr("v has shape"));
  EXPECT_THAT(code(out(q), view({3, 32}), view(k), view(k)),
              testing::HasSubstr("q has shape (3, 32)"));
  EXPECT_THAT(code(out({0, 4, 8}), view({0, 4, 8}), view({0, 2, 8}), view({0, 2, 8})),
              testing::HasSubstr("at least one number"));
  EXPECT_THAT(code(out(q), view(q, DType::kF16), view(k), view(k)), testing::HasSubstr("f16"));
  EXPECT_THAT(code(TensorView(data.data() + 1, DType::kF32, q), view(q), view(k), view(k)),
              testing::HasSubstr("overlap"));
  EXPECT_THAT(code(out(q), view(q), view(k), view(k), {}, DType::kI32),
              testing::HasSubstr("the type to multiply in is i32"));
  const std::vector<KeyValueRows> odd(3);
  EXPECT_THAT(code(out(q), view(q), view(k), view(k), odd),
              testing::HasSubstr("3 cached segments"));
  const std::vector<KeyValueRows> dangling(2, {nullptr, nullptr, DType::kF16, 5});
  EXPECT_THAT(code(out(q), view(q), view(k), view(k), dangling),
              testing::HasSubstr("5 cached tokens"));
  const std::vector<KeyValueRows> codes(2, {nullptr, nullptr, DType::kU8, 0});
  EXPECT_THAT(code(out(q), view(q), view(k), view(k), codes), testing::HasSubstr("u8"));
}

// ----------------------------------------------------------------------------------------- decode

/// One piece with its memory. The state starts as rubbish: it must be overwritten.
struct Piece {
  Piece(size_t rows, size_t queries, size_t dim, DType dtype, unsigned seed)
      : head_dim(dim),
        q(normal_values(queries * dim, seed)),
        keys(store(normal_values(rows * dim, seed + 1), dtype)),
        values(store(normal_values(rows * dim, seed + 2), dtype)),
        max(queries, 1e9f),
        sum(queries, std::nanf("")),
        out(queries * dim, std::nanf("")),
        cached{keys.bytes.data(), values.bytes.data(), dtype, static_cast<int64_t>(rows)} {}

  DecodeSplit decode() { return {q.data(), cached, {max.data(), sum.data(), out.data()}}; }
  SoftmaxState state() { return {max.data(), sum.data(), out.data()}; }

  std::vector<double> expected(float scale) const {
    std::vector<const float*> k;
    std::vector<const float*> v;
    for (size_t j = 0; j < static_cast<size_t>(cached.rows); ++j) {
      k.push_back(keys.floats.data() + j * head_dim);
      v.push_back(values.floats.data() + j * head_dim);
    }
    std::vector<double> result;
    for (size_t i = 0; i * head_dim < q.size(); ++i) {
      const std::vector<double> row = reference::attend_one(q.data() + i * head_dim, k, v, head_dim,
                                                            static_cast<double>(scale));
      result.insert(result.end(), row.begin(), row.end());
    }
    return result;
  }

  std::vector<float> merged() {
    std::vector<float> result(q.size());
    const SoftmaxState part = state();
    merge_one(result.data(), {&part, 1}, static_cast<int>(max.size()), static_cast<int>(head_dim));
    return result;
  }

  size_t head_dim;
  std::vector<float> q;
  Stored keys, values;
  std::vector<float> max, sum, out;
  KeyValueRows cached;
};

void attend_one_piece(Piece& piece, float scale, Stream& stream) {
  const DecodeSplit decode = piece.decode();
  attend_rows({&decode, 1}, static_cast<int>(piece.max.size()), static_cast<int>(piece.head_dim),
              scale, stream);
}

TEST(AttendRows, EqualsTheReference) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (size_t head_dim : {1, 2, 15, 16, 17, 32, 33, 48, 64, 72, 80, 96, 128, 256}) {
      for (size_t queries : {1, 2, 3, 4, 5, 6, 7, 8, 9, 14}) {
        for (size_t rows : {0, 1, 17, 63, 64, 65, 300}) {
          if (head_dim < 32 && rows == 300) continue;
          Piece piece(rows, queries, head_dim, dtype, 7);
          const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
          attend_one_piece(piece, scale, stream);
          EXPECT_LE(normalised_error(piece.merged(), piece.expected(scale)), kTolerance)
              << dtype_name(dtype) << " head_dim " << head_dim << " queries " << queries << " rows "
              << rows;
        }
      }
    }
  }
}

TEST(AttendRows, EqualsTheReferenceOverALongRun) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (size_t queries : {1, 7}) {
    Piece piece(4097, queries, 128, DType::kF16, 3);
    attend_one_piece(piece, 0.088f, stream);
    EXPECT_LE(normalised_error(piece.merged(), piece.expected(0.088f)), kTolerance);
  }
}

TEST(AttendRows, StatesMaximumAndSum) {
  ThreadPool pool(1);
  Stream stream(pool);
  Piece piece(100, 2, 64, DType::kF32, 5);
  attend_one_piece(piece, 0.125f, stream);
  for (size_t i = 0; i < 2; ++i) {
    double max = -1e30;
    double sum = 0;
    std::vector<double> scores;
    for (size_t j = 0; j < 100; ++j) {
      double dot = 0;
      for (size_t c = 0; c < 64; ++c) {
        dot += static_cast<double>(piece.q[i * 64 + c]) *
               static_cast<double>(piece.keys.floats[j * 64 + c]);
      }
      scores.push_back(dot / 8);
      max = std::max(max, dot / 8);
    }
    for (double s : scores) sum += std::exp(s - max);
    EXPECT_NEAR(piece.max[i], max, 1e-5);
    EXPECT_NEAR(piece.sum[i], sum, 1e-4);
  }
}

TEST(AttendRows, NoRowsGiveTheEmptyState) {
  ThreadPool pool(1);
  Stream stream(pool);
  Piece piece(0, 2, 64, DType::kF16, 5);
  piece.cached.keys = nullptr;
  piece.cached.values = nullptr;
  attend_one_piece(piece, 1, stream);
  EXPECT_THAT(piece.max, testing::Each(-kInfinity));
  EXPECT_THAT(piece.sum, testing::Each(0.0f));
  EXPECT_THAT(piece.out, testing::Each(0.0f));
}

TEST(AttendRows, KeepsHugeScoresApart) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (float factor : {12.0f, -12.0f}) {
    Piece piece(300, 4, 64, DType::kF32, 9);
    for (float& x : piece.q) x = std::round(x * factor);
    for (float& x : piece.keys.floats) x = std::round(x * 12);
    piece.keys = store(piece.keys.floats, DType::kF32);
    piece.cached.keys = piece.keys.bytes.data();
    attend_one_piece(piece, 1, stream);
    EXPECT_LE(normalised_error(piece.merged(), piece.expected(1)), kTolerance);
  }
}

TEST(AttendRows, HasNoSubnormalWeights) {
  ThreadPool pool(1);
  Stream stream(pool);
  Piece piece(70, 2, 48, DType::kF32, 9);
  std::fill(piece.q.begin(), piece.q.end(), 1.0f);
  std::vector<float> keys(size_t{70} * 48, 0.0f);
  std::fill(keys.begin(), keys.begin() + 48, 90.0f / 48);
  std::vector<float> values(size_t{70} * 48, 1e38f);
  std::fill(values.begin(), values.begin() + 48, 0.0f);
  piece.keys = store(keys, DType::kF32);
  piece.values = store(values, DType::kF32);
  piece.cached.keys = piece.keys.bytes.data();
  piece.cached.values = piece.values.bytes.data();
  attend_one_piece(piece, 1, stream);
  EXPECT_THAT(piece.merged(), testing::Each(0.0f));
}

TEST(AttendRows, AveragesValuesWhenAllScoresAreEqual) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (float scale : {1.0f, 0.0f, -2.0f}) {
    Piece piece(70, 2, 48, DType::kBF16, 9);
    piece.keys = store(std::vector<float>(size_t{70} * 48, 1.0f), DType::kBF16);
    piece.cached.keys = piece.keys.bytes.data();
    attend_one_piece(piece, scale, stream);
    EXPECT_LE(normalised_error(piece.merged(), piece.expected(scale)), kTolerance);
  }
}

TEST(AttendRows, PiecesMergeToTheWhole) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (size_t head_dim : {33, 128}) {
    constexpr size_t kQueries = 4;
    Piece whole(1000, kQueries, head_dim, DType::kF16, 21);
    attend_one_piece(whole, 0.1f, stream);
    const std::vector<float> one = whole.merged();
    const std::vector<double> expected(one.begin(), one.end());

    std::vector<Piece> parts;
    std::vector<DecodeSplit> pieces;
    std::vector<SoftmaxState> states;
    const std::vector<size_t> cuts = {0, 1, 64, 64, 700, 1000};
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      parts.emplace_back(0, kQueries, head_dim, DType::kF16, 21);
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t offset = cuts[i] * head_dim * 2;
      pieces.push_back(parts[i].decode());
      pieces[i].cached = {whole.cached.keys + offset, whole.cached.values + offset, DType::kF16,
                          static_cast<int64_t>(cuts[i + 1] - cuts[i])};
      states.push_back(parts[i].state());
    }
    attend_rows(pieces, kQueries, static_cast<int>(head_dim), 0.1f, stream);
    std::vector<float> merged(kQueries * head_dim);
    merge_one(merged.data(), states, kQueries, static_cast<int>(head_dim));
    EXPECT_LE(normalised_error(merged, expected), 1e-6);
    // In place of the first part.
    merge_one(states[0].out, states, kQueries, static_cast<int>(head_dim));
    EXPECT_EQ(parts[0].out, merged);
  }
}

TEST(AttendRows, IsBitIdenticalForAnyBatchAndNumberOfThreads) {
  constexpr size_t kPieces = 9;
  const auto run = [&](int threads, bool alone) {
    ThreadPool pool(threads);
    Stream stream(pool);
    std::vector<Piece> pieces;
    for (unsigned i = 0; i < kPieces; ++i) pieces.emplace_back(i * 37, 7, 72, DType::kF16, i);
    std::vector<DecodeSplit> decode;
    for (Piece& piece : pieces) decode.push_back(piece.decode());
    if (alone) {
      for (const DecodeSplit& piece : decode) attend_rows({&piece, 1}, 7, 72, 0.1f, stream);
    } else {
      attend_rows(decode, 7, 72, 0.1f, stream);
    }
    std::vector<float> all;
    for (const Piece& piece : pieces) {
      all.insert(all.end(), piece.max.begin(), piece.max.end());
      all.insert(all.end(), piece.sum.begin(), piece.sum.end());
      all.insert(all.end(), piece.out.begin(), piece.out.end());
    }
    return all;
  };
  const std::vector<float> expected = run(1, false);
  EXPECT_EQ(run(1, true), expected);
  EXPECT_EQ(run(2, false), expected);
  EXPECT_EQ(run(3, false), expected);
}

TEST(AttendRows, AllocatesNothing) {
  ThreadPool pool(2);
  Stream stream(pool);
  std::vector<Piece> pieces;
  for (unsigned i = 0; i < 8; ++i) pieces.emplace_back(200, 4, 128, DType::kF16, i);
  std::vector<DecodeSplit> decode;
  for (Piece& piece : pieces) decode.push_back(piece.decode());
  attend_rows(decode, 4, 128, 0.1f, stream);
  const size_t before = allocations();
  for (int i = 0; i < 10; ++i) attend_rows(decode, 4, 128, 0.1f, stream);
  EXPECT_EQ(allocations(), before);
}

TEST(AttendRows, RefusesWhatItCannotRead) {
  ThreadPool pool(1);
  Stream stream(pool);
  Piece good(3, 1, 8, DType::kF32, 1);
  const auto code = [&](DecodeSplit piece, int queries, int head_dim) {
    try {
      attend_rows({&piece, 1}, queries, head_dim, 1, stream);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(code(good.decode(), 1, 8), "no error");
  EXPECT_THAT(code(good.decode(), 0, 8), testing::HasSubstr("q_per_kv 0"));
  DecodeSplit bad = good.decode();
  bad.cached.dtype = DType::kI32;
  EXPECT_THAT(code(bad, 1, 8), testing::HasSubstr("i32"));
  bad = good.decode();
  bad.cached.values = nullptr;
  EXPECT_THAT(code(bad, 1, 8), testing::HasSubstr("3 cached tokens"));
  bad = good.decode();
  bad.q = nullptr;
  EXPECT_THAT(code(bad, 1, 8), testing::HasSubstr("has no query"));
}

// ------------------------------------------------------------------------------------------ merge

TEST(MergeStates, IgnoresEmptyStates) {
  std::vector<float> max = {-kInfinity, 3.0f, -kInfinity};
  std::vector<float> sum = {0.0f, 2.0f, 0.0f};
  std::vector<float> out = {0, 0, 4, 6, 0, 0};
  const std::vector<SoftmaxState> parts = {
      {&max[0], &sum[0], &out[0]}, {&max[1], &sum[1], &out[2]}, {&max[2], &sum[2], &out[4]}};
  std::vector<float> merged(2, std::nanf(""));
  merge_one(merged.data(), parts, 1, 2);
  EXPECT_THAT(merged, testing::ElementsAre(2.0f, 3.0f));
  // No part at all.
  merged.assign(2, std::nanf(""));
  merge_one(merged.data(), {}, 1, 2);
  EXPECT_THAT(merged, testing::ElementsAre(0.0f, 0.0f));
  // Nothing seen at all.
  merge_one(merged.data(), std::span(parts).first(1), 1, 2);
  EXPECT_THAT(merged, testing::ElementsAre(0.0f, 0.0f));
}

TEST(MergeStates, KeepsDistantMaximaApart) {
  std::vector<float> max = {-1e4f, 1e4f};
  std::vector<float> sum = {5.0f, 2.0f};
  std::vector<float> out = {1, 1, 4, 6};
  const std::vector<SoftmaxState> parts = {{&max[0], &sum[0], &out[0]},
                                           {&max[1], &sum[1], &out[2]}};
  std::vector<float> merged(2);
  merge_one(merged.data(), parts, 1, 2);
  EXPECT_THAT(merged, testing::ElementsAre(2.0f, 3.0f));
}

/// Windows and pictures of every size, alone and in company, on one thread and on several.
TEST(SegmentAttention, MakesOfASegmentWhatAttentionMakesOfItAlone) {
  constexpr int64_t kHeads = 3;
  for (const int64_t head_dim : {5, 16, 80}) {
    for (const std::vector<int32_t>& bounds : {std::vector<int32_t>{0, 1},
                                               {0, 150},
                                               {0, 1, 2, 3},
                                               {0, 64, 96, 160, 176},
                                               {0, 7, 208, 209, 300}}) {
      const int64_t n = bounds.back();
      const Shape shape{n, kHeads, head_dim};
      const auto count = static_cast<size_t>(shape.elements());
      std::vector<float> q = normal_values(count, 1);
      std::vector<float> k = normal_values(count, 2);
      std::vector<float> v = normal_values(count, 3);
      const auto view = [&](std::vector<float>& x) {
        return TensorView(x.data(), DType::kF32, shape);
      };
      std::vector<float> expected(count);
      ThreadPool one(1);
      Stream alone(one);
      for (size_t i = 0; i + 1 < bounds.size(); ++i) {
        const int64_t rows = bounds[i + 1] - bounds[i];
        const auto slice = [&](std::vector<float>& x) { return view(x).slice(bounds[i], rows); };
        attention(slice(expected), slice(q), slice(k), slice(v), {}, false, 0.3f, DType::kF32,
                  alone);
      }
      for (const int threads : {1, 3}) {
        ThreadPool pool(threads);
        Stream stream(pool);
        std::vector<float> out(count);
        segment_attention(view(out), view(q), view(k), view(v), Segments(bounds, stream), 0.3f,
                          DType::kF32, stream);
        EXPECT_EQ(out, expected) << "head_dim " << head_dim << ", " << n << " rows";
        std::vector<float> in_place = q;
        segment_attention(view(in_place), view(in_place), view(k), view(v),
                          Segments(bounds, stream), 0.3f, DType::kF32, stream);
        EXPECT_EQ(in_place, expected) << "in place";
      }
    }
  }
}

TEST(SegmentAttention, RefusesBoundsThatDoNotCutTheRows) {
  ThreadPool pool(1);
  Stream stream(pool);
  std::vector<float> data(64);
  std::vector<float> result(64);
  const Shape shape{4, 2, 8};
  const ConstTensorView view(data.data(), DType::kF32, shape);
  const auto refusal = [&](const std::vector<int32_t>& bounds) {
    try {
      segment_attention(TensorView(result.data(), DType::kF32, shape), view, view, view,
                        Segments(bounds, stream), 1, DType::kF32, stream);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(refusal({0, 1, 4}), "no error");
  EXPECT_THAT(refusal({}), testing::HasSubstr("0 bounds"));
  EXPECT_THAT(refusal({0}), testing::HasSubstr("1 bounds from 0 on; expected at least two"));
  EXPECT_THAT(refusal({1, 4}), testing::HasSubstr("2 bounds from 1 on"));
  EXPECT_THAT(refusal({0, 3}), testing::HasSubstr("have 3 rows, expected the 4 of q"));
  EXPECT_THAT(refusal({0, 5}), testing::HasSubstr("have 5 rows"));
  EXPECT_THAT(refusal({0, 2, 2, 4}), testing::HasSubstr("bound 2 is 2, after 2"));
  EXPECT_THAT(refusal({0, 3, 1, 4}), testing::HasSubstr("bound 2 is 1, after 3"));
}

// ------------------------------------------------------------------------------- instruction sets

class AttentionOnEveryTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(AttentionOnEveryTarget, PrefillEqualsTheReference) {
  for (size_t head_dim : {3, 33, 64, 72, 128}) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      expect_parity({.n = 99,
                     .q_per_kv = 3,
                     .head_dim = head_dim,
                     .causal = true,
                     .past_dtype = dtype,
                     .past_rows = {1, 70}});
    }
  }
}

TEST_P(AttentionOnEveryTarget, DecodeEqualsTheReference) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (size_t head_dim : {3, 33, 64, 72, 128}) {
      for (size_t queries : {1, 2, 3, 4, 7}) {
        Piece piece(77, queries, head_dim, dtype, 7);
        attend_one_piece(piece, 0.1f, stream);
        EXPECT_LE(normalised_error(piece.merged(), piece.expected(0.1f)), kTolerance)
            << dtype_name(dtype) << " head_dim " << head_dim << " queries " << queries;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionOnEveryTarget,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return hwy::TargetName(test.param); });

}  // namespace
}  // namespace kvlm
