#!/usr/bin/env python3
"""Makes the table of docs/models.md: what each published checkpoint needs, from the fields in models.json.

    tools/results/models.py             writes the table between its markers in docs/models.md
    tools/results/models.py --check     writes nothing; ends with 1 if the page is out of date

Weights are counted from the shapes. Visual tokens follow the rules of vision/ (tests/tools/models_page_test.py compares them
with vlm-run). Bytes of the cache are what `vlm-kv explain` says of the configuration. KVLM_BUILD is the build folder; nothing
is downloaded. Standard library only.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tools" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"
PROGRAM = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools" / "vlm-kv"
BEGIN, END = "<!-- made by tools/results/models.py -->", "<!-- end -->"
PHOTO, SCAN = (1280, 960), (1240, 1754)  # width, height
TEXT, ANSWER = 64, 128
SPECS = ("f16", "int4", "calibquant,bits=2 + int4,scope=text")
HEAD = ("`hf download` name", "disk, GB", "memory, GB", "visual tokens", "cache of a photo, MB", "cache of a page, MB",
        "run here")  # fmt: skip


def sub_configs(config):
    """(decoder, tower) of a configuration in any of its spellings."""
    return config.get("text_config") or config.get("llm_config") or config, config["vision_config"]


def side(value):
    return value[0] if isinstance(value, list) else value


def configs(data):
    """(checkpoint, config.json, preprocessor_config.json) of each, as far as they matter."""
    for entry in data["checkpoints"]:
        family = data["families"][entry["family"]]
        kind, *numbers = data["decoders"][entry["decoder"]]
        text = dict(zip(data["text_fields"], numbers), model_type=kind)
        text |= {"head_dim": 128} if kind == "qwen3" else {"bias": False} if kind == "internlm2" else {}
        vision = dict(data["vision"][entry["vision"]])
        tied = {"tie_word_embeddings": entry.get("tied", False)}
        if entry["family"] == "internvl_chat":
            names = {"internlm2": "InternLM2ForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
            config = {**family["model"], "llm_config": {**text, **tied, "architectures": [names[kind]]}}
        elif "_vl" in entry["family"]:
            thirds = [16, 24, 24] if kind == "qwen2" else [24, 20, 20]
            rope = {"rope_type": "default", "mrope_section": thirds} | ({"mrope_interleaved": True} if kind == "qwen3" else {})
            vision["hidden_size" if entry["family"] == "qwen2_vl" else "out_hidden_size"] = text["hidden_size"]
            text |= {"model_type": entry["family"] + "_text", "rope_scaling": rope}
            config = {**family["model"], **tied, "text_config": text}
        else:
            config = {**family["model"], **tied, "text_config": text}
        yield entry, {**config, "vision_config": vision}, family["processor"]


def decoder_parameters(text, tied, kind):
    width, heads, groups = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    dim = text.get("head_dim") or width // heads
    layer = 2 * width * dim * (heads + groups) + 3 * width * text["intermediate_size"] + 2 * width
    if "qwen3" in kind:
        layer += 2 * dim  # norms of queries and keys
    elif "qwen2" in kind:
        layer += dim * (heads + 2 * groups)  # biases of queries, keys and values
    return text["vocab_size"] * width * (1 if tied else 2) + width + text["num_hidden_layers"] * layer


def blocks(width, inner, layers, *, gated=False, norms=4):
    """Layers of a vision tower: attention and MLP with biases, `norms` vectors of norms and scales."""
    mlp = 3 * width * inner + 2 * inner + width if gated else 2 * width * inner + inner + width
    return layers * (4 * width * (width + 1) + mlp + norms * width)


def tower_parameters(config):
    """(stored, of these not read) of the tower and the projector."""
    text, vision = sub_configs(config)
    kind, out = config["model_type"], text["hidden_size"]
    width = vision["embed_dim"] if kind == "qwen2_vl" else vision["hidden_size"]
    patch = 3 * side(vision["patch_size"]) ** 2 * width
    if "_vl" in kind:
        wide = width * vision["spatial_merge_size"] ** 2
        merger = wide * (wide + 1) + out * (wide + 1)
        inner = vision.get("intermediate_size") or width * vision["mlp_ratio"]
        gated = kind == "qwen2_5_vl"
        count = 2 * patch + blocks(width, inner, vision["depth"], gated=gated, norms=2 if gated else 4)
        if kind == "qwen3_vl":
            deep = len(vision["deepstack_visual_indexes"])
            return count + width * (3 + vision["num_position_embeddings"]) + (1 + deep) * merger + deep * 2 * wide, 0
        return count + merger + (1 if gated else 2) * width, 0
    inner, layers = vision["intermediate_size"], vision["num_hidden_layers"]
    grid = (side(vision["image_size"]) // side(vision["patch_size"])) ** 2
    if "internvl" in kind:
        wide = round(width / config["downsample_ratio"] ** 2)
        projector = 2 * wide + out * (wide + 1) + out * (out + 1)
        return patch + width * (3 + grid) + blocks(width, inner, layers, norms=6) + projector, 0
    projector = out * (width + 1) + out * (out + 1) + (0 if kind == "llava" else out)
    clip = vision["model_type"] == "clip_vision_model"
    count = patch + width * (grid + (6 if clip else 3)) + blocks(width, inner, layers) + projector
    return count, blocks(width, inner, 1) + 2 * width if clip else 0  # the second last layer is read


def parameters(config):
    """(stored in the files, held by kvlm)."""
    text, _ = sub_configs(config)
    tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
    stored, unread = tower_parameters(config)
    stored += decoder_parameters(text, tied, text["model_type"] + config["model_type"])
    return stored, stored - unread


def smart_resize(width, height, factor, least, most):
    """As vision/smart_resize.cpp: sides that are multiples of `factor` within the budget of pixels."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        return [max(factor, math.floor(size / shrink / factor) * factor) for size in (width, height)]
    if tall * wide < least:
        grow = math.sqrt(least / (height * width))
        return [math.ceil(size * grow / factor) * factor for size in (width, height)]
    return [wide, tall]


def anyres_tokens(width, height, tile, patches, pinpoints, most):
    """As best_canvas() and anyres_layout() of vision/tiling.cpp; `most` tiles are kept whole, 0 is all."""
    def shown(canvas):
        scale = min(canvas[1] / width, canvas[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - canvas[0] * canvas[1]
    tall, wide = max(pinpoints, key=shown)
    rows, columns = tall // tile * patches, wide // tile * patches
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * columns / (most * patches**2)) if most else 0
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return patches**2 + rows * (columns + 1)


def tile_count(width, height, least, most, tile):
    """As dynamic_tile_count() of vision/tiling.cpp, without the thumbnail."""
    best, difference = 1, math.inf
    for count in range(least, most + 1):
        for columns in (n for n in range(1, count + 1) if count % n == 0):
            off = abs(width / height - columns / (count // columns))
            if off < difference or (off == difference and width * height > 0.5 * tile * tile * count):
                best, difference = count, off
    return best


def visual_tokens(config, processor, width, height):
    """Tokens of one image of this size, alone in its prompt."""
    _, vision = sub_configs(config)
    kind, patch = config["model_type"], side(vision["patch_size"])
    if "_vl" in kind:
        factor, size = patch * vision["spatial_merge_size"], processor.get("size", {})
        least, most = (processor.get(old, size.get(new)) for old, new in
                       (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")))
        wide, tall = smart_resize(width, height, factor, least, most)
        return wide // factor * (tall // factor)
    tile = side(vision["image_size"])
    patches = tile // patch
    if "internvl" in kind:
        least = config.get("min_dynamic_patch", processor.get("min_patches", 1))
        most = config.get("max_dynamic_patch", processor.get("max_patches", 12))
        tiles = tile_count(width, height, least, most, tile)
        return (tiles + (tiles > 1)) * round(patches * config["downsample_ratio"]) ** 2
    if kind == "llava":
        return patches**2
    most = int(config["vision_aspect_ratio"].rsplit("_", 1)[1]) if kind == "llava_onevision" else 0
    return anyres_tokens(width, height, tile, patches, config["image_grid_pinpoints"], most)


@functools.cache
def cache_bytes(config, spec, visual, program):
    """Bytes of one sequence after an image of `visual` tokens, the question and the answer; `config` is JSON."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config, "utf-8")
        command = [program, "explain", spec, "-m", folder, "--json", "--visual", visual, "--tokens", visual + TEXT + ANSWER]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)["bytes"]


def table(data, program=PROGRAM):
    lines = ["| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 2) + "---|"]
    for entry, config, processor in configs(data):
        stored, held = parameters(config)
        sizes = [f"{2 * count / 1e9:.1f}" if entry.get("weights", True) else "?" for count in (stored, held)]
        tokens = [visual_tokens(config, processor, *size) for size in (PHOTO, SCAN)]
        caches = [" / ".join(f"{cache_bytes(json.dumps(config), spec, count, program) / 1e6:.0f}" for spec in SPECS)
                  for count in tokens]
        cells = [f"`{entry['id']}`", *sizes, " / ".join(f"{count:,}" for count in tokens), *caches,
                 ", ".join(["small", *entry.get("ran", [])])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text, made):
    head, rest = text.split(BEGIN + "\n", 1)
    return head + BEGIN + "\n" + made + END + rest.split(END, 1)[1]


def main():
    old = PAGE.read_text("utf-8")
    new = page(old, table(json.loads(DATA.read_text("utf-8"))))
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
