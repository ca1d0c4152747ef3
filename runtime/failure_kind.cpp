#include "runtime/failure_kind.h"

#include <new>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

bool has_code(const std::exception_ptr& failure, ErrorCode code) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error.code() == code;
  } catch (...) {
    return false;
  }
}

}  // namespace

bool is_out_of_memory(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    return true;
  } catch (...) {
    return has_code(failure, ErrorCode::kOutOfMemory);
  }
}

bool is_cancellation(const std::exception_ptr& failure) {
  return has_code(failure, ErrorCode::kCancelled);
}

bool is_device_failure(const std::exception_ptr& failure) {
  return has_code(failure, ErrorCode::kDevice);
}

}  // namespace kvlm
