#include "python/src/rules.h"

#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "kvcache/retention/scored.h"
#include "kvcache/spec/registry.h"

// Retention rules in Python: a function scores the rows of a layer, and a ScoredRule keeps the
// best. The function is called by the thread that fills the cache, which takes the GIL for it;
// arrays that it is given are copies in host memory, which it may keep.
namespace nb = nanobind;

namespace kvlm::python {

namespace {

/// Calls a policy by name: kvlm.rules._call(name, found, options). Never destroyed: the thread of a
/// cache may outlive the interpreter.
nb::object& caller() {
  static auto* const function = new nb::object;
  return *function;
}

/// (kv_heads, n, head_dim)
std::vector<float> on_host(std::span<const StoredRows> heads, int head_dim, Stream& stream) {
  std::vector<float> all;
  for (const StoredRows& head : heads) {
    const std::vector<float> one = rows_on_host(head, head_dim, stream);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

struct Needs {
  bool keys = true, values = true, queries = false;
};

class PythonRule final : public retention::ScoredRule {
 public:
  PythonRule(const OptionValues& options, const PolicyContext& context, Needs needs)
      : ScoredRule(options, context), policy_(options, retention::kScoredOptions), needs_(needs) {}

  ImportanceNeeds needs() const noexcept override {
    ImportanceNeeds all = ScoredRule::needs();
    all.queries = all.row_scores && needs_.queries;
    return all;
  }

  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override {
    const auto heads = layer.keys.size();
    const auto n = static_cast<size_t>(layer.keys.front().rows);
    const auto dim = static_cast<size_t>(layer.shape->head_dim);
    std::vector<float> keys, values, queries;
    if (needs_.keys) keys = on_host(layer.keys, layer.shape->head_dim, stream);
    if (needs_.values) values = on_host(layer.values, layer.shape->head_dim, stream);
    if (needs_.queries) {
      Tensor f32(DType::kF32, layer.queries.shape(), stream.device());
      convert(f32, layer.queries, stream);
      queries.resize(static_cast<size_t>(layer.queries.elements()));
      copy(TensorView(queries.data(), DType::kF32, layer.queries.shape()), f32, stream);
      stream.synchronize();
    }
    call_python([&] {
      nb::dict view;
      view["index"] = layer.layer;
      view["layers"] = layer.shape->layers;
      view["rows"] = n;
      view["scale"] = layer.scale;
      const std::array<size_t, 3> rows{heads, n, dim};
      const std::array<size_t, 3> of_queries{n, static_cast<size_t>(layer.shape->q_heads), dim};
      const std::array<size_t, 1> one{n};
      if (needs_.keys) view["keys"] = owned(std::move(keys), rows);
      if (needs_.values) view["values"] = owned(std::move(values), rows);
      if (needs_.queries) view["queries"] = owned(std::move(queries), of_queries);
      view["tags"] = owned(std::vector<int16_t>(layer.modality.begin(), layer.modality.end()), one);
      std::vector<uint8_t> visual;
      for (const int16_t tag : layer.modality) visual.push_back(tag != kTextRow);
      view["visual"] = owned(std::move(visual), one);
      take(policy_(view), scores, heads, n);
    });
  }

 private:
  /// Reads what the function has returned.
  void take(const nb::object& returned, std::span<double> scores, size_t heads, size_t n) const {
    using Scores = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
    Scores found;
    if (!nb::try_cast(returned, found)) {
      refuse(fmt::format("a {}", nb::type_name(returned.type()).c_str()));
    }
    if (found.shape(0) != heads || found.shape(1) != n) {
      refuse(fmt::format("({}, {}) numbers", found.shape(0), found.shape(1)), heads, n);
    }
    std::copy_n(found.data(), scores.size(), scores.begin());
    for (size_t h = 0; h < heads; ++h) {
      const std::span row = scores.subspan(h * n, n);
      if (std::ranges::all_of(row, [](double x) { return std::isnan(x); })) {
        refuse(fmt::format("no number for KV head {}: all are NaN", h), heads, n);
      }
    }
  }
  [[noreturn]] void refuse(const std::string& what, size_t heads = 0, size_t n = 0) const {
    const std::string shape = heads == 0 ? "(kv_heads, n)" : fmt::format("({}, {})", heads, n);
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the rule {} returned {}; expected an array of shape {} of floats in "
                            "host memory, the best rows highest (of a GPU's tensor return .cpu())",
                            policy_.name, what, shape));
  }

  PythonPolicy policy_;
  Needs needs_;
};

void add_retention(const std::string& name, const std::string& help,
                   const std::vector<PythonOption>& options, bool keys, bool values, bool queries) {
  const std::vector<OptionInfo> table = option_table(retention::kScoredOptions, options);
  const Needs needs{keys, values, queries};
  register_retention({{.name = name,
                       .source = "Python",
                       .stores = help,
                       .composes = "any quantizer; share=codes and xquant only with head_shared=on",
                       .options = table},
                      [needs](const OptionValues& values_of, const PolicyContext& context) {
                        return std::make_unique<PythonRule>(values_of, context, needs);
                      }});
}

}  // namespace

RuleFailure::RuleFailure(const nb::python_error& error)
    : Error(ErrorCode::kInvalidArgument,
            fmt::format("a policy in Python raised {}: {}", nb::type_name(error.type()).c_str(),
                        nb::str(error.value()).c_str())),
      value_(new nb::object(nb::borrow(error.value())), [](nb::object* value) {
        const nb::gil_scoped_acquire acquire;
        delete value;
      }) {}

void RuleFailure::set() const {
  if (!value_->is_valid()) {
    PyErr_SetString(PyExc_RuntimeError, "a rule has failed; its exception was raised before");
    return;
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value_->ptr())), value_->ptr());
  // Its traceback will hold the answer that holds this.
  value_->reset();
}

void call_python(const std::function<void()>& body) {
  const nb::gil_scoped_acquire acquire;
  try {
    body();
  } catch (const nb::python_error& error) {
    throw RuleFailure(error);
  }
}

PythonPolicy::PythonPolicy(const OptionValues& values, std::span<const OptionInfo> common)
    : name(values.info().name) {
  for (const OptionInfo& option : values.info().options) {
    const bool own = std::ranges::none_of(
        common, [&](const OptionInfo& each) { return each.key == option.key; });
    if (own) options[std::string(option.key)] = values.text(option.key);
  }
}

nb::object PythonPolicy::operator()(const nb::dict& view) const {
  nb::dict values;
  for (const auto& [key, value] : options) values[key.c_str()] = value;
  return caller()(name, view, values);
}

std::vector<OptionInfo> option_table(std::span<const OptionInfo> common,
                                     const std::vector<PythonOption>& options) {
  std::vector<OptionInfo> table(common.begin(), common.end());
  for (const PythonOption& option : options) {
    OptionInfo info{.key = option.key, .standard = option.standard, .help = "of the function"};
    constexpr double kMost = 1e9;
    if (option.kind == "int") info.type = OptionInfo::Type::kInteger;
    if (option.kind == "float") info.type = OptionInfo::Type::kReal;
    info.low = -kMost;
    info.high = kMost;
    info.choices = option.choices;
    table.push_back(info);
  }
  return table;
}

void add_rules(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PythonOption>(m, "PolicyOption")
      .def(nb::init<std::string, std::string, std::string, std::string>(), "key"_a, "kind"_a,
           "standard"_a, "choices"_a);
  m.def("add_retention", &add_retention, "name"_a, "help"_a, "options"_a, "keys"_a, "values"_a,
        "queries"_a);
  m.def(
      "set_caller", [](nb::object function) { caller() = std::move(function); }, "function"_a);
}

}  // namespace kvlm::python
