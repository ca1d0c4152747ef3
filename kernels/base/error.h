#pragma once

#include <stdexcept>
#include <string>

namespace kvlm {

/// What kind of thing went wrong; the programs turn it into an exit status.
enum class ErrorCode {
  kInvalidArgument,  ///< a request that can never be satisfied: a flag, a shape, a spec
  kCorruptFile,      ///< a file that is missing, unreadable, damaged or inconsistent
  kUnsupported,      ///< a valid request that this build, device or family does not serve
  kOutOfMemory,      ///< a reservation that does not fit, with both figures in the message
  kDevice,           ///< the device or its driver failed
  kCancelled,        ///< nothing went wrong: whoever follows the work wants no more (watch.h)
};

/// The only exception this project throws. what() is one sentence a user can act on: it names the
/// thing, what was found, what was expected and what to do next.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace kvlm
