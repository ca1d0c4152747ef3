"""Writes geometry.txt, what the tests of picture geometry expect: sizes, tiles, patches, positions.

Every expected value comes from transformers' own functions and processors or from torch, never from
kvlm itself. Sizes are drawn with a fixed seed, so a second run with the same library versions
changes nothing. Needs: numpy, Pillow 13, torch, torchvision, transformers 5.

One case a line; "#" begins a comment, "-" stands for a refusal:
  size H W  IC IR  JC JR  NR NC  OR OC  QH QW  VH VW
      of a picture of H x W pixels: columns and rows of InternVL's grid of up to 12 tiles and up to 6;
      rows and columns of LLaVA-NeXT's feature map; of LLaVA-OneVision's; the sides in cells of 28
      that Qwen2.5-VL resizes it to; the sides in cells of 32 of a Qwen3-VL clip of
      2 + (7 H + W) % 31 frames
  budget H W MIN MAX  RH RW         Qwen2.5-VL's size within a budget of pixels
  canvas H W  CH CW  PH PW          LLaVA-NeXT's canvas and the picture's size on it
  cap KIND FRAMES H W  RH RW        a clip's size with cap_pixels_per_frame (KIND: qwen2, qwen3)
  tiles FAMILY BACKEND KIND H W  COUNT CRC   pixel_values of all tiles of test picture KIND
  patches BACKEND KIND H W PATCH MERGE DEPTH MIN MAX  T R C CRC   Qwen2-VL's pixel_values
  clip KIND FRAMES H W PATCH MERGE DEPTH  T R C CRC      of a video; frame i is picture KIND moved by i
  axis MODE N M  V0 .. V7           eight of M samples, evenly spaced, that torch's interpolate makes
                                    of the sines of 0 to N - 1
  learned SIDE T H W MERGE  CRC CRC Qwen3-VL's indices (int32) and weights of the position table
  windows T H W MERGE WINDOW PATCH  CRC CRC  Qwen2.5-VL's window_index and bounds (int32)
CRC is zlib.crc32 in hexadecimal, of float32 where nothing else is said.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from make_pictures import DATA, crc, picture
from PIL import Image
from transformers import LlavaNextImageProcessor, LlavaOnevisionImageProcessor
from transformers import Qwen2VLImageProcessor
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.got_ocr2 import image_processing_got_ocr2 as got_ocr2
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl import video_processing_qwen3_vl as qwen3
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_window_index,
)

NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION = [[384 * r, 384 * c] for r in range(1, 7) for c in range(1, 7)]
QWEN_MAX = 12845056


def map_size(height: int, width: int, kind: str) -> tuple[int, int]:
    """Rows and columns of the feature map, from the processor that counts its tokens."""
    if kind == "next":
        owner, pinpoints, tile, side = LlavaNextProcessor, NEXT, 336, 24
        processor = SimpleNamespace()
    else:
        owner, pinpoints, tile, side = LlavaOnevisionProcessor, ONEVISION, 384, 27
        processor = SimpleNamespace(vision_aspect_ratio="anyres_max_9")
    tall, wide = select_best_resolution((height, width), pinpoints)
    features, rows = owner._get_unpadded_features(
        processor, height, width, side, side, tall // tile, wide // tile
    )
    return rows, features // rows if rows else 0


def sizes() -> list[tuple[int, int]]:
    """Awkward sizes, then random ones: by magnitude, then as photographs are."""
    drawn = [(1, 1), (1, 7), (7, 1), (1, 200), (1, 201), (1, 4000), (4000, 1), (448, 448)]
    drawn += [(336, 336), (384, 384), (28, 28), (42, 70), (997, 1009), (14, 14), (861, 328)]
    random.seed(13)
    while len(drawn) < 1300:
        drawn.append(tuple(int(math.exp(random.uniform(0, math.log(5000)))) for _ in range(2)))
    while len(drawn) < 2000:
        drawn.append((random.randint(200, 4100), random.randint(200, 4100)))
    return drawn


def or_refusal(function, factor: int) -> str:
    """The sides in units of `factor`, or what stands for a refusal."""
    try:
        height, width = function()
    except ValueError:
        return "- -"
    assert height % factor == 0 and width % factor == 0
    return f"{height // factor} {width // factor}"


def size_cases() -> list[str]:
    lines = []
    for height, width in sizes():
        twelve, six = (
            got_ocr2.get_optimal_tiled_canvas((height, width), (448, 448), 1, most)
            for most in (12, 6)
        )
        frames = 2 + (7 * height + width) % 31
        qwen = or_refusal(lambda h=height, w=width: smart_resize(h, w, 28, 3136, QWEN_MAX), 28)
        clip = or_refusal(
            lambda h=height, w=width, n=frames: qwen3.smart_resize(
                n, h, w, 2, 32, 128 * 32 * 32, 32 * 32 * 768
            ),
            32,
        )
        numbers = (*twelve, *six, *map_size(height, width, "next"), *map_size(height, width, "ov"))
        lines.append(f"size {height} {width} {' '.join(map(str, numbers))} {qwen} {clip}")
    # Where the order in which it divides shows.
    for height, width, most in (
        (3600, 500, 1003520),
        (4902, 1634, 602112),
        (2584, 3230, 1003520),
        (1278, 1704, 602112),
    ):
        sides = smart_resize(height, width, 28, 3136, most)
        lines.append(f"budget {height} {width} 3136 {most} {sides[0]} {sides[1]}")
    for height, width in sizes()[::20]:
        canvas = select_best_resolution((height, width), NEXT)
        image = np.zeros((3, height, width), dtype=np.uint8)
        shown = get_patch_output_size(image, canvas, "channels_first")
        lines.append(f"canvas {height} {width} {' '.join(map(str, (*canvas, *shown)))}")
    return lines


def cap_cases() -> list[str]:
    """The size to which the video processors resize with the cap, seen on empty clips."""
    lines = []
    for kind, processor in (
        ("qwen2", Qwen2VLVideoProcessor()),
        ("qwen3", qwen3.Qwen3VLVideoProcessor()),
    ):
        factor = processor.patch_size * processor.merge_size
        for frames, height, width in ((2, 480, 640), (5, 333, 1001), (64, 120, 90), (700, 60, 80)):
            clip = torch.zeros((1, frames, 3, height, width), dtype=torch.uint8)
            shape = processor.resize(
                clip,
                processor.size,
                resample=3,
                factor=factor,
                temporal_factor=2,
                cap_pixels_per_frame=True,
            ).shape
            lines.append(f"cap {kind} {frames} {height} {width} {shape[-2]} {shape[-1]}")
    return lines


def values_of(batch: dict, key: str = "pixel_values") -> np.ndarray:
    values = batch[key]
    values = np.asarray(values[0] if isinstance(values, list) else values)
    return np.ascontiguousarray(values.astype(np.float32))


def tile_cases() -> list[str]:
    """All steps of a tiled picture, with small tiles."""
    pinpoints = [[r * 28, c * 28] for r in range(1, 4) for c in range(1, 4)]
    square = {"height": 28, "width": 28}
    internvl = {"size": square, "crop_to_patches": True, "max_patches": 12}
    next_options = {"size": {"shortest_edge": 28}, "crop_size": square}
    onevision = {"size": square, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    families = (
        ("internvl", internvl, got_ocr2.GotOcr2ImageProcessor, GotOcr2ImageProcessorPil),
        (
            "next",
            {**next_options, "image_grid_pinpoints": pinpoints},
            LlavaNextImageProcessor,
            LlavaNextImageProcessorPil,
        ),
        (
            "onevision",
            {**onevision, "image_grid_pinpoints": pinpoints},
            LlavaOnevisionImageProcessor,
            LlavaOnevisionImageProcessorPil,
        ),
    )
    lines = []
    for family, options, torchvision_kind, pil_kind in families:
        for kind, height, width in (
            ("smooth", 1, 1),
            ("noise", 1, 3),
            ("noise", 31, 59),
            ("smooth", 59, 31),
            ("extremes", 56, 84),
            ("noise", 57, 83),
            ("smooth", 20, 301),
            ("noise", 97, 89),
            ("noise", 200, 40),
        ):
            image = Image.fromarray(picture(kind, height, width))
            for backend, processor in (("torchvision", torchvision_kind), ("pil", pil_kind)):
                values = values_of(processor(**options)(image, return_tensors="np"))
                values = values.reshape(-1, 3, 28, 28)
                lines.append(
                    f"tiles {family} {backend} {kind} {height} {width} {len(values)} "
                    f"{crc(values.tobytes())}"
                )
    # Two pictures of one OneVision prompt are not tiled.
    for kind, height, width in (("noise", 31, 59), ("smooth", 84, 83), ("noise", 5, 1)):
        image = Image.fromarray(picture(kind, height, width))
        for backend, processor in (
            ("torchvision", LlavaOnevisionImageProcessor),
            ("pil", LlavaOnevisionImageProcessorPil),
        ):
            batch = processor(**onevision)([[image, image]], return_tensors="np")
            values = np.ascontiguousarray(np.asarray(batch["pixel_values"])[0].astype(np.float32))
            lines.append(
                f"tiles square {backend} {kind} {height} {width} 1 {crc(values.tobytes())}"
            )
    return lines


def patch_cases() -> list[str]:
    lines = []
    for kind, height, width, patch, merge, depth, least, most in (
        ("noise", 31, 59, 14, 2, 2, 3136, 12845056),
        ("smooth", 59, 31, 14, 2, 2, 3136, 12845056),
        ("noise", 56, 84, 14, 2, 2, 3136, 12845056),
        ("extremes", 97, 89, 16, 2, 2, 4096, 9000),
        ("noise", 45, 140, 8, 1, 1, 64, 9000),
        ("noise", 100, 40, 7, 3, 3, 64, 9000),
        ("smooth", 3, 500, 14, 2, 2, 3136, 12845056),
    ):
        image = Image.fromarray(picture(kind, height, width))
        for backend, processor in (
            ("torchvision", Qwen2VLImageProcessor),
            ("pil", Qwen2VLImageProcessorPil),
        ):
            batch = processor(
                patch_size=patch,
                merge_size=merge,
                temporal_patch_size=depth,
                size={"shortest_edge": least, "longest_edge": most},
            )(image, return_tensors="np")
            grid = " ".join(map(str, np.asarray(batch["image_grid_thw"])[0]))
            lines.append(
                f"patches {backend} {kind} {height} {width} {patch} {merge} {depth} {least} {most} "
                f"{grid} {crc(values_of(batch).tobytes())}"
            )
    for kind, frames, height, width, patch, merge, depth in (
        ("noise", 1, 56, 28, 14, 2, 2),
        ("noise", 4, 28, 84, 14, 2, 2),
        ("smooth", 5, 56, 56, 14, 2, 2),
        ("noise", 7, 24, 36, 4, 3, 3),
    ):
        whole = picture(kind, height + frames, width)
        clip = np.stack([whole[i : i + height] for i in range(frames)])
        processor = Qwen2VLVideoProcessor(
            patch_size=patch, merge_size=merge, temporal_patch_size=depth
        )
        batch = processor(
            torch.from_numpy(clip).permute(0, 3, 1, 2), do_resize=False, return_tensors="np"
        )
        grid = " ".join(map(str, np.asarray(batch["video_grid_thw"])[0]))
        lines.append(
            f"clip {kind} {frames} {height} {width} {patch} {merge} {depth} {grid} "
            f"{crc(values_of(batch, 'pixel_values_videos').tobytes())}"
        )
    return lines


def position_cases() -> list[str]:
    lines = []
    for length, to_length in (
        (27, 14),
        (135, 108),
        (121, 70),
        (162, 81),
        (32, 32),
        (32, 16),
        (32, 45),
        (7, 1),
        (1, 5),
        (3, 997),
    ):
        axis = torch.sin(torch.arange(length, dtype=torch.float64)).float().reshape(1, 1, -1, 1)
        for mode in ("bilinear", "bicubic"):
            out = torch.nn.functional.interpolate(axis, size=(to_length, 1), mode=mode)
            samples = [out[0, 0, (2 * i + 1) * to_length // 16, 0].item() for i in range(8)]
            lines.append(
                f"axis {mode} {length} {to_length} " + " ".join(f"{v:.7g}" for v in samples)
            )
    for side, slices, height, width, merge in (
        (48, 1, 2, 2, 2),
        (48, 1, 34, 46, 2),
        (48, 3, 48, 48, 2),
        (48, 2, 60, 94, 2),
        (48, 1, 200, 142, 2),
        (5, 1, 1, 7, 1),
        (7, 2, 9, 6, 3),
        (1, 1, 4, 4, 2),
    ):
        indices, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor([[slices, height, width]]),
            side,
            align_corners=True,
            spatial_merge_size=merge,
        )
        data = indices.to(torch.int32).contiguous().numpy().tobytes()
        lines.append(
            f"learned {side} {slices} {height} {width} {merge} {crc(data)} "
            f"{crc(weights.contiguous().numpy().tobytes())}"
        )
    for slices, height, width, merge, window, patch in (
        (1, 12, 20, 2, 112, 14),
        (2, 8, 12, 2, 112, 14),
        (1, 2, 2, 2, 112, 14),
        (1, 16, 16, 2, 112, 14),
        (3, 46, 34, 2, 112, 14),
        (1, 118, 92, 2, 112, 14),
        (2, 7, 5, 1, 42, 14),
        (1, 9, 12, 3, 90, 10),
    ):
        order, bounds = get_vision_window_index(
            torch.tensor([[slices, height, width]]), merge, window, patch
        )
        lines.append(
            f"windows {slices} {height} {width} {merge} {window} {patch} "
            f"{crc(order.to(torch.int32).numpy().tobytes())} "
            f"{crc(bounds.to(torch.int32).numpy().tobytes())}"
        )
    return lines


def main() -> None:
    """Writes the file into one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=DATA,
        help="folder to write to (default: data/ beside this script)",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Made by tests/vision/make_geometry.py, which explains the lines, with "
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}."
    ]
    lines += size_cases() + cap_cases() + tile_cases() + patch_cases() + position_cases()
    (args.out / "geometry.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
