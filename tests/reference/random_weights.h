#pragma once

#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/weight_map.h"

namespace kvlm::reference {

/// Named random weights, both as the floats that a scalar reference reads and as a WeightMap in the
/// format under test: the floats are rounded to it first.
class RandomWeights {
 public:
  explicit RandomWeights(DType dtype, unsigned seed = 1) : dtype_(dtype), rng_(seed) {}

  /// A matrix with the usual deviation of 1 / sqrt(in).
  void matrix(const std::string& name, const Shape& shape) {
    const int64_t in = shape.elements() / shape[0];
    add(name, shape, 0, 1 / std::sqrt(static_cast<float>(in)));
  }
  void vector(const std::string& name, int64_t size, float mean) { add(name, {size}, mean, 0.2f); }
  void add(const std::string& name, const Shape& shape, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    Entry& entry = entries_[name];
    entry.shape = shape;
    entry.values.resize(static_cast<size_t>(shape.elements()));
    for (float& value : entry.values) value = rounded(normal(rng_));
  }
  void copy(const std::string& from, const std::string& to) { entries_[to] = entries_.at(from); }
  void remove(const std::string& name) { entries_.erase(name); }

  std::span<const float> operator[](const std::string& name) const {
    return entries_.at(name).values;
  }
  /// The values, or none if the name is absent.
  std::span<const float> find(const std::string& name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? std::span<const float>() : found->second.values;
  }

  WeightMap map() const {
    WeightMap map;
    for (const auto& [name, entry] : entries_) {
      auto tensor = std::make_shared<Tensor>(dtype_, entry.shape);
      for (size_t i = 0; i < entry.values.size(); ++i) {
        if (dtype_ == DType::kF16) {
          tensor->as<f16>()[i] = to_f16(entry.values[i]);
        } else if (dtype_ == DType::kBF16) {
          tensor->as<bf16>()[i] = to_bf16(entry.values[i]);
        } else {
          tensor->as<float>()[i] = entry.values[i];
        }
      }
      const ConstTensorView view = *tensor;
      map.add(name, view, std::move(tensor));
    }
    return map;
  }

 private:
  struct Entry {
    Shape shape;
    std::vector<float> values;
  };

  float rounded(float x) const {
    if (dtype_ == DType::kF16) return to_float(to_f16(x));
    if (dtype_ == DType::kBF16) return to_float(to_bf16(x));
    return x;
  }

  DType dtype_;
  std::mt19937 rng_;
  std::map<std::string, Entry> entries_;
};

}  // namespace kvlm::reference
