#include "kernels/base/weights.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"

namespace kvlm {

namespace {

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
void convert_into(Tensor& to, const ConstTensorView& from) {
  T* out = to.as<T>();
  for (int64_t i = 0; i < from.elements(); ++i) out[i] = from_float<T>(element(from, i));
}

std::shared_ptr<Tensor> converted(const ConstTensorView& view, DType dtype) {
  auto tensor = std::make_shared<Tensor>(dtype, view.shape(), Device{}, MemoryUse::kWeights);
  if (dtype == DType::kF16) {
    convert_into<f16>(*tensor, view);
  } else if (dtype == DType::kBF16) {
    convert_into<bf16>(*tensor, view);
  } else {
    convert_into<float>(*tensor, view);
  }
  return tensor;
}

}  // namespace

void WeightMap::add(std::string name, ConstTensorView view, std::shared_ptr<const void> owner) {
  insert(std::move(name), {view, {}});
  if (owner && (owners_.empty() || owners_.back() != owner)) owners_.push_back(std::move(owner));
}

void WeightMap::add_unreadable(std::string name, std::string dtype) {
  insert(std::move(name), {{}, std::move(dtype)});
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

std::optional<ConstTensorView> WeightMap::take_if(std::string_view name, const Shape& shape) {
  if (!contains(name)) return std::nullopt;
  return take(name, shape);
}

ConstTensorView WeightMap::take(std::string_view name, const Shape& shape) {
  return placed(take_unplaced(name, shape, /*wide=*/false));
}

ConstTensorView WeightMap::placed(ConstTensorView view) {
  if (view.device() == device_) return view;
  auto tensor = std::make_shared<Tensor>(view.dtype(), view.shape(), device_, MemoryUse::kWeights);
  cuda::copy_now(tensor->view().data(), view.data(), view.bytes());
  owners_.push_back(tensor);
  return std::as_const(*tensor).view();
}

bool WeightMap::same(std::string_view a, std::string_view b) const {
  const auto first = tensors_.find(a);
  const auto second = tensors_.find(b);
  if (first == tensors_.end() || second == tensors_.end()) return false;
  const ConstTensorView& x = first->second.view;
  const ConstTensorView& y = second->second.view;
  return x.dtype() == y.dtype() && x.shape() == y.shape() &&
         std::memcmp(x.data(), y.data(), x.bytes()) == 0;
}

ConstTensorView WeightMap::take_unplaced(std::string_view name, const Shape& shape, bool wide) {
  const auto place = tensors_.find(name);
  if (place == tensors_.end() && make_) {
    std::shared_ptr<Tensor> made = make_(name, shape, wide);
    owners_.push_back(made);
    return std::as_const(*made).view();
  }
  if (place == tensors_.end()) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("the weights have no tensor {}, expected with shape {}; the checkpoint is "
                    "incomplete or of another architecture than its config.json says",
                    name, shape.str()));
  }
  const ConstTensorView view = place->second.view;
  const std::string& unreadable = place->second.unreadable_dtype;
  if (!unreadable.empty() || !is_float(view.dtype())) {
    const std::string_view found = unreadable.empty() ? dtype_name(view.dtype()) : unreadable;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("tensor {} holds {}; weights must be f32, f16 or bf16: use a "
                            "checkpoint that is not quantised",
                            name, found));
  }
  if (view.shape() != shape) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("tensor {} has shape {}, but config.json implies {}; the weights and the "
                    "configuration do not belong together",
                    name, view.shape().str(), shape.str()));
  }
  tensors_.erase(place);
  return view;
}

ConstTensorView WeightMap::take_f32(std::string_view name, const Shape& shape) {
  const ConstTensorView view = take_unplaced(name, shape, /*wide=*/true);
  if (view.dtype() == DType::kF32) return placed(view);
  auto tensor = converted(view, DType::kF32);
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
                  fmt::format("tensor {} is a second spelling of {}, which is there too; keep one",
                              name, place->first));
    }
  }
  tensors_ = std::move(renamed);
}

void WeightMap::convert(DType dtype) {
  for (auto& [name, entry] : tensors_) {
    ConstTensorView& view = entry.view;
    if (view.empty() || view.dtype() == dtype || !is_float(view.dtype())) continue;
    auto tensor = converted(view, dtype);
    view = std::as_const(*tensor).view();
    owners_.push_back(std::move(tensor));
  }
}

}  // namespace kvlm
