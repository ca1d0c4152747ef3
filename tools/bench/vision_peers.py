#!/usr/bin/env python3
"""Times the vision towers of transformers on this machine's GPU, to compare with `vlm-bench vision`.

Random weights, SDPA attention, no gradients. InternViT-300M runs over the 13 tiles of 448 x 448 pixels that InternVL2.5
makes of a large image, alone and followed by the projector of the 8B model. The tower of Qwen2.5-VL-7B, with its merger,
runs over an image of 1280 x 960. The last two end with the visual tokens of a prompt, as `vlm-bench vision` does. Figures
are medians of CUDA events after warming up: for pixels on the GPU in the tower's dtype, and for pixels in f32 on the host,
which is what `vlm-bench vision` starts from. --compile adds torch.compile. Needs torch and transformers
(tools/golden/requirements.txt).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
import transformers
from transformers.models.internvl.configuration_internvl import InternVLConfig, InternVLVisionConfig
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

TILES = 13
GRID = (1, 952 // 14, 1288 // 14)  # smart_resize of 1280 x 960
PATCH_COLUMNS = 3 * 2 * 14 * 14


def intern_vit_config(layers):
    return InternVLVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers or 24,
        num_attention_heads=16,
        image_size=[448, 448],
        patch_size=[14, 14],
        attention_bias=True,
        use_qk_norm=False,
        norm_type="layer_norm",
    )


def intern_vit(dtype, layers):
    """InternViT-300M and its input on the host."""
    tower = InternVLVisionModel._from_config(intern_vit_config(layers), attn_implementation="sdpa", dtype=dtype)
    return tower, (torch.randn(TILES, 3, 448, 448),)


class PictureRows(torch.nn.Module):
    """Tower, pixel shuffle and projector: the rows of a picture as the decoder takes them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return self.model.get_image_features(pixels)


def internvl(dtype, layers):
    """InternViT-300M with InternVL2.5-8B's projector; of its decoder a small layer, which is not run."""
    decoder = {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 1,
               "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 64}  # fmt: skip
    config = InternVLConfig(vision_config=intern_vit_config(layers).to_dict(), text_config=decoder)
    model = InternVLModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
    return PictureRows(model), (torch.randn(TILES, 3, 448, 448),)


def qwen_vit(dtype, layers):
    """The tower of Qwen2.5-VL-7B and its input on the host."""
    depth = layers or 32
    config = Qwen2_5_VLVisionConfig(
        depth=depth,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        out_hidden_size=3584,
        fullatt_block_indexes=[i for i in (7, 15, 23, 31) if i < depth],
        window_size=112,
    )
    tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(
        config, attn_implementation="sdpa", dtype=dtype
    )
    patches = torch.randn(GRID[1] * GRID[2], PATCH_COLUMNS)
    return tower, (patches, torch.tensor([GRID]))


TOWERS = {"internvit-300m": intern_vit, "internvl2.5-8b": internvl, "qwen2.5-vl-7b": qwen_vit}


def median_ms(function, repeats):
    """Median time of a call, in ms, by CUDA events."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def measure(name, arguments):
    """Rows of one tower."""
    dtype = getattr(torch, {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[arguments.dtype])
    torch.manual_seed(1)
    tower, host = TOWERS[name](dtype, arguments.layers)
    tower = tower.to("cuda").eval()
    pixels, *others = host
    others = [other.to("cuda") for other in others]
    placed = pixels.to("cuda", dtype)

    def row(kind, function):
        with torch.inference_mode():
            median, least, most = median_ms(function, arguments.repeats)
        return {"tower": name, "kind": kind, "dtype": arguments.dtype, "ms": median, "min_ms": least,
                "max_ms": most, "pictures_per_s": 1000 / median, "torch": torch.__version__,
                "transformers": transformers.__version__}

    yield row("eager, pixels on the GPU", lambda: tower(placed, *others))
    yield row("eager, pixels on the host", lambda: tower(pixels.to("cuda", dtype), *others))
    if arguments.compile:
        compiled = torch.compile(tower)
        yield row("compiled, pixels on the GPU", lambda: compiled(placed, *others))


def main() -> int:
    """Parses the command line and prints a JSON object a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower", choices=TOWERS, action="append", help="default: all")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    parser.add_argument("--layers", type=int, help="fewer layers than the released tower has")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("vision_peers.py: torch sees no GPU", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    transformers.utils.logging.set_verbosity_error()
    for name in arguments.tower or TOWERS:
        for row in measure(name, arguments):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
