"""From painted pages to what a vision tower takes: resizing as image processors do it, and cutting."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

PATCH = 14
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@lru_cache(maxsize=64)
def _weights(size: int, to: int, device: torch.device) -> torch.Tensor:
    """The bicubic (antialiased) resize of a line of `size` values as a matrix (to, size)."""
    lines = torch.eye(size)[None, None]
    return F.interpolate(lines, size=(to, size), mode="bicubic", antialias=True)[0, 0].to(device)


def resize(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pixels (pages, 3, h, w), whole values, to (pages, 3, height, width), whole values again."""
    h, w = pixels.shape[-2:]
    if (h, w) == (height, width):
        return pixels
    out = _weights(h, height, pixels.device) @ pixels @ _weights(w, width, pixels.device).T
    return out.round_().clamp_(0, 255)


def normalise(pixels: torch.Tensor, mean: tuple, std: tuple) -> torch.Tensor:
    """Values 0 to 255 of (..., 3, h, w) to the tower's."""
    mean, std = (torch.tensor(v, device=pixels.device)[:, None, None] * 255 for v in (mean, std))
    return (pixels - mean) / std


def processor(mean: tuple, std: tuple) -> dict:
    """Settings of an image processor of transformers that does the same, without those of its size."""
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }
