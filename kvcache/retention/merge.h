#pragma once
#include <cstdint>
#include <span>
#include <vector>
#include "kvcache/retention.h"
namespace kvlm { void merge_rows(MergeRule, std::span<const int32_t>, int, size_t, std::vector<float>&, std::vector<float>&); }
