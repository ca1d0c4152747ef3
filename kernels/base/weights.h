#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Named weights of one model, borrowed from a mapped file or owned, whatever filled the map. Does
/// no I/O. A model's constructor takes each tensor it needs once, checked; what is left afterwards
/// was not expected.
class WeightMap {
 public:
  /// Adds `view` under `name`; `owner` keeps its bytes alive. Throws Error{kCorruptFile} if the
  /// name is there already.
  void add(std::string name, ConstTensorView view, std::shared_ptr<const void> owner);

  bool contains(std::string_view name) const noexcept;

  /// Removes and returns a tensor. The shape must match; the dtype must be f32, f16 or bf16.
  /// Throws Error{kCorruptFile} naming the tensor, what the file holds and what was expected.
  /// The bytes stay valid as long as owners() is kept.
  ConstTensorView take(std::string_view name, const Shape& shape);
  /// take(), or nothing when the name is absent.
  std::optional<ConstTensorView> take_if(std::string_view name, const Shape& shape);
  /// take() of a vector, widened to f32: norm weights and biases, which are small and always read
  /// in f32.
  ConstTensorView take_f32(std::string_view name, const Shape& shape);

  /// Names not taken yet, sorted.
  std::vector<std::string> remaining() const;
  /// Renames every tensor: the function maps a name to its new name, or to "" to drop the tensor.
  /// Throws Error{kCorruptFile} if two names become one.
  void rename(const std::function<std::string(std::string_view)>& rule);

  /// Everything that keeps taken views alive; a model stores it beside its views.
  std::vector<std::shared_ptr<const void>> owners() const { return owners_; }

  /// Converts every remaining tensor to `dtype`, in memory that the map then owns. Without effect
  /// on tensors that have it already.
  void convert(DType dtype);

 private:
  std::map<std::string, ConstTensorView, std::less<>> tensors_;
  std::vector<std::shared_ptr<const void>> owners_;
};

}  // namespace kvlm
