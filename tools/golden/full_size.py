#!/usr/bin/env python3
"""Exports a random checkpoint of a released model's exact shape, in f16, with its goldens.

The folder is like those of export.py with the suffix f16 (tests/golden/README.md), with the taps of
the first layers only, and far too large to be kept: tests/tools/full_size_test.py makes it, holds the
runtime against it and throws it away. The shape `small` goes the same way in a few seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # before common.py hides them

import common
import llava15
import torch
import transformers

KEPT_TAPS = frozenset(
    ["position_ids", "projector_in", "projector_out", "inputs_embeds", "logits_prefill"]
    + ["vision.patch_embed", "vision.embeddings", "vision.pre_norm", "vision.selected"]
    + ["vision.layer.0", "vision.layer.1", "llm.layer.0", "llm.layer.1", "llm.norm"]
)

SHAPES = {
    "llava-1.5-7b": llava15.LlavaShape(
        vision={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "projection_dim": 768,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
        text={
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        image_id=32000,
        vocab_size=32064,
        picture=(640, 480),
        taps=KEPT_TAPS,
    ),
    "small": llava15.LlavaShape(
        vision=llava15.TINY.vision | {"num_hidden_layers": 5, "image_size": 84},
        text=llava15.TINY.text | {"num_hidden_layers": 4},
        image_id=1000,
        vocab_size=1032,
        picture=(160, 120),
        taps=KEPT_TAPS,
    ),
}


def main() -> int:
    """Parses the command line and writes one folder, OUT/SHAPE_f16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llava-1.5-7b")
    parser.add_argument("--out", type=Path, required=True, help="directory of the folder")
    parser.add_argument("--device", default="cpu", help="where the reference runs: cpu or cuda")
    arguments = parser.parse_args()
    # The reference's f32 is f32, not TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name = arguments.shape.replace("-", "_").replace(".", "") + "_f16"
    spec = llava15.LlavaSpec(
        name,
        f"random weights of the shape of {arguments.shape}, in f16",
        21,
        shape=SHAPES[arguments.shape],
    )
    try:
        (arguments.out / name).mkdir(parents=True)
        llava15.llava_half(arguments.out, spec, torch.float16, arguments.device)
    except (common.ExportError, OSError) as error:
        print(f"full_size.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
