#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/weight_map.h"
#include "runtime/loading/source.h"
#include "runtime/loading/stored_tensor.h"

namespace kvlm {

/// config.json of a model folder, which needs no weights. Throws Error{kCorruptFile} naming the
/// file and the defect, larger than 16 MiB among them.
nlohmann::json read_config(const std::filesystem::path& folder);

/// A model folder as published on the Hugging Face hub: config files, tokenizer files and
/// safetensors weights, single or sharded. Every byte of it is treated as hostile.
class Checkpoint {
 public:
  /// Opens the folder and maps its weights read-only: model.safetensors if it is there, otherwise
  /// the shards that model.safetensors.index.json lists. Checks every header and the index in full
  /// (safetensors.h; shard names are plain, every listed tensor is in its shard and in no other)
  /// before any tensor is looked at. Reads no tensor data yet.
  /// Throws Error{kCorruptFile} naming the file and the defect; Error{kUnsupported} for weights
  /// that exist only in another format (pytorch_model.bin), or quantized in a way that is not read,
  /// naming the cure.
  /// A file that another process truncates while it is mapped ends this process with SIGBUS, for
  /// which mapped_file_at() names the file: nothing short of copying every weight would prevent
  /// that, and we do not.
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
  /// Throws Error{kInvalidArgument} if `file_name` is not a plain name, Error{kCorruptFile} if the
  /// file is unreadable, a Git LFS pointer or too large (16 MiB; vocabularies and the index 128).
  std::optional<std::string> text(const std::string& file_name) const;
  /// All tensors under their names on disk; views into the mapping, which the map keeps alive. A
  /// view is aligned to its element type, not more: a tensor that the file left unaligned is
  /// copied. Quantized matrices are under the name of the matrix that they stand for. More than
  /// four dimensions become two (WeightMap::take). With `read_ahead` the system is asked to read
  /// the files from now on.
  WeightMap take_weights(bool read_ahead = true) const;
  /// All tensors as they lie in the files, under their names there.
  std::map<std::string, StoredTensor> tensors() const;
  /// Whether config.json says that matrices are quantized (quantization.h).
  bool is_quantized() const noexcept;
  /// Total bytes of the tensors, in the dtypes on disk, or with floats converted to `dtype`.
  size_t weight_bytes(std::optional<DType> dtype = {}) const noexcept;
  /// Things worth telling the user once (tensors of a shard that the index does not list, ...).
  const std::vector<std::string>& warnings() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A checkpoint folder as a source; its weights are mapped, not read.
ModelSource open_source(const Checkpoint& checkpoint, const std::string& name);
/// The same for a model that is only to say how large it is (WeightMap::plan): no weight is read.
ModelSource plan_source(const Checkpoint& checkpoint, const std::string& name, DeviceKind device);

}  // namespace kvlm
