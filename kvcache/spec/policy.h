#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/kv_cache.h"
#include "kvcache/spec/cache_spec.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, [policy], registry,
// cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// Kinds of parts. A spec has at most one retention and one sharing part, and one quantizer for
/// each disjoint set of tokens, or one simulated quantizer.
enum class PartKind : uint8_t { kQuantizer, kRetention, kSharing, kSimulation };

/// One option of a policy: legal values, value in each profile, help. The parser, the help text,
/// `vlm-kv list` and docs/policy-options.md are generated from this table.
struct OptionInfo {
  enum class Type : uint8_t {
    kChoice,       ///< one of `choices`, separated by '|'
    kInteger,      ///< low..high
    kReal,         ///< low..high, also written A/B; `open_high` excludes high
    kRealPair,     ///< A:B, each low..high
    kChannels,     ///< auto or an integer low..high
    kStartLayers,  ///< A:B, of keys and of values, each off or an integer low..high
    kLayers,       ///< integers and ranges low..high joined by '/', as 0-1/30
  };

  std::string_view key = {};
  Type type = Type::kChoice;
  std::string_view choices = {};   ///< of kChoice
  double low = 0;                  ///< smallest legal number
  double high = 0;                 ///< largest legal number
  bool open_high = false;          ///< `high` itself is not legal
  std::string_view standard = {};  ///< value in profile=default
  std::string_view official = {};  ///< value in profile=official; empty: as default
  std::string_view paper = {};     ///< value in profile=paper; empty: as default
  std::string_view help = {};      ///< one line
};

/// Description of a policy for the parser and for users.
struct PolicyInfo {
  std::string_view name = {};
  PartKind kind = PartKind::kQuantizer;
  std::string_view source = {};    ///< paper, sections
  std::string_view stores = {};    ///< one sentence: which tokens are stored how
  std::string_view composes = {};  ///< one sentence: compatible parts
  std::span<const OptionInfo> options = {};
  std::string_view example = {};  ///< a legal spec with this policy
  std::string_view arxiv = {};    ///< arXiv number of the paper, if any
};

/// All options of this policy: its own, then those of its kind (scope and layers of a quantizer;
/// the profile).
std::vector<const OptionInfo*> options_of(const PolicyInfo& info);

/// Legal values as text: "nearest, floor", "an integer from 1 to 8".
std::string legal_values(const OptionInfo& option);

/// The canonical spelling of a value: the shortest exact number, the fewest layer ranges. Throws
/// Error{kInvalidArgument} with the part, the key, the value, the legal values and the nearest one.
std::string checked_value(std::string_view part, const OptionInfo& option, std::string_view value);

/// The values of a part's options: as written, else from the profile, else the default.
class OptionValues {
 public:
  /// Throws Error{kInvalidArgument} for a key or value that `info` does not allow.
  OptionValues(const PolicyInfo& info, const SpecPart& part);

  /// The policy has this option.
  bool has(std::string_view key) const noexcept;
  /// The option was written in the spec.
  bool given(std::string_view key) const noexcept;
  /// For keys of options_of(info()).
  std::string_view text(std::string_view key) const;
  /// -1 if the value is auto.
  int integer(std::string_view key) const;
  double real(std::string_view key) const;
  std::pair<double, double> real_pair(std::string_view key) const;
  /// For kStartLayers; a side that is off starts after the last layer.
  std::pair<int, int> start_layers(std::string_view key) const;
  const PolicyInfo& info() const noexcept { return *info_; }

 private:
  const PolicyInfo* info_;
  std::map<std::string, std::string, std::less<>> values_;
  std::vector<std::string> given_;
};

/// Throws Error{kInvalidArgument} if the option was written although it is `idle`; `because` is the
/// reason: "--kv kivi,bits=3 has no effect: ...".
void refuse_idle(const OptionValues& options, std::string_view key, bool idle,
                 std::string_view because);

/// Values measured by `vlm-kv profile` and loaded by --kv-profile.
struct PolicyProfile {
  std::string model;  ///< model that was measured
  /// PrefixKV: forget ratio of each layer, by the score it was fitted to (score=).
  std::map<std::string, std::vector<double>, std::less<>> forget;
  /// The kept fraction that `forget` was fitted for
  double forget_keep = 0;
  /// By score=: Gini coefficients of the scores (docs/formulas.md, "Profile"), for information.
  std::map<std::string, std::vector<double>, std::less<>> gini;
  /// By score=: standard deviation over the prompts, and their mean distance from `forget`, for
  /// information.
  std::map<std::string, std::vector<double>, std::less<>> forget_std;
  std::map<std::string, std::vector<double>, std::less<>> forget_mad;

  // By bit width: a policy with another width uses its own default, since the best value at 1 bit
  // ruins 8 bits. Fitted for one setting each: for ranges with or without this project's shrinking;
  // for rounding to nearest in one range per head. profile=official uses none of them.
  std::map<int, std::pair<double, double>> tau;           ///< CalibQuant, shrink=eta
  std::map<int, std::pair<double, double>> tau_unshrunk;  ///< CalibQuant, shrink=none
  std::map<int, double> alpha;                            ///< 1BitVKV
  std::map<int, double> eta;                              ///< XQuant
};

/// The profile's value for a bit width, or null; `profile` may be null.
template <class Value>
const Value* fitted(const PolicyProfile* profile, std::map<int, Value> PolicyProfile::*of,
                    int bits) {
  if (profile == nullptr) return nullptr;
  const auto found = (profile->*of).find(bits);
  return found == (profile->*of).end() ? nullptr : &found->second;
}

/// The decoder and the spec around a part.
struct PolicyContext {
  const CacheShape* shape = nullptr;
  const PolicyProfile* profile = nullptr;  ///< null if not given
  bool with_quantizer = false;             ///< a part of the spec packs tokens
  bool with_retention = false;             ///< a part of the spec evicts tokens
  bool with_sharing = false;               ///< layers share codes
};

class Quantizer;
class Retention;
class Simulation;

/// A quantizer's registry entry. `make` throws Error{kUnsupported} with the cure for options that
/// do not fit the decoder.
struct QuantizerEntry {
  PolicyInfo info;
  std::unique_ptr<Quantizer> (*make)(const OptionValues& options, const PolicyContext& context);
};

/// Makes a rule from its option values.
using RetentionMaker =
    std::function<std::unique_ptr<Retention>(const OptionValues&, const PolicyContext&)>;

/// A retention rule's registry entry.
struct RetentionEntry {
  PolicyInfo info;
  RetentionMaker make;
  /// Check the result of select(): set for rules that are not built in.
  bool checked = false;
};

/// The registry entry of a simulated quantizer.
struct SimulationEntry {
  PolicyInfo info;
  std::function<std::unique_ptr<Simulation>(const OptionValues&, const PolicyContext&)> make;
};

}  // namespace kvlm
