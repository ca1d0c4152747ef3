#pragma once

#include <fmt/format.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/sample.h"
#include "tests/kernels/values.h"

// Rows to sample from, for the CPU against a plain reference and for a GPU against the CPU.
namespace kvlm::testing {

enum class Logits : uint8_t { kNormal, kSharp, kTies, kEqual, kMasked, kZeros };

/// Rows of one kind; each row has another choice of options.
struct SampleCase {
  int64_t vocab = 1;
  int64_t rows = 1;
  Logits kind = Logits::kNormal;
  bool greedy = false;
  uint32_t seed = 0;

  std::string str() const {
    return fmt::format("{} rows of {} logits, kind {}, {}", rows, vocab, static_cast<int>(kind),
                       greedy ? "greedy" : "drawn");
  }
};

inline std::vector<SampleCase> sample_cases() {
  std::vector<SampleCase> cases;
  uint32_t seed = 0;
  for (const int64_t vocab : {1, 2, 31, 32, 33, 1000, 92553, 152064}) {
    for (int64_t rows = 1; rows <= 9; ++rows) {
      if (vocab > 1000 && rows % 8 != 1) continue;  // sorting them takes long
      for (const Logits kind : {Logits::kNormal, Logits::kSharp, Logits::kTies, Logits::kEqual,
                                Logits::kMasked, Logits::kZeros}) {
        for (const bool greedy : {true, false}) {
          cases.push_back({vocab, rows, kind, greedy, ++seed});
        }
      }
    }
  }
  return cases;
}

inline std::vector<float> logits_of(const SampleCase& c) {
  const auto count = static_cast<size_t>(c.rows * c.vocab);
  std::vector<float> values = normal_values(count, c.seed, c.kind == Logits::kSharp ? 12.0f : 3.0f);
  for (float& x : values) {
    const bool odd = std::signbit(x);
    switch (c.kind) {
      case Logits::kTies:
        x = std::round(2 * x) / 2;
        break;
      case Logits::kEqual:
        x = -1.5f;
        break;
      case Logits::kMasked:
        if (x < 2) x = -HUGE_VALF;
        break;
      case Logits::kZeros:
        x = std::abs(x) < 3 ? (odd ? -0.0f : 0.0f) : -1;
        break;
      default:
        break;
    }
  }
  // An infinite maximum has no probabilities.
  for (size_t i = 0; i < count; i += static_cast<size_t>(c.vocab)) {
    if (std::isinf(values[i])) values[i] = 1;
  }
  return values;
}

/// What sample_rows() takes, on the host.
struct SampleInput {
  explicit SampleInput(const SampleCase& c)
      : words(static_cast<size_t>(c.vocab + 31) / 32),
        logits(make_tensor(DType::kF32, {c.rows, c.vocab}, logits_of(c))) {
    std::mt19937_64 random(c.seed);
    for (size_t i = 0; i < words * static_cast<size_t>(c.rows); ++i) {
      seen.push_back(static_cast<uint32_t>(random() & random()));
    }
    const auto vocab = static_cast<int>(c.vocab);
    const double temperatures[] = {1, 0.7, 1e-4, 30};
    const int top_ks[] = {0, 1, 2, 50, vocab / 2, vocab, vocab + 5};
    const double top_ps[] = {1, 0.9, 1, 1e-9, 0.999999, 0.5};
    for (size_t i = 0; i < static_cast<size_t>(c.rows); ++i) {
      RowSampling row;
      row.uniform = static_cast<double>(random() >> 11) * 0x1p-53;
      if (!c.greedy) {
        row.temperature = temperatures[random() % std::size(temperatures)];
        row.top_k = top_ks[random() % std::size(top_ks)];
        row.top_p = top_ps[random() % std::size(top_ps)];
        if (random() % 8 == 0) row.uniform = random() % 2 == 0 ? 0 : 1 - 0x1p-20;
      }
      row.repetition_penalty = random() % 2 == 0 ? 1.0f : random() % 2 == 0 ? 1.3f : 0.6f;
      if (random() % 4 != 0) row.seen = seen.data() + i * words;
      rows.push_back(row);
    }
  }

  size_t words;                // of a row's bits
  Tensor logits;               // (rows, vocab)
  std::vector<uint32_t> seen;  // (rows, words)
  std::vector<RowSampling> rows;
};

}  // namespace kvlm::testing
