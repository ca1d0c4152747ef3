#pragma once

#include <filesystem>

namespace kvlm::test {

/// The root of the source tree that this test program was built from, for reading test data.
std::filesystem::path source_folder();

}  // namespace kvlm::test
