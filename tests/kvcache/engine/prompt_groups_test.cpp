// The end of a prompt, in groups of layers.
#include "tests/kvcache/groups.h"

namespace kvlm {
namespace {

TEST(PromptGroups, LayersDoNotDependOnThoseBehind) {
  for (const char* spec : testlife::kGroupedSpecs) testlife::check_groups(spec, {});
}

}  // namespace
}  // namespace kvlm
