"""Regions of RefCOCO as lmms-eval shows them: the whole image with the bounding box in red. Needs Pillow."""

from __future__ import annotations

import io
import math

from errors import EvaluationError, printable

QUESTION = "Provide a short description for this region."  # lmms-eval's; its own column "question" is of the segmentation
Box = tuple[float, float, float, float]  # left, top, width and height, in pixels


def box_of(found: object, what: str) -> Box:
    """A cell of the column bbox; EvaluationError if it is no box."""
    if not (isinstance(found, list) and len(found) == 4 and all(isinstance(x, (int, float)) and math.isfinite(x) for x in found)
            and min(found[2:]) >= 0):  # fmt: skip
        raise EvaluationError(f"{what} has the bbox {printable(found)}; expected left, top, width and height in pixels")
    return tuple(found)


def with_box(content: bytes, box: Box) -> bytes:
    """An encoded image with a red box one pixel wide, as PNG."""
    try:
        from PIL import Image, ImageDraw
    except ModuleNotFoundError:
        raise EvaluationError(
            "regions cannot be drawn: this Python has no Pillow; run tools/eval/setup.sh and start with "
            "build/eval-venv/bin/python3"
        ) from None
    try:
        image = Image.open(io.BytesIO(content)).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise EvaluationError(f"an image with a region cannot be read: {printable(error)}; download the file again") from None
    left, top, width, height = box
    ImageDraw.Draw(image).rectangle([left, top, left + width, top + height], outline="red")
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()
