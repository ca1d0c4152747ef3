#pragma once

#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace kvlm {

/// A request that is answered by an error: {"error": {"message", "type", "param", "code"}}.
class ApiError : public std::runtime_error {
 public:
  /// `code` is one of docs/serve.md, "Errors"; `param` the key at fault, or empty.
  ApiError(int status, std::string code, const std::string& message, std::string param = {})
      : std::runtime_error(message),
        status_(status),
        code_(std::move(code)),
        param_(std::move(param)) {}

  int status() const noexcept { return status_; }
  const std::string& code() const noexcept { return code_; }
  /// Seconds for Retry-After; 0: none.
  int retry_after() const noexcept;
  nlohmann::ordered_json json() const;

 private:
  int status_;
  std::string code_;
  std::string param_;
};

/// The answer to whatever was thrown.
ApiError api_error_of(const std::exception_ptr& failure);

}  // namespace kvlm
