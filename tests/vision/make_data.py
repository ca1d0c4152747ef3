"""Writes the pictures and the expected values that the tests of vision/ read.

Every expected value comes from the reference libraries (Pillow, torch with torchvision,
transformers), never from kvlm itself. All inputs come from fixed formulas, so a second run with the
same library versions changes nothing. Needs: numpy, Pillow 13, torch, torchvision, transformers 5.

goldens.txt has one case a line; "#" begins a comment:
  decode FILE WIDTH HEIGHT CRC              the RGB of a file; make_pictures.py writes it
  resize BACKEND FILTER KIND H W H2 W2 CRC  test picture KIND of H x W, resized to H2 x W2
  pixels BACKEND KIND H W EDGE CROP CRC V0 .. V7  CLIPImageProcessor's pixel_values; CRC of the
                                            float32 bytes, and eight of them, evenly spaced
  table BACKEND RESCALE NORMALIZE CRC       the 256 grey values through a float path
CRC is zlib.crc32 in hexadecimal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torchvision
import torchvision.transforms.v2.functional as tvf
import transformers
from make_pictures import DATA, crc, decode_cases, picture
from PIL import Image
from torchvision.transforms import InterpolationMode
from transformers import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
PIL_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
TORCH_FILTERS = {
    "nearest": InterpolationMode.NEAREST_EXACT,
    "lanczos": InterpolationMode.LANCZOS,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


def torch_resize(pixels: np.ndarray, height: int, width: int, name: str) -> np.ndarray:
    """What transformers' default backend calls; the memory layout must not matter."""
    planes = torch.from_numpy(pixels).permute(2, 0, 1)
    results = [
        tvf.resize(t, [height, width], interpolation=TORCH_FILTERS[name], antialias=True)
        for t in (planes.contiguous()[None], planes.contiguous(), planes)
    ]
    assert all(torch.equal(results[0][0], other) for other in results[1:])
    return results[0][0].permute(1, 2, 0).contiguous().numpy()


def resize_cases() -> list[str]:
    """Resizes over awkward sizes."""
    sizes = [
        (1, 1, 1, 1),
        (1, 1, 5, 7),
        (1, 9, 4, 3),
        (9, 1, 3, 4),
        (1, 64, 1, 17),
        (64, 1, 17, 1),
        (7, 5, 3, 11),
        (5, 7, 11, 3),
        (7, 5, 14, 10),
        (40, 40, 20, 30),
        (40, 40, 19, 30),
        (48, 64, 48, 33),
        (48, 64, 33, 64),
        (64, 48, 33, 100),
        (333, 101, 36, 112),
        (1001, 3, 10, 2),
        (3, 1001, 2, 10),
        (480, 640, 336, 448),
        (333, 1001, 56, 168),
        (1001, 333, 168, 56),
        (97, 89, 336, 308),
        (336, 336, 336, 336),
        (337, 335, 336, 336),
        (346, 195, 187, 110),
    ]
    lines = []
    for height, width, to_height, to_width in sizes:
        for kind in ("noise", "extremes"):
            pixels = picture(kind, height, width)
            for backend, names in (("pil", PIL_FILTERS), ("torchvision", TORCH_FILTERS)):
                for name in names:
                    if backend == "pil":
                        image = Image.fromarray(pixels)
                        result = np.asarray(image.resize((to_width, to_height), PIL_FILTERS[name]))
                    else:
                        result = torch_resize(pixels, to_height, to_width, name)
                    lines.append(
                        f"resize {backend} {name} {kind} {height} {width} {to_height} {to_width} "
                        f"{crc(result.tobytes())}"
                    )
    return lines


def pixel_cases() -> list[str]:
    """pixel_values of both backends of CLIPImageProcessor."""
    lines = []
    for kind, height, width, edge, crop in (
        ("smooth", 45, 61, 28, 28),
        ("noise", 61, 45, 28, 28),
        ("noise", 100, 33, 56, 56),
        ("smooth", 29, 29, 28, 28),
        ("noise", 56, 56, 56, 56),
        ("smooth", 30, 50, 28, 33),
        ("noise", 50, 30, 28, 35),
        ("extremes", 480, 641, 336, 336),
        ("smooth", 641, 333, 336, 336),
        ("noise", 1, 3, 14, 14),
    ):
        image = Image.fromarray(picture(kind, height, width))
        options = {
            "size": {"shortest_edge": edge},
            "crop_size": {"height": crop, "width": crop},
        }
        for backend, processor in (
            ("torchvision", CLIPImageProcessor(**options)),
            ("pil", CLIPImageProcessorPil(**options)),
        ):
            assert processor.backend == backend
            # Tensors for one, arrays for the other: asking PIL's backend for tensors is a detour.
            values = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
            assert values.dtype == np.float32 and values.shape == (3, crop, crop)
            values = np.ascontiguousarray(values)
            flat = values.reshape(-1)
            samples = [flat[(2 * i + 1) * len(flat) // 16] for i in range(8)]
            lines.append(
                f"pixels {backend} {kind} {height} {width} {edge} {crop} {crc(values.tobytes())} "
                + " ".join(f"{v:.9g}" for v in samples)
            )
    return lines


def table_cases() -> list[str]:
    """All byte values through each float path, with and without each step."""
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = np.dstack([grey] * 3)
    lines = []
    for rescale, normalize in ((1, 1), (1, 0), (0, 1)):
        for factor in (1 / 255, 1 / 127.5):
            options = {
                "do_resize": False,
                "do_center_crop": False,
                "do_rescale": bool(rescale),
                "rescale_factor": factor,
                "do_normalize": bool(normalize),
                "image_mean": CLIP_MEAN,
                "image_std": CLIP_STD,
            }
            for backend, kind in (
                ("torchvision", CLIPImageProcessor),
                ("pil", CLIPImageProcessorPil),
            ):
                values = kind()(Image.fromarray(pixels), return_tensors="np", **options)
                data = np.ascontiguousarray(values["pixel_values"][0].astype(np.float32))
                lines.append(
                    f"table {backend} {factor:.17g} {rescale} {normalize} {crc(data.tobytes())}"
                )
    from torchvision.transforms import Normalize, ToTensor

    unit = ToTensor()(Image.fromarray(pixels))
    normal = Normalize(CLIP_MEAN, CLIP_STD)(unit)
    for normalize, data in ((1, normal), (0, unit)):
        digest = crc(data.contiguous().numpy().tobytes())
        lines.append(f"table to_tensor {1 / 255:.17g} 1 {normalize} {digest}")
    return lines


def main() -> None:
    """Writes everything into one folder."""
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
        "# Made by tests/vision/make_data.py, which explains the lines, with "
        f"Pillow {Image.__version__}, torch {torch.__version__.split('+')[0]}, "
        f"torchvision {torchvision.__version__.split('+')[0]}, "
        f"transformers {transformers.__version__}."
    ]
    lines += decode_cases(args.out) + resize_cases() + pixel_cases() + table_cases()
    (args.out / "goldens.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
