// The parts of config.json and preprocessor_config.json that become shapes: every number that comes
// out is one that sizes can be computed from, or the file is refused in one readable sentence.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/families/internvl/config.h"
#include "runtime/families/qwen_vl/config.h"
#include "runtime/families/qwen_vl/files.h"
#include "runtime/loading/clip_config.h"
#include "runtime/loading/decoder_config.h"
#include "runtime/loading/feature_selection.h"
#include "runtime/loading/image_processor.h"
#include "runtime/loading/siglip_config.h"
#include "tests/fuzz/readable_errors.h"

namespace {

using kvlm::fuzz::require;
using kvlm::fuzz::succeeds;

constexpr std::array kDecoders = {kvlm::DecoderType::kLlama,    kvlm::DecoderType::kMistral,
                                  kvlm::DecoderType::kQwen2,    kvlm::DecoderType::kQwen3,
                                  kvlm::DecoderType::kQwen2Vl,  kvlm::DecoderType::kQwen3Vl,
                                  kvlm::DecoderType::kInternLm2};

constexpr std::array kProcessors = {kvlm::ImageProcessor::kLlava, kvlm::ImageProcessor::kClip,
                                    kvlm::ImageProcessor::kSiglip, kvlm::ImageProcessor::kLlavaNext,
                                    kvlm::ImageProcessor::kLlavaOnevision};

void require_llama(const kvlm::LlamaConfig& llama) {
  constexpr int64_t kMost = int64_t{1} << 28;
  for (const int64_t value :
       {llama.layers, llama.hidden, llama.intermediate, llama.q_heads, llama.kv_heads,
        llama.head_dim, llama.vocab_size, llama.max_positions}) {
    require(value > 0 && value < kMost);
  }
  require(llama.q_heads % llama.kv_heads == 0 && llama.head_dim % 2 == 0);
  require(llama.sliding_window == 0 || llama.max_positions <= llama.sliding_window);
  const kvlm::RopeConfig& rope = llama.rope;
  for (const double value : {rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                             rope.beta_fast, rope.beta_slow}) {
    require(std::isfinite(value) && value > 0);
  }
  require(std::isfinite(rope.attention_factor) && rope.attention_factor >= 0);
  require(rope.rotary_dim == llama.head_dim && rope.max_positions > 0);
}

template <class Config>
void require_tower(const Config& tower) {
  require(tower.hidden > 0 && tower.layers > 0 && tower.heads > 0 && tower.intermediate > 0);
  require(tower.hidden % tower.heads == 0);
  require(tower.patch_size > 0 && tower.patch_size <= tower.image_size);
  require(tower.image_size <= 16384);
}

void require_qwen_vl(const kvlm::QwenVlConfig& qwen) {
  require_llama(qwen.text);
  constexpr int64_t kMost = int64_t{1} << 28;
  const kvlm::QwenVitConfig& tower = qwen.vision;
  for (const int64_t value :
       {tower.hidden, tower.intermediate, tower.layers, tower.heads, tower.patch_size, tower.merge,
        tower.depth, tower.out, qwen.token_side(), tower.hidden * tower.merge * tower.merge}) {
    require(value > 0 && value <= kMost);
  }
  require(tower.window >= 0 && tower.position_side >= 0);
  for (const auto* layers : {&tower.full_attention, &tower.deepstack}) {
    for (const int layer : *layers) require(layer >= 0 && layer < tower.layers);
  }
  for (const int32_t id : {qwen.image_id, qwen.video_id}) {
    require(id >= 0 && id < qwen.text.vocab_size);
  }
}

void require_internvl(const kvlm::InternVlConfig& model) {
  require_llama(model.text);
  const kvlm::InternVitConfig& vision = model.vision;
  require(vision.hidden > 0 && vision.layers > 0 && vision.intermediate > 0);
  require(vision.heads > 0 && vision.hidden % vision.heads == 0);
  require(vision.patch_size > 0 && vision.patch_size <= vision.image_size);
  require(vision.feature_layer >= -vision.layers - 1 && vision.feature_layer <= vision.layers);
  const int patches = vision.image_size / vision.patch_size;
  require(int64_t{vision.hidden} * model.merge * model.merge <= 1 << 20);
  require(model.merge > 0 && patches % model.merge == 0 && model.tile_rows() > 0);
}

void require_preprocess(const kvlm::PreprocessSpec& spec) {
  require(spec.shortest_edge > 0 || (spec.resize_height > 0 && spec.resize_width > 0));
  require(spec.crop_height > 0 && spec.crop_width > 0);
  require(std::isfinite(spec.rescale_factor));
  for (const double value : spec.std) require(value > 0);
}

void require_qwen_vl_files(const kvlm::QwenVlFiles& files) {
  for (const kvlm::QwenVlPixels* pixels : {&files.pictures, &files.frames}) {
    require(std::isfinite(pixels->spec.rescale_factor));
    require(!pixels->spec.do_rescale || pixels->spec.rescale_factor > 0);
    for (const double value : pixels->spec.std) require(value > 0);
    require(pixels->budget.min_pixels > 0 && pixels->budget.max_pixels > 0);
  }
  require(files.clips.sampling.min_frames > 0 && files.clips.sampling.max_frames > 0);
  require(files.clips.sampling.default_fps >= 0 && files.clips.max_tokens > 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  succeeds([&] {
    const nlohmann::json file = kvlm::parse_json(text, "config.json");
    const kvlm::ConfigReader config(file, "config.json");
    for (const kvlm::ConfigReader& decoder : {config, config.object("text_config")}) {
      for (const kvlm::DecoderType type : kDecoders) {
        succeeds([&] { require_llama(kvlm::parse_decoder_config(decoder, type)); });
      }
      succeeds([&] { static_cast<void>(kvlm::decoder_type(decoder, kDecoders)); });
    }
    const kvlm::ConfigReader vision = config.object("vision_config");
    for (const bool absent : {false, true}) {
      succeeds([&] { require_tower(kvlm::parse_clip_config(vision, absent)); });
      succeeds([&] { require_tower(kvlm::parse_siglip_config(vision, absent)); });
    }
    succeeds(
        [&] { require(!kvlm::parse_feature_selection(config, -2, "default").layers.empty()); });
    succeeds([&] { require_preprocess(kvlm::parse_preprocess(config, kProcessors, {})); });
    succeeds([&] {
      const kvlm::InternVlHfConfig hf = kvlm::parse_internvl_config(config);
      require_internvl(hf.model);
      require(hf.image_id >= 0 && hf.image_id < hf.model.text.vocab_size);
    });
    succeeds([&] {
      const kvlm::InternVlChatConfig chat = kvlm::parse_internvl_chat_config(config);
      require_internvl(chat.model);
      require(chat.tiling.min_tiles >= 1 && chat.tiling.min_tiles <= chat.tiling.max_tiles);
      require(chat.tiling.max_tiles <= 1024 && chat.tiling.tile == chat.model.vision.image_size);
    });
    succeeds([&] { require_qwen_vl(kvlm::parse_qwen_vl(config)); });
    // The same text as the files of both processors.
    kvlm::QwenVlConfig qwen;
    for (const auto generation : {kvlm::QwenVlGeneration::kQwen2, kvlm::QwenVlGeneration::kQwen3}) {
      qwen.generation = generation;
      kvlm::ModelSource source;
      source.file = [&](const std::string&) { return std::optional(std::string(text)); };
      succeeds([&] { require_qwen_vl_files(kvlm::read_qwen_vl_files(source, qwen, {})); });
    }
  });
  return 0;
}
