#pragma once

#include <string>
#include <string_view>

namespace kvlm {

/// Hostile text, made fit for a message: letters of every script stay; controls, marks that turn
/// the direction of writing and bytes that are not UTF-8 become \u or \x with their hex digits (a
/// tensor name may carry terminal escapes); the tail beyond 120 bytes becomes "...".
std::string printable(std::string_view text);

}  // namespace kvlm
