#pragma once

#include <nanobind/nanobind.h>

namespace kvlm::python {

/// Adds the class CachedPrompt: arrays of what a prompt left in the cache.
void add_cached_prompt(nanobind::module_& m);

}  // namespace kvlm::python
