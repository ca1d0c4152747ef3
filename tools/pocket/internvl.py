"""pocket-internvl: InternVL in the layout of transformers, and a lean forward pass over its modules for training.

The tower takes tiles of 224 px; a page of 336 x 336 becomes 2 x 2 tiles and a thumbnail, one of 336 x 672 two tiles and
a thumbnail. Each tile gives 64 visual tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, InternVLConfig, InternVLForConditionalGeneration

import batches
import byte_level
import decoder
import draw
import pages
from decoder import heads, linear

NAME, FAMILY = "pocket-internvl", "internvl"
TILE, MAX_TILES = 224, 4
SIDE = TILE // pages.PATCH
ROWS = SIDE * SIDE // 4  # visual tokens of a tile
THETA = 10000.0
EPS = 1e-6
# Objects are told by size, colour, shape and mark: a tile does not know where on the page it lies.
LABEL_SIZES = tuple(size + 1 for size in draw.OBJECT_SIZES[:4])

PLAN = batches.Plan(
    always=(batches.Group(336, 336, captions=20, questions=68, documents=40),),
    others=tuple(batches.Group(h, w, captions=6, questions=18) for h, w in ((336, 672), (672, 336))),
)
TINY_PLAN = batches.Plan(
    always=(batches.Group(336, 336, captions=1, questions=1, documents=1),),
    others=tuple(batches.Group(h, w, captions=1, questions=1) for h, w in ((336, 672), (672, 336))),
    often=2,
)

# The template of the checkpoints that transformers converted: pictures and texts as they come, a line break after a
# picture.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def processor_files() -> dict[str, dict]:
    """What the checkpoint says on pictures and frames, by file name."""
    pixels = pages.processor(pages.IMAGENET_MEAN, pages.IMAGENET_STD) | {"size": {"height": TILE, "width": TILE}}
    tiling = {"crop_to_patches": True, "min_patches": 1, "max_patches": MAX_TILES}
    named = {"processor_class": "InternVLProcessor"}
    return {
        "preprocessor_config.json": {"image_processor_type": "GotOcr2ImageProcessor", **named, **pixels, **tiling},
        "video_preprocessor_config.json": {"video_processor_type": "InternVLVideoProcessor", **named, **pixels},
        "processor_config.json": {**named, "image_seq_length": ROWS},
    }


def config(tiny: bool = False) -> InternVLConfig:
    """InternViT of the 300M kind in small, pixel shuffle, a Qwen2 decoder."""
    tokens = byte_level.added_tokens(FAMILY)
    return InternVLConfig(
        vision_config={
            "hidden_size": 64 if tiny else 256,
            "intermediate_size": 128 if tiny else 576,
            "num_hidden_layers": 2 if tiny else 5,
            "num_attention_heads": 1 if tiny else 4,
            "attention_bias": True,
            "norm_type": "layer_norm",
            "layer_norm_eps": EPS,
            "use_qk_norm": False,
            "use_mean_pooling": True,
            "layer_scale_init_value": 1.0,
            "image_size": [TILE, TILE],
            "patch_size": [pages.PATCH, pages.PATCH],
        },
        text_config={"model_type": "qwen2"} | decoder.text_config(tiny, THETA),
        image_token_id=tokens["<IMG_CONTEXT>"],
        image_seq_length=ROWS,
        downsample_ratio=0.5,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def build(tiny: bool = False) -> InternVLForConditionalGeneration:
    """A freshly initialised model in float32."""
    model = InternVLForConditionalGeneration(config(tiny))
    torch.nn.init.normal_(model.model.vision_tower.embeddings.position_embeddings, std=0.02)
    torch.nn.init.normal_(model.model.vision_tower.embeddings.cls_token, std=0.02)
    tokens = byte_level.added_tokens(FAMILY)
    model.generation_config = GenerationConfig(
        bos_token_id=tokens[byte_level.END_OF_TEXT],
        eos_token_id=[tokens[byte_level.END], tokens[byte_level.END_OF_TEXT]],
        pad_token_id=tokens[byte_level.END_OF_TEXT],
        do_sample=False,
        max_new_tokens=224,
    )
    return model


def tiles(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles of a page: the closest ratio, more tiles where the page has the pixels for them."""
    best, found = float("inf"), (1, 1)
    grids = [(c, r) for c in range(1, MAX_TILES + 1) for r in range(1, MAX_TILES + 1) if c * r <= MAX_TILES]
    for columns, rows in sorted(grids, key=lambda g: g[0] * g[1]):
        away = abs(width / height - columns / rows)
        if away < best or (away == best and height * width > 0.5 * TILE * TILE * columns * rows):
            best, found = away, (rows, columns)
    return found


def grid(group: batches.Group) -> tuple[int, int]:
    """Patches of a page's tiles together, without the thumbnail: rows and columns."""
    rows, columns = tiles(group.height, group.width)
    return rows * SIDE, columns * SIDE


def by_tile(x: torch.Tensor, rows: int, columns: int, side: int) -> torch.Tensor:
    """(pages, rows * side, columns * side, ...) to (pages, tiles, side, side, ...)."""
    return x.unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3).flatten(1, 2)


def cut(group: batches.Group, pixels: torch.Tensor) -> torch.Tensor:
    """Painted pages (pages, 3, h, w) to normalised tiles (pages, tiles + thumbnail, 3, TILE, TILE)."""
    rows, columns = tiles(group.height, group.width)
    canvas = pages.resize(pixels, rows * TILE, columns * TILE).permute(0, 2, 3, 1)
    parts = by_tile(canvas, rows, columns, TILE).permute(0, 1, 4, 2, 3)
    if rows * columns > 1:
        parts = torch.cat((parts, pages.resize(pixels, TILE, TILE)[:, None]), 1)
    parts = pages.normalise(parts, pages.IMAGENET_MEAN, pages.IMAGENET_STD)
    return parts.bfloat16() if parts.is_cuda else parts


def labels(group: batches.Group, characters: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
    """What lies under the patches of the tiles, (pages, tiles * SIDE * SIDE, parts)."""
    rows, columns = tiles(group.height, group.width)
    x = torch.cat((characters, objects[..., : len(LABEL_SIZES)]), -1)
    return by_tile(x.unflatten(1, (rows * SIDE, columns * SIDE)), rows, columns, SIDE).flatten(1, 3)


def vit_block(x, count, dtype, n1w, n1b, qw, qb, kw, kb, vw, vb, ow, ob, s1, n2w, n2b, w1, b1, w2, b2, s2):
    """One InternViT layer on the residual x (tiles, tokens, width) f32; products run in `dtype`."""
    h = F.layer_norm(x, x.shape[-1:], n1w, n1b, EPS).to(dtype)
    q, k, v = (heads(linear(h, w, b), count) for w, b in ((qw, qb), (kw, kb), (vw, vb)))
    h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + s1 * linear(h, ow, ob).float()
    h = F.layer_norm(x, x.shape[-1:], n2w, n2b, EPS).to(dtype)
    return x + s2 * linear(F.gelu(linear(h, w1, b1)), w2, b2).float()


class Runner:
    """Runs the model on groups of pages; `compiled` compiles the two blocks once each."""

    def __init__(self, model: InternVLForConditionalGeneration, dtype: torch.dtype, compiled: bool):
        self.model, self.dtype = model, dtype
        compile_ = torch.compile if compiled else lambda f, **_: f
        self.block = compile_(vit_block, dynamic=False)
        self.tower = model.model.vision_tower
        self.projector = model.model.multi_modal_projector
        self.heads = model.config.vision_config.num_attention_heads
        self.side = model.config.vision_config.image_size[0] // pages.PATCH
        self.theta = model.config.text_config.rope_parameters["rope_theta"]
        self.decoder = decoder.Decoder(
            model.model.language_model, model.lm_head, dtype, compile_(decoder.block, dynamic=False)
        )
        self.width = model.config.vision_config.hidden_size
        self.weights = []
        for l in self.tower.encoder.layer:
            a = l.attention
            projections = [p for m in (a.q_proj, a.k_proj, a.v_proj, a.projection_layer) for p in (m.weight, m.bias)]
            norms = [l.layernorm_before, l.layernorm_after]
            mlp = [p for m in (l.mlp.fc1, l.mlp.fc2) for p in (m.weight, m.bias)]
            before, after = ([m.weight, m.bias] for m in norms)
            self.weights.append([*before, *projections, l.lambda_1, *after, *mlp, l.lambda_2])

    def see(self, groups, parts, eager: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tiles of `cut` to visual tokens (count, tokens, width) f32 and patch features (count, patches, width), by group.

        The patches are those of the tiles, in the order of `labels`; the thumbnail's are left out.
        """
        return [self._see(part, vit_block if eager else self.block) for part in parts]

    def _see(self, parts: torch.Tensor, run) -> tuple[torch.Tensor, torch.Tensor]:
        count = parts.shape[1]
        e = self.tower.embeddings
        x = parts.flatten(0, 1).unfold(2, pages.PATCH, pages.PATCH).unfold(3, pages.PATCH, pages.PATCH)
        x = x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2).to(self.dtype)
        p = e.patch_embeddings.projection
        x = linear(x, p.weight.flatten(1), p.bias).float()
        x = torch.cat((e.cls_token.expand(len(x), -1, -1), x), 1) + e.position_embeddings
        for weights in self.weights:
            x = run(x, self.heads, self.dtype, *weights)
        x = x[:, 1:]
        shuffled = x.unflatten(1, (self.side // 2, 2, self.side // 2, 2)).transpose(2, 3).flatten(3).flatten(1, 2)
        j = self.projector
        h = F.layer_norm(shuffled, shuffled.shape[-1:], j.layer_norm.weight, j.layer_norm.bias, 1e-5).to(self.dtype)
        h = linear(F.gelu(linear(h, j.linear_1.weight, j.linear_1.bias)), j.linear_2.weight, j.linear_2.bias)
        visual = h.float().unflatten(0, (-1, count)).flatten(1, 2)
        return visual, x.unflatten(0, (-1, count))[:, : max(1, count - 1)].flatten(1, 2)

    def read(self, groups, visual, prefix: torch.Tensor, ids, eager: bool = False) -> list[torch.Tensor]:
        """Logits of the text positions, (count, text, vocabulary) f32, by group."""
        return [self._read(v, prefix, t, decoder.block if eager else None) for v, t in zip(visual, ids)]

    def _read(self, visual: torch.Tensor, prefix: torch.Tensor, ids: torch.Tensor, run) -> torch.Tensor:
        start = self.decoder.embed(prefix).expand(len(ids), -1, -1)
        x = torch.cat((start, visual, self.decoder.embed(ids)), 1)
        cos, sin = decoder.angles(torch.arange(x.shape[1], device=x.device), self.theta)
        return self.decoder(x, cos, sin, ids.shape[1], run)

    def matrices(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Modules whose matrices Muon optimises: those of the tower with the projector, and those of the decoder."""
        return [self.tower.encoder, self.projector], [self.decoder.text.layers]

    def reference(self, group: batches.Group, parts: torch.Tensor, prefix: torch.Tensor, ids: torch.Tensor):
        """The module's own logits of the text positions."""
        shape = len(ids), parts.shape[1] * self.side**2 // 4
        image = torch.full(shape, self.model.config.image_token_id, device=ids.device)
        full = torch.cat((prefix.expand(len(ids), -1), image, ids), 1)
        return self.model(input_ids=full, pixel_values=parts.flatten(0, 1)).logits[:, -ids.shape[1] :]
