#pragma once

#include <string_view>
#include <vector>

namespace kvlm {

/// As nearest_spelling() (kvcache/words.h), but only a candidate that is likely to be meant: at
/// most a third of the longer word's letters differ. Empty if there is none.
std::string_view near_spelling(std::string_view word,
                               const std::vector<std::string_view>& candidates) noexcept;

}  // namespace kvlm
