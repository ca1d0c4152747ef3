#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/simulation.h"
#include "kvcache/spec/registry.h"
#include "python/src/rules.h"

// Simulated quantizers in Python: a function gives back what codes would make of the rows of a
// prompt, which are stored unpacked. It is called as retention rules are (rules.cpp).
namespace nb = nanobind;

namespace kvlm::python {

namespace {

constexpr std::array kCommon{
    OptionInfo{.key = "hold",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 1 << 20,
               .standard = "0",
               .help = "the newest kept tokens of a prompt, which stay as they are"},
};

class PythonSimulation final : public Simulation {
 public:
  PythonSimulation(const OptionValues& options, const PolicyContext& context)
      : policy_(options, kCommon),
        hold_(options.integer("hold")),
        head_dim_(static_cast<size_t>(context.shape->head_dim)) {}

  int hold() const noexcept override { return hold_; }

  void round_trip(KvSide side, int layer, std::span<float> rows, int n) const override {
    const std::array shape{rows.size() / (static_cast<size_t>(n) * head_dim_),
                           static_cast<size_t>(n), head_dim_};
    call_python([&] {
      nb::dict view;
      view["rows"] = owned(std::vector<float>(rows.begin(), rows.end()), shape);
      view["side"] = side == KvSide::kKeys ? "keys" : "values";
      view["layer"] = layer;
      take(policy_(view), rows, shape);
    });
  }

 private:
  /// Reads what the function has returned.
  void take(const nb::object& returned, std::span<float> rows,
            const std::array<size_t, 3>& shape) const {
    using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
    Rows found;
    if (!nb::try_cast(returned, found)) {
      refuse(fmt::format("a {}", nb::type_name(returned.type()).c_str()), shape);
    }
    const std::array got{found.shape(0), found.shape(1), found.shape(2)};
    if (got != shape) refuse(fmt::format("({}) numbers", fmt::join(got, ", ")), shape);
    std::copy_n(found.data(), rows.size(), rows.begin());
    if (!std::ranges::all_of(rows, [](float x) { return std::isfinite(x); })) {
      refuse("numbers that are not finite", shape);
    }
  }
  [[noreturn]] void refuse(const std::string& what, const std::array<size_t, 3>& shape) const {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the quantizer {} returned {}; expected an array of shape ({}) of "
                            "floats in host memory (of a GPU's tensor return .cpu())",
                            policy_.name, what, fmt::join(shape, ", ")));
  }

  PythonPolicy policy_;
  int hold_;
  size_t head_dim_;
};

void add_quantizer(const std::string& name, const std::string& help,
                   const std::vector<PythonOption>& options) {
  const std::vector<OptionInfo> table = option_table(kCommon, options);
  register_simulation({{.name = name,
                        .source = "Python, simulated",
                        .stores = help,
                        .composes = "any retention rule",
                        .options = table},
                       [](const OptionValues& values, const PolicyContext& context) {
                         return std::make_unique<PythonSimulation>(values, context);
                       }});
}

}  // namespace

void add_simulations(nb::module_& m) {
  using namespace nb::literals;
  m.def("add_quantizer", &add_quantizer, "name"_a, "help"_a, "options"_a);
}

}  // namespace kvlm::python
