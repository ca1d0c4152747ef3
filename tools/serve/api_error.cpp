#include "tools/serve/api_error.h"

#include <fmt/format.h>

#include <array>
#include <new>
#include <regex>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/service.h"

namespace kvlm {

int ApiError::retry_after() const noexcept {
  if (status_ == 429) return 1;
  return status_ == 503 ? 5 : 0;
}

nlohmann::ordered_json ApiError::json() const {
  const char* type = status_ == 401   ? "authentication_error"
                     : status_ == 429 ? "rate_limit_error"
                     : status_ >= 500 ? "server_error"
                                      : "invalid_request_error";
  // Options of the programs, which are keys here or the server's.
  static const std::array<std::pair<std::regex, const char*>, 3> kWords = {
      {{std::regex("(^|[ (])--kv(?![-a-z])"), "$1kv"},
       {std::regex("(^|[ (])--frames(?![-a-z])"), "$1media_io_kwargs.video.num_frames"},
       {std::regex("(^|[ (])--kv-profile(?![-a-z])"), "$1the server's --kv-profile"}}};
  std::string message = what();
  for (const auto& [option, key] : kWords) message = std::regex_replace(message, option, key);
  nlohmann::ordered_json error{{"message", message}, {"type", type}};
  error["param"] = param_.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param_);
  error["code"] = code_;
  return {{"error", std::move(error)}};
}

ApiError api_error_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const ApiError& error) {
    return error;
  } catch (const ServiceRefusal& refusal) {
    using Reason = ServiceRefusal::Reason;
    if (refusal.reason() == Reason::kFull) return {429, "queue_full", refusal.what()};
    return {503, refusal.reason() == Reason::kDraining ? "draining" : "device_lost",
            refusal.what()};
  } catch (const Error& error) {
    switch (error.code()) {
      case ErrorCode::kInvalidArgument:
        return {400, "invalid_value", error.what()};
      case ErrorCode::kUnsupported:
        return {400, "unsupported", error.what()};
      case ErrorCode::kCorruptFile:
        return {400, "invalid_image", error.what(), "messages"};
      case ErrorCode::kOutOfMemory:
        return {503, "no_memory", error.what()};
      case ErrorCode::kCancelled:
        return {503, "draining", "the server is about to end; ask another one"};
      case ErrorCode::kDevice:
        return {503, "device_lost", error.what()};
    }
    return {500, "internal", error.what()};
  } catch (const std::bad_alloc&) {
    return {503, "no_memory", "out of memory; send smaller images or fewer of them"};
  } catch (const std::exception& error) {
    return {500, "internal", fmt::format("unexpected failure: {}; please report it", error.what())};
  }
}

}  // namespace kvlm
