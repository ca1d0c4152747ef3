#pragma once

#include <string>
#include <vector>

#include "kvcache/spec/policy.h"

namespace kvlm {

/// How a spec names a policy: its name, or share=codes.
std::string spec_name(const PolicyInfo& info);

/// What a quantizer takes beside options of its own.
std::vector<const OptionInfo*> general_options();

/// docs/policies.md: what a spec is, and an overview of the policies.
std::string policies_markdown();

/// docs/policy-options.md: every option.
std::string options_markdown();

}  // namespace kvlm
