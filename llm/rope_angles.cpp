// Inverse frequencies of each type of RoPE, worked out in the order of the reference so that angles
// have its bits; then angles of rows. Early positions are looked up in a table, which sine and
// cosine filled when the decoder was made; later ones and the dynamic type beyond max_positions are
// computed.
#include "llm/rope_angles.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numbers>

namespace kvlm {

namespace {

/// theta^(-2i/d) as the reference computes it: exponent and power in f32.
float plain(double theta, int index, int rotary_dim) {
  const float exponent = static_cast<float>(2 * index) / static_cast<float>(rotary_dim);
  return 1.0f / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
}

float llama3(const RopeConfig& config, float inverse) {
  const double wavelength = 2.0 * std::numbers::pi / static_cast<double>(inverse);
  const double original = config.original_max_positions;
  if (wavelength < original / config.high_freq_factor) return inverse;
  const auto scaled = static_cast<float>(static_cast<double>(inverse) / config.factor);
  if (wavelength > original / config.low_freq_factor) return scaled;
  const double smooth = (original / wavelength - config.low_freq_factor) /
                        (config.high_freq_factor - config.low_freq_factor);
  return static_cast<float>((1 - smooth) * static_cast<double>(inverse) / config.factor +
                            smooth * static_cast<double>(inverse));
}

/// Source: Peng et al. 2023, "YaRN", as transformers 5.23 blends it (modeling_rope_utils.py).
float yarn(const RopeConfig& config, float inverse, int index) {
  const double dim = config.rotary_dim;
  const auto correction = [&](double rotations) {
    return dim * std::log(config.original_max_positions / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(config.theta));
  };
  double low = correction(config.beta_fast);
  double high = correction(config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const double ramp = std::clamp((index - low) / (high - low), 0.0, 1.0);
  const double interpolated = static_cast<double>(inverse) / config.factor;
  return static_cast<float>(interpolated * ramp + static_cast<double>(inverse) * (1 - ramp));
}

float inverse_frequency(const RopeConfig& config, int index, int64_t sequence_length) {
  const float inverse = plain(config.theta, index, config.rotary_dim);
  switch (config.type) {
    case RopeConfig::Type::kDefault:
      return inverse;
    case RopeConfig::Type::kLinear:
      return static_cast<float>(static_cast<double>(inverse) / config.factor);
    case RopeConfig::Type::kDynamic: {
      const auto length =
          static_cast<double>(std::max<int64_t>(sequence_length, config.max_positions));
      const double dim = config.rotary_dim;
      const double stretch = config.factor * length / config.max_positions - (config.factor - 1);
      return plain(config.theta * std::pow(stretch, dim / (dim - 2)), index, config.rotary_dim);
    }
    case RopeConfig::Type::kLlama3:
      return llama3(config, inverse);
    case RopeConfig::Type::kYarn:
      return yarn(config, inverse, index);
  }
  return inverse;
}

/// What a frequency turns by. Source: Wang et al. 2024, "Qwen2-VL", sec. 2.1.
const int32_t Position::*axis_of(const RopeConfig& config, int index) {
  const auto& [time, height, width] = config.sections;
  if (config.axes() == 1) return &Position::time;
  if (config.interleaved) {
    if (index % 3 == 1 && index < 3 * height) return &Position::height;
    if (index % 3 == 2 && index < 3 * width) return &Position::width;
    return &Position::time;
  }
  if (index < time) return &Position::time;
  return index < time + height ? &Position::height : &Position::width;
}

}  // namespace

std::vector<float> rope_frequencies(const RopeConfig& config, int64_t sequence_length) {
  std::vector<float> inverse;
  for (int i = 0; i < config.rotary_dim / 2; ++i) {
    inverse.push_back(inverse_frequency(config, i, sequence_length));
  }
  return inverse;
}

RopeAngles::RopeAngles(const RopeConfig& config)
    : config_(config), base_(rope_frequencies(config, config.max_positions)) {
  assert(config.rotary_dim % 2 == 0);
  if (config.type == RopeConfig::Type::kYarn) {
    magnitude_ = static_cast<float>(config.attention_factor > 0 ? config.attention_factor
                                    : config.factor > 1         ? 0.1 * std::log(config.factor) + 1
                                                                : 1);
  }
  for (int i = 0; i < config.rotary_dim / 2; ++i) {
    axes_.push_back(axis_of(config, i));
  }
  // Computed once for the positions of most prompts, whose sines would take longer than their rows.
  tabled_ = std::clamp(config.max_positions, 0, kTabledPositions);
  const Shape tables{tabled_, static_cast<int64_t>(base_.size())};
  cos_table_ = Tensor(DType::kF32, tables);
  sin_table_ = Tensor(DType::kF32, tables);
  float* to_cos = cos_table_.as<float>();
  float* to_sin = sin_table_.as<float>();
  for (int32_t at = 0; at < tabled_; ++at) {
    for (const float inverse : base_) {
      const Rotation rotated = rotation(at, inverse);
      *to_cos++ = rotated.cos;
      *to_sin++ = rotated.sin;
    }
  }
}

/// On every axis at the same place of the tables.
bool RopeAngles::is_tabled(const Position& position) const noexcept {
  return position == Position::on_every_axis(position.time) && position.time >= 0 &&
         position.time < tabled_;
}

bool RopeAngles::find(std::span<const Position> positions, std::span<int32_t> rows) const noexcept {
  if (config_.type == RopeConfig::Type::kDynamic) return false;  // by the length of a sequence
  for (size_t i = 0; i < positions.size(); ++i) {
    if (!is_tabled(positions[i])) return false;
    rows[i] = positions[i].time;
  }
  return true;
}

RopeAngles::Rotation RopeAngles::rotation(int32_t position, float inverse) const {
  const float angle = static_cast<float>(position) * inverse;
  return {std::cos(angle) * magnitude_, std::sin(angle) * magnitude_};
}

void RopeAngles::fill(std::span<const Position> positions, int64_t sequence_length, TensorView cos,
                      TensorView sin) const {
  const size_t half = base_.size();
  assert(cos.shape() ==
         Shape({static_cast<int64_t>(positions.size()), static_cast<int64_t>(half)}));
  const bool stretched =
      config_.type == RopeConfig::Type::kDynamic && sequence_length > config_.max_positions;
  float* to_cos = cos.as<float>();
  float* to_sin = sin.as<float>();
  if (stretched) {
    for (size_t i = 0; i < half; ++i) {
      const float inverse = inverse_frequency(config_, static_cast<int>(i), sequence_length);
      for (size_t row = 0; row < positions.size(); ++row) {
        const Rotation rotated = rotation(positions[row].*axes_[i], inverse);
        to_cos[row * half + i] = rotated.cos;
        to_sin[row * half + i] = rotated.sin;
      }
    }
    return;
  }
  const float* cos_of = cos_table_.as<float>();
  const float* sin_of = sin_table_.as<float>();
  for (const Position& position : positions) {
    if (is_tabled(position)) {
      const size_t from = static_cast<size_t>(position.time) * half;
      to_cos = std::copy_n(cos_of + from, half, to_cos);
      to_sin = std::copy_n(sin_of + from, half, to_sin);
      continue;
    }
    for (size_t i = 0; i < half; ++i) {
      const int32_t at = position.*axes_[i];
      const size_t from = static_cast<size_t>(at) * half + i;
      const Rotation rotated =
          at >= 0 && at < tabled_ ? Rotation{cos_of[from], sin_of[from]} : rotation(at, base_[i]);
      *to_cos++ = rotated.cos;
      *to_sin++ = rotated.sin;
    }
  }
}

}  // namespace kvlm
