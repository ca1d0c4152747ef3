#pragma once

#include "llm/llama.h"
#include "runtime/config.h"
#include "runtime/model.h"
#include "vision/clip_vit.h"
#include "vision/preprocess.h"

namespace kvlm {

// Parts of configuration files that several families share. Absent fields take the class defaults
// of models.md 2.3, because hub files store differences from them.

/// A text_config of model_type llama or mistral. Throws Error{kUnsupported} for another one, for an
/// unknown rope type. A sliding window limits max_positions.
LlamaConfig parse_llama_config(const ConfigReader& text);

/// A vision_config of a CLIP tower; feature layers and strategy come from the model's own level.
ClipConfig parse_clip_config(const ConfigReader& vision, const ConfigReader& model);

/// "quick_gelu", "gelu", "gelu_pytorch_tanh" (also "gelu_new"), "silu" (also "swish").
Activation parse_activation(const ConfigReader& reader, std::string_view key,
                            std::string_view fallback);

/// A CLIP-type preprocessor_config.json, or the image_processor of a processor_config.json.
PreprocessSpec parse_preprocess(const ConfigReader& processor, const LoadOptions& options);

/// generation_config.json; eos ids fall back to the model's config. Sampling only if do_sample.
GenerationDefaults parse_generation(const ConfigReader& generation, const ConfigReader& model);

/// tokenizer_config.json and its companions; what is not there takes its default.
TokenizerConfig read_tokenizer_config(const ModelSource& source);

/// The tokenizer of a checkpoint: tokenizer.json as written, else tokenizer.model with the added
/// tokens of its companions. A tokenizer.model knows no `placeholder`; unless a companion gives it
/// an id, it has the one of config.json.
std::unique_ptr<Tokenizer> load_tokenizer(const ModelSource& source, TokenizerConfig config,
                                          const AddedToken& placeholder);

/// The chat template of a checkpoint (models.md 2.1: processor_config.json,
/// chat_template.json, chat_template.jinja, tokenizer_config.json), or `builtin` if it has none.
ChatTemplate load_chat_template(const ModelSource& source, std::string_view builtin);

}  // namespace kvlm
