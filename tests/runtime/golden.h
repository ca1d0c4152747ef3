#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/elementwise.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "runtime/family.h"
#include "runtime/generator.h"
#include "runtime/loading/checkpoint.h"
#include "runtime/loading/safetensors.h"
#include "tests/source_folder.h"
#include "vision/video.h"

namespace kvlm::test {

/// Where the folders of checkpoints and goldens are: KVLM_TEST_GOLDEN_DIR, or those of this tree.
inline std::filesystem::path golden_root() {
  if (const char* folder = std::getenv("KVLM_TEST_GOLDEN_DIR")) return folder;
  return test::source_folder() / "tests/golden";
}

/// Where models run: KVLM_TEST_DEVICE=cuda holds the goldens against a GPU.
inline Device test_device() {
  const char* name = std::getenv("KVLM_TEST_DEVICE");
  return name != nullptr && std::string_view(name) == "cuda" ? Device{DeviceKind::kCuda, 0}
                                                             : Device{};
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The tensors of a safetensors file, whole in memory.
class GoldenTensors {
 public:
  explicit GoldenTensors(const std::filesystem::path& file)
      : bytes_(read_file(file)),
        header_(parse_safetensors(std::as_bytes(std::span(bytes_)), file.string())) {}

  const std::vector<SafetensorsEntry>& entries() const noexcept { return header_.entries; }
  std::vector<int64_t> shape(const std::string& name) const { return at(name, {}).shape; }
  std::vector<float> floats(const std::string& name) const { return read<float>(name, "F32"); }
  std::vector<int64_t> integers(const std::string& name) const {
    return read<int64_t>(name, "I64");
  }
  std::vector<uint8_t> bytes(const std::string& name) const { return read<uint8_t>(name, "U8"); }
  std::string text(const std::string& name) const {
    const std::vector<uint8_t> raw = bytes(name);
    return {raw.begin(), raw.end()};
  }
  /// The bytes of a tensor of any type.
  std::string raw(const SafetensorsEntry& entry) const {
    return bytes_.substr(header_.data_offset + entry.begin, entry.end - entry.begin);
  }

 private:
  const SafetensorsEntry* find(const std::string& name) const noexcept {
    const auto found = std::find_if(header_.entries.begin(), header_.entries.end(),
                                    [&](const SafetensorsEntry& e) { return e.name == name; });
    return found == header_.entries.end() ? nullptr : &*found;
  }
  const SafetensorsEntry& at(const std::string& name, const std::string& dtype) const {
    const SafetensorsEntry* entry = find(name);
    if (entry == nullptr) throw std::runtime_error("golden.safetensors has no " + name);
    if (!dtype.empty() && entry->dtype != dtype) {
      throw std::runtime_error(name + " is " + entry->dtype + ", not " + dtype);
    }
    return *entry;
  }
  template <class T>
  std::vector<T> read(const std::string& name, const std::string& dtype) const {
    const SafetensorsEntry& entry = at(name, dtype);
    std::vector<T> values((entry.end - entry.begin) / sizeof(T));
    std::memcpy(values.data(), bytes_.data() + header_.data_offset + entry.begin,
                entry.end - entry.begin);
    return values;
  }

  std::string bytes_;
  SafetensorsHeader header_;
};

/// Pictures (N, 3, height, width) of the goldens as the rows that a tower takes: patch by patch,
/// columns (channel, dy, dx); pixels beyond the last whole patch are left out.
inline std::vector<float> patches_of_pixels(const GoldenTensors& tensors, const std::string& name,
                                            int64_t patch) {
  const std::vector<int64_t> shape = tensors.shape(name);
  const std::vector<float> pixels = tensors.floats(name);
  const int64_t height = shape[2];
  const int64_t width = shape[3];
  std::vector<float> rows;
  for (int64_t picture = 0; picture < shape[0]; ++picture) {
    for (int64_t y = 0; y < height / patch; ++y) {
      for (int64_t x = 0; x < width / patch; ++x) {
        for (int64_t channel = 0; channel < 3; ++channel) {
          for (int64_t dy = 0; dy < patch; ++dy) {
            const int64_t line = (picture * 3 + channel) * height + y * patch + dy;
            const auto from = pixels.begin() + line * width + x * patch;
            rows.insert(rows.end(), from, from + patch);
          }
        }
      }
    }
  }
  return rows;
}

/// A model of a checkpoint folder, with all that it borrows.
class LoadedModel {
 public:
  /// `edit` may change what the checkpoint says before the model is assembled from it.
  explicit LoadedModel(const std::filesystem::path& folder, const LoadOptions& options = {},
                       int threads = 1, const std::function<void(ModelSource&)>& edit = {})
      : checkpoint_(std::make_unique<Checkpoint>(folder)),
        pool_(std::make_unique<ThreadPool>(threads)),
        stream_(std::make_unique<Stream>(*pool_, test_device())) {
    const std::string name = folder.filename().string();
    ModelSource source = open_source(*checkpoint_, name);
    if (edit) edit(source);
    const Family& family = family_of(source.config, name);
    model_ = family.load(std::move(source), options, *stream_);
  }

  Model& operator*() const noexcept { return *model_; }
  Model* operator->() const noexcept { return model_.get(); }
  Stream& stream() const noexcept { return *stream_; }
  /// A cache with room for `sequences` of `rows` tokens.
  std::unique_ptr<KvCache> cache(std::string_view spec = "f32", int rows = 512,
                                 size_t sequences = 1) const {
    const auto plan = plan_cache(parse_spec(spec), model_->decoder().cache_shape());
    return make_cache(plan, sequences * reservation(*plan, {rows, 0, rows}).bytes(), test_device());
  }

 private:
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Model> model_;
};

/// As the reference that made the goldens has it.
inline LoadOptions reference_options() {
  LoadOptions options;
  options.transformers5 = true;
  return options;
}

/// One case of a golden folder (tests/golden/README.md). A folder without goldens of its own is
/// compared with those of the folder that its manifest names.
struct GoldenCase {
  std::filesystem::path folder;   ///< of the checkpoint
  std::filesystem::path goldens;  ///< of golden.safetensors and the pictures
  nlohmann::json entry;

  std::string name() const { return entry.at("name"); }
  std::string kind() const { return entry.at("kind"); }
  /// Rows of a cache that holds the prompt and the whole answer.
  int rows() const {
    return entry.at("prompt_tokens").get<int>() + entry.at("max_new_tokens").get<int>();
  }
  std::string tensor(const std::string& what) const { return name() + "." + what; }
  /// The case that holds the taps: a case may share its inputs with another one.
  std::string tapped(const std::string& what) const {
    return entry.value("same_inputs_as", name()) + "." + what;
  }

  /// Folders about RoPE hold nothing of pictures.
  bool about_rope() const { return goldens.filename().string().starts_with("llava_rope"); }
  /// The reference's pictures and vision taps; not of a second turn, nor of folders about RoPE.
  bool holds_pictures() const {
    return !about_rope() && kind() != "two_turns" && !entry.at("images").empty();
  }
  /// The reference's decoder taps.
  bool holds_decoder_taps() const { return !about_rope() && kind() != "eos"; }
  bool holds(const std::string& tap) const {
    const auto starts = [&](std::string_view with) { return tap.starts_with(with); };
    if (starts("vision.") || starts("projector_") || starts("pixel_values")) {
      return holds_pictures();
    }
    return starts("llm.") || starts("inputs_embeds") ? holds_decoder_taps() : true;
  }
  /// Names of all tensors of the case (tests/golden/README.md).
  std::set<std::string> tensors() const {
    const bool half = goldens.filename().string().ends_with("f16");  // bf16 too
    std::set<std::string> names;
    const auto add = [&](const std::string& what) { names.insert(tensor(what)); };
    for (const char* what :
         {"prompt", "input_ids", "greedy_ids", "greedy_logits", "text_out", "text_out_special"}) {
      add(what);
    }
    if (kind() == "repetition_penalty") add("greedy_scores");
    for (const char* what : {"forced_logits", "half.forced_logits"}) {
      if (half) add(what);
    }
    if (entry.contains("same_inputs_as")) return names;
    add("attention_mask");
    add("position_ids");
    for (const char* tap :
         {"vision.patch_embed", "vision.embeddings", "vision.pre_norm", "vision.layer.0",
          "vision.layer.1", "vision.layer.2", "vision.selected", "projector_in", "projector_out",
          "inputs_embeds", "llm.layer.0", "llm.layer.1", "llm.norm", "logits_prefill"}) {
      if (!holds(tap)) continue;
      add(tap);
      if (half) add(std::string("half.") + tap);
    }
    if (!holds_pictures()) return names;
    for (const char* what :
         {"image_sizes", "pixel_values.pil", "pixel_values.torchvision", "logits_last_pil"}) {
      add(what);
    }
    for (size_t i = 0; i < entry.at("images").size(); ++i) {
      for (const char* what : {"image_u8.", "resized_u8.pil.", "resized_u8.torchvision."}) {
        add(what + std::to_string(i));
      }
    }
    return names;
  }

  /// The clips of the case: the frames that the reference took.
  std::vector<DecodedClip> videos() const {
    std::vector<DecodedClip> videos;
    for (const nlohmann::json& entry_of : entry.value("videos", nlohmann::json::array())) {
      const auto file = open_video(goldens / entry_of.at("folder").get<std::string>());
      DecodedClip video{{file->info(), entry_of.at("taken")}, {}};
      video.clip.info.fps = entry_of.at("fps").is_null() ? 0 : entry_of.at("fps").get<double>();
      video.frames = file->read(video.clip.frames).frames;
      videos.push_back(std::move(video));
    }
    return videos;
  }

  std::vector<Image> images() const {
    std::vector<Image> images;
    for (const std::string file : entry.at("images")) images.push_back(load_image(goldens / file));
    return images;
  }

  /// The messages of the manifest, or for a prompt without them the user turn that renders to it.
  std::vector<ChatMessage> messages() const {
    std::vector<ChatMessage> messages;
    if (entry.at("messages").is_null()) {
      constexpr std::string_view kBefore = "USER: ";
      constexpr std::string_view kAfter = " ASSISTANT:";
      const std::string prompt = entry.at("prompt");
      if (!prompt.starts_with(kBefore) || !prompt.ends_with(kAfter)) {
        throw std::runtime_error("prompt " + prompt);
      }
      return {user_message(
          prompt.substr(kBefore.size(), prompt.size() - kBefore.size() - kAfter.size()),
          entry.at("images").size(), "<image>")};
    }
    for (const nlohmann::json& from : entry.at("messages")) {
      ChatMessage message{from.at("role"), {}};
      if (from.at("content").is_string()) {
        message.content.push_back({ContentItem::Kind::kText, from.at("content")});
        messages.push_back(std::move(message));
        continue;
      }
      for (const nlohmann::json& item : from.at("content")) {
        if (item.at("type") == "image") {
          message.content.push_back({ContentItem::Kind::kImage, {}});
        } else if (item.at("type") == "video") {
          message.content.push_back({ContentItem::Kind::kVideo, {}});
        } else {
          message.content.push_back({ContentItem::Kind::kText, item.at("text")});
        }
      }
      messages.push_back(std::move(message));
    }
    return messages;
  }

  GenerationRequest request() const {
    GenerationRequest request;
    request.id = name();
    request.messages = messages();
    request.images = images();
    request.videos = videos();
    request.sampling.repetition_penalty = entry.at("repetition_penalty");
    request.max_tokens = entry.at("max_new_tokens");
    return request;
  }
};

/// An edit that lets a file of the checkpoint read as `content`, or as missing if it is null.
inline std::function<void(ModelSource&)> with_file(std::string name, const char* content) {
  return [name = std::move(name), content](ModelSource& source) {
    source.file = [name, content, inner = source.file](const std::string& wanted) {
      if (wanted != name) return inner(wanted);
      return content == nullptr ? std::nullopt : std::optional<std::string>(content);
    };
  };
}

/// How a case is called when a test of it fails.
inline void PrintTo(const GoldenCase& golden, std::ostream* out) {  // NOLINT: GoogleTest's name
  *out << golden.folder.filename().string() << " " << golden.name();
}

inline nlohmann::json golden_manifest(const std::filesystem::path& folder) {
  return nlohmann::json::parse(read_file(folder / "manifest.json"));
}

/// Every golden folder, sorted.
inline std::vector<std::filesystem::path> golden_folders() {
  std::vector<std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator(golden_root())) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

/// Every case of a golden folder.
inline std::vector<GoldenCase> golden_cases_of(const std::filesystem::path& folder) {
  std::vector<GoldenCase> cases;
  const nlohmann::json own = golden_manifest(folder);
  const std::filesystem::path goldens =
      own.contains("goldens_of") ? golden_root() / own.at("goldens_of") : folder;
  const nlohmann::json manifest = golden_manifest(goldens);
  for (const nlohmann::json& entry : manifest.at("cases")) {
    cases.push_back({folder, goldens, entry});
  }
  return cases;
}

/// Every case of every golden folder of a family (the manifest's word), sorted by folder.
inline std::vector<GoldenCase> golden_cases(std::string_view family = "llava") {
  std::vector<GoldenCase> cases;
  for (const std::filesystem::path& folder : golden_folders()) {
    if (golden_manifest(folder).value("family", "llava") != family) continue;
    for (GoldenCase& golden : golden_cases_of(folder)) cases.push_back(std::move(golden));
  }
  return cases;
}

/// Names of the folders whose weights are f16 or bf16, sorted.
inline std::vector<std::string> half_folders() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden_root())) {
    std::string name = entry.path().filename().string();
    if (name.ends_with("f16")) names.push_back(std::move(name));  // bf16 too
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// On a GPU half-precision weights are multiplied with activations rounded alike: then the gates of
/// half arithmetic apply (HalfGolden), not those of f32.
inline bool rounds_activations(const std::filesystem::path& checkpoint) {
  return test_device().kind == DeviceKind::kCuda &&
         checkpoint.filename().string().ends_with("f16");  // bf16 too
}

/// The case of this name.
inline GoldenCase golden_case(const std::string& folder, const std::string& name) {
  for (GoldenCase& entry : golden_cases()) {
    if (entry.folder.filename() == folder && entry.name() == name) return std::move(entry);
  }
  throw std::runtime_error("no golden " + folder + " " + name);
}

/// f32 values of any device.
inline std::vector<float> floats_of(ConstTensorView view, Stream& stream) {
  std::vector<float> values(static_cast<size_t>(view.elements()));
  copy(TensorView(values.data(), DType::kF32, view.shape()), view, stream);
  stream.synchronize();
  return values;
}

/// What stands for pictures of LLaVA-1.5 of so many rows each.
inline PromptVisuals pictures_of(std::span<const int> rows) {
  PromptVisuals visuals;
  for (const int count : rows) visuals.pictures.push_back({"<image>", {{.rows = count}}});
  return visuals;
}

/// The prompt of a conversation with such pictures.
inline Prompt prompt_of(const Model& model, const std::vector<ChatMessage>& messages,
                        std::span<const int> rows = {}) {
  return make_prompt(model, outline_prompt(model, messages, pictures_of(rows)));
}

/// Generates one request to its end, alone.
inline GenerationResult generate(Model& model, KvCache& cache, Stream& stream,
                                 GenerationRequest request) {
  Generator generator(model, cache, stream);
  const int key = generator.admit(std::move(request), {});
  generator.deliver();
  while (!generator.finished(key)) {
    generator.step();
    generator.deliver();
  }
  return generator.take(key);
}

inline GenerationResult generate(const LoadedModel& model, std::string_view kv,
                                 GenerationRequest request) {
  const auto cache = model.cache(kv);
  return generate(*model, *cache, model.stream(), std::move(request));
}

}  // namespace kvlm::test
