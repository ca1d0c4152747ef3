#include "tools/kv/equal_bits.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/base/error.h"
#include "kvcache/spec/registry.h"

namespace kvlm {

namespace {

constexpr int kSteps = 10000;  // of keep=, which is written with four decimals

void set(SpecPart& part, const std::string& key, const std::string& value) {
  std::erase_if(part.options, [&](const auto& option) { return option.first == key; });
  part.options.emplace_back(key, value);
  std::ranges::sort(part.options);
}

const OptionInfo* option_of(const PolicyInfo& info, std::string_view key) {
  const std::vector<const OptionInfo*> options = options_of(info);
  const auto found = std::ranges::find(options, key, &OptionInfo::key);
  return found == options.end() ? nullptr : *found;
}

}  // namespace

CacheSpec at_equal_bits(const CacheSpec& spec, double bits, const CacheShape& shape,
                        const PromptSize& prompt, const PolicyProfile* profile) {
  CacheSpec solved = spec;
  const auto rule = std::ranges::find_if(
      solved.parts, [](const SpecPart& part) { return find_retention(part.name) != nullptr; });
  if (rule == solved.parts.end()) return spec;
  const auto refuse = [&](const std::string& text) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--bits {} with --kv {}: {}", bits, canonical(spec), text));
  };
  const PolicyInfo& info = find_retention(rule->name)->info;
  if (rule->find("keep") != nullptr) {
    refuse("keep= and --bits both set what is kept; give one of them");
  }
  if (option_of(info, "keep") == nullptr) {
    refuse(fmt::format("{} has no keep= to solve; leave --bits out", rule->name));
  }
  const OptionInfo* evict = option_of(info, "evict");
  if (evict != nullptr && evict->standard == "none" && rule->find("evict") == nullptr) {
    const bool packs = std::ranges::any_of(solved.parts, [](const SpecPart& part) {
      return find_quantizer(part.name) != nullptr && !find_format(part.name);
    });
    set(*rule, "evict", packs ? "window" : "score");
  }
  const auto with_keep = [&](int steps) {
    set(*rule, "keep", fmt::format("{:.4f}", static_cast<double>(steps) / kSteps));
    return parse_spec(canonical(solved));
  };
  const auto bits_at = [&](int steps) {
    return estimate(with_keep(steps), shape, prompt, profile).stored_bits;
  };
  int low = kSteps / 1000, high = kSteps;  // legal values of keep=
  if (bits_at(high) < bits) {
    refuse(
        fmt::format("with keep=1 it stores {:.3f} bits already; give fewer bits", bits_at(high)));
  }
  if (bits_at(low) > bits) {
    refuse(fmt::format("what is always kept stores {:.3f} bits; give more bits", bits_at(low)));
  }
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (bits_at(middle) < bits ? low : high) = middle;
  }
  return with_keep(std::abs(bits_at(low) - bits) < std::abs(bits_at(high) - bits) ? low : high);
}

}  // namespace kvlm
