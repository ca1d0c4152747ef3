"""The pocket LLaVA: its configuration, and a lean forward pass over the transformers modules for training.

The parameters live in a `LlavaForConditionalGeneration`, so a trained model is saved as it stands. Training calls the
functions here instead of the module's own forward: every batch has the same shape (prefix, 576 visual tokens, text),
needs no attention mask, computes logits for the text only and compiles to few kernels. Together they equal the
module's forward; train.py --check measures by how much.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import draw
import tokenizer


def config(tiny: bool = False) -> LlavaConfig:
    """LLaVA-1.5 in small: CLIP tower at 336 px, MLP projector, LLaMA decoder with grouped-query attention."""
    vision = CLIPVisionConfig(
        hidden_size=64 if tiny else 256,
        intermediate_size=128 if tiny else 1024,
        projection_dim=64 if tiny else 256,
        num_hidden_layers=3 if tiny else 7,  # the last one is not used: features come from layer -2
        num_attention_heads=1 if tiny else 4,
        image_size=draw.PAGE,
        patch_size=draw.PATCH,
    )
    text = LlamaConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=128 if tiny else 256,
        intermediate_size=256 if tiny else 768,
        num_hidden_layers=2 if tiny else 8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_id=tokenizer.EOS_ID,
        pad_token_id=tokenizer.PAD_ID,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.IMAGE_ID,
        image_seq_length=draw.PATCHES**2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
    )


def build(tiny: bool = False) -> LlavaForConditionalGeneration:
    """A freshly initialised model in float32."""
    model = LlavaForConditionalGeneration(config(tiny))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.BOS_ID, eos_token_id=tokenizer.EOS_ID, pad_token_id=tokenizer.PAD_ID, do_sample=False,
        max_new_tokens=192,
    )
    return model


def vision_parts(model: LlavaForConditionalGeneration):
    tower = model.model.vision_tower
    return getattr(tower, "vision_model", tower)


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def clip_block(x, heads, dtype, ln1w, ln1b, qw, qb, kw, kb, vw, vb, ow, ob, ln2w, ln2b, w1, b1, w2, b2):
    """One CLIP encoder layer on the residual x (batch, tokens, width) f32; products run in `dtype`."""
    h = F.layer_norm(x, x.shape[-1:], ln1w, ln1b, 1e-5).to(dtype)
    q, k, v = (_heads(_linear(h, w, b), heads) for w, b in ((qw, qb), (kw, kb), (vw, vb)))
    h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + _linear(h, ow, ob).float()
    h = F.layer_norm(x, x.shape[-1:], ln2w, ln2b, 1e-5).to(dtype)
    h = _linear(h, w1, b1)
    return x + _linear(h * torch.sigmoid(1.702 * h), w2, b2).float()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def llama_block(x, cos, sin, q_heads, kv_heads, dtype, ln1, qw, kw, vw, ow, ln2, gate, up, down):
    """One LLaMA decoder layer on the residual x (batch, tokens, width) f32; products run in `dtype`."""
    h = _rms_norm(x, ln1).to(dtype)
    q, k, v = _heads(_linear(h, qw), q_heads), _heads(_linear(h, kw), kv_heads), _heads(_linear(h, vw), kv_heads)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    k, v = (t.repeat_interleave(q_heads // kv_heads, 1) for t in (k, v))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + _linear(h, ow).float()
    h = _rms_norm(x, ln2).to(dtype)
    return x + _linear(F.silu(_linear(h, gate)) * _linear(h, up), down).float()


class Runner:
    """Runs the model on training batches; `compiled` compiles the two blocks once each."""

    def __init__(self, model: LlavaForConditionalGeneration, dtype: torch.dtype, compiled: bool):
        self.model, self.dtype = model, dtype
        compile_ = torch.compile if compiled else lambda f, **_: f
        self.clip_block = compile_(clip_block, dynamic=False)
        self.llama_block = compile_(llama_block, dynamic=False)
        self.vision = vision_parts(model)
        self.text = model.model.language_model
        vision, text = model.config.vision_config, model.config.text_config
        self.clip_heads = vision.num_attention_heads
        self.q_heads, self.kv_heads = text.num_attention_heads, text.num_key_value_heads
        self.clip_weights = [
            [p for m in (
                l.layer_norm1, l.self_attn.q_proj, l.self_attn.k_proj, l.self_attn.v_proj, l.self_attn.out_proj,
                l.layer_norm2, l.mlp.fc1, l.mlp.fc2,
            ) for p in (m.weight, m.bias)]
            for l in self.vision.encoder.layers[:-1]
        ]  # fmt: skip
        self.llama_weights = [
            [m.weight for m in (
                l.input_layernorm, l.self_attn.q_proj, l.self_attn.k_proj, l.self_attn.v_proj, l.self_attn.o_proj,
                l.post_attention_layernorm, l.mlp.gate_proj, l.mlp.up_proj, l.mlp.down_proj,
            )]
            for l in self.text.layers
        ]  # fmt: skip
        self.head_dim = text.head_dim

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised pixels (batch, 3, 336, 336) to the features of layer -2 without CLS, (batch, 576, width) f32."""
        e = self.vision.embeddings
        patches = pixels.unfold(2, draw.PATCH, draw.PATCH).unfold(3, draw.PATCH, draw.PATCH)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2).to(self.dtype)
        x = _linear(patches, e.patch_embedding.weight.flatten(1)).float()
        x = torch.cat((e.class_embedding.expand(len(x), 1, -1), x), 1) + e.position_embedding.weight
        norm = getattr(self.vision, "pre_layrnorm", None)
        x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-5)
        for weights in self.clip_weights:
            x = self.clip_block(x, self.clip_heads, self.dtype, *weights)
        return x[:, 1:]

    def read(self, features: torch.Tensor, prefix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Final hidden states of the text positions, (batch, text, width) f32."""
        p = self.model.model.multi_modal_projector
        visual = F.gelu(_linear(features.to(self.dtype), p.linear_1.weight, p.linear_1.bias))
        visual = _linear(visual, p.linear_2.weight, p.linear_2.bias).float()
        table = self.text.embed_tokens.weight
        start = F.embedding(prefix, table).expand(len(ids), -1, -1)
        x = torch.cat((start, visual, F.embedding(ids, table)), 1)
        cos, sin = self._rope(x.shape[1], x.device)
        for weights in self.llama_weights:
            x = self.llama_block(x, cos, sin, self.q_heads, self.kv_heads, self.dtype, *weights)
        return _rms_norm(x[:, -ids.shape[1] :], self.text.norm.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _linear(hidden.to(self.dtype), self.model.lm_head.weight).float()

    def _rope(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rate = 10000.0 ** -(torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)
        angle = torch.arange(length, device=device).float()[:, None] * rate
        return angle.cos(), angle.sin()
