#include "kernels/weight_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"
#include "kernels/quantized/round.h"

// Named tensors on their way from a file to a model: renamed, split, put together, converted, and
// copied to the device when they are taken. What nobody took is the caller's to refuse.
namespace kvlm {

namespace {

constexpr std::string_view kPhase = "loading";

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

float element(const ConstTensorView& view, int64_t i) {
  switch (view.dtype()) {
    case DType::kF16:
      return to_float(view.as<f16>()[i]);
    case DType::kBF16:
      return to_float(view.as<bf16>()[i]);
    default:
      return view.as<float>()[i];
  }
}

template <class T>
void convert_into(Tensor& to, const ConstTensorView& from, const Watch* watch) {
  constexpr int64_t kBlock = int64_t{1} << 22;  // some milliseconds
  T* out = to.as<T>();
  const int64_t count = from.elements();
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    give_up_if_cancelled(watch);
    const int64_t end = std::min(count, begin + kBlock);
    for (int64_t i = begin; i < end; ++i) out[i] = from_float<T>(element(from, i));
  }
}

/// The tensor `name` has another shape than config.json implies.
[[noreturn]] void refuse_shape(std::string_view name, const Shape& found,
                               std::string_view expected) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("tensor {} has shape {}, but config.json implies {}; the weights and the "
                          "configuration do not belong together",
                          name, found.str(), expected));
}

Shape with_rows(const Shape& shape, int64_t rows) {
  std::vector<int64_t> dims;
  for (int axis = 0; axis < shape.rank(); ++axis) dims.push_back(axis == 0 ? rows : shape[axis]);
  return Shape(dims);
}

/// `unreadable` is empty for a tensor of `dtype`, which is one of weights.
void check_readable(std::string_view name, std::string_view unreadable, DType dtype) {
  if (unreadable.empty() && is_float(dtype)) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("tensor {} holds {}; weights must be f32, f16 or bf16: use the 16-bit "
                          "checkpoint that is not quantized",
                          name, unreadable.empty() ? dtype_name(dtype) : unreadable));
}

/// Runs of rows as one tensor.
std::shared_ptr<Tensor> put_together(std::span<const ConstTensorView> runs, const Shape& shape) {
  auto tensor =
      std::make_shared<Tensor>(runs.front().dtype(), shape, Device{}, MemoryUse::kWeights);
  std::byte* to = tensor->view().data();
  for (const ConstTensorView& run : runs) {
    std::memcpy(to, run.data(), run.bytes());
    to += run.bytes();
  }
  return tensor;
}

std::shared_ptr<Tensor> converted(const ConstTensorView& view, DType dtype, const Watch* watch) {
  auto tensor = std::make_shared<Tensor>(dtype, view.shape(), Device{}, MemoryUse::kWeights);
  if (dtype == DType::kF16) {
    convert_into<f16>(*tensor, view, watch);
  } else if (dtype == DType::kBF16) {
    convert_into<bf16>(*tensor, view, watch);
  } else {
    convert_into<float>(*tensor, view, watch);
  }
  return tensor;
}

void clear_now(TensorView view) {
  if (view.device().kind == DeviceKind::kCpu) {
    std::memset(view.data(), 0, view.bytes());
  } else {
    cuda::clear_now(view.data(), view.bytes());
  }
}

int64_t columns_of(const Shape& shape) {
  return shape.rank() == 1 || shape[0] == 0 ? 1 : shape.elements() / shape[0];
}

/// Throws where a row of `part` would go beyond a tensor of `shape`.
void check_fits(const WeightMap::SubTensor& part, const Shape& shape) {
  const int64_t last = part.first + (part.shape[0] - 1) * part.step;
  if (part.first >= 0 && part.step >= 1 && last < shape[0] &&
      columns_of(part.shape) <= columns_of(shape)) {
    return;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "take_together: a tensor {} of shape {} does not fit into {} from row {} in steps of {}",
          part.name, part.shape.str(), shape.str(), part.first, part.step));
}

/// Rows of `from`, each `bytes` long, to rows that begin `stride` bytes apart.
void copy_rows_now(std::byte* to, size_t stride, ConstTensorView from, size_t bytes, bool to_gpu) {
  const auto rows = static_cast<size_t>(from.shape()[0]);
  if (to_gpu || from.device().kind != DeviceKind::kCpu) {
    return cuda::copy_rows_now(to, stride, from.data(), bytes, rows);
  }
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * stride, from.data() + row * bytes, bytes);
  }
}

/// Copies `view`, in the format of `to`, to the rows that `part` names. Returns the bytes.
size_t put_part(Tensor& to, const WeightMap::SubTensor& part, ConstTensorView view,
                const Watch* watch) {
  std::shared_ptr<Tensor> changed;
  if (view.dtype() != to.dtype()) {
    changed = converted(view, to.dtype(), watch);
    view = std::as_const(*changed).view();
  }
  const auto bytes_of = [&](const Shape& shape) {
    return static_cast<size_t>(columns_of(shape)) * dtype_bytes(to.dtype());
  };
  const size_t row_bytes = bytes_of(to.shape());
  copy_rows_now(to.view().data() + static_cast<size_t>(part.first) * row_bytes,
                static_cast<size_t>(part.step) * row_bytes, view, bytes_of(view.shape()),
                to.view().device().kind != DeviceKind::kCpu);
  return view.bytes();
}

}  // namespace

void WeightMap::add(std::string name, ConstTensorView view, std::shared_ptr<const void> owner) {
  Entry entry{.view = view, .unreadable_dtype = {}};
  entry.added_as = name;
  insert(std::move(name), std::move(entry));
  if (owner && (owners_.empty() || owners_.back() != owner)) owners_.push_back(std::move(owner));
}

void WeightMap::add_unreadable(std::string name, std::string dtype) {
  insert(std::move(name), {.view = {}, .unreadable_dtype = std::move(dtype)});
}

void WeightMap::add_quantized(std::string name, std::shared_ptr<const QuantizedSource> source) {
  insert(std::move(name), {.view = {}, .unreadable_dtype = {}, .quantized = std::move(source)});
}

void WeightMap::insert(std::string name, Entry entry) {
  const auto [place, inserted] = tensors_.emplace(std::move(name), std::move(entry));
  if (!inserted) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("tensor {} is there twice; keep one of the weight files that hold it",
                            place->first));
  }
}

bool WeightMap::contains(std::string_view name) const noexcept {
  return tensors_.find(name) != tensors_.end();
}

std::optional<ConstTensorView> WeightMap::find(std::string_view name) const {
  const auto place = tensors_.find(name);
  if (place == tensors_.end() || !place->second.runs.empty()) return std::nullopt;
  const Entry& entry = place->second;
  if (!entry.unreadable_dtype.empty() || entry.quantized != nullptr ||
      !is_float(entry.view.dtype())) {
    return std::nullopt;
  }
  return entry.view;
}

namespace {

/// Some rows of every group of a quantized matrix.
class SlicedRows final : public QuantizedSource {
 public:
  /// `rows` of each of `groups` groups, from row `first` of it on.
  SlicedRows(std::shared_ptr<const QuantizedSource> whole, int64_t groups, int64_t first,
             int64_t rows)
      : QuantizedSource(whole->format()),
        whole_(std::move(whole)),
        stride_(format_.out / groups),
        first_(first),
        rows_(rows) {
    format_.out = groups * rows;
  }
  void read(int64_t first, int64_t count, QuantizedRows& to) const override {
    QuantizedRows one;
    one.resize(format_, 1);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i;
      whole_->read(row / rows_ * stride_ + first_ + row % rows_, 1, one);
      std::ranges::copy(one.codes, to.codes.begin() + i * format_.in);
      std::ranges::copy(one.scales, to.scales.begin() + i * format_.groups());
      if (format_.has_zeros) std::ranges::copy(one.zeros, to.zeros.begin() + i * format_.groups());
    }
  }

 private:
  std::shared_ptr<const QuantizedSource> whole_;
  int64_t stride_, first_, rows_;
};

}  // namespace

void WeightMap::split(std::string_view name, int64_t groups, std::span<const Slice> slices) {
  const auto place = tensors_.find(name);
  if (place == tensors_.end()) return;  // whoever takes a slice says what is missing
  const Entry packed = std::move(place->second);
  tensors_.erase(place);
  int64_t group_rows = 0;
  for (const Slice& slice : slices) group_rows += slice.rows;
  const bool quantized = packed.quantized != nullptr;
  const bool readable = packed.unreadable_dtype.empty();
  const Shape shape = quantized ? packed.quantized->format().shape() : packed.view.shape();
  if (readable && (shape.rank() == 0 || shape[0] != groups * group_rows)) {
    refuse_shape(name, shape, fmt::format("{} rows", groups * group_rows));
  }
  int64_t first = 0;
  for (const Slice& slice : slices) {
    Entry entry{.view = {}, .unreadable_dtype = packed.unreadable_dtype};
    entry.added_as = packed.added_as;
    if (quantized) {
      entry.quantized = std::make_shared<SlicedRows>(packed.quantized, groups, first, slice.rows);
      insert(slice.name, std::move(entry));
      first += slice.rows;
      continue;
    }
    if (readable && groups == 1) entry.view = packed.view.slice(first, slice.rows);
    for (int64_t group = 0; readable && groups > 1 && group < groups; ++group) {
      entry.runs.push_back(packed.view.slice(group * group_rows + first, slice.rows));
    }
    insert(slice.name, std::move(entry));
    first += slice.rows;
  }
}

ConstTensorView WeightMap::take(std::string_view name, const Shape& shape) {
  const size_t kept = owners_.size();
  const ConstTensorView taken = take_unplaced(name, shape, /*wide=*/false, device_);
  const ConstTensorView view = placed(taken);
  // What was made of it on the way to another device is not needed there.
  if (view.device() != taken.device()) {
    owners_.erase(owners_.begin() + static_cast<std::ptrdiff_t>(kept), owners_.end() - 1);
  }
  return view;
}

namespace {

/// Matrices with fewer outputs or inputs are not rounded.
constexpr int64_t kFewestOutputs = 16;
constexpr int64_t kFewestInputs = 32;

/// Memory for weights whose numbers nothing reads.
std::shared_ptr<Tensor> unfilled(const Shape& shape, DType dtype) {
  return std::make_shared<Tensor>(dtype, shape, Device{}, MemoryUse::kWeights);
}

/// A quantized matrix as floats of `dtype`.
std::shared_ptr<Tensor> widened(const QuantizedSource& source, DType dtype, const Watch* watch) {
  const QuantizedFormat& format = source.format();
  auto wide = std::make_shared<Tensor>(DType::kF32, format.shape(), Device{}, MemoryUse::kWeights);
  QuantizedRows row;
  row.resize(format, 1);
  for (int64_t o = 0; o < format.out; ++o) {
    give_up_if_cancelled(watch);
    source.read(o, 1, row);
    row.widen(format, 0, wide->as<float>() + o * format.in);
  }
  return dtype == DType::kF32 ? wide : converted(std::as_const(*wide).view(), dtype, watch);
}

}  // namespace

Weight WeightMap::take_matrix(std::string_view name, const Shape& shape, MatrixUse use) {
  const auto place = tensors_.find(name);
  const std::optional<WeightCode> code = rounding_.code_of(use);
  if (place != tensors_.end() && place->second.quantized != nullptr) {
    const std::shared_ptr<const QuantizedSource> source = place->second.quantized;
    if (source->format().shape() != shape) {
      refuse_shape(name, source->format().shape(), shape.str());
    }
    tensors_.erase(place);
    return laid_out(*source);
  }
  if (!code || shape[0] < kFewestOutputs || shape[1] < kFewestInputs) return take(name, shape);
  const size_t kept = owners_.size();
  const DType half =
      convert_to_.value_or(place == tensors_.end() ? DType::kBF16 : place->second.view.dtype());
  const auto update = updates_.find(name);
  if (rounded_ != nullptr && use == MatrixUse::kDecoder && place != tensors_.end()) {
    Rounded rounded{place->second.added_as, *code, {}};
    if (update != updates_.end()) rounded.update = update->second;
    rounded_->emplace(rounded.name, std::move(rounded));
  }
  // The sum with an update is rounded once.
  const ConstTensorView floats =
      take_unplaced(name, shape, /*wide=*/update != updates_.end(), Device{});
  const DType activations = half == DType::kF16 ? DType::kF16 : DType::kBF16;
  const auto source = round_matrix(std::string(name), floats, *code, activations);
  const Weight weight = laid_out(*source);
  // The floats are not needed any more, where they were made for this.
  owners_.erase(owners_.begin() + static_cast<std::ptrdiff_t>(kept), owners_.end() - 1);
  return weight;
}

Weight WeightMap::laid_out(const QuantizedSource& source) {
  QuantizedMatrix matrix;
  matrix.format = source.format();
  if (convert_to_ && *convert_to_ != DType::kF32) matrix.format.activations = *convert_to_;
  matrix.device = device_;
  if (planned_) matrix.device.kind = *planned_;
  matrix.exact = exact_;
  const auto bytes = static_cast<int64_t>(layout_of(matrix.format, matrix.device.kind).bytes);
  auto tensor = std::make_shared<Tensor>(DType::kU8, Shape{bytes}, device_, MemoryUse::kWeights);
  ThreadPool alone(1);
  ThreadPool& pool = pool_ != nullptr ? *pool_ : alone;
  if (planned_) {
    // Its bytes are all that is asked for.
  } else if (device_.kind == DeviceKind::kCpu) {
    lay_out(source, device_.kind, tensor->view().data(), pool);
  } else {
    Tensor here(DType::kU8, {bytes}, Device{}, MemoryUse::kWeights);
    lay_out(source, device_.kind, here.view().data(), pool);
    cuda::copy_now(tensor->view().data(), here.view().data(), here.bytes());
  }
  matrix.data = owned(std::move(tensor)).data();
  count(static_cast<size_t>(bytes));
  return Weight(matrix);
}

ConstTensorView WeightMap::owned(std::shared_ptr<Tensor> tensor) {
  const ConstTensorView view = std::as_const(*tensor).view();
  owners_.push_back(std::move(tensor));
  return view;
}

ConstTensorView WeightMap::placed(ConstTensorView view) {
  if (view.device() != device_) {
    auto tensor =
        std::make_shared<Tensor>(view.dtype(), view.shape(), device_, MemoryUse::kWeights);
    cuda::copy_now(tensor->view().data(), view.data(), view.bytes());
    view = owned(std::move(tensor));
  }
  count(view.bytes());
  return view;
}

void WeightMap::count(size_t bytes) {
  if (total_bytes_ == 0) return;
  // Short of the whole: some of it may be taken by nobody, and whoever loads ends the phase.
  loaded_bytes_ = std::min(loaded_bytes_ + bytes, total_bytes_ - 1);
  report_progress(watch_, kPhase, loaded_bytes_, total_bytes_);
}

ConstTensorView WeightMap::take_together(const Shape& shape, std::span<const SubTensor> parts) {
  return joined(shape, parts, /*wide=*/false);
}

ConstTensorView WeightMap::take_together_f32(const Shape& shape, std::span<const SubTensor> parts) {
  return joined(shape, parts, /*wide=*/true);
}

ConstTensorView WeightMap::joined(const Shape& shape, std::span<const SubTensor> parts, bool wide) {
  for (const SubTensor& part : parts) check_fits(part, shape);
  // What is taken is needed until it is copied, and then by nobody.
  const size_t kept = owners_.size();
  std::vector<ConstTensorView> views;
  for (const SubTensor& part : parts)
    views.push_back(take_unplaced(part.name, part.shape, wide, device_));
  const DType first = views.front().dtype();
  const bool alike = std::ranges::all_of(
      views, [first](const ConstTensorView& view) { return view.dtype() == first; });
  const DType dtype = wide || !alike ? DType::kF32 : first;
  auto tensor = std::make_shared<Tensor>(dtype, shape, device_, MemoryUse::kWeights);
  clear_now(tensor->view());
  for (size_t i = 0; i < parts.size(); ++i) {
    count(put_part(*tensor, parts[i], views[i], watch_));
  }
  owners_.resize(kept);
  return owned(std::move(tensor));
}

bool WeightMap::same(std::string_view a, std::string_view b) const {
  const auto first = tensors_.find(a);
  const auto second = tensors_.find(b);
  if (first == tensors_.end() || second == tensors_.end()) return false;
  if (first->second.quantized != nullptr || second->second.quantized != nullptr) return false;
  const ConstTensorView& x = first->second.view;
  const ConstTensorView& y = second->second.view;
  return x.dtype() == y.dtype() && x.shape() == y.shape() &&
         std::memcmp(x.data(), y.data(), x.bytes()) == 0;
}

void add_low_rank(Tensor& w, const WeightMap::LowRankUpdate& update, ThreadPool* pool) {
  const int64_t in = w.shape()[1];
  const int64_t rank = update.a->shape()[0];
  const auto* a = update.a->as<float>();
  const auto* b = update.b->as<float>();
  const auto add_row = [&](size_t row, int) {
    float* to = w.as<float>() + static_cast<int64_t>(row) * in;
    for (int64_t k = 0; k < rank; ++k) {
      const float factor = update.scale * b[static_cast<int64_t>(row) * rank + k];
      for (int64_t i = 0; i < in; ++i) to[i] += factor * a[k * in + i];
    }
  };
  const auto rows = static_cast<size_t>(w.shape()[0]);
  if (pool != nullptr) return pool->parallel_for(rows, add_row);
  for (size_t row = 0; row < rows; ++row) add_row(row, 0);
}

void WeightMap::add_update(std::string name, LowRankUpdate update) {
  const auto [place, inserted] = updates_.emplace(std::move(name), std::move(update));
  if (inserted) return;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("matrix {} has two updates; keep one", place->first));
}

std::vector<std::string> WeightMap::unused_updates() const {
  std::vector<std::string> names;
  for (const auto& [name, update] : updates_) names.push_back(name);
  return names;
}

ConstTensorView WeightMap::take_unplaced(std::string_view name, const Shape& shape, bool wide,
                                         Device making) {
  const auto place = updates_.find(name);
  if (place == updates_.end()) return take_stored(name, shape, wide, making);
  const LowRankUpdate update = std::move(place->second);
  updates_.erase(place);
  if (shape.rank() != 2 || update.a->shape()[1] != shape[1] || update.b->shape()[0] != shape[0]) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("the update of {} is for a matrix ({}, {}), but it is {}; the adapter "
                            "is not of this model",
                            name, update.b->shape()[0], update.a->shape()[1], shape.str()));
  }
  const size_t kept = owners_.size();
  const ConstTensorView stored = take_stored(name, shape, wide, making);
  if (planned_) return owned(unfilled(shape, wide ? DType::kF32 : stored.dtype()));
  const auto sum = converted(stored, DType::kF32, watch_);
  add_low_rank(*sum, update, pool_);
  const DType dtype = wide ? DType::kF32 : stored.dtype();
  auto result = dtype == DType::kF32 ? sum : converted(std::as_const(*sum).view(), dtype, watch_);
  owners_.resize(kept);
  return owned(std::move(result));
}

ConstTensorView WeightMap::take_stored(std::string_view name, const Shape& shape, bool wide,
                                       Device making) {
  const auto place = tensors_.find(name);
  if (place == tensors_.end() && make_) return owned(make_(name, shape, wide, making));
  if (place == tensors_.end()) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("the weights have no tensor {}, expected with shape {}; the checkpoint is "
                    "incomplete or of another architecture than its config.json says",
                    name, shape.str()));
  }
  const Entry& entry = place->second;
  if (entry.quantized != nullptr) {
    const std::shared_ptr<const QuantizedSource> source = entry.quantized;
    if (source->format().shape() != shape) {
      refuse_shape(name, source->format().shape(), shape.str());
    }
    tensors_.erase(place);
    const DType dtype = wide ? DType::kF32 : convert_to_.value_or(source->format().activations);
    return owned(planned_ ? unfilled(shape, dtype) : widened(*source, dtype, watch_));
  }
  ConstTensorView view = entry.runs.empty() ? entry.view : entry.runs.front();
  check_readable(name, entry.unreadable_dtype, view.dtype());
  Shape found = view.shape();
  if (!entry.runs.empty()) found = with_rows(found, found[0] * std::ssize(entry.runs));
  if (found != shape) refuse_shape(name, found, shape.str());
  std::shared_ptr<Tensor> whole;
  if (!entry.runs.empty()) {
    whole = put_together(entry.runs, shape);
    view = std::as_const(*whole).view();
  }
  tensors_.erase(place);
  if (!convert_to_ || view.dtype() == *convert_to_) return whole ? owned(std::move(whole)) : view;
  if (planned_ && shape.rank() > 1) return owned(unfilled(shape, *convert_to_));
  return owned(converted(view, *convert_to_, watch_));
}

ConstTensorView WeightMap::take_f32(std::string_view name, const Shape& shape) {
  const ConstTensorView view = take_unplaced(name, shape, /*wide=*/true, device_);
  if (view.dtype() == DType::kF32) return placed(view);
  auto tensor = converted(view, DType::kF32, watch_);
  const ConstTensorView wide = std::as_const(*tensor).view();
  if (wide.device() == device_) owners_.push_back(tensor);
  return placed(wide);
}

std::vector<std::string> WeightMap::remaining() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) names.push_back(name);
  return names;
}

void WeightMap::rename(const std::function<std::string(std::string_view)>& rule) {
  std::map<std::string, Entry, std::less<>> renamed;
  for (const auto& [name, entry] : tensors_) {
    std::string canonical = rule(name);
    if (canonical.empty()) continue;
    const auto [place, inserted] = renamed.emplace(std::move(canonical), entry);
    if (!inserted) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("tensor {} is another name of {}, which is there too; keep one", name,
                              place->first));
    }
  }
  tensors_ = std::move(renamed);
  for (const std::string& name : unused_updates()) {
    LowRankUpdate update = std::move(updates_.extract(name).mapped());
    std::string canonical = rule(name);
    add_update(canonical.empty() ? name : std::move(canonical), std::move(update));
  }
}

void WeightMap::follow(Watch* watch, size_t total_bytes) {
  watch_ = watch;
  total_bytes_ = total_bytes;
  loaded_bytes_ = 0;
  report_progress(watch_, kPhase, 0, total_bytes_);
}

}  // namespace kvlm
