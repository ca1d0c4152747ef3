#include "runtime/family_model.h"

#include <utility>

#include "kernels/elementwise.h"

namespace kvlm {

size_t FamilyModel::weight_bytes() const noexcept {
  return visual_weight_bytes() + decoder_->weight_bytes();
}

void FamilyModel::set_decoder(std::unique_ptr<Decoder> decoder, const LoadOptions& options) {
  decoder_ = std::move(decoder);
  dtype_ = options.dtype.value_or(decoder_->weight_dtype());
}

VisualRows pack_visuals(Tensor features, std::span<const int64_t> feature_rows,
                        std::span<const VisualInput* const> visuals, ConstTensorView newline,
                        Stream& stream) {
  VisualRows result;
  // Views into them must stay; and what is freed while a GPU works is waited for.
  result.tensors.reserve(2 * visuals.size() + 1);
  result.tensors.push_back(std::move(features));
  const ConstTensorView all = result.tensors.front().view();
  const int64_t hidden = all.shape()[1];
  int64_t first = 0;
  for (size_t i = 0; i < visuals.size(); ++i) {
    const ConstTensorView own = all.slice(first, feature_rows[i]);
    first += feature_rows[i];
    if (visuals[i]->packing.indices.empty()) {
      result.each.push_back({own, {}});
      continue;
    }
    Tensor entries(DType::kF32, {feature_rows[i] + 1, hidden}, stream.device());
    copy(entries.view().slice(0, feature_rows[i]), own, stream);
    copy(entries.view().slice(feature_rows[i], 1), newline.reshape({1, hidden}), stream);
    Tensor rows(DType::kF32, {visuals[i]->rows, hidden}, stream.device());
    blend_rows(rows, entries, visuals[i]->packing, stream);
    result.tensors.push_back(std::move(entries));
    result.tensors.push_back(std::move(rows));
    result.each.push_back({result.tensors.back().view(), {}});
  }
  return result;
}

}  // namespace kvlm
