#include "runtime/families/anyres.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/loading/fields.h"
#include "vision/feature_map.h"

namespace kvlm {

namespace {

constexpr std::string_view kPinpoints = "image_grid_pinpoints";
constexpr int64_t kMaxTiles = 1024;  // as best_canvas() has it

Pinpoints parse_pinpoints(const ConfigReader& reader, int tile, const Pinpoints& absent) {
  const nlohmann::json& list = reader.raw(kPinpoints);
  Pinpoints pinpoints;
  const auto fail = [&] {
    reader.fail(kPinpoints, fmt::format("a list of [height, width], multiples of the tile's {} "
                                        "pixels and {} tiles at most",
                                        tile, kMaxTiles));
  };
  const auto is_side = [&](const nlohmann::json& value) {
    return value.is_number_integer() && value.get<int64_t>() > 0 &&
           value.get<int64_t>() <= kMaxTiles * tile && value.get<int64_t>() % tile == 0;
  };
  if (list.is_null()) return absent;
  if (!list.is_array() || list.empty()) fail();
  for (const nlohmann::json& entry : list) {
    if (!entry.is_array() || entry.size() != 2 || !is_side(entry[0]) || !is_side(entry[1])) fail();
    const auto height = entry[0].get<int>();
    const auto width = entry[1].get<int>();
    if (int64_t{height / tile} * (width / tile) > kMaxTiles) fail();
    pinpoints.push_back({height, width});
  }
  return pinpoints;
}

}  // namespace

Pinpoints read_pinpoints(const ConfigReader& config, const ConfigReader& processor, int tile,
                         const Pinpoints& absent) {
  Pinpoints pinpoints = parse_pinpoints(processor, tile, absent);
  const auto sorted = [](Pinpoints list) {
    std::sort(list.begin(), list.end());
    return list;
  };
  if (sorted(pinpoints) == sorted(parse_pinpoints(config, tile, absent))) return pinpoints;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{} and {} list different image_grid_pinpoints; the two files do not "
                          "belong together",
                          processor.path(), config.path()));
}

AnyresPictures::AnyresPictures(const PreprocessSpec& spec, AnyresTiling tiling, int patch)
    : spec_(spec),
      normalization_(normalization_table(spec)),
      tiling_(std::move(tiling)),
      patches_{.patch = patch, .merge = 1, .depth = 1} {}

AnyresLayout AnyresPictures::layout(int height, int width) const {
  return anyres_layout(height, width, tiling_, tiling_.tile / patches_.patch);
}

int64_t AnyresPictures::rows(const PictureShape& shape) const {
  return layout(shape.height, shape.width).tokens();
}

VisualInput AnyresPictures::prepare(const Image& image) const {
  try {
    const AnyresLayout layout = this->layout(image.height, image.width);
    const std::vector<Image> tiles =
        anyres_tiles(image, tiling_, spec_.resample, spec_.resize_backend);
    return {cut_tiles(tiles, patches_, normalization_), layout.tokens(), pack_anyres(layout)};
  } catch (const Error& error) {
    if (image.name.empty()) throw;
    throw Error(error.code(), fmt::format("{}: {}", image.name, error.what()));
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {  // more than a vector ever holds
  }
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format(
          "image {} of {} x {} pixels cannot be cut into tiles: out of memory; scale it down first",
          image.name, image.width, image.height));
}

}  // namespace kvlm
