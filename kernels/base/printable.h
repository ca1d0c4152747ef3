#pragma once

#include <string>
#include <string_view>

namespace kvlm {

/// Hostile text, made fit for a message: bytes outside printable ASCII become \xNN (a
/// tensor name may carry terminal escapes) and the tail beyond 120 bytes becomes "...".
std::string printable(std::string_view text);

}  // namespace kvlm
