#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"
#include "kernels/base/watch.h"
#include "kernels/quantized/layout.h"
#include "kernels/weight.h"

namespace kvlm {

/// What a matrix of weights is to a model, on which its rounding depends.
enum class MatrixUse : uint8_t {
  kDecoder,     ///< a product of the decoder
  kVocabulary,  ///< the embeddings or the head
};

/// Which matrices are rounded when they are taken (quantized/round.h), by what they are; nothing
/// leaves them as they are. The embeddings and the head, which lose more, have 8 bits wherever the
/// decoder is rounded.
struct WeightRounding {
  std::optional<WeightCode> decoder;

  std::optional<WeightCode> code_of(MatrixUse use) const noexcept {
    return use == MatrixUse::kVocabulary && decoder ? WeightCode::kU8 : decoder;
  }
};

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

  /// Adds a quantized matrix. take_matrix() gives it as it is, take() widened to 16 bits. Throws
  /// like add().
  void add_quantized(std::string name, std::shared_ptr<const QuantizedSource> source);

  /// An update of low rank: weight += scale * b a, of a (rank, in) and b (out, rank) in f32.
  struct LowRankUpdate {
    std::shared_ptr<const Tensor> a, b;
    float scale = 1;
  };
  /// From now on the matrix `name` is taken with this added, in f32, before it is converted or
  /// rounded. Throws Error{kCorruptFile} if it has one already.
  void add_update(std::string name, LowRankUpdate update);
  /// Names of updates whose matrix has not been taken, sorted.
  std::vector<std::string> unused_updates() const;

  /// From now on take() asks `make` for a name that is absent, instead of throwing; contains() and
  /// remaining() do not know such tensors. It may make a tensor on `device` itself, which saves the
  /// copy: that of place_on(), or the CPU for what is rounded there; `wide` says that take_f32()
  /// asked, which is given f32. For models of random weights.
  using Maker = std::function<std::shared_ptr<Tensor>(std::string_view name, const Shape& shape,
                                                      bool wide, Device device)>;
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
  /// Removes and returns a matrix (out, in) that x is multiplied by: quantized where the file has
  /// it so or round() says so, else as take(). Throws as take().
  Weight take_matrix(std::string_view name, const Shape& shape, MatrixUse use);
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
  /// Renames every tensor and update: the function maps a name to its new name, or to "" to drop
  /// the tensor. Throws Error{kCorruptFile} if two names become one.
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

  /// From now on take() copies what it returns to the device of `stream`, in memory that the map
  /// then owns; its threads round and lay out matrices.
  void place_on(Stream& stream) {
    device_ = stream.device();
    pool_ = &stream.pool();
  }
  Device device() const noexcept { return device_; }
  /// From now on tensors that would be made, rather than borrowed, are made without their numbers:
  /// for a model that is only to say how large it is on a device of this kind. Vectors keep theirs.
  void plan(DeviceKind device) { planned_ = device; }
  /// A matrix that was rounded: the name under which add() got it, and what was added to it.
  struct Rounded {
    std::string name;
    WeightCode code;
    std::optional<LowRankUpdate> update;
  };
  /// From now on take_matrix() rounds. It notes the decoder's matrices in `rounded`, which may be
  /// null, by those names.
  void round(const WeightRounding& rounding, std::map<std::string, Rounded>* rounded = nullptr) {
    rounding_ = rounding;
    rounded_ = rounded;
  }
  /// From now on take_matrix() gives matrices that the CPU multiplies f32 activations with.
  void keep_activations() { exact_ = true; }
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
    std::shared_ptr<const QuantizedSource> quantized = {};  // if there is one, it is the tensor
    std::string added_as = {};                              // before rename() and split()
  };

  void insert(std::string name, Entry entry);
  /// A tensor in its own dtype or that of convert(), or in f32 if `wide`.
  ConstTensorView take_unplaced(std::string_view name, const Shape& shape, bool wide,
                                Device making);
  ConstTensorView take_stored(std::string_view name, const Shape& shape, bool wide, Device making);
  ConstTensorView placed(ConstTensorView view);
  /// A matrix in the layout of the device.
  Weight laid_out(const QuantizedSource& source);
  ConstTensorView joined(const Shape& shape, std::span<const SubTensor> parts, bool wide);
  void count(size_t bytes);
  ConstTensorView owned(std::shared_ptr<Tensor> tensor);

  std::map<std::string, Entry, std::less<>> tensors_;
  std::map<std::string, LowRankUpdate, std::less<>> updates_;
  std::map<std::string, Rounded>* rounded_ = nullptr;
  std::vector<std::shared_ptr<const void>> owners_;
  Maker make_;
  Device device_{};
  ThreadPool* pool_ = nullptr;
  WeightRounding rounding_;
  bool exact_ = false;
  std::optional<DeviceKind> planned_;
  std::optional<DType> convert_to_;
  Watch* watch_ = nullptr;
  size_t loaded_bytes_ = 0;
  size_t total_bytes_ = 0;
};

/// w += scale * b a, of w (out, in) in f32, with the threads of `pool` if there is one.
void add_low_rank(Tensor& w, const WeightMap::LowRankUpdate& update, ThreadPool* pool);

}  // namespace kvlm
