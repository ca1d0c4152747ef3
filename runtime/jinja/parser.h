#pragma once

#include <string>
#include <string_view>

#include "runtime/jinja/ast.h"

namespace kvlm::jinja {

/// Parses a template. Throws Error{kUnsupported} naming the construct and its line for Jinja2 that
/// is not built, Error{kCorruptFile} for what is not Jinja2.
Block parse(std::string_view source, const std::string& name);

}  // namespace kvlm::jinja
