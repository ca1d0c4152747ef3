#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"

namespace kvlm {

/// Up to four dimensions, outermost first; row-major and dense. Rank 0 is a scalar.
class Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() noexcept = default;
  Shape(std::initializer_list<int64_t> dims) noexcept
      : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims) noexcept : rank_(static_cast<int>(dims.size())) {
    assert(dims.size() <= kMaxRank);
    for (size_t i = 0; i < dims.size(); ++i) dims_[i] = dims[i];
  }

  int rank() const noexcept { return rank_; }
  int64_t operator[](int axis) const noexcept {
    assert(axis >= 0 && axis < rank_);
    return dims_[static_cast<size_t>(axis)];
  }
  int64_t back() const noexcept { return (*this)[rank_ - 1]; }
  /// Product of all dimensions.
  int64_t elements() const noexcept {
    int64_t product = 1;
    for (int i = 0; i < rank_; ++i) product *= dims_[static_cast<size_t>(i)];
    return product;
  }
  /// "(577, 1024)".
  std::string str() const;

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

class Tensor;

/// Borrows a dense read-only tensor.
class ConstTensorView {
 public:
  ConstTensorView() noexcept = default;
  ConstTensorView(const void* data, DType dtype, Shape shape, Device device = {}) noexcept
      : data_(static_cast<const std::byte*>(data)), dtype_(dtype), shape_(shape), device_(device) {}
  ConstTensorView(const Tensor& tensor) noexcept;  // NOLINT(google-explicit-constructor)

  const std::byte* data() const noexcept { return data_; }
  template <class T>
  const T* as() const noexcept {
    assert(dtype_ == kDTypeOf<T>);
    return reinterpret_cast<const T*>(data_);
  }
  DType dtype() const noexcept { return dtype_; }
  const Shape& shape() const noexcept { return shape_; }
  Device device() const noexcept { return device_; }
  bool empty() const noexcept { return data_ == nullptr; }
  int64_t elements() const noexcept { return empty() ? 0 : shape_.elements(); }
  size_t bytes() const noexcept { return static_cast<size_t>(elements()) * dtype_bytes(dtype_); }

  /// Entries [begin, begin + count) of the outermost dimension.
  ConstTensorView slice(int64_t begin, int64_t count) const noexcept {
    return {data_ + offset_of(begin), dtype_, outer(count), device_};
  }
  /// The same elements under another shape of equal size.
  ConstTensorView reshape(Shape shape) const noexcept {
    assert(shape.elements() == shape_.elements());
    return {data_, dtype_, shape, device_};
  }

 protected:
  size_t offset_of(int64_t begin) const noexcept {
    int64_t stride = 1;
    for (int i = 1; i < shape_.rank(); ++i) stride *= shape_[i];
    return static_cast<size_t>(begin * stride) * dtype_bytes(dtype_);
  }
  Shape outer(int64_t count) const noexcept {
    std::array<int64_t, Shape::kMaxRank> dims{};
    for (int i = 0; i < shape_.rank(); ++i) dims[static_cast<size_t>(i)] = shape_[i];
    dims[0] = count;
    return Shape(std::span<const int64_t>(dims.data(), static_cast<size_t>(shape_.rank())));
  }

  const std::byte* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_;
  Device device_{};
};

/// Borrows a dense writable tensor.
class TensorView : public ConstTensorView {
 public:
  TensorView() noexcept = default;
  TensorView(void* data, DType dtype, Shape shape, Device device = {}) noexcept
      : ConstTensorView(data, dtype, shape, device), mutable_(static_cast<std::byte*>(data)) {}
  TensorView(Tensor& tensor) noexcept;  // NOLINT(google-explicit-constructor)

  std::byte* data() const noexcept { return mutable_; }
  template <class T>
  T* as() const noexcept {
    assert(dtype_ == kDTypeOf<T>);
    return reinterpret_cast<T*>(mutable_);
  }
  TensorView slice(int64_t begin, int64_t count) const noexcept {
    return {mutable_ + offset_of(begin), dtype_, outer(count), device_};
  }
  TensorView reshape(Shape shape) const noexcept {
    assert(shape.elements() == shape_.elements());
    return {mutable_, dtype_, shape, device_};
  }

 private:
  std::byte* mutable_ = nullptr;
};

/// Owns a dense tensor. Move-only.
class Tensor {
 public:
  Tensor() noexcept = default;
  /// Not initialised. Throws like Buffer.
  Tensor(DType dtype, Shape shape, Device device = {}, MemoryUse use = MemoryUse::kWorkspace)
      : dtype_(dtype),
        shape_(shape),
        buffer_(device, static_cast<size_t>(shape.elements()) * dtype_bytes(dtype), use) {}

  TensorView view() noexcept { return {buffer_.data(), dtype_, shape_, buffer_.device()}; }
  ConstTensorView view() const noexcept {
    return {buffer_.data(), dtype_, shape_, buffer_.device()};
  }
  template <class T>
  T* as() noexcept {
    return view().as<T>();
  }
  template <class T>
  const T* as() const noexcept {
    return view().as<T>();
  }
  const Shape& shape() const noexcept { return shape_; }
  DType dtype() const noexcept { return dtype_; }
  size_t bytes() const noexcept { return buffer_.bytes(); }
  bool empty() const noexcept { return buffer_.data() == nullptr; }

 private:
  DType dtype_ = DType::kF32;
  Shape shape_;
  Buffer buffer_;
};

inline ConstTensorView::ConstTensorView(const Tensor& tensor) noexcept
    : ConstTensorView(tensor.view()) {}
inline TensorView::TensorView(Tensor& tensor) noexcept : TensorView(tensor.view()) {}

}  // namespace kvlm
