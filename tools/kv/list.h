#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kvcache/spec/policy.h"

namespace kvlm {

/// How a spec names a policy: its name, or share=codes.
std::string spec_name(const PolicyInfo& info);

/// "quantizer", "retention" or "sharing".
std::string_view kind_name(PartKind kind);

/// The policy of a name, or share for share=codes; all for no name. Throws Error{kInvalidArgument}
/// with the nearest name.
std::vector<const PolicyInfo*> listed(const std::string& name);

/// What a quantizer takes beside options of its own.
std::vector<const OptionInfo*> general_options();

/// docs/policies.md: what a spec is, and an overview of the policies.
std::string policies_markdown();

/// docs/policy-options.md: every option.
std::string options_markdown();

}  // namespace kvlm
