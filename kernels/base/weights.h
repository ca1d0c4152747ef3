#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/base/watch.h"

namespace kvlm {

/// Named weights of one model, borrowed from a mapped file or owned, whatever filled the map. Does
/// no I/O. A model's constructor takes each tensor it needs once, checked; what is left afterwards
/// was not expected.
class WeightMap {
 public:
  /// Adds `view` under `name`; `owner` keeps its bytes alive. Throws Error{kCorruptFile} if the
  /// name is there already.
  void add(std::string name, ConstTensorView view, std::shared_ptr<const void> owner);

  /// Adds a tensor whose element type has no DType ("I64", "F8_E4M3", ...), without its bytes.
  /// Harmless while nobody asks for it (buffers such as position_ids): take() then refuses it under
  /// its own dtype. Throws like add().
  void add_unreadable(std::string name, std::string dtype);

  /// From now on take() asks `make` for a name that is absent, instead of throwing; contains() and
  /// remaining() do not know such tensors. It may make a tensor on the device of place_on() itself,
  /// which saves the copy; `wide` says that take_f32() asked, which is given f32. For models of
  /// random weights.
  using Maker =
      std::function<std::shared_ptr<Tensor>(std::string_view name, const Shape& shape, bool wide)>;
  void make_missing(Maker make) { make_ = std::move(make); }

  bool contains(std::string_view name) const noexcept;
  /// A tensor as it was added, which stays in the map; nothing if there is none of that name, or
  /// none of weights.
  std::optional<ConstTensorView> find(std::string_view name) const;

  /// Removes and returns a tensor. The shape must match; the dtype must be f32, f16 or bf16.
  /// A tensor of more than four dimensions is in the map as a matrix: the first dimension and the
  /// product of the others (a 3-d convolution, [1280,3,2,14,14] on disk, is taken as (1280, 1176)).
  /// Throws Error{kCorruptFile} naming the tensor, what the file holds and what was expected;
  /// Error{kUnsupported} if it holds another dtype.
  /// The bytes stay valid as long as owners() is kept.
  ConstTensorView take(std::string_view name, const Shape& shape);
  /// take() of a vector, widened to f32: norm weights and biases, which are small and always read
  /// in f32.
  ConstTensorView take_f32(std::string_view name, const Shape& shape);

  /// Where a matrix that is taken into a larger one goes: row i to row first + i * step, from the
  /// first column on. A vector is a matrix of one column.
  struct SubTensor {
    std::string name;
    Shape shape;
    int64_t first = 0;
    int64_t step = 1;
  };
  /// Takes matrices, or vectors, into one tensor of `shape` on the device of place_on(); what no
  /// part fills is zero. Of the parts' dtype, or of f32 where they differ. At least one part.
  /// Throws as take(), and Error{kInvalidArgument} for a part that does not fit into `shape`.
  ConstTensorView take_together(const Shape& shape, std::span<const SubTensor> parts);
  /// The same, of take_f32()'s vectors.
  ConstTensorView take_together_f32(const Shape& shape, std::span<const SubTensor> parts);

  /// Names not taken yet, sorted.
  std::vector<std::string> remaining() const;
  /// Renames every tensor: the function maps a name to its new name, or to "" to drop the tensor.
  /// Throws Error{kCorruptFile} if two names become one.
  void rename(const std::function<std::string(std::string_view)>& rule);

  /// One of the tensors that a packed one becomes, and how many rows of each group are its own.
  struct Slice {
    std::string name;
    int64_t rows;
  };
  /// Divides a tensor by rows (entries of its outermost dimension) into tensors of their own, which
  /// take its place: its rows are `groups` groups alike, each holding the rows of all `slices` in
  /// turn. Slices of one group stay views; others are put together once they are taken. Throws
  /// Error{kCorruptFile} for another number of rows, and as rename().
  void split(std::string_view name, int64_t groups, std::span<const Slice> slices);

  /// From now on take() copies what it returns to `device`, in memory that the map then owns.
  void place_on(Device device) { device_ = device; }
  Device device() const noexcept { return device_; }
  /// Whether two tensors that nobody took yet hold the same numbers of the same dtype, before
  /// convert().
  bool same(std::string_view a, std::string_view b) const;

  /// From now on take() tells `watch`, which may be null, how much of `total_bytes` is there, as
  /// phase "loading", and throws Error{kCancelled} once it wants no more.
  void follow(Watch* watch, size_t total_bytes);

  /// Everything that keeps taken views alive; a model stores it beside its views.
  std::vector<std::shared_ptr<const void>> owners() const { return owners_; }

  /// From now on take() converts f32, f16 and bf16 tensors to `dtype`, one of these, in memory that
  /// the map then owns. Without effect on tensors that have it already, and on those that a Maker
  /// makes.
  void convert(DType dtype) { convert_to_ = dtype; }

 private:
  struct Entry {
    ConstTensorView view;                    // empty when the element type has no DType
    std::string unreadable_dtype;            // its name then; otherwise empty
    std::vector<ConstTensorView> runs = {};  // of rows; if there are any, they are the tensor
  };

  void insert(std::string name, Entry entry);
  /// Refuses an absent tensor that a quantizer of weights has packed under another name.
  void refuse_packed(std::string_view name) const;
  ConstTensorView take_unplaced(std::string_view name, const Shape& shape, bool wide);
  ConstTensorView placed(ConstTensorView view);
  ConstTensorView joined(const Shape& shape, std::span<const SubTensor> parts, bool wide);
  void count(size_t bytes);
  ConstTensorView owned(std::shared_ptr<Tensor> tensor);

  std::map<std::string, Entry, std::less<>> tensors_;
  std::vector<std::shared_ptr<const void>> owners_;
  Maker make_;
  Device device_{};
  std::optional<DType> convert_to_;
  Watch* watch_ = nullptr;
  size_t loaded_bytes_ = 0;
  size_t total_bytes_ = 0;
};

}  // namespace kvlm
