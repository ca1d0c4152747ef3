#include "runtime/loading/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "kernels/base/buffer.h"
#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/config.h"
#include "runtime/loading/mapped_file.h"
#include "runtime/loading/quantization.h"
#include "runtime/loading/quantized_tensors.h"
#include "runtime/loading/safetensors.h"

// A model folder: config.json and its companions as checked JSON, and the tensors of its
// safetensors files, mapped and not copied. The index file, if there is one, must agree with the
// files. Names that leave the folder, links to nothing and the pointers that Git LFS leaves are
// refused with what to do.
namespace kvlm {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;  // `json` is a member of Checkpoint

static_assert(std::endian::native == std::endian::little, "tensors are used as they lie on disk");

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
// The largest published vocabularies and indices are some 35 MB, configurations some hundred kB.
constexpr size_t kMaxTextBytes = size_t{128} << 20;
constexpr size_t kMaxConfigBytes = size_t{16} << 20;

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kCorruptFile, message);
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name.find("..") == std::string_view::npos &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

/// Follows links.
bool target_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Maps a file of the folder. Refuses what `git clone` leaves without Git LFS and links without
/// their target, which is how an interrupted download looks in the Hugging Face cache.
std::shared_ptr<const MappedFile> map_file(const fs::path& folder, const std::string& name) {
  const fs::path path = folder / name;
  if (!target_exists(path)) {
    fail(
        fmt::format("{}: a link to a file that does not exist; the download is incomplete, repeat "
                    "it (hf download ORG/NAME)",
                    path.string()));
  }
  auto file = std::make_shared<const MappedFile>(path, path.string());
  constexpr std::string_view kPointer = "version https://git-lfs.github.com/spec/";
  const std::span<const std::byte> bytes = file->bytes();
  if (bytes.size() >= kPointer.size() &&
      std::memcmp(bytes.data(), kPointer.data(), kPointer.size()) == 0) {
    fail(
        fmt::format("{}: a Git LFS pointer, not the file itself; run `git lfs pull` in the folder "
                    "or download it with `hf download ORG/NAME`",
                    path.string()));
  }
  return file;
}

/// True for links too, whether or not their target exists.
bool has_entry(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

size_t max_bytes_of(std::string_view name) {
  return name.starts_with("tokenizer.") || name == kIndexFile ? kMaxTextBytes : kMaxConfigBytes;
}

/// A file that is read as a whole, or nothing if it does not exist.
std::shared_ptr<const MappedFile> open_text(const fs::path& folder, const std::string& name) {
  if (!has_entry(folder / name)) return nullptr;
  auto file = map_file(folder, name);
  if (file->bytes().empty()) {
    fail(fmt::format("{}: an empty file, as an interrupted copy leaves it; download it again",
                     (folder / name).string()));
  }
  if (file->bytes().size() > max_bytes_of(name)) {
    fail(fmt::format("{}: {} bytes long, but at most {} are read; download it again",
                     (folder / name).string(), file->bytes().size(), max_bytes_of(name)));
  }
  return file;
}

/// Null if there is no such file.
Json read_json(const fs::path& folder, const std::string& name) {
  const auto file = open_text(folder, name);
  return file ? parse_json(text_of(*file), (folder / name).string()) : Json();
}

/// The DType of the file's word, or nothing for those that no kernel reads.
std::optional<DType> readable_dtype(std::string_view word) {
  if (word == "F32") return DType::kF32;
  if (word == "F16") return DType::kF16;
  if (word == "BF16") return DType::kBF16;
  if (word == "I32") return DType::kI32;
  if (word == "U8") return DType::kU8;
  return std::nullopt;
}

/// At most four dimensions stay as they are; more become (first, product of the others), which
/// parse_safetensors has found not to overflow.
Shape shape_of(const std::vector<int64_t>& dims) {
  if (dims.size() <= Shape::kMaxRank) return Shape(dims);
  int64_t rest = 1;
  for (size_t i = 1; i < dims.size(); ++i) rest *= dims[i];
  return {dims[0], rest};
}

struct Shard {
  std::shared_ptr<const MappedFile> file;
  SafetensorsHeader header;

  const std::byte* data(const SafetensorsEntry& entry) const {
    return file->bytes().data() + header.data_offset + entry.begin;
  }
  /// The address of a mapping is a multiple of the page size, so the offset decides.
  bool is_unaligned(const SafetensorsEntry& entry) const {
    const std::optional<DType> dtype = readable_dtype(entry.dtype);
    return dtype && (header.data_offset + entry.begin) % dtype_bytes(*dtype) != 0;
  }
};

Shard open_shard(const fs::path& folder, const std::string& name) {
  Shard shard;
  shard.file = map_file(folder, name);
  shard.header = parse_safetensors(shard.file->bytes(), (folder / name).string());
  return shard;
}

/// Tells what the folder holds instead of weights, and what to do about it.
[[noreturn]] void fail_without_weights(const fs::path& folder) {
  std::vector<std::string> safetensors;
  std::string foreign;
  bool is_sharded = false;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (extension == ".safetensors") {
      safetensors.push_back(printable(name));
      is_sharded = is_sharded || name.starts_with("model-");
    }
    constexpr std::array<std::string_view, 7> kForeign = {".bin", ".pt",   ".pth",    ".gguf",
                                                          ".h5",  ".ckpt", ".msgpack"};
    if (std::ranges::find(kForeign, extension) != kForeign.end() &&
        (foreign.empty() || name.starts_with("pytorch_model"))) {
      foreign = printable(name);
    }
  }
  std::ranges::sort(safetensors);
  if (is_sharded) {
    fail(fmt::format("{}: holds the shard {} but no {}; download that file too", folder.string(),
                     safetensors.front(), kIndexFile));
  }
  if (!safetensors.empty()) {
    fail(fmt::format(
        "{}: holds no {} and no {}, only {}; if that is the whole model, name it {}, "
        "and if it is an adapter, merge it into its base model first",
        folder.string(), kSingleFile, kIndexFile, fmt::join(safetensors, ", "), kSingleFile));
  }
  if (!foreign.empty()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: its weights are in {}, which is not supported; use the "
                            "safetensors of the same model, or load it in transformers and call "
                            "save_pretrained(FOLDER, safe_serialization=True)",
                            folder.string(), foreign));
  }
  fail(
      fmt::format("{}: holds no weights, neither {} nor {}; download the whole model (hf download "
                  "ORG/NAME)",
                  folder.string(), kSingleFile, kIndexFile));
}

void check_folder(const fs::path& folder) {
  std::error_code ignored;
  const fs::file_status status = fs::status(folder, ignored);
  if (!fs::exists(status)) {
    fail(fmt::format("{}: there is no such folder; give the folder of a checkpoint",
                     folder.string()));
  }
  if (!fs::is_directory(status)) {
    fail(fmt::format("{}: is a file; give the folder that holds config.json and the weights",
                     folder.string()));
  }
  std::error_code unreadable;
  const bool is_empty = fs::is_empty(folder, unreadable);
  if (unreadable) {
    fail(fmt::format("{}: cannot read the folder: {}", folder.string(), unreadable.message()));
  }
  if (is_empty) {
    fail(
        fmt::format("{}: the folder is empty and has no config.json; download a model into it (hf "
                    "download ORG/NAME "
                    "--local-dir FOLDER)",
                    folder.string()));
  }
  if (!has_entry(folder / "config.json")) {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
      if (entry.path().extension() != ".gguf") continue;
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: holds {}, and GGUF is not read; give the folder of the "
                              "safetensors checkpoint that it was made from",
                              folder.string(), printable(entry.path().filename().string())));
    }
    fail(
        fmt::format("{}: has no config.json; give the folder of a whole checkpoint, as "
                    "transformers saves it",
                    folder.string()));
  }
}

}  // namespace

struct Checkpoint::State {
  explicit State(fs::path path) : folder(std::move(path)) {}

  fs::path folder;
  Json config;
  std::vector<Shard> shards;
  std::vector<std::string> warnings;
  std::optional<QuantizationConfig> quantization;
  size_t weight_bytes = 0;

  void open_weights();
  void open_sharded();
  void check_against_index(const std::map<std::string, std::string>& shard_of_tensor,
                           const std::vector<std::string>& shard_names);
};

void Checkpoint::State::open_weights() {
  if (has_entry(folder / kSingleFile)) {
    shards.push_back(open_shard(folder, std::string(kSingleFile)));
  } else if (has_entry(folder / kIndexFile)) {
    open_sharded();
  } else {
    fail_without_weights(folder);
  }
  size_t unaligned = 0;
  for (const Shard& shard : shards) {
    for (const SafetensorsEntry& entry : shard.header.entries) {
      weight_bytes += entry.end - entry.begin;
      if (shard.is_unaligned(entry)) ++unaligned;
    }
  }
  if (unaligned > 0) {
    warnings.push_back(
        fmt::format("{}: {} tensors are not aligned in the file and are copied; "
                    "saving the checkpoint again with a newer safetensors avoids it",
                    folder.string(), unaligned));
  }
}

void Checkpoint::State::open_sharded() {
  const std::string index_path = (folder / kIndexFile).string();
  const Json index = read_json(folder, std::string(kIndexFile));
  const Json* map = nullptr;
  if (index.is_object() && index.contains("weight_map")) map = &index["weight_map"];
  if (map == nullptr || !map->is_object() || map->empty()) {
    fail(
        fmt::format("{}: has no weight_map from tensors to shards; download it again", index_path));
  }
  std::map<std::string, std::string> shard_of_tensor;
  std::vector<std::string> shard_names;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) {
      fail(
          fmt::format("{}: tensor {} is mapped to something that is not a file name; download the "
                      "index again",
                      index_path, printable(tensor)));
    }
    const auto& name = shard.get_ref<const std::string&>();
    if (!is_plain_name(name)) {
      fail(
          fmt::format("{}: tensor {} is mapped to \"{}\", which is not a plain file name; do not "
                      "trust this checkpoint",
                      index_path, printable(tensor), printable(name)));
    }
    shard_of_tensor.emplace(tensor, name);
    shard_names.push_back(name);
  }
  std::ranges::sort(shard_names);
  shard_names.erase(std::unique(shard_names.begin(), shard_names.end()), shard_names.end());

  std::vector<std::string> missing;
  for (const std::string& name : shard_names) {
    if (!target_exists(folder / name)) missing.push_back(printable(name));
  }
  if (!missing.empty()) {
    fail(
        fmt::format("{}: {} of {} shards are missing, the first is {}; the download is "
                    "incomplete, repeat it (hf download ORG/NAME)",
                    index_path, missing.size(), shard_names.size(), missing.front()));
  }
  for (const std::string& name : shard_names) shards.push_back(open_shard(folder, name));
  check_against_index(shard_of_tensor, shard_names);
}

void Checkpoint::State::check_against_index(
    const std::map<std::string, std::string>& shard_of_tensor,
    const std::vector<std::string>& shard_names) {
  const std::string index_path = (folder / kIndexFile).string();
  std::map<std::string_view, size_t> found;  // tensor -> shard
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const SafetensorsEntry& entry : shards[i].header.entries) {
      const auto [place, inserted] = found.emplace(entry.name, i);
      if (!inserted) {
        fail(
            fmt::format("{}: tensor {} is in two shards, {} and {}; the files do not belong "
                        "together, download them again",
                        index_path, printable(entry.name), printable(shard_names[place->second]),
                        printable(shard_names[i])));
      }
    }
  }
  for (const auto& [tensor, shard] : shard_of_tensor) {
    const auto place = found.find(tensor);
    if (place == found.end() || shard_names[place->second] != shard) {
      fail(
          fmt::format("{}: tensor {} is not in its shard {}; the files do not belong together, "
                      "download them again",
                      index_path, printable(tensor), printable(shard)));
    }
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    std::string first;
    const size_t unlisted =
        std::erase_if(shards[i].header.entries, [&](const SafetensorsEntry& entry) {
          if (shard_of_tensor.contains(entry.name)) return false;
          if (first.empty()) first = printable(entry.name);
          return true;
        });
    if (unlisted > 0) {
      warnings.push_back(
          fmt::format("{}: {} tensors are not listed in {} and are ignored, the "
                      "first is {}",
                      printable(shard_names[i]), unlisted, kIndexFile, first));
    }
  }
}

nlohmann::json read_config(const fs::path& folder) {
  check_folder(folder);
  Json config = read_json(folder, "config.json");
  if (!config.is_object()) {
    fail(fmt::format("{}: is not an object; download it again", (folder / "config.json").string()));
  }
  return config;
}

Checkpoint::Checkpoint(fs::path folder) : state_(std::make_unique<State>(std::move(folder))) {
  state_->config = read_config(state_->folder);
  // Before the weights: their names and types are the quantizer's.
  state_->quantization =
      read_quantization(state_->folder, state_->config,
                        [&](const std::string& file) { return read_json(state_->folder, file); });
  if (state_->quantization) state_->warnings = state_->quantization->warnings;
  state_->open_weights();
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const fs::path& Checkpoint::folder() const noexcept { return state_->folder; }

const nlohmann::json& Checkpoint::config() const noexcept { return state_->config; }

namespace {

void check_plain(const std::string& file_name) {
  if (is_plain_name(file_name)) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("\"{}\" is not a plain file name of a checkpoint folder", printable(file_name)));
}

}  // namespace

nlohmann::json Checkpoint::json(const std::string& file_name) const {
  check_plain(file_name);
  return read_json(state_->folder, file_name);
}

std::optional<std::string> Checkpoint::text(const std::string& file_name) const {
  check_plain(file_name);
  const auto file = open_text(state_->folder, file_name);
  if (!file) return std::nullopt;
  return std::string(text_of(*file));
}

namespace {

/// Adds a tensor as it lies in its file, copied only if it is not aligned.
void add_tensor(WeightMap& weights, const std::string& name, const StoredTensor& tensor) {
  const std::optional<DType> dtype = readable_dtype(tensor.dtype);
  if (!dtype) return weights.add_unreadable(name, tensor.dtype);
  const Shape shape = shape_of(tensor.shape);
  const ConstTensorView view(tensor.data, *dtype, shape);
  if (reinterpret_cast<uintptr_t>(tensor.data) % dtype_bytes(*dtype) == 0) {
    return weights.add(name, view, tensor.owner);
  }
  auto copy = std::make_shared<Buffer>(Device{}, view.bytes(), MemoryUse::kWeights);
  // An empty tensor may be unaligned too; its buffer has no address to copy to.
  if (copy->bytes() > 0) std::memcpy(copy->data(), tensor.data, copy->bytes());
  const std::byte* data = copy->data();
  weights.add(name, {data, *dtype, shape}, std::move(copy));
}

/// The half format of most of a checkpoint's floats: bf16 if it has none.
DType half_format(const std::map<std::string, StoredTensor>& tensors) {
  size_t halves = 0;
  size_t brains = 0;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.dtype == "F16") ++halves;
    if (tensor.dtype == "BF16") ++brains;
  }
  return halves > brains ? DType::kF16 : DType::kBF16;
}

}  // namespace

std::map<std::string, StoredTensor> Checkpoint::tensors() const {
  std::map<std::string, StoredTensor> tensors;
  for (const Shard& shard : state_->shards) {
    for (const SafetensorsEntry& entry : shard.header.entries) {
      tensors.emplace(entry.name, StoredTensor{entry.dtype, entry.shape, shard.data(entry),
                                               entry.end - entry.begin, shard.file});
    }
  }
  return tensors;
}

WeightMap Checkpoint::take_weights(bool read_ahead) const {
  WeightMap weights;
  std::map<std::string, StoredTensor> tensors = this->tensors();
  for (const Shard& shard : state_->shards) {
    if (read_ahead) shard.file->read_ahead();
  }
  take_quantized(tensors, state_->quantization, half_format(tensors), weights);
  for (const auto& [name, tensor] : tensors) add_tensor(weights, name, tensor);
  return weights;
}

bool Checkpoint::is_quantized() const noexcept { return state_->quantization.has_value(); }

size_t Checkpoint::weight_bytes(std::optional<DType> dtype) const noexcept {
  if (!dtype) return state_->weight_bytes;
  size_t bytes = 0;
  for (const Shard& shard : state_->shards) {
    for (const SafetensorsEntry& entry : shard.header.entries) {
      const size_t length = entry.end - entry.begin;
      const bool is_float = entry.dtype == "F32" || entry.dtype == "F16" || entry.dtype == "BF16";
      bytes += is_float ? length / dtype_bytes(*readable_dtype(entry.dtype)) * dtype_bytes(*dtype)
                        : length;
    }
  }
  return bytes;
}

const std::vector<std::string>& Checkpoint::warnings() const noexcept { return state_->warnings; }

namespace {

ModelSource source_of(const Checkpoint& checkpoint, const std::string& name, bool read_ahead) {
  ModelSource source;
  source.name = name;
  source.config = checkpoint.config();
  source.file = [&checkpoint](const std::string& file) { return checkpoint.text(file); };
  source.weights = checkpoint.take_weights(read_ahead);
  return source;
}

}  // namespace

ModelSource open_source(const Checkpoint& checkpoint, const std::string& name) {
  return source_of(checkpoint, name, /*read_ahead=*/true);
}

ModelSource plan_source(const Checkpoint& checkpoint, const std::string& name, DeviceKind device) {
  ModelSource source = source_of(checkpoint, name, /*read_ahead=*/false);
  source.weights.plan(device);
  return source;
}

}  // namespace kvlm
