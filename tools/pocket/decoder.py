"""The decoder of the three models: its shape, a lean forward pass, and its warm start. LLaMA's is Qwen2's without biases.

Training calls the functions here instead of the module's own forward: no attention mask, logits for the text only, few
kernels when compiled. train.py --check measures how far they depart from the module's.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import byte_level

HEAD_DIM = 64
EPS = 1e-6
POSITIONS = 2048


def text_config(tiny: bool, theta: float) -> dict:
    """Settings of the Qwen2 decoders, without those of their rope sections."""
    return {
        "vocab_size": byte_level.VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 128 if tiny else 512,
        "num_hidden_layers": 2 if tiny else 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": byte_level.BASE,
        "eos_token_id": byte_level.BASE + 2,
        "pad_token_id": byte_level.BASE,
    }


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def linear(x: torch.Tensor, weight: torch.Tensor | tuple, bias: torch.Tensor | None = None) -> torch.Tensor:
    """weight: a matrix, or (matrix, a, b, scale): with an adapter of low rank, matrix + scale * b a."""
    if isinstance(weight, tuple):
        weight, a, b, scale = weight
        return linear(x, weight, bias) + linear(linear(x, a), b) * scale
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def block(x, cos, sin, q_heads, kv_heads, eps, dtype, ln1, qw, qb, kw, kb, vw, vb, ow, ln2, gate, up, down):
    """One decoder layer on the residual x (batch, tokens, width) f32; products run in `dtype`."""
    h = rms_norm(x, ln1, eps).to(dtype)
    q, k = heads(linear(h, qw, qb), q_heads), heads(linear(h, kw, kb), kv_heads)
    v = heads(linear(h, vw, vb), kv_heads)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (t.repeat_interleave(q_heads // kv_heads, 1) for t in (k, v))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + linear(h, ow).float()
    h = rms_norm(x, ln2, eps).to(dtype)
    return x + linear(F.silu(linear(h, gate)) * linear(h, up), down).float()


def angles(positions: torch.Tensor, theta: float, sections: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (..., tokens, HEAD_DIM / 2) of positions (..., tokens), or (3, tokens) with M-RoPE sections."""
    half = HEAD_DIM // 2
    rate = theta ** -(torch.arange(0, HEAD_DIM, 2, device=positions.device).float() / HEAD_DIM)
    angle = positions.float()[..., None] * rate
    if sections:
        assert sum(sections) == half
        angle = torch.cat([part[k % 3] for k, part in enumerate(angle.split(sections, -1))], -1)
    return angle.cos(), angle.sin()


class Decoder:
    """Runs a language model on embeddings. `run` is the block, compiled or not."""

    def __init__(self, language_model, head: torch.nn.Linear, dtype: torch.dtype, run):
        self.text, self.head, self.dtype, self.run = language_model, head, dtype, run
        config = language_model.config
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.weights = []
        for l in language_model.layers:
            a = l.self_attn
            projections = [p for m in (a.q_proj, a.k_proj, a.v_proj) for p in (m.weight, m.bias)]
            mlp = [m.weight for m in (l.post_attention_layernorm, l.mlp.gate_proj, l.mlp.up_proj, l.mlp.down_proj)]
            self.weights.append([l.input_layernorm.weight, *projections, a.o_proj.weight, *mlp])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.text.embed_tokens.weight)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, last: int, run=None) -> torch.Tensor:
        """Logits (batch, last, vocabulary) f32 of the last positions of the embeddings x (batch, tokens, width) f32."""
        for weights in self.weights:
            x = (run or self.run)(x, cos, sin, self.q_heads, self.kv_heads, self.eps, self.dtype, *weights)
        x = rms_norm(x[:, -last:], self.text.norm.weight, self.eps)
        return linear(x.to(self.dtype), self.head.weight).float()


@torch.no_grad()
def warm(language_model, head: torch.nn.Linear, vocabulary: Path, llava: Path) -> None:
    """Copies the decoder of pocket-llava: equal pieces, all attention, and the MLP rows with the largest weights.

    vocabulary: tokenizer.json of the new model; llava: folder of pocket-llava.
    """
    from tokenizers import Tokenizer

    old = {k: v.float() for path in sorted(llava.glob("*.safetensors")) for k, v in load_file(path).items()}
    old = {k.removeprefix("model.").replace("language_model.model.", "language_model."): v for k, v in old.items()}
    pieces = Tokenizer.from_file(str(llava / "tokenizer.json")).get_vocab()
    new = Tokenizer.from_file(str(vocabulary))
    old_head = old["language_model.lm_head.weight"] if "language_model.lm_head.weight" in old else old["lm_head.weight"]
    tables = ((language_model.embed_tokens.weight, old["language_model.embed_tokens.weight"]), (head.weight, old_head))
    copied = 0
    for piece, row in new.get_vocab(with_added_tokens=True).items():
        name = "</s>" if piece == byte_level.END else piece.replace("\u0120", "\u2581")
        same = [pieces[name]] if name in pieces else [pieces[c] for c in name if c in pieces]
        copied += name in pieces
        for table, source in tables:
            if same:
                table[row] = source[same].mean(0)
    print(f"{copied} of {len(new.get_vocab())} pieces are pocket-llava's", flush=True)
    language_model.norm.weight.copy_(old["language_model.norm.weight"])
    for k, layer in enumerate(language_model.layers):
        source = {n.split(f"layers.{k}.", 1)[1]: v for n, v in old.items() if n.startswith(f"language_model.layers.{k}.")}
        rows = sum(source[f"mlp.{m}_proj.weight"].square().mean(1).log() for m in ("gate", "up"))
        rows = (rows + source["mlp.down_proj.weight"].square().mean(0).log()).topk(layer.mlp.gate_proj.out_features).indices
        for name, weight in source.items():
            if name.startswith("mlp."):
                weight = weight[:, rows] if "down" in name else weight[rows]
            layer.get_parameter(name).copy_(weight)
        for m in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            m.bias.zero_()
