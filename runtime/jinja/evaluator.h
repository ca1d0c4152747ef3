#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/jinja/ast.h"

namespace kvlm::jinja {

/// Whether a template may call this; the parser asks, so that rendering meets no unknown name.
bool is_function(std::string_view name);
bool is_method(std::string_view name);
bool is_filter(std::string_view name);
bool is_test(std::string_view name);

/// Runs a template with these variables. Throws Error{kInvalidArgument} with the template's words
/// when it calls raise_exception and for what would be an exception in Python, Error{kUnsupported}
/// when it takes more than its share of steps or memory.
std::string render(const Block& block, std::vector<std::pair<std::string, Value>> variables,
                   const std::string& name);

}  // namespace kvlm::jinja
