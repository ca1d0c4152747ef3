#include "runtime/failure_kind.h"

#include <new>

#include "kernels/base/error.h"

namespace kvlm {

bool is_out_of_memory(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kOutOfMemory;
  } catch (...) {
    return false;
  }
}

bool is_cancellation(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error.code() == ErrorCode::kCancelled;
  } catch (...) {
    return false;
  }
}

}  // namespace kvlm
