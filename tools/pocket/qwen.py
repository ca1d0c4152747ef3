"""pocket-qwen: Qwen2.5-VL in small, and a lean forward pass over the modules of transformers for training.

A page of 336 x 336 is enlarged to 448 x 448 and gives 256 visual tokens; a clip of 8 frames of 224 x 224 gives 4 x 64.
Both are 1024 patches in 16 windows of 64, so pages and clips run as one batch; other shapes run by themselves.
Patches are kept in the order of the windows throughout, as the tower does it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import batches
import byte_level
import clips
import decoder
import draw
import pages
from decoder import linear, rms_norm, rotate

NAME, FAMILY = "pocket-qwen", "qwen"
PATCH, MERGE, TEMPORAL = pages.PATCH, 2, 2
UNIT = PATCH * MERGE
WINDOW = 112 // UNIT  # cells of 2 x 2 patches along a window's side
MIN_PIXELS, MAX_PIXELS = 252 * UNIT * UNIT, 768 * UNIT * UNIT
VIDEO_MIN_PIXELS = 4 * UNIT * UNIT
TOKENS_PER_SECOND = 2
THETA, SECTIONS = 500.0, (4, 14, 14)
VISION_THETA = 10000.0
FULL_ATTENTION = (2, 5)
# An object's facts in the first and in the second frame of a pair; a page has the same in both.
LABEL_SIZES = tuple(size + 1 for size in draw.OBJECT_SIZES) * 2

SHAPES = ((336, 448), (448, 336), (336, 504), (504, 336), (336, 672), (672, 336), (448, 448))
LENGTHS = (4, 6, 10, 12)

# The template of Qwen2.5-VL, without the numbering of pictures that it has as an option.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in content %}{{ content['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def processor_files() -> dict[str, dict]:
    """What the checkpoint says on pictures and frames, by file name. Clips are taken at the rate of the drawn ones."""
    pixels = pages.processor(pages.CLIP_MEAN, pages.CLIP_STD)
    patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": TEMPORAL}
    named = {"processor_class": "Qwen2_5_VLProcessor"}
    video = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": VIDEO_MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "do_sample_frames": True,
        "fps": clips.FRAMES_PER_SECOND,
        "min_frames": LENGTHS[0],
        "max_frames": LENGTHS[-1],
        "cap_pixels_per_frame": False,
    }
    return {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            **named,
            **pixels,
            **patches,
            "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        },
        "video_preprocessor_config.json": {**named, **pixels, **patches, **video},
        "processor_config.json": named,
    }


def _others(pages_each: int, clips_each: int) -> tuple[batches.Group, ...]:
    third = max(1, pages_each // 3)
    made = [batches.Group(h, w, captions=third, questions=third, documents=third) for h, w in SHAPES]
    half = max(1, clips_each // 2)
    found = [batches.Group(draw.FRAME, draw.FRAME, frames=n, captions=half, questions=half) for n in LENGTHS]
    return (*made[:3], *found[:2], *made[3:], *found[2:])


PLAN = batches.Plan(
    always=(
        batches.Group(336, 336, captions=16, questions=48, documents=32),
        batches.Group(draw.FRAME, draw.FRAME, frames=clips.FRAMES, captions=12, questions=20),
    ),
    others=_others(24, 24),
)
TINY_PLAN = batches.Plan(
    always=(
        batches.Group(336, 336, captions=1, questions=1, documents=1),
        batches.Group(draw.FRAME, draw.FRAME, frames=clips.FRAMES, captions=1, questions=1),
    ),
    others=_others(3, 2),
    often=2,
)


def config(tiny: bool = False) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL in small: windows of 112 px, full attention in blocks 2 and 5, M-RoPE."""
    tokens = byte_level.added_tokens(FAMILY)
    text = decoder.text_config(tiny, THETA)
    text["rope_parameters"] |= {"mrope_section": list(SECTIONS)}
    return Qwen2_5_VLConfig(
        vision_config={
            "depth": 3 if tiny else 6,
            "hidden_size": 64 if tiny else 192,
            "intermediate_size": 64 if tiny else 416,
            "num_heads": 1 if tiny else 3,
            "hidden_act": "silu",
            "out_hidden_size": 256,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL,
            "window_size": WINDOW * UNIT,
            "fullatt_block_indexes": [k for k in FULL_ATTENTION if not tiny or k < 3],
            "tokens_per_second": TOKENS_PER_SECOND,
        },
        text_config=text,
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def build(tiny: bool = False) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly initialised model in float32."""
    model = Qwen2_5_VLForConditionalGeneration(config(tiny))
    tokens = byte_level.added_tokens(FAMILY)
    model.generation_config = GenerationConfig(
        bos_token_id=tokens[byte_level.END_OF_TEXT],
        eos_token_id=[tokens[byte_level.END], tokens[byte_level.END_OF_TEXT]],
        pad_token_id=tokens[byte_level.END_OF_TEXT],
        do_sample=False,
        max_new_tokens=224,
    )
    return model


def fitted(group: batches.Group) -> tuple[int, int]:
    """The size that the processor gives a page or frame: multiples of 28 px whose area lies within the bounds."""
    h, w = group.height, group.width
    least = VIDEO_MIN_PIXELS if group.frames > 1 else MIN_PIXELS
    height, width = round(h / UNIT) * UNIT, round(w / UNIT) * UNIT
    if height * width > MAX_PIXELS:
        down = math.sqrt(h * w / MAX_PIXELS)
        return math.floor(h / down / UNIT) * UNIT, math.floor(w / down / UNIT) * UNIT
    if height * width < least:
        up = math.sqrt(least / (h * w))
        return math.ceil(h * up / UNIT) * UNIT, math.ceil(w * up / UNIT) * UNIT
    return height, width


def grid(group: batches.Group) -> tuple[int, int]:
    """Patches of a page or frame: rows and columns."""
    height, width = fitted(group)
    return height // PATCH, width // PATCH


@lru_cache(maxsize=None)
def layout(group: batches.Group) -> dict:
    """Where the patches of a page or clip go.

    order: index of each patch of the sequence in (time, row, column) order; raster: index of each visual token in the
    sequence; places: (row, column) of each patch; sizes: patches of each window; cells: (time, row, column) of tokens.
    """
    rows, columns = grid(group)
    times = max(1, group.frames // TEMPORAL)
    down, across = rows // MERGE, columns // MERGE
    cells, sizes = [], []
    for t in range(times):
        for top in range(0, down, WINDOW):
            for left in range(0, across, WINDOW):
                window = [
                    (t, y, x)
                    for y in range(top, min(top + WINDOW, down))
                    for x in range(left, min(left + WINDOW, across))
                ]
                cells += window
                sizes.append(len(window) * MERGE * MERGE)
    patches = [(t, MERGE * y + i, MERGE * x + j) for t, y, x in cells for i in range(MERGE) for j in range(MERGE)]
    return {
        "times": times,
        "order": torch.tensor([(t * rows + y) * columns + x for t, y, x in patches]),
        "places": torch.tensor([(y, x) for _, y, x in patches]),
        "raster": torch.tensor([(t * down + y) * across + x for t, y, x in cells]).argsort(),
        "cells": torch.tensor(sorted(cells)),
        "sizes": sizes,
    }


def cut(group: batches.Group, pixels: torch.Tensor) -> torch.Tensor:
    """Painted pages or frames (count * frames, 3, h, w) to normalised patches (count, patches, 3 * 2 * 14 * 14)."""
    where = layout(group)
    rows, columns = grid(group)
    x = pages.normalise(pages.resize(pixels, *fitted(group)), pages.CLIP_MEAN, pages.CLIP_STD)
    if x.is_cuda:
        x = x.bfloat16()
    x = x.unflatten(0, (-1, group.frames))
    if group.frames == 1:
        x = x.expand(-1, TEMPORAL, -1, -1, -1)
    # (count, times, pair, 3, rows, 14, columns, 14) to (count, times, rows, columns, 3, pair, 14, 14)
    x = x.unflatten(1, (where["times"], TEMPORAL)).unflatten(4, (rows, PATCH)).unflatten(6, (columns, PATCH))
    x = x.permute(0, 1, 4, 6, 3, 2, 5, 7).flatten(4).flatten(1, 3)
    return x[:, where["order"].to(x.device)]


def labels(group: batches.Group, characters: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
    """What lies under the patches in the order of `cut`, (count, patches, parts)."""
    if group.frames > 1:
        characters = characters.unflatten(0, (-1, group.frames))[:, ::TEMPORAL].flatten(1, 2)
        objects = objects.unflatten(0, (-1, group.frames // TEMPORAL, TEMPORAL)).flatten(0, 1)
        objects = torch.cat((objects[:, 0], objects[:, 1]), -1).unflatten(0, (-1, group.frames // TEMPORAL)).flatten(1, 2)
    else:
        objects = torch.cat((objects, objects), -1)
    return torch.cat((characters, objects), -1)[:, layout(group)["order"].to(characters.device)]


def positions(group: batches.Group, prefix: int, text: int) -> torch.Tensor:
    """M-RoPE positions (3, tokens): the prefix, the visual tokens, the text."""
    cells = layout(group)["cells"].clone()
    if group.frames > 1:
        cells[:, 0] = (cells[:, 0] * TOKENS_PER_SECOND * TEMPORAL / clips.FRAMES_PER_SECOND).long()
    after = prefix + max(grid(group)) // MERGE
    parts = (torch.arange(prefix).expand(3, -1), cells.T + prefix, after + torch.arange(text).expand(3, -1))
    return torch.cat(parts, 1)


def spread(table: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Rows of a table (kinds, ...) repeated `counts` times each."""
    return torch.cat([table[k : k + 1].expand(n, *table.shape[1:]) for k, n in enumerate(counts)])


def attend(q, k, v, counts, segments, mask):
    """Attention within segments: q, k, v (batch, patches, heads, dim); segments: their length for each kind of row."""
    found, first = [], 0
    for count, length in zip(counts, segments):
        part = [t[first : first + count].reshape(-1, length, *t.shape[2:]).transpose(1, 2) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*part, attn_mask=mask)
        found.append(out.transpose(1, 2).reshape(count, q.shape[1], -1))
        first += count
    return torch.cat(found) if len(found) > 1 else found[0]


def vision_block(x, cos, sin, kinds, counts, segments, mask, heads, dtype, n1, qkvw, qkvb, ow, ob, n2, gw, gb, uw, ub, dw, db):
    """One layer of the tower on the residual x (batch, patches, width) f32; products run in `dtype`."""
    h = linear(rms_norm(x, n1).to(dtype), qkvw, qkvb).unflatten(-1, (3, heads, -1))
    q, k, v = h.unbind(2)
    cos, sin = (spread(t, kinds)[:, :, None] for t in (cos, sin))
    h = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, counts, segments, mask)
    x = x + linear(h, ow, ob).float()
    h = rms_norm(x, n2).to(dtype)
    return x + linear(F.silu(linear(h, gw, gb)) * linear(h, uw, ub), dw, db).float()


def text_block(x, cos, sin, q_heads, kv_heads, eps, dtype, kinds, *weights):
    """A decoder layer whose rows have positions by kind."""
    cos, sin = (spread(t, kinds)[:, None] for t in (cos, sin))
    return decoder.block(x, cos, sin, q_heads, kv_heads, eps, dtype, *weights)


class Runner:
    """Runs the model on groups of pages and clips; `compiled` compiles the blocks once for each use."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, dtype: torch.dtype, compiled: bool):
        self.model, self.dtype = model, dtype
        compile_ = torch.compile if compiled else lambda f, **_: f
        self.block = compile_(vision_block, dynamic=False)
        self.text_block = compile_(text_block, dynamic=False)
        self.tower = model.model.visual
        vision = model.config.vision_config
        self.heads, self.width = vision.num_heads, vision.hidden_size
        self.full = set(vision.fullatt_block_indexes)
        self.decoder = decoder.Decoder(model.model.language_model, model.lm_head, dtype, self.text_block)
        self.weights = []
        for b in self.tower.blocks:
            parts = (b.attn.qkv, b.attn.proj), (b.mlp.gate_proj, b.mlp.up_proj, b.mlp.down_proj)
            attention, mlp = ([p for m in part for p in (m.weight, m.bias)] for part in parts)
            self.weights.append([b.norm1.weight, *attention, b.norm2.weight, *mlp])
        self.tables: dict = {}

    def _angles(self, group: batches.Group, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tower's rows and columns, (patches, head_dim / 2)."""
        key = ("vision", group)
        if key not in self.tables:
            quarter = self.width // self.heads // 4
            rate = VISION_THETA ** -(torch.arange(quarter).float() / quarter)
            angle = (layout(group)["places"].float()[..., None] * rate).flatten(1).to(device)
            self.tables[key] = (angle.cos(), angle.sin())
        return self.tables[key]

    def _rope(self, group: batches.Group, prefix: int, text: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        key = ("text", group, prefix, text)
        if key not in self.tables:
            self.tables[key] = decoder.angles(positions(group, prefix, text).to(device), THETA, SECTIONS)
        return self.tables[key]

    def _mask(self, group: batches.Group, device) -> torch.Tensor | None:
        """Which patches lie in one window, (patches, patches), where windows differ in size."""
        key = ("mask", group)
        if key not in self.tables:
            sizes = torch.tensor(layout(group)["sizes"])
            window = torch.arange(len(sizes)).repeat_interleave(sizes)
            self.tables[key] = (window[:, None] == window[None]).to(device) if len(sizes.unique()) > 1 else None
        return self.tables[key]

    def see(self, groups, parts, eager: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Patches of `cut` to visual tokens (count, tokens, width) and patch features (count, patches, width), by group.

        Groups that are seen together have equally many patches; only a single group may have windows of several sizes.
        """
        x = torch.cat(parts).to(self.dtype)
        x = linear(x, self.tower.patch_embed.proj.weight.flatten(1)).float()
        count, patches = x.shape[:2]
        kinds = tuple(len(p) for p in parts)
        cos, sin = (torch.stack(t) for t in zip(*(self._angles(g, x.device) for g in groups)))
        mask = self._mask(groups[0], x.device)
        assert mask is None or len(groups) == 1
        window = ((count,), (patches,) if mask is not None else (layout(groups[0])["sizes"][0],), mask)
        full = (kinds, tuple(patches // layout(g)["times"] for g in groups), None)
        run = vision_block if eager else self.block
        for k, weights in enumerate(self.weights):
            x = run(x, cos, sin, kinds, *(full if k in self.full else window), self.heads, self.dtype, *weights)
        m = self.tower.merger
        h = rms_norm(x, m.ln_q.weight).to(self.dtype).unflatten(1, (-1, MERGE * MERGE)).flatten(2)
        first, second = m.mlp[0], m.mlp[2]
        h = linear(F.gelu(linear(h, first.weight, first.bias)), second.weight, second.bias).float()
        visual = [t[:, layout(g)["raster"].to(t.device)] for g, t in zip(groups, h.split(kinds))]
        return list(zip(visual, x.split(kinds)))

    def read(self, groups, visual, prefix: torch.Tensor, ids, eager: bool = False) -> list[torch.Tensor]:
        """Logits of the text positions, (count, text, vocabulary) f32, by group."""
        kinds = tuple(len(t) for t in ids)
        text = torch.cat(ids)
        length = text.shape[1]
        start = self.decoder.embed(prefix).expand(len(text), -1, -1)
        x = torch.cat((start, torch.cat(visual), self.decoder.embed(text)), 1)
        ropes = [self._rope(g, prefix.shape[1], length, x.device) for g in groups]
        cos, sin = (torch.stack(t) for t in zip(*ropes))
        block = text_block if eager else self.text_block

        def run(x, cos, sin, q_heads, kv_heads, eps, dtype, *weights):
            return block(x, cos, sin, q_heads, kv_heads, eps, dtype, kinds, *weights)

        return list(self.decoder(x, cos, sin, length, run).split(kinds))

    def matrices(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Modules whose matrices Muon optimises: those of the tower with the merger, and those of the decoder."""
        return [self.tower.blocks, self.tower.merger], [self.decoder.text.layers]

    def reference(self, group: batches.Group, parts: torch.Tensor, prefix: torch.Tensor, ids: torch.Tensor):
        """The module's own logits of the text positions."""
        rows, columns = grid(group)
        where = layout(group)
        # The module takes patches in the order of cells, 2 x 2 patches each, and orders them by window itself.
        tokens = parts.unflatten(1, (-1, MERGE * MERGE))[:, where["raster"]].flatten(0, 2)
        video = group.frames > 1
        pad = self.model.config.video_token_id if video else self.model.config.image_token_id
        count = len(where["cells"])
        full = torch.cat((prefix.expand(len(ids), -1), torch.full((len(ids), count), pad), ids), 1)
        types = torch.zeros_like(full)
        types[:, prefix.shape[1] : prefix.shape[1] + count] = 2 if video else 1
        shape = torch.tensor([[where["times"], rows, columns]] * len(ids))
        if video:
            seconds = torch.full((len(ids),), TEMPORAL / clips.FRAMES_PER_SECOND)
            given = {"pixel_values_videos": tokens, "video_grid_thw": shape, "second_per_grid_ts": seconds}
        else:
            given = {"pixel_values": tokens, "image_grid_thw": shape}
        return self.model(input_ids=full, mm_token_type_ids=types, **given).logits[:, -ids.shape[1] :]
