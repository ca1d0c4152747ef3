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

// From a sentence to a cache, each file needs only those before it: words, cache_spec, [policy],
// registry, cache_plan, conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// What a part of a spec decides. A spec has at most one retention and one sharing part, and one
/// quantizer for each disjoint set of slots.
enum class PartKind : uint8_t { kQuantizer, kRetention, kSharing };

/// One option of a policy: its legal values, its value in each profile, and what it means. The
/// table of them is the parser, the help, `vlm-kv list` and docs/policy-options.md.
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

/// An option of the paper that is not built, and why (docs/formulas.md, "Not built").
struct NotBuilt {
  std::string_view key;
  std::string_view why;
};

/// What a policy is, for people and for the parser.
struct PolicyInfo {
  std::string_view name = {};
  PartKind kind = PartKind::kQuantizer;
  std::string_view source = {};    ///< paper, sections
  std::string_view stores = {};    ///< one sentence: which rows are stored how
  std::string_view composes = {};  ///< one sentence: with what
  std::span<const OptionInfo> options = {};
  std::string_view example = {};  ///< a legal spec with it
  std::string_view arxiv = {};    ///< number of the paper on arxiv.org, if it is there
  std::span<const NotBuilt> not_built = {};
};

/// Every option that a part of this policy takes: its own, then those of its kind (a quantizer's
/// scope and layers; the profile).
std::vector<const OptionInfo*> options_of(const PolicyInfo& info);

/// What an option's value may be, for people: "nearest, floor", "an integer from 1 to 8".
std::string legal_values(const OptionInfo& option);

/// The canonical spelling of a value: numbers as short as they are exact, layers as few ranges as
/// they can be. Throws Error{kInvalidArgument} with the part, the key, the value, the legal values
/// and the nearest of them.
std::string checked_value(std::string_view part, const OptionInfo& option, std::string_view value);

/// The values of a part's options: what was written, else the profile's, else the default.
class OptionValues {
 public:
  /// Throws Error{kInvalidArgument} for a key or value that `info` has not.
  OptionValues(const PolicyInfo& info, const SpecPart& part);

  /// The policy has the option at all.
  bool has(std::string_view key) const noexcept;
  /// Written in the spec, not taken from a profile.
  bool given(std::string_view key) const noexcept;
  /// The readers take a key of options_of(info()).
  std::string_view text(std::string_view key) const;
  /// -1 if the value is auto.
  int integer(std::string_view key) const;
  double real(std::string_view key) const;
  std::pair<double, double> real_pair(std::string_view key) const;
  /// Of kStartLayers; a part that is off starts after every layer.
  std::pair<int, int> start_layers(std::string_view key) const;
  const PolicyInfo& info() const noexcept { return *info_; }

 private:
  const PolicyInfo* info_;
  std::map<std::string, std::string, std::less<>> values_;
  std::vector<std::string> given_;
};

/// Throws Error{kInvalidArgument} if an option was written that is `idle`, "because" of something:
/// "--kv kivi,bits=3 has no effect: ...".
void refuse_idle(const OptionValues& options, std::string_view key, bool idle,
                 std::string_view because);

/// What `vlm-kv profile` measured on a model and --kv-profile gives back.
struct PolicyProfile {
  std::string model;  ///< on which it was measured
  /// PrefixKV: the forget ratio of each layer, by the score that it was fitted on (score=).
  std::map<std::string, std::vector<double>, std::less<>> forget;
  double forget_keep = 0;  ///< the kept fraction those were fitted for
  /// As forget: Gini coefficients of the scores (docs/formulas.md, "Profile"), for people.
  std::map<std::string, std::vector<double>, std::less<>> gini;
  /// As forget: standard deviation over the prompts that it is the mean of, and their mean distance
  /// from it, for people.
  std::map<std::string, std::vector<double>, std::less<>> forget_std;
  std::map<std::string, std::vector<double>, std::less<>> forget_mad;

  // By the bits that they were fitted at. A policy of another width has its own default: what is
  // best at 1 bit ruins 8.
  // And for the setting that they were fitted in: ranges as this project shrinks them or as they
  // are, values rounded to the nearest in a range a head. profile=official takes none of them.
  std::map<int, std::pair<double, double>> tau;           ///< CalibQuant, shrink=eta
  std::map<int, std::pair<double, double>> tau_unshrunk;  ///< CalibQuant, shrink=none
  std::map<int, double> alpha;                            ///< 1BitVKV
  std::map<int, double> eta;                              ///< XQuant
};

/// What a profile has for a width, or null; `profile` may be null.
template <class Value>
const Value* fitted(const PolicyProfile* profile, std::map<int, Value> PolicyProfile::*of,
                    int bits) {
  if (profile == nullptr) return nullptr;
  const auto found = (profile->*of).find(bits);
  return found == (profile->*of).end() ? nullptr : &found->second;
}

/// What surrounds a part when it is made.
struct PolicyContext {
  const CacheShape* shape = nullptr;
  const PolicyProfile* profile = nullptr;  ///< null if none was given
  bool with_quantizer = false;             ///< a part of the spec packs rows
  bool with_retention = false;             ///< a part of the spec drops rows
  bool with_sharing = false;               ///< codes are shared between layers
};

class Quantizer;
class Retention;

/// A quantizer's line in the registry. `make` throws Error{kUnsupported} for options that do not
/// fit the decoder, with the cure.
struct QuantizerEntry {
  PolicyInfo info;
  std::unique_ptr<Quantizer> (*make)(const OptionValues& options, const PolicyContext& context);
};

/// Makes a rule from the values of its options.
using RetentionMaker =
    std::function<std::unique_ptr<Retention>(const OptionValues&, const PolicyContext&)>;

/// A retention rule's line in the registry.
struct RetentionEntry {
  PolicyInfo info;
  RetentionMaker make;
  /// What select() returns is checked before it is used: a rule that is not built in.
  bool checked = false;
};

}  // namespace kvlm
