#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "runtime/loading/source.h"
#include "runtime/model.h"

namespace kvlm {

/// One line of published models that share a config layout, names, preprocessing and prompts.
struct Family {
  std::string_view name;
  /// config.json's model_type that belongs to it.
  std::string_view model_type;
  /// What the decoder will need from a cache, from config.json alone: a spec that cannot serve it
  /// is refused before any weight is read. Throws like load().
  CacheShape (*cache_shape)(const nlohmann::json& config);
  /// Assembles the model. Throws Error{kCorruptFile} or Error{kUnsupported} naming the file and
  /// field.
  std::unique_ptr<Model> (*load)(ModelSource source, const LoadOptions& options, Stream& stream);
};

/// Every family that is built in.
std::span<const Family> families();

/// The family of a config.json. Throws Error{kUnsupported} listing what is built in.
const Family& family_of(const nlohmann::json& config, const std::string& name);

}  // namespace kvlm
