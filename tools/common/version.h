#pragma once

namespace kvlm {

// Written by cmake/version.cmake at every build.
extern const char* const kVersion;
extern const char* const kCommit;
extern const char* const kCompiler;
extern const char* const kCudaVersion;
extern const char* const kSourceFolder;
/// Where an installed program's data is, relative to its own folder: "../share/kvlm".
extern const char* const kInstalledData;

}  // namespace kvlm
