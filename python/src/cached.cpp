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
nb::object rows(const Held& prompt, const CachedLayer& layer, const std::vector<float>& numbers) {
  const auto slots = static_cast<size_t>(layer.slots);
  const std::array shape{layer.kept.size() / slots, slots, numbers.size() / layer.kept.size()};
  return view(prompt, numbers, shape);
}

/// (kv_heads, slots)
template <class T>
nb::object each(const Held& prompt, const CachedLayer& layer, const std::vector<T>& numbers) {
  const auto slots = static_cast<size_t>(layer.slots);
  return view(prompt, numbers, std::array{numbers.size() / slots, slots});
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
      .def(
          "keys",
          [](const Held& prompt, int number) {
            const CachedLayer& layer = layer_of(prompt, number);
            return rows(prompt, layer, layer.keys);
          },
          "layer"_a)
      .def(
          "values",
          [](const Held& prompt, int number) {
            const CachedLayer& layer = layer_of(prompt, number);
            return rows(prompt, layer, layer.values);
          },
          "layer"_a)
      .def(
          "kept",
          [](const Held& prompt, int number) {
            const CachedLayer& layer = layer_of(prompt, number);
            return each(prompt, layer, layer.kept);
          },
          "layer"_a)
      .def(
          "tags",
          [](const Held& prompt, int number) {
            const CachedLayer& layer = layer_of(prompt, number);
            return each(prompt, layer, layer.tags);
          },
          "layer"_a);
}

}  // namespace kvlm::python
