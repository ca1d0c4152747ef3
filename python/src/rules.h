#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/spec/policy.h"

namespace kvlm::python {

/// An exception of Python's on its way from the thread of the cache to whoever asked.
class RuleFailure final : public Error {
 public:
  /// Takes the current exception. With the GIL.
  explicit RuleFailure(const nanobind::python_error& error);
  /// Makes it Python's current exception, once. With the GIL.
  void set() const;

 private:
  std::shared_ptr<nanobind::object> value_;
};

/// Runs `body` with the GIL. Throws RuleFailure for an exception of Python's.
void call_python(const std::function<void()>& body);

/// A policy in Python: its name, and its own options as text.
struct PythonPolicy {
  /// Without `common` options, which are C++'s.
  PythonPolicy(const OptionValues& options, std::span<const OptionInfo> common);
  /// Calls kvlm.rules' function of that name with `view` and the options. With the GIL.
  nanobind::object operator()(const nanobind::dict& view) const;

  std::string name;
  std::map<std::string, std::string> options;
};

/// An option of a policy, as its decorator finds it in the function's signature.
struct PythonOption {
  std::string key, kind, standard, choices;
};
/// The table of `common` options and a policy's own, whose texts `options` keeps.
std::vector<OptionInfo> option_table(std::span<const OptionInfo> common,
                                     const std::vector<PythonOption>& options);

/// An array that owns its numbers.
template <class T, class Shape>
nanobind::object owned(std::vector<T>&& numbers, const Shape& shape) {
  auto* kept = new std::vector<T>(std::move(numbers));
  const nanobind::capsule owner(kept,
                                [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::array_api, const T, nanobind::device::cpu>(
      kept->data(), shape.size(), shape.data(), owner));
}

/// What kvlm.retention() is made of.
void add_rules(nanobind::module_& m);
/// What kvlm.quantizer() is made of.
void add_simulations(nanobind::module_& m);

}  // namespace kvlm::python
