#include "runtime/saving/rounded_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kernels/quantized/round.h"

// A checkpoint with some of its matrices rounded. The header of the new file is known from shapes
// alone; then the tensors follow one by one, so that no more than one matrix is in memory.
namespace kvlm {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Rounded = WeightMap::Rounded;

constexpr int64_t kGroup = 32;

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorCode::kCorruptFile, what); }

/// A tensor of the new file.
struct Output {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  size_t bytes;
};

std::string without_suffix(const std::string& name) {
  constexpr std::string_view kWeight = ".weight";
  return name.substr(0, name.size() - kWeight.size());
}

int bits_of(const Rounded& rounded) { return static_cast<int>(code_bits(rounded.code)); }

/// What a rounded matrix becomes, in the order in which write_matrix() writes it.
std::vector<Output> outputs_of(const Rounded& rounded, const StoredTensor& tensor) {
  const std::string prefix = without_suffix(rounded.name);
  const int64_t out = tensor.shape[0];
  const int64_t in = tensor.shape[1];
  const int64_t words = in * bits_of(rounded) / 32;
  const int64_t groups = in / kGroup;
  return {{prefix + ".weight_packed", "I32", {out, words}, static_cast<size_t>(out * words * 4)},
          {prefix + ".weight_scale", "F16", {out, groups}, static_cast<size_t>(out * groups * 2)},
          {prefix + ".weight_shape", "I64", {2}, 16}};
}

DType dtype_of(const std::string& word) {
  return word == "F32" ? DType::kF32 : word == "F16" ? DType::kF16 : DType::kBF16;
}

class Writer {
 public:
  explicit Writer(const fs::path& path) : path_(path), file_(path, std::ios::binary) {}

  void write(const void* data, size_t bytes) {
    file_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    if (!file_) {
      fail(
          fmt::format("{}: cannot be written; make room or choose another folder", path_.string()));
    }
  }
  void header(const std::vector<Output>& outputs) {
    Json header = Json::object();
    header["__metadata__"] = {{"format", "pt"}};
    size_t begin = 0;
    for (const Output& output : outputs) {
      header[output.name] = {{"dtype", output.dtype},
                             {"shape", output.shape},
                             {"data_offsets", {begin, begin + output.bytes}}};
      begin += output.bytes;
    }
    std::string text = header.dump();
    while (text.size() % 8 != 0) text += ' ';
    const uint64_t size = text.size();
    write(&size, sizeof(size));
    write(text.data(), text.size());
  }
  void close() {
    file_.close();
    if (!file_) fail(fmt::format("{}: cannot be written; make room", path_.string()));
  }

 private:
  fs::path path_;
  std::ofstream file_;
};

/// Codes packed to words, scales and shape.
void write_matrix(Writer& writer, const Rounded& rounded, const StoredTensor& tensor,
                  ThreadPool& pool) {
  const int64_t out = tensor.shape[0];
  const int64_t in = tensor.shape[1];
  ConstTensorView floats(tensor.data, dtype_of(tensor.dtype), {out, in});
  Tensor aligned(floats.dtype(), {out, in});
  std::memcpy(aligned.view().data(), tensor.data, tensor.bytes);
  Tensor sum;
  floats = aligned;
  if (rounded.update) {
    sum = Tensor(DType::kF32, {out, in});
    for (int64_t i = 0; i < out * in; ++i) {
      sum.as<float>()[i] = floats.dtype() == DType::kF32   ? floats.as<float>()[i]
                           : floats.dtype() == DType::kF16 ? to_float(floats.as<f16>()[i])
                                                           : to_float(floats.as<bf16>()[i]);
    }
    add_low_rank(sum, *rounded.update, &pool);
    floats = sum;
  }
  const auto source = round_matrix(rounded.name, floats, rounded.code, DType::kBF16);
  const int bits = bits_of(rounded);
  const int64_t words = in * bits / 32;
  const int64_t groups = in / kGroup;
  std::vector<uint32_t> packed(static_cast<size_t>(out * words));
  std::vector<f16> scales(static_cast<size_t>(out * groups));
  pool.parallel_for(static_cast<size_t>(out), [&](size_t row, int) {
    QuantizedRows rows;
    rows.resize(source->format(), 1);
    source->read(static_cast<int64_t>(row), 1, rows);
    uint32_t* to = packed.data() + row * static_cast<size_t>(words);
    for (int64_t i = 0; i < in; ++i) {
      to[i * bits / 32] |= static_cast<uint32_t>(rows.codes[static_cast<size_t>(i)])
                           << (i * bits % 32);
    }
    for (int64_t group = 0; group < groups; ++group) {
      scales[row * static_cast<size_t>(groups) + static_cast<size_t>(group)] =
          to_f16(rows.scales[static_cast<size_t>(group)]);
    }
  });
  const int64_t shape[] = {out, in};
  writer.write(packed.data(), packed.size() * sizeof(uint32_t));
  writer.write(scales.data(), scales.size() * sizeof(f16));
  writer.write(shape, sizeof(shape));
}

/// What llm-compressor writes for such weights.
Json quantization_config(int bits) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"quantization_status", "compressed"},
          {"ignore",
           {"re:.*lm_head", "re:.*visual.*", "re:.*vision_tower.*", "re:.*vision_model.*",
            "re:.*multi_modal_projector.*", "re:.*mlp1.*"}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"input_activations", nullptr},
              {"output_activations", nullptr},
              {"weights",
               {{"num_bits", bits},
                {"type", "int"},
                {"symmetric", true},
                {"strategy", "group"},
                {"group_size", kGroup},
                {"dynamic", false}}}}}}}};
}

void require_empty(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) {
    fs::create_directories(folder, ignored);
    if (fs::is_directory(folder, ignored)) return;
    fail(fmt::format("--save-weights: cannot make the folder {}", printable(folder.string())));
  }
  if (fs::is_directory(folder, ignored) && fs::is_empty(folder, ignored)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--save-weights: {} is there already; give a folder that is not, or is "
                          "empty",
                          printable(folder.string())));
}

/// Copies what is no weights: tokenizer, templates, processors.
void copy_companions(const fs::path& from, const fs::path& to) {
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    const bool weights =
        name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    if (!entry.is_regular_file() || weights || name == "config.json") continue;
    std::error_code error;
    fs::copy_file(entry.path(), to / name, error);
    if (error) fail(fmt::format("{}: {}", (to / name).string(), error.message()));
  }
}

}  // namespace

void save_rounded(const Checkpoint& checkpoint, const std::map<std::string, Rounded>& rounded,
                  const fs::path& folder, ThreadPool& pool) {
  if (rounded.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--save-weights: no matrix was rounded; add --weights int4 or int8");
  }
  const std::map<std::string, StoredTensor> tensors = checkpoint.tensors();
  std::vector<Output> outputs;
  for (const auto& [name, tensor] : tensors) {
    const auto found = rounded.find(name);
    if (found == rounded.end()) {
      outputs.push_back({name, tensor.dtype, tensor.shape, tensor.bytes});
      continue;
    }
    if (tensor.shape[1] % kGroup != 0) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("--save-weights: tensor {} has {} inputs; compressed-tensors takes "
                              "whole groups of {}",
                              name, tensor.shape[1], kGroup));
    }
    for (Output& output : outputs_of(found->second, tensor)) outputs.push_back(std::move(output));
  }
  require_empty(folder);
  copy_companions(checkpoint.folder(), folder);

  const fs::path part = folder / "model.safetensors.part";
  Writer writer(part);
  writer.header(outputs);
  for (const auto& [name, tensor] : tensors) {
    const auto found = rounded.find(name);
    if (found == rounded.end()) {
      writer.write(tensor.data, tensor.bytes);
    } else {
      write_matrix(writer, found->second, tensor, pool);
    }
  }
  writer.close();
  fs::rename(part, folder / "model.safetensors");
  Json config = Json::parse(checkpoint.config().dump());
  config["quantization_config"] = quantization_config(bits_of(rounded.begin()->second));
  const std::string text = config.dump(2) + "\n";
  Writer json(folder / "config.json");
  json.write(text.data(), text.size());
  json.close();
}

}  // namespace kvlm
