#include "runtime/synthetic_shapes.h"

#include <array>

namespace kvlm {

namespace {

// The prompts of the published templates, one turn of a user: all that a model of random weights is
// asked.
constexpr std::string_view kUserAssistant =
    "{% for message in messages %}USER: {% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>\n{% elif item['type'] == 'text' %}{{ item['text'] }}"
    "{% endif %}{% endfor %}{% endfor %} ASSISTANT:";
constexpr std::string_view kPictureMarks =
    "{% for message in messages %}user\n{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>\n{% elif item['type'] == 'video' %}<video>\n"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "assistant\n";
constexpr std::string_view kContextMarks =
    "{% for message in messages %}user\n{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<IMG_CONTEXT>\n{% elif item['type'] == 'video' %}<video>\n"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "assistant\n";
constexpr std::string_view kVisionMarks =
    "{% for message in messages %}<|im_start|>user\n{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif item['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n";

// What several shapes have: towers as vision_config, pictures as preprocessor_config.json, special
// tokens.
constexpr std::string_view kClipL336 =
    R"({"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
"num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14})";
constexpr std::string_view kInternVit300M =
    R"({"model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096,
"num_hidden_layers": 24, "num_attention_heads": 16, "image_size": [448, 448],
"patch_size": [14, 14], "attention_bias": true, "norm_type": "layer_norm",
"use_qk_norm": false})";
constexpr std::string_view kClipPixels =
    R"({"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}})";
constexpr std::string_view kTilePixels =
    R"({"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": true,
"min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448},
"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]})";
constexpr std::string_view kLlavaTokens = R"([[32000, "<image>"]])";
constexpr std::string_view kInternLm2Tokens =
    R"([[92544, "<img>"], [92545, "</img>"], [92546, "<IMG_CONTEXT>"]])";
constexpr std::string_view kQwenTokens =
    R"([[151643, "<|endoftext|>"], [151644, "<|im_start|>"], [151645, "<|im_end|>"], [151652,
"<|vision_start|>"], [151653, "<|vision_end|>"], [151655, "<|image_pad|>"], [151656,
"<|video_pad|>"]])";

constexpr std::array kShapes = {
    SyntheticShape{"llava-1.5-7b",
                   R"({"model_type": "llava", "image_token_index": 32000,
"text_config": {"model_type": "llama",
"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
"max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05}})",
                   kClipL336, kClipPixels, kLlavaTokens, ""},
    SyntheticShape{"llava-1.5-13b",
                   R"({"model_type": "llava", "image_token_index": 32000,
"text_config": {"model_type": "llama",
"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824,
"num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32064,
"max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05}})",
                   kClipL336, kClipPixels, kLlavaTokens, ""},
    // Not released: LLaVA-1.5's tower with the decoder of TinyLlama-1.1B, to measure small
    // machines.
    SyntheticShape{"llava-tinyllama-1.1b",
                   R"({"model_type": "llava", "image_token_index": 32000,
"text_config": {"model_type": "llama",
"num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632,
"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32064,
"max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-05}})",
                   kClipL336, kClipPixels, kLlavaTokens, ""},
    SyntheticShape{
        "llava-next-7b",
        R"({"model_type": "llava_next", "image_token_index": 32000, "image_grid_pinpoints": [[336,
672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
"text_config": {"model_type": "llama",
"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
"max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05}})",
        kClipL336,
        R"({"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[336, 672],
[672, 336], [672, 672], [1008, 336], [336, 1008]], "size": {"shortest_edge": 336},
"crop_size": {"height": 336, "width": 336}})",
        kLlavaTokens, kUserAssistant},
    SyntheticShape{
        "llava-onevision-7b",
        R"({"model_type": "llava_onevision", "image_token_index": 151646,
"video_token_index": 151647, "vision_aspect_ratio": "anyres_max_9",
"image_grid_pinpoints": [[384, 384], [384, 768], [384, 1152], [384, 1536], [384, 1920],
[384, 2304], [768, 384], [768, 768], [768, 1152], [768, 1536], [768, 1920], [768, 2304],
[1152, 384], [1152, 768], [1152, 1152], [1152, 1536], [1152, 1920], [1152, 2304], [1536,
384], [1536, 768], [1536, 1152], [1536, 1536], [1536, 1920], [1536, 2304], [1920, 384],
[1920, 768], [1920, 1152], [1920, 1536], [1920, 1920], [1920, 2304], [2304, 384], [2304,
768], [2304, 1152], [2304, 1536], [2304, 1920], [2304, 2304]],
"vision_feature_layer": -1, "vision_feature_select_strategy": "full",
"text_config": {"model_type": "qwen2", "eos_token_id": 151645,
"num_hidden_layers": 28, "hidden_size": 3584,
"intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
"vocab_size": 152128, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
"rms_norm_eps": 1e-06}})",
        R"({"model_type": "siglip_vision_model", "hidden_size": 1152,
"intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
"image_size": 384, "patch_size": 14, "vision_use_head": false})",
        R"({"image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": [[384,
384], [384, 768], [384, 1152], [384, 1536], [384, 1920], [384, 2304], [768, 384], [768,
768], [768, 1152], [768, 1536], [768, 1920], [768, 2304], [1152, 384], [1152, 768],
[1152, 1152], [1152, 1536], [1152, 1920], [1152, 2304], [1536, 384], [1536, 768], [1536,
1152], [1536, 1536], [1536, 1920], [1536, 2304], [1920, 384], [1920, 768], [1920, 1152],
[1920, 1536], [1920, 1920], [1920, 2304], [2304, 384], [2304, 768], [2304, 1152], [2304,
1536], [2304, 1920], [2304, 2304]], "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5,
0.5, 0.5], "size": {"height": 384, "width": 384}})",
        R"([[151646, "<image>"], [151647, "<video>"]])", kPictureMarks},
    SyntheticShape{"internvl2.5-8b",
                   R"({"model_type": "internvl", "image_token_id": 92546, "image_seq_length": 256,
"downsample_ratio": 0.5, "tie_word_embeddings": false,
"text_config": {"model_type": "llama",
"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 92553,
"max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-05,
"rope_scaling": {"type": "dynamic", "factor": 2.0}}})",
                   kInternVit300M, kTilePixels, kInternLm2Tokens, kContextMarks},
    SyntheticShape{"internvl2.5-26b",
                   R"({"model_type": "internvl", "image_token_id": 92546, "image_seq_length": 256,
"downsample_ratio": 0.5, "tie_word_embeddings": false,
"text_config": {"model_type": "llama",
"num_hidden_layers": 48, "hidden_size": 6144, "intermediate_size": 16384,
"num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 92553,
"max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-05,
"rope_scaling": {"type": "dynamic", "factor": 3.0}}})",
                   R"({"model_type": "internvl_vision", "hidden_size": 3200,
"intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
"image_size": [448, 448], "patch_size": [14, 14], "attention_bias": false,
"norm_type": "rms_norm", "use_qk_norm": true})",
                   kTilePixels, kInternLm2Tokens, kContextMarks},
    SyntheticShape{"internvl3.5-8b",
                   R"({"model_type": "internvl", "image_token_id": 151671, "image_seq_length": 256,
"downsample_ratio": 0.5, "tie_word_embeddings": false,
"text_config": {"model_type": "qwen3", "eos_token_id": 151645,
"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
"max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
"head_dim": 128}})",
                   kInternVit300M, kTilePixels,
                   R"([[151669, "<img>"], [151670, "</img>"], [151671, "<IMG_CONTEXT>"]])",
                   kContextMarks},
    SyntheticShape{"qwen2.5-vl-7b",
                   R"({"model_type": "qwen2_5_vl", "vision_start_token_id": 151652,
"vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656,
"tie_word_embeddings": false,
"text_config": {"model_type": "qwen2_5_vl_text",
"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
"max_position_embeddings": 128000, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}})",
                   R"({"model_type": "qwen2_5_vl", "depth": 32,
"hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
"out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
"temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
"tokens_per_second": 2, "in_chans": 3})",
                   R"({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136,
"max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258,
0.27577711]})",
                   kQwenTokens, kVisionMarks},
    SyntheticShape{
        "qwen3-vl-8b",
        R"({"model_type": "qwen3_vl", "vision_start_token_id": 151652,
"vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656,
"tie_word_embeddings": false,
"text_config": {"model_type": "qwen3_vl_text", "eos_token_id": 151645, "num_hidden_layers": 36,
"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
"num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 262144,
"rope_theta": 5000000.0, "rms_norm_eps": 1e-06, "head_dim": 128,
"rope_scaling": {"rope_type": "default", "mrope_interleaved": true, "mrope_section": [24,
20, 20]}}})",
        R"({"model_type": "qwen3_vl", "depth": 27,
"hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 4304,
"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
"deepstack_visual_indexes": [8, 16, 24], "in_channels": 3})",
        R"({"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 65536,
"longest_edge": 16777216}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})",
        kQwenTokens, kVisionMarks},
};

}  // namespace

std::span<const SyntheticShape> synthetic_shapes() { return kShapes; }

}  // namespace kvlm
