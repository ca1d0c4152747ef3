#include "kvcache/extensions/rotation.h"

#include <array>

#include "kernels/hadamard.h"

namespace kvlm {

Rotation::Rotation(const CacheTraits& traits)
    : traits_(traits), generated_(traits.device()), prompt_(traits.device()) {}

void Rotation::reserve(const Workload& load) {
  if (!traits_.plan().rotates_any()) return;
  const size_t heads = (traits_.q_per_kv() + 2) * traits_.kv_heads();
  generated_.grow(load.slots * heads * traits_.dim());
}

QkvRows Rotation::turned(int layer, const QkvRows& rows, bool generated, Stream& stream) {
  const Rotated rotated = traits_.plan().rotated(layer);
  if (rotated == Rotated::kNothing) return rows;
  const bool values = rotated == Rotated::kKeysAndValues;
  FloatSpace& space = generated ? generated_ : prompt_;
  space.grow(static_cast<size_t>(rows.q.elements() + rows.k.elements() + rows.v.elements()));
  float* to = space.data();
  std::array<HadamardRows, 3> jobs;
  size_t count = 0;
  for (const ConstTensorView& from : {rows.q, rows.k, values ? rows.v : ConstTensorView()}) {
    if (from.empty()) continue;
    jobs[count++] = {from, TensorView(to, from.dtype(), from.shape(), from.device())};
    to += from.elements();
  }
  hadamard(std::span(jobs).first(count), stream);
  const ConstTensorView q = rows.q.empty() ? rows.q : ConstTensorView(jobs[0].to);
  if (!values) return {q, jobs[count - 1].to, rows.v};
  return {q, jobs[count - 2].to, jobs[count - 1].to};
}

void Rotation::turn_back(TensorView rows, Stream& stream) {
  if (rows.empty()) return;
  const HadamardRows job{rows, rows};  // the matrix is its own inverse
  hadamard({&job, 1}, stream);
}

void Rotation::turn_generated_back(TensorView out, std::span<const StepRows> step, Stream& stream) {
  int64_t first = 0;
  for (size_t i = 0; i < step.size();) {
    int64_t rows = 0;
    for (; i < step.size() && !step[i].prompt; ++i) rows += step[i].rows;
    if (rows > 0) turn_back(out.slice(first, rows), stream);
    first += rows;
    if (i < step.size()) first += step[i++].rows;
  }
}

}  // namespace kvlm
