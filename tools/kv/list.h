#pragma once

#include <string>
#include <vector>

#include "kvcache/policy.h"

namespace kvlm {

/// How a spec names a policy: its name, or share=codes.
std::string spec_name(const PolicyInfo& info);

/// What a quantizer takes beside options of its own.
std::vector<const OptionInfo*> general_options();

/// docs/policies.md.
std::string policies_markdown();

}  // namespace kvlm
