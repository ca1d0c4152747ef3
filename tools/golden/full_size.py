#!/usr/bin/env python3
"""Exports a random checkpoint of a released model's exact widths, in half precision, with goldens.

The folder is like those of export.py with the suffix f16 or bf16 (tests/golden/README.md), with the
taps of the first layers only, and far too large to be kept: tests/tools/full_size_test.py makes it,
holds the runtime against it and throws it away. The shapes whose names begin with small go the same
way in a few seconds. Widths, heads and vocabularies are those released; only llava-1.5-7b has all
layers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # before common.py hides them

import common
import shapes
import torch
import transformers

# Devices draw other weights from a seed, and not every model has clear winners at every step.
ATTEMPTS = 4
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def main() -> int:
    """Parses the command line and writes one folder, OUT/SHAPE_DTYPE."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(shapes.writers(torch.float16, "cpu"))
    parser.add_argument("--shape", choices=names, default="llava-1.5-7b")
    parser.add_argument("--dtype", choices=DTYPES, default="f16", help="of the weights")
    parser.add_argument("--out", type=Path, required=True, help="directory of the folder")
    parser.add_argument("--device", default="cpu", help="where the reference runs: cpu or cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # matrices this small gain nothing from more
    # The reference's f32 is f32, not TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name = f"{arguments.shape}-{arguments.dtype}".replace("-", "_").replace(".", "")
    write = shapes.writers(DTYPES[arguments.dtype], arguments.device)[arguments.shape]
    for attempt in range(ATTEMPTS):
        try:
            (arguments.out / name).mkdir(parents=True)
            write(arguments.out, name, 100 * attempt)
            return 0
        except OSError as error:
            print(f"full_size.py: {error}", file=sys.stderr)
            return 1
        except common.ExportError as error:
            print(f"full_size.py: attempt {attempt + 1} of {ATTEMPTS}: {error}", file=sys.stderr)
            shutil.rmtree(arguments.out / name)
    return 1


if __name__ == "__main__":
    sys.exit(main())
