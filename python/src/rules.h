#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <memory>

namespace kvlm::python {

/// An exception of Python's on its way from the thread of the cache to whoever asked.
class RuleFailure final : public std::exception {
 public:
  /// Takes the current exception. With the GIL.
  explicit RuleFailure(const nanobind::python_error& error);
  const char* what() const noexcept override { return "a rule in Python has failed"; }
  /// Makes it Python's current exception, once. With the GIL.
  void set() const;

 private:
  std::shared_ptr<nanobind::object> value_;
};

/// Whether this thread is inside a rule.
bool in_rule() noexcept;

/// What kvlm.retention() is made of.
void add_rules(nanobind::module_& m);

}  // namespace kvlm::python
