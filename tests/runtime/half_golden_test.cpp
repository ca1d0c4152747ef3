// Checkpoints of any family in f16 and bf16 against transformers (tests/golden/README.md), with the
// bounds of half precision given here. KVLM_TEST_GOLDEN_DIR may name other folders, those of
// tests/tools/full_size_test.py for one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "tests/runtime/gates.h"
#include "tests/runtime/golden_run.h"

namespace kvlm {
namespace {

using test::GoldenCase;
using test::GoldenRun;
using test::kLogitGate;
using test::LoadedModel;
using test::Taps;
using test::within;

/// Steps compared with a reference: mean KL(reference || ours), how often the first maxima agree,
/// and by how much the reference preferred its own where they do not.
struct Agreement {
  double mean_kl = 0;
  double top1 = 0;
  double worst_gap = 0;
};

size_t first_maximum(std::span<const float> values) {
  return static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

Agreement agreement(const std::vector<std::vector<float>>& ours,
                    const std::vector<std::vector<float>>& reference) {
  const auto log_sum = [](std::span<const float> logits) {
    const auto max = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x) - max);
    return max + std::log(sum);
  };
  Agreement result;
  const auto steps = static_cast<double>(reference.size());
  for (size_t step = 0; step < reference.size(); ++step) {
    const std::vector<float>& row = reference[step];
    const double reference_sum = log_sum(row);
    const double our_sum = log_sum(ours[step]);
    for (size_t i = 0; i < row.size(); ++i) {
      const double p = static_cast<double>(row[i]) - reference_sum;
      const double q = static_cast<double>(ours[step][i]) - our_sum;
      result.mean_kl += std::exp(p) * (p - q) / steps;
    }
    const size_t theirs = first_maximum(row);
    const size_t chosen = first_maximum(ours[step]);
    if (theirs == chosen) {
      result.top1 += 1 / steps;
    } else {
      result.worst_gap = std::max(result.worst_gap, static_cast<double>(row[theirs] - row[chosen]));
    }
  }
  return result;
}

/// A tap in the order in which a forward pass produces them. Not every family has every one, nor
/// every folder.
struct TapName {
  std::string_view reference;
  std::string_view ours;
  bool always = false;      // recorded for every case
  bool of_visuals = false;  // recorded for every case with pictures or clips
};

constexpr TapName kTaps[] = {
    {"vision.patch_embed", "vision.patch_embed", false, true},
    {"vision.embeddings", "vision.embeddings"},
    {"vision.pre_norm", "vision.pre_norm"},
    {"vision.layer.0", "vision.layer.0", false, true},
    {"vision.layer.1", "vision.layer.1", false, true},
    {"vision.selected", "vision.selected", false, true},
    {"projector_in", "vision.selected"},  // of LLaVA-1.5, the only one that records it
    {"projector_out", "projector_out", false, true},
    {"deepstack.0", "deepstack.0"},
    {"deepstack.1", "deepstack.1"},
    {"deepstack.2", "deepstack.2"},
    {"inputs_embeds", "inputs_embeds", true},
    {"llm.layer.0", "llm.layer.0", true},
    {"llm.layer.1", "llm.layer.1", true},
    {"llm.norm", "llm.norm", true},
    {"logits_prefill", "logits_prefill"},
};

class HalfGolden : public testing::TestWithParam<std::string> {
 protected:
  std::vector<GoldenCase> cases() const {
    return test::golden_cases_of(test::golden_root() / GetParam());
  }
  std::shared_ptr<const LoadedModel> load(const LoadOptions& options = {}) const {
    return std::make_shared<const LoadedModel>(test::golden_root() / GetParam(), options);
  }
};

/// One case, with what half-precision folders add to it.
struct HalfRun : GoldenRun {
  using GoldenRun::GoldenRun;

  /// The reference's logits of every step, in its f32 arithmetic or in the half type.
  std::vector<std::vector<float>> reference(const std::string& name, size_t steps) const {
    const std::vector<float> all = tensors_.floats(golden_.tensor(name));
    const auto vocab = static_cast<size_t>(loaded_->decoder().vocab_size());
    EXPECT_EQ(all.size(), steps * vocab) << name;
    std::vector<std::vector<float>> rows;
    for (size_t step = 0; step < all.size() / vocab; ++step) {
      const auto row = std::span(all).subspan(step * vocab, vocab);
      rows.emplace_back(row.begin(), row.end());
    }
    return rows;
  }
  /// The tensor of a tap in the reference's half arithmetic, of a picture or of a clip; or nothing.
  std::string recorded(std::string_view tap) const {
    for (const char* prefix : {"half.", "half.video."}) {
      std::string name = golden_.tensor(fmt::format("{}{}", prefix, tap));
      if (names_.contains(name)) return name;
    }
    return {};
  }
  /// The smallest cosine of a row with the reference's.
  double least_cosine(std::span<const float> ours, const std::string& name) const {
    const std::vector<float> reference = tensors_.floats(name);
    const auto width = static_cast<size_t>(tensors_.shape(name).back());
    if (ours.size() != reference.size()) return -1;
    double least = 1;
    for (size_t row = 0; row < ours.size(); row += width) {
      double dot = 0;
      double a = 0;
      double b = 0;
      for (size_t i = row; i < row + width; ++i) {
        const auto x = static_cast<double>(ours[i]);
        const auto y = static_cast<double>(reference[i]);
        dot += x * y;
        a += x * x;
        b += y * y;
      }
      const double cosine = dot / std::sqrt(a * b);
      least = cosine >= least ? least : cosine;  // so that NaN is kept
    }
    return least;
  }
  bool has_visuals() const { return !images_.empty() || !videos_.empty(); }
};

/// Weights in f16 and bf16: the CPU computes in f32, so there the tight gate is the reference's f32
/// arithmetic on the rounded weights; the reference's own half arithmetic is met within the bounds
/// below, over all steps of all cases, since one of 32 is already 3 %.
TEST_P(HalfGolden, ForcedLogitsMeetTheirGates) {
  const auto model = load();
  for (const char* kv : {"f32", "f16"}) {
    std::vector<std::vector<float>> ours;
    std::map<std::string, std::vector<std::vector<float>>> references;
    for (const GoldenCase& golden : cases()) {
      HalfRun run(golden, model);
      Taps taps;
      const auto logits = run.forced_logits(run.greedy_ids(), taps, kv);
      ours.insert(ours.end(), logits.begin(), logits.end());
      for (const std::string name : {"forced_logits", "half.forced_logits"}) {
        const auto rows = run.reference(name, logits.size());
        ASSERT_EQ(rows.size(), logits.size());
        references[name].insert(references[name].end(), rows.begin(), rows.end());
        if (name != "forced_logits" || kv != std::string_view("f32")) continue;
        if (test::rounds_activations(golden.folder)) continue;
        for (size_t step = 0; step < rows.size(); ++step) {
          EXPECT_TRUE(within(fmt::format("{}[{}]", golden.tensor(name), step), logits[step],
                             rows[step], kLogitGate));
        }
      }
    }
    ASSERT_GE(ours.size(), 64u);
    for (const auto& [name, reference] : references) {
      const Agreement measured = agreement(ours, reference);
      fmt::print("{} --kv {}: mean KL {:.2g}, top-1 {:.1f} %, largest gap {:.2g}\n", name, kv,
                 measured.mean_kl, 100 * measured.top1, measured.worst_gap);
      EXPECT_LE(measured.mean_kl, 1e-2) << name << ", --kv " << kv;
      EXPECT_GE(measured.top1, 0.98) << name << ", --kv " << kv;
      EXPECT_LT(measured.worst_gap, 0.1) << name << ", --kv " << kv;
    }
  }
}

/// The reference's half arithmetic at every tap that is recorded: cosine per row.
TEST_P(HalfGolden, TapsPointTheSameWay) {
  const auto model = load();
  for (const GoldenCase& golden : cases()) {
    HalfRun run(golden, model);
    Taps taps;
    const int32_t nothing = 0;
    run.forced_logits(std::span(&nothing, 1), taps);
    for (const TapName& tap : kTaps) {
      const std::string name = run.recorded(tap.reference);
      if (name.empty()) {
        EXPECT_FALSE(tap.always || (tap.of_visuals && run.has_visuals())) << tap.reference;
        continue;
      }
      const double least = tap.ours.starts_with("vision.") ? 0.999 : 0.998;
      ASSERT_GE(run.least_cosine(taps[std::string(tap.ours)], name), least)
          << "first tap that differs: " << name;
    }
  }
}

/// The widened weights in f32, where the tight gate holds on either device: for every step, and for
/// every row of the prompt where the goldens have them.
TEST_P(HalfGolden, WeightsWidenedToF32GiveTheReferencesLogits) {
  LoadOptions options;
  options.dtype = DType::kF32;
  const auto model = load(options);
  EXPECT_EQ((*model)->dtype(), DType::kF32);
  for (const GoldenCase& golden : cases()) {
    HalfRun run(golden, model);
    Taps taps;
    const auto logits = run.forced_logits(run.greedy_ids(), taps);
    const auto rows = run.reference("forced_logits", logits.size());
    ASSERT_EQ(rows.size(), logits.size());
    for (size_t step = 0; step < rows.size(); ++step) {
      EXPECT_TRUE(within(fmt::format("{} {} step {}", GetParam(), golden.name(), step),
                         logits[step], rows[step], kLogitGate));
    }
    if (run.has("logits_prefill")) {
      EXPECT_TRUE(within(fmt::format("{} {}", GetParam(), golden.name()), taps["logits_prefill"],
                         run.floats("logits_prefill"), kLogitGate));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, HalfGolden, testing::ValuesIn(test::half_folders()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace kvlm
