#pragma once

#include <cmath>
#include <memory>
#include <span>

#include "kvcache/simulation.h"
#include "kvcache/spec/registry.h"

namespace kvlm::test {

/// Rounds keys to multiples of 1/step and turns the sign of values, but for the newest `hold`.
class Rounded final : public Simulation {
 public:
  explicit Rounded(const OptionValues& options)
      : step_(static_cast<float>(options.integer("step"))), hold_(options.integer("hold")) {}

  int hold() const noexcept override { return hold_; }
  void round_trip(KvSide side, int /*layer*/, std::span<float> rows, int /*n*/) const override {
    for (float& x : rows) x = side == KvSide::kKeys ? change_key(x) : -x;
  }
  float change_key(float x) const { return std::round(x * step_) / step_; }

 private:
  float step_;
  int hold_;
};

/// Lets specs say rounded,step=,hold=.
inline void register_rounded() {
  static constexpr OptionInfo kOptions[] = {
      {.key = "hold",
       .type = OptionInfo::Type::kInteger,
       .low = 0,
       .high = 1000,
       .standard = "0",
       .help = "the newest tokens that stay"},
      {.key = "step",
       .type = OptionInfo::Type::kInteger,
       .low = 1,
       .high = 1000,
       .standard = "8",
       .help = "keys become multiples of 1/step"},
  };
  if (find_simulation("rounded") != nullptr) return;
  register_simulation({{.name = "rounded", .options = kOptions},
                       [](const OptionValues& options, const PolicyContext&) {
                         return std::make_unique<Rounded>(options);
                       }});
}

}  // namespace kvlm::test
