#pragma once

#include <memory>
#include <string>

#include "kernels/weight_map.h"
#include "llm/decoder.h"
#include "llm/rope_angles.h"

namespace kvlm {

/// The shape of a LLaMA-type decoder (LLaMA, Vicuna, Mistral, Yi, InternLM2 once unpacked; with
/// qkv_bias Qwen2; with qk_norm Qwen3).
struct LlamaConfig {
  int layers = 32;
  int hidden = 4096;
  int intermediate = 11008;
  int q_heads = 32;
  int kv_heads = 32;
  int head_dim = 128;
  int vocab_size = 32000;
  int max_positions = 2048;
  int sliding_window = 0;  ///< rows that a row attends to; 0: all. max_positions is no larger
  float rms_eps = 1e-6f;
  bool qkv_bias = false;
  bool output_bias = false;  ///< attention_bias of LLaMA gives o_proj a bias too
  bool mlp_bias = false;
  bool qk_norm = false;  ///< rms_norm of every head of q and of k before they are rotated (Qwen3)
  bool tie_embeddings = false;
  RopeConfig rope;
};

/// What such a decoder needs from a cache; `multiply` is left to who knows the weights' type.
CacheShape llama_cache_shape(const LlamaConfig& config);

/// Decoder::workspace_bytes() of such a decoder; an upper bound for weights of any type.
size_t llama_workspace_bytes(const LlamaConfig& config, int64_t rows) noexcept;

/// A LLaMA-type decoder from canonical names (those of transformers 5): `prefix` +
/// "embed_tokens.weight", "layers.N...", "norm.weight", and "lm_head.weight". Takes what it needs
/// out of `weights`. A layer is x += o(attention(norm x)), then x += down(silu(gate u) * up u) with
/// u = norm x.
/// Source: Touvron et al. 2023, "LLaMA"; transformers 5.23 for Qwen3's norms of q and k.
std::unique_ptr<Decoder> make_llama(const LlamaConfig& config, WeightMap& weights,
                                    const std::string& prefix);

}  // namespace kvlm
