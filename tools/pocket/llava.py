"""pocket-llava: LLaVA-1.5 in small, and a lean forward pass over the modules of transformers for training.

A page of 336 x 336 gives 576 visual tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import batches
import decoder
import draw
import pages
import tokenizer
from decoder import heads, linear

NAME, FAMILY = "pocket-llava", "llava"
THETA = 10000.0
EPS = 1e-5
LABEL_SIZES = tuple(size + 1 for size in draw.OBJECT_SIZES)

PLAN = batches.Plan(always=(batches.Group(draw.PAGE, draw.PAGE, captions=16, questions=80, documents=32),))
TINY_PLAN = batches.Plan(always=(batches.Group(draw.PAGE, draw.PAGE, captions=1, questions=1, documents=1),))

# The template of the LLaVA-1.5 checkpoints in Hugging Face format: role, images, texts each followed by a space.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{# Render all text next #}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
    "{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def processor_files() -> dict[str, dict]:
    """What the checkpoint says on pictures, by file name."""
    pixels = pages.processor(pages.CLIP_MEAN, pages.CLIP_STD) | {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"shortest_edge": draw.PAGE},
        "do_center_crop": True,
        "crop_size": {"height": draw.PAGE, "width": draw.PAGE},
    }
    return {
        "preprocessor_config.json": dict(sorted(pixels.items())),
        "processor_config.json": {
            "image_token": tokenizer.IMAGE_TOKEN,
            "num_additional_image_tokens": 1,
            "patch_size": draw.PATCH,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
    }


def hub_name(name: str) -> str:
    """The name of a weight in released LLaVA-1.5 checkpoints; transformers 5 saves a shorter one of the tower's."""
    head, tail = "vision_tower.", "vision_tower.vision_model."
    return tail + name.removeprefix(head) if name.startswith(head) and not name.startswith(tail) else name


def config(tiny: bool = False) -> LlavaConfig:
    """CLIP tower at 336 px, MLP projector, LLaMA decoder with grouped-query attention."""
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
        head_dim=decoder.HEAD_DIM,
        max_position_embeddings=decoder.POSITIONS,
        rms_norm_eps=EPS,
        rope_theta=THETA,
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
        bos_token_id=tokenizer.BOS_ID,
        eos_token_id=tokenizer.EOS_ID,
        pad_token_id=tokenizer.PAD_ID,
        do_sample=False,
        max_new_tokens=192,
    )
    return model


def grid(group: batches.Group) -> tuple[int, int]:
    """Patches of a page: rows and columns."""
    return group.height // draw.PATCH, group.width // draw.PATCH


def cut(group: batches.Group, pixels: torch.Tensor) -> torch.Tensor:
    """Painted pages (pages, 3, h, w) to normalised pixels of the same shape."""
    return pages.normalise(pixels, pages.CLIP_MEAN, pages.CLIP_STD)


def labels(group: batches.Group, characters: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
    """What lies under the patches, (pages, patches, parts)."""
    return torch.cat((characters, objects), -1)


def clip_block(x, count, dtype, ln1w, ln1b, qw, qb, kw, kb, vw, vb, ow, ob, ln2w, ln2b, w1, b1, w2, b2):
    """One CLIP encoder layer on the residual x (pages, tokens, width) f32; products run in `dtype`."""
    h = F.layer_norm(x, x.shape[-1:], ln1w, ln1b, EPS).to(dtype)
    q, k, v = (heads(linear(h, w, b), count) for w, b in ((qw, qb), (kw, kb), (vw, vb)))
    h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + linear(h, ow, ob).float()
    h = F.layer_norm(x, x.shape[-1:], ln2w, ln2b, EPS).to(dtype)
    h = linear(h, w1, b1)
    return x + linear(h * torch.sigmoid(1.702 * h), w2, b2).float()


class Runner:
    """Runs the model on groups of pages; `compiled` compiles the two blocks once each."""

    def __init__(self, model: LlavaForConditionalGeneration, dtype: torch.dtype, compiled: bool):
        self.model, self.dtype = model, dtype
        compile_ = torch.compile if compiled else lambda f, **_: f
        self.block = compile_(clip_block, dynamic=False)
        tower = model.model.vision_tower
        self.tower = getattr(tower, "vision_model", tower)
        self.projector = model.model.multi_modal_projector
        vision = model.config.vision_config
        self.heads, self.width = vision.num_attention_heads, vision.hidden_size
        self.decoder = decoder.Decoder(
            model.model.language_model, model.lm_head, dtype, compile_(decoder.block, dynamic=False)
        )
        self.weights = []
        for l in self.tower.encoder.layers[:-1]:
            a = l.self_attn
            parts = (l.layer_norm1, a.q_proj, a.k_proj, a.v_proj, a.out_proj, l.layer_norm2, l.mlp.fc1, l.mlp.fc2)
            self.weights.append([p for m in parts for p in (m.weight, m.bias)])

    def see(self, groups, parts, eager: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pixels of `cut` to visual tokens (count, 576, width) f32 and patch features (count, 576, width), by group."""
        return [self._see(pixels, clip_block if eager else self.block) for pixels in parts]

    def _see(self, pixels: torch.Tensor, run) -> tuple[torch.Tensor, torch.Tensor]:
        e, norm = self.tower.embeddings, self.tower.pre_layrnorm
        x = pixels.unfold(2, draw.PATCH, draw.PATCH).unfold(3, draw.PATCH, draw.PATCH)
        x = x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2).to(self.dtype)
        x = linear(x, e.patch_embedding.weight.flatten(1)).float()
        x = torch.cat((e.class_embedding.expand(len(x), 1, -1), x), 1) + e.position_embedding.weight
        x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, EPS)
        for weights in self.weights:
            x = run(x, self.heads, self.dtype, *weights)
        first, second = self.projector.linear_1, self.projector.linear_2
        h = F.gelu(linear(x[:, 1:].to(self.dtype), first.weight, first.bias))
        return linear(h, second.weight, second.bias).float(), x[:, 1:]

    def read(self, groups, visual, prefix: torch.Tensor, ids, eager: bool = False) -> list[torch.Tensor]:
        """Logits of the text positions, (count, text, vocabulary) f32, by group."""
        return [self._read(v, prefix, t, decoder.block if eager else None) for v, t in zip(visual, ids)]

    def _read(self, visual: torch.Tensor, prefix: torch.Tensor, ids: torch.Tensor, run) -> torch.Tensor:
        start = self.decoder.embed(prefix).expand(len(ids), -1, -1)
        x = torch.cat((start, visual, self.decoder.embed(ids)), 1)
        cos, sin = decoder.angles(torch.arange(x.shape[1], device=x.device), THETA)
        return self.decoder(x, cos, sin, ids.shape[1], run)

    def matrices(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Modules whose matrices Muon optimises: those of the tower with the projector, and those of the decoder."""
        return [*self.tower.encoder.layers[:-1], self.projector], [self.decoder.text.layers]

    def reference(self, group: batches.Group, parts: torch.Tensor, prefix: torch.Tensor, ids: torch.Tensor):
        """The module's own logits of the text positions."""
        image = torch.full((len(ids), draw.PATCHES**2), self.model.config.image_token_id)
        full = torch.cat((prefix.expand(len(ids), -1), image, ids), 1)
        return self.model(input_ids=full, pixel_values=parts).logits[:, -ids.shape[1] :]
