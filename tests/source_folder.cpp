#include "tests/source_folder.h"

namespace kvlm::test {

std::filesystem::path source_folder() { return KVLM_SOURCE_DIR; }

}  // namespace kvlm::test
