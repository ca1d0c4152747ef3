#include "python/src/cached.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>

#include "runtime/generator.h"

// What a prompt left in the cache, as arrays that keep the one copy of it alive.
namespace nb = nanobind;

namespace kvlm::python {

namespace {

using Held = std::shared_ptr<CachedPrompt>;

template <class T, size_t N>
nb::object view(const Held& prompt, const std::vector<T>& numbers,
                const std::array<size_t, N>& shape) {
  const nb::capsule owner(new Held(prompt),
                          [](void* held) noexcept { delete static_cast<Held*>(held); });
  return nb::cast(nb::ndarray<nb::array_api, const T, nb::device::cpu>(numbers.data(), shape.size(),
                                                                       shape.data(), owner));
}

const CachedLayer& layer_of(const Held& prompt, int layer) {
  if (layer < 0 || layer >= static_cast<int>(prompt->layers.size())) {
    throw nb::index_error("there is no such layer");
  }
  return prompt->layers[static_cast<size_t>(layer)];
}

/// (kv_heads, slots, head_dim)
template <std::vector<float> CachedLayer::*numbers>
nb::object rows(const Held& prompt, int number) {
  const CachedLayer& layer = layer_of(prompt, number);
  const auto slots = static_cast<size_t>(layer.slots);
  const size_t head_dim = (layer.*numbers).size() / layer.kept.size();
  return view(prompt, layer.*numbers, std::array{layer.kept.size() / slots, slots, head_dim});
}

/// (kv_heads, slots)
template <auto CachedLayer::*numbers>
nb::object each(const Held& prompt, int number) {
  const CachedLayer& layer = layer_of(prompt, number);
  const auto slots = static_cast<size_t>(layer.slots);
  return view(prompt, layer.*numbers, std::array{layer.kept.size() / slots, slots});
}

}  // namespace

void add_cached_prompt(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<CachedPrompt>(m, "CachedPrompt")
      .def_ro("tokens", &CachedPrompt::ids)
      .def_prop_ro("layers", [](const CachedPrompt& prompt) { return prompt.layers.size(); })
      .def("modality",
           [](const Held& prompt) {
             return view(prompt, prompt->modality, std::array{prompt->modality.size()});
           })
      .def("logits",
           [](const Held& prompt) {
             return view(prompt, prompt->logits, std::array{prompt->logits.size()});
           })
      .def("keys", &rows<&CachedLayer::keys>, "layer"_a)
      .def("values", &rows<&CachedLayer::values>, "layer"_a)
      .def("kept", &each<&CachedLayer::kept>, "layer"_a)
      .def("tags", &each<&CachedLayer::tags>, "layer"_a);
}

}  // namespace kvlm::python
