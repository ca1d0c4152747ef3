#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/weights.h"

namespace kvlm {

/// A model folder as published on the Hugging Face hub: config files, tokenizer files and
/// safetensors weights, single or sharded. Every byte of it is treated as hostile.
class Checkpoint {
 public:
  /// Opens the folder and maps its weights read-only. Checks models.md 10.2 and 10.3 in full.
  /// Throws Error{kCorruptFile} naming the file and the defect; Error{kUnsupported} for weights
  /// that exist only in another format (pytorch_model.bin), naming the cure.
  explicit Checkpoint(std::filesystem::path folder);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::filesystem::path& folder() const noexcept;
  /// config.json.
  const nlohmann::json& config() const noexcept;
  /// A further JSON file of the folder, or null (JSON null) if it does not exist.
  /// Throws Error{kCorruptFile} if it exists and is damaged (duplicate keys included).
  nlohmann::json json(const std::string& file_name) const;
  /// The bytes of a further file of the folder, or nothing if it does not exist.
  std::optional<std::string> text(const std::string& file_name) const;
  /// All tensors under their names on disk; views into the mapping (copies where the file left a
  /// tensor unaligned). Callable once.
  WeightMap take_weights();
  /// Total bytes of the tensors.
  size_t weight_bytes() const noexcept;
  /// Things worth telling the user once (tensors of a shard that the index does not list, ...).
  const std::vector<std::string>& warnings() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
