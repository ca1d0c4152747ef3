#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "kvcache/chance.h"
#include "kvcache/quantizers/common.h"

// VidKV: bits of each key channel, the spectrum of narrow channels, ternary values, protected
// visual tokens. Departures from the paper are listed at the class.
namespace kvlm::quantizers {

namespace {

constexpr size_t kMaxHeadDim = 1024;
/// Numbers so many times larger than their channel's mean are outliers (M of section 4.2).
constexpr double kOutlier = 3;

/// The real Fourier transform of n numbers as n x n matrices, in Hermitian packing [Re_0, Re_1 ..
/// Re_floor(n/2), Im_1 .. Im_ceil(n/2)-1] (docs/formulas.md, "Spectrum"). There are three: for
/// keys, for queries such that dot products are kept, and the inverse. n is at most head_dim, so a
/// table product is fast, exact for any n, and the same on every device.
void add_hermitian(size_t n, KeyBasis& basis) {
  for (std::vector<float>& matrix : basis.matrix) matrix.resize(n * n);
  auto& [key, query, back] = basis.matrix;
  const size_t real = n / 2 + 1;
  for (size_t row = 0; row < n; ++row) {
    const bool imaginary = row >= real;
    const size_t k = imaginary ? row - real + 1 : row;
    // Frequencies that also represent their mirror image count twice.
    const double count = k == 0 || 2 * k == n ? 1 : 2;
    for (size_t j = 0; j < n; ++j) {
      const double angle =
          2 * std::numbers::pi * static_cast<double>(j * k % n) / static_cast<double>(n);
      const double wave = imaginary ? -std::sin(angle) : std::cos(angle);
      key[row * n + j] = static_cast<float>(wave);
      query[row * n + j] = static_cast<float>(count * wave / static_cast<double>(n));
      back[j * n + row] = static_cast<float>(count * wave / static_cast<double>(n));
    }
  }
}

/// floor(head_dim * (bits - 1)), exact for bits with up to four decimals.
int anomalous_channels(double bits, int head_dim) {
  const auto scaled = std::llround((bits - 1) * 10000);
  const auto channels = static_cast<int>(scaled * head_dim / 10000);
  return scaled > 0 && channels == 0 ? std::min(32, head_dim) : channels;
}

/// Keys: the widest channels at 2 bits, the signs of the spectrum of the others at 1 bit. Values:
/// ternary per channel, those of protected visual tokens at 2 bits. Source: VidKV sections 4.2-4.3,
/// eqs. 4-7, algs. 1-3 (docs/formulas.md, "VidKV"). Departures: spectra in Hermitian packing, so
/// that a 1-bit channel takes 1 bit (the published code stores 4). Signs mean +S and -S
/// (onebit=sym; the paper's S and 0 halve every amplitude). Ternary values are scaled (scale=mean;
/// the code forgets to). A flush packs new tokens only (flush=append; repacking destroys signs).
/// Outliers are counted by magnitude: the paper prints K_i > M mean(K), which holds for half of the
/// numbers in a channel around 0. Ablations of the paper: criterion= (table 1), value_axis=token
/// (table 1), protect_by=random (table 3), value_bits=1 (table 6), fft=alg3 (algorithm 3).
class VidKv final : public PlannedQuantizer {
 public:
  VidKv(const OptionValues& options, const PolicyContext& context)
      : dim_(context.shape->head_dim),
        anomalous_(anomalous_channels(options.real("key_bits"), dim_)),
        fft_(has_spectrum(options)),
        criterion_(options.text("criterion") == "variance"   ? Criterion::kVariance
                   : options.text("criterion") == "outliers" ? Criterion::kOutliers
                                                             : Criterion::kRange),
        mask_per_head_(options.text("mask_scope") == "head"),
        repack_keys_(options.text("flush") != "append"),
        repack_values_(options.text("flush") == "requant_all"),
        protect_(options.real("protect")),
        official_protection_(options.text("stp") == "official"),
        protects_by_chance_(options.text("protect_by") == "random"),
        seed_(static_cast<uint64_t>(options.integer("seed"))),
        basis_{.dim = dim_,
               .first = anomalous_,
               .matrix = {},
               .cufft = options.text("fft") == "cufft"} {
    if (fft_ && anomalous_ < dim_) add_hermitian(static_cast<size_t>(dim_ - anomalous_), basis_);
    check_residual(options);
    refuse_idle_options(options);
    const double fine = options.real("key_bits") * 10000;
    if (std::abs(fine - std::round(fine)) > 1e-6) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--kv vidkv,key_bits={} has more than four decimals; use key_bits={}",
                              options.text("key_bits"), std::round(fine) / 10000));
    }
    const int group = options.integer("group");
    const int residual = options.integer("residual");
    const int tail_keep = tail_keep_of(options, context);
    const FlushRule flush{
        .prompt_unit = group, .hold = tail_keep, .trigger = residual + tail_keep, .rows = residual};
    keys_ = {key_packing(options, group)};
    values_ = {value_packing(options, group)};
    keys_[0].flush = values_[0].flush = flush;
    keys_[0].nominal_bits = options.real("key_bits");
    if (values_[0].format.section[0].code != CodeFormat::kBits2 && protect_ > 0) {
      protected_ = {packing_of(ScaleAxis::kChannel, 2, group, dim_, meta_of(options))};
      values_[0].nominal_bits += (2 - values_[0].nominal_bits) * protect_;
    }
  }

  const Packing* protected_values() const noexcept override {
    return protected_.empty() ? nullptr : protected_.data();
  }
  std::vector<float> protection_scores(ConstTensorView embeddings,
                                       std::span<const int16_t> modality) const override;
  std::vector<int32_t> protect(std::span<const float> scores,
                               std::span<const int16_t> modality) const override;

  void learn(std::span<const float> low, std::span<const float> high,
             std::span<HeadFacts> facts) const override;
  bool learns_from_rows() const noexcept override { return criterion_ != Criterion::kRange; }
  void learn_rows(std::span<const float* const> keys, int rows,
                  std::span<HeadFacts> facts) const override;
  size_t facts_bytes(int kv_heads) const noexcept override {
    return static_cast<size_t>(dim_ + 7) / 8 * static_cast<size_t>(mask_per_head_ ? kv_heads : 1);
  }
  const KeyBasis* key_basis() const noexcept override { return &basis_; }
  bool repacks(KvSide side) const noexcept override {
    return side == KvSide::kKeys ? repack_keys_ : repack_values_;
  }

 private:
  /// Measures of how hard a channel is to quantize (section 4.2).
  enum class Criterion : uint8_t { kRange, kVariance, kOutliers };
  using ChannelNumbers = std::array<double, kMaxHeadDim>;

  static bool has_spectrum(const OptionValues& options);
  void refuse_idle_options(const OptionValues& options) const;
  void order_channels(const ChannelNumbers& hardness, HeadFacts& head) const;
  ChannelNumbers hardness(std::span<const float* const> keys, int rows) const;
  Packing key_packing(const OptionValues& options, int group) const;
  Packing value_packing(const OptionValues& options, int group) const;

  int dim_;
  int anomalous_;  // channels with 2 bits
  bool fft_;
  Criterion criterion_;
  bool mask_per_head_;
  bool repack_keys_;
  bool repack_values_;
  double protect_;
  bool official_protection_;
  bool protects_by_chance_;
  uint64_t seed_;
  KeyBasis basis_;
  std::vector<Packing> protected_;  // (1,) or none
};

/// Whether narrow channels are coded as a spectrum. Algorithm 3 does so if half or three quarters
/// of the channels have 2 bits.
bool VidKv::has_spectrum(const OptionValues& options) {
  if (options.text("fft") != "alg3") return options.text("fft") != "off";
  const double wide = options.real("key_bits") - 1;
  return wide == 0.5 || wide == 0.75;
}

void VidKv::refuse_idle_options(const OptionValues& options) const {
  const std::string_view value_bits = options.text("value_bits");
  refuse_idle(options, "protect", protect_ > 0 && value_bits == "2",
              "protected values have 2 bits, and value_bits=2 gives them to all");
  for (const char* key : {"gamma", "scale", "trits"}) {
    refuse_idle(options, key, value_bits != "1.58",
                "it applies to ternary values only (value_bits=1.58)");
  }
  for (const char* key : {"protect_by", "stp"}) {
    refuse_idle(options, key, protect_ == 0, "no token is protected without protect=");
  }
  refuse_idle(options, "seed", protect_ == 0 || !protects_by_chance_,
              "only protect_by=random draws tokens");
  refuse_idle(options, "criterion", anomalous_ == 0 || anomalous_ == dim_,
              "all channels have the same bit width");
  for (const char* key : {"onebit", "fft"}) {
    refuse_idle(options, key, anomalous_ == dim_, "no key channel has 1 bit");
  }
}

Packing VidKv::key_packing(const OptionValues& options, int group) const {
  Packing packing;
  packing.format.axis = ScaleAxis::kChannel;
  packing.format.block_rows = group;
  packing.format.meta = meta_of(options);
  packing.format.sections = 0;
  const auto add = [&](const PackedSection& section, const PackRule& rule) {
    const auto at = static_cast<size_t>(packing.format.sections++);
    packing.format.section[at] = section;
    packing.rules[at] = rule;
  };
  if (anomalous_ > 0) add({.code = CodeFormat::kBits2, .channels = anomalous_}, {});
  const int normal = dim_ - anomalous_;
  if (normal == 0) return packing;
  PackedSection section{.code = CodeFormat::kBits1, .channels = normal};
  PackRule rule;
  const std::string_view onebit = options.text("onebit");
  if (onebit != "minmax") {
    rule.rule = CodeRule::kSign;
    section.zero_stored = false;
    if (onebit == "sym") {
      section.slope = 2;
      section.offset = -1;
    } else {
      // zero_mean: real parts are 0 or S, imaginary parts -S/2 or S/2.
      section.slope = 1;
      section.offset = 0;
      section.split = fft_ ? normal / 2 + 1 : normal;
      section.offset_after = -0.5f;
    }
  }
  add(section, rule);
  return packing;
}

Packing VidKv::value_packing(const OptionValues& options, int group) const {
  const std::string_view bits = options.text("value_bits");
  const ScaleAxis axis =
      options.text("value_axis") == "token" ? ScaleAxis::kToken : ScaleAxis::kChannel;
  Packing packing = packing_of(axis, bits == "1" ? 1 : 2, group, dim_, meta_of(options));
  if (bits != "1.58") return packing;
  packing.format.section[0] = section_of(
      options.text("trits") == "trit2b" ? CodeFormat::kTrit2b : CodeFormat::kTrit5, dim_);
  packing.rules[0].rule = CodeRule::kTernary;
  packing.rules[0].gamma = static_cast<float>(options.real("gamma"));
  const std::string_view scale = options.text("scale");
  packing.rules[0].ternary_scale = scale == "mean"  ? TernaryScale::kMean
                                   : scale == "twn" ? TernaryScale::kNonZero
                                                    : TernaryScale::kUnit;
  packing.nominal_bits = 1.58;
  return packing;
}

/// Puts the hardest channels first, both kinds in ascending order. Does not allocate, because a
/// flush that repacks learns in decode.
void VidKv::order_channels(const ChannelNumbers& hardness, HeadFacts& head) const {
  std::vector<uint16_t>& channels = head.key_channels;
  channels.resize(static_cast<size_t>(dim_));
  std::iota(channels.begin(), channels.end(), uint16_t{0});
  std::sort(channels.begin(), channels.end(), [&](uint16_t a, uint16_t b) {
    return hardness[a] != hardness[b] ? hardness[a] > hardness[b] : a < b;
  });
  std::sort(channels.begin(), channels.begin() + anomalous_);
  std::sort(channels.begin() + anomalous_, channels.end());
}

/// Hard channels are those with the widest range over all tokens, and over all heads unless each
/// has its own mask (docs/formulas.md, "Mixed channels").
void VidKv::learn(std::span<const float> low, std::span<const float> high,
                  std::span<HeadFacts> facts) const {
  const auto dim = static_cast<size_t>(dim_);
  const auto order = [&](size_t first_head, size_t heads, HeadFacts& found) {
    ChannelNumbers range;
    for (size_t d = 0; d < dim; ++d) {
      float least = low[first_head * dim + d];
      float most = high[first_head * dim + d];
      for (size_t head = first_head + 1; head < first_head + heads; ++head) {
        least = std::min(least, low[head * dim + d]);
        most = std::max(most, high[head * dim + d]);
      }
      range[d] = static_cast<double>(most) - static_cast<double>(least);
    }
    order_channels(range, found);
  };
  if (mask_per_head_) {
    for (size_t head = 0; head < facts.size(); ++head) order(head, 1, facts[head]);
    return;
  }
  order(0, facts.size(), facts[0]);
  for (HeadFacts& found : facts.subspan(1)) found.key_channels = facts[0].key_channels;
}

void VidKv::learn_rows(std::span<const float* const> keys, int rows,
                       std::span<HeadFacts> facts) const {
  if (mask_per_head_) {
    for (size_t h = 0; h < keys.size(); ++h) {
      order_channels(hardness(keys.subspan(h, 1), rows), facts[h]);
    }
    return;
  }
  order_channels(hardness(keys, rows), facts[0]);
  for (HeadFacts& head : facts.subspan(1)) head.key_channels = facts[0].key_channels;
}

/// (head_dim,) the variance of each channel, or how many of its numbers exceed kOutlier times their
/// mean magnitude (section 4.2, M = 3).
VidKv::ChannelNumbers VidKv::hardness(std::span<const float* const> keys, int rows) const {
  const auto dim = static_cast<size_t>(dim_);
  const double count = static_cast<double>(rows) * static_cast<double>(keys.size());
  // Sums number(x, channel) by channel.
  const auto sum = [&](const auto& number) {
    ChannelNumbers sums{};
    for (const float* head : keys) {
      for (size_t i = 0; i < static_cast<size_t>(rows) * dim; ++i) {
        sums[i % dim] += number(static_cast<double>(head[i]), i % dim);
      }
    }
    return sums;
  };
  if (criterion_ == Criterion::kVariance) {
    const ChannelNumbers sums = sum([](double x, size_t) { return x; });
    return sum([&](double x, size_t d) {
      const double off = x - sums[d] / count;
      return off * off;
    });
  }
  const ChannelNumbers sums = sum([](double x, size_t) { return std::abs(x); });
  return sum([&](double x, size_t d) { return std::abs(x) > kOutlier * sums[d] / count ? 1 : 0; });
}

/// Mean dot product of each visual token with the text tokens after the last image
/// (docs/formulas.md, "Protected tokens"), or a random number (protect_by=random).
std::vector<float> VidKv::protection_scores(ConstTensorView embeddings,
                                            std::span<const int16_t> modality) const {
  const auto rows = modality.size();
  if (protects_by_chance_) {
    std::vector<float> numbers(rows);
    for (size_t row = 0; row < rows; ++row) {
      numbers[row] = static_cast<float>(unit_number(splitmix64(splitmix64(seed_) ^ row)));
    }
    return numbers;
  }
  const auto hidden = static_cast<size_t>(embeddings.shape()[1]);
  const float* x = embeddings.as<float>();
  std::vector<float> scores(rows);
  size_t after = rows;
  while (after > 0 && modality[after - 1] == kTextRow) --after;
  if (after == rows) return scores;
  std::vector<double> mean(hidden);
  for (size_t row = after; row < rows; ++row) {
    for (size_t i = 0; i < hidden; ++i) {
      mean[i] += static_cast<double>(x[row * hidden + i]) / static_cast<double>(rows - after);
    }
  }
  for (size_t row = 0; row < after; ++row) {
    if (modality[row] == kTextRow) continue;
    double sum = 0;
    for (size_t i = 0; i < hidden; ++i) sum += mean[i] * static_cast<double>(x[row * hidden + i]);
    scores[row] = static_cast<float>(sum);
  }
  return scores;
}

std::vector<int32_t> VidKv::protect(std::span<const float> scores,
                                    std::span<const int16_t> modality) const {
  std::vector<int32_t> visual;
  for (size_t row = 0; row < modality.size(); ++row) {
    if (modality[row] != kTextRow) visual.push_back(static_cast<int32_t>(row));
  }
  const auto count = static_cast<int>(visual.size());
  int chosen = static_cast<int>(std::lround(protect_ * count));
  // The published code rounds down to whole groups of 32, and later loses one of them.
  if (official_protection_) {
    chosen = std::min(count, std::max(32, static_cast<int>(protect_ * count) / 32 * 32));
  }
  std::stable_sort(visual.begin(), visual.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  visual.resize(static_cast<size_t>(chosen));
  std::sort(visual.begin(), visual.end());
  if (official_protection_) visual.resize(static_cast<size_t>(std::max(0, chosen - 32)));
  return visual;
}

constexpr std::array kOptions{
    OptionInfo{.key = "criterion",
               .choices = "range|variance|outliers",
               .standard = "range",
               .help = "measure by which a layer picks its 2-bit key channels. range: widest "
                       "range; variance: largest variance; outliers: most outliers"},
    OptionInfo{.key = "fft",
               .choices = "on|off|alg3|cufft",
               .standard = "on",
               .official = "cufft",
               .paper = "alg3",
               .help = "coding of the 1-bit key channels. on: their spectrum (FFT); off: the "
                       "channels as they are; alg3: the spectrum at key_bits=1.5 and 1.75, else as "
                       "they are; cufft: the spectrum, computed by cuFFT on a GPU"},
    OptionInfo{
        .key = "flush",
        .choices = "append|requant_key|requant_all",
        .standard = "append",
        .official = "requant_all",
        .paper = "requant_key",
        .help = "when the residual window is full. append: its tokens are packed; requant_key: all "
                "keys are packed again; requant_all: all keys and values are packed again"},
    OptionInfo{.key = "gamma",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 10,
               .standard = "0.7",
               .official = "0.5",
               .help = "threshold below which a value becomes the ternary code 0, as a multiple of "
                       "the mean magnitude"},
    kGroup,
    OptionInfo{.key = "key_bits",
               .type = OptionInfo::Type::kReal,
               .low = 1,
               .high = 2,
               .standard = "1.5",
               .help = "average bits per key channel: 1 plus the share of channels at 2 bits"},
    OptionInfo{.key = "mask_scope",
               .choices = "layer|head",
               .standard = "layer",
               .help = "layer: all KV heads of a layer share one choice of 2-bit channels; head: "
                       "each has its own"},
    kMeta,
    OptionInfo{.key = "onebit",
               .choices = "sym|zero_mean|minmax",
               .standard = "sym",
               .official = "zero_mean",
               .paper = "minmax",
               .help = "levels of a 1-bit code. sym: -S and S; zero_mean: 0 and S; minmax: both "
                       "ends of the range"},
    OptionInfo{
        .key = "protect",
        .type = OptionInfo::Type::kReal,
        .low = 0,
        .high = 1,
        .standard = "0",
        .help = "share of visual tokens whose values take 2 bits (semantic token protection)"},
    OptionInfo{.key = "protect_by",
               .choices = "semantic|random",
               .standard = "semantic",
               .help = "which visual tokens are protected. semantic: those most similar to the "
                       "text after the images; random: any"},
    kResidual,
    OptionInfo{.key = "scale",
               .choices = "mean|twn|unit",
               .standard = "mean",
               .official = "unit",
               .paper = "unit",
               .help = "scale of ternary values. mean: the mean magnitude; twn: the mean magnitude "
                       "of non-zero codes; unit: 1"},
    OptionInfo{.key = "seed",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 2147483647,
               .standard = "0",
               .help = "seed of protect_by=random"},
    OptionInfo{.key = "stp",
               .choices = "exact|official",
               .standard = "exact",
               .official = "official",
               .help = "number of protected tokens. exact: the share as written; official: rounded "
                       "as in the published code"},
    kTailKeep,
    OptionInfo{.key = "trits",
               .choices = "trit5|trit2b",
               .standard = "trit5",
               .official = "trit2b",
               .help = "packing of ternary codes. trit5: five in a byte; trit2b: four in a byte"},
    OptionInfo{.key = "value_axis",
               .choices = "channel|token",
               .standard = "channel",
               .help = "values that share a scale. channel: a channel in a group of tokens; token: "
                       "a group of channels in a token. Protected values always use channel"},
    OptionInfo{.key = "value_bits",
               .choices = "1|1.58|2",
               .standard = "1.58",
               .help = "bits of a value; 1.58 is ternary"},
};

}  // namespace

const QuantizerEntry vidkv{
    {.name = "vidkv",
     .kind = PartKind::kQuantizer,
     .source = "VidKV, sections 4.2-4.3, equations 4-7, algorithms 1-3",
     .stores = "keys at 2 bits in the channels of widest range and 1 bit in the spectrum of the "
               "others, ternary values; both per channel in groups of tokens",
     .composes = "any retention rule; share=codes,from=off:0",
     .options = kOptions,
     .example = "vidkv,residual=32",
     .arxiv = "2503.16257"},
    make<VidKv>};

}  // namespace kvlm::quantizers
