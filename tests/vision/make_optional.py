#!/usr/bin/env python3
"""Writes the TIFF and HEIC images that the tests of vision/ decode, and what the reference makes of them.

Expected values come from Pillow and, for HEIC, pillow-heif. Needs: numpy, Pillow 13, pillow-heif. Replaces the lines "optional
FILE WIDTH HEIGHT CRC" of goldens.txt.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pillow_heif
from PIL import Image, ImageOps

from make_pictures import DATA, picture, shape

pillow_heif.register_heif_opener()

# Versions of libheif widen halved chroma differently, by a few steps; the test compares these with what was coded.
ROUNDED = ("photo.heic", "turned.heic")


def tiff(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "TIFF", **options)
    return stream.getvalue()


def heic(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "HEIF", **options)
    return stream.getvalue()


def rgb16(height: int, width: int) -> bytes:
    """A big-endian TIFF of 16-bit colours in one strip, which Pillow reads and does not write."""
    rows = (picture("noise", height, width).astype(">u2") * 257 - 3).tobytes()
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, 0), (259, 3, 1, 1 << 16), (262, 3, 1, 2 << 16), (273, 4, 1, 0),
            (277, 3, 1, 3 << 16), (278, 4, 1, height), (279, 4, 1, len(rows))]
    end = 8 + 2 + 12 * len(tags) + 4
    values = {258: end, 273: end + 6}
    body = b"".join(struct.pack(">HHII", tag, kind, count, values.get(tag, value)) for tag, kind, count, value in tags)
    return b"MM\0*" + struct.pack(">IH", 8, len(tags)) + body + bytes(4) + struct.pack(">3H", 16, 16, 16) + rows


def files() -> dict[str, bytes]:
    smooth = Image.fromarray(picture("smooth", 29, 37))
    noise = Image.fromarray(picture("noise", 19, 23))
    alpha = noise.copy()
    alpha.putalpha(Image.fromarray(picture("noise", 19, 23)[..., 0]))
    exif = Image.Exif()
    exif[0x112] = 6
    grey16 = Image.fromarray((picture("noise", 9, 11)[..., 0].astype("u2") * 3))
    return {
        "rgb.tif": tiff(noise),
        "lzw.tif": tiff(smooth, compression="tiff_lzw"),
        "deflate.tif": tiff(smooth, compression="tiff_adobe_deflate"),
        "jpeg.tif": tiff(smooth, compression="jpeg", quality=90),
        "grey.tif": tiff(noise.convert("L")),
        "grey_alpha.tif": tiff(alpha.convert("LA")),
        "bits.tif": tiff(noise.convert("1"), compression="group4"),
        "palette.tif": tiff(noise.quantize(200)),
        "rgba.tif": tiff(alpha),
        "shape.tif": tiff(shape(levels=5)),
        "grey16.tif": tiff(grey16),
        "rgb16.tif": rgb16(9, 11),
        "turned.tif": tiff(smooth, exif=exif),
        "photo.heic": heic(Image.fromarray(picture("smooth", 64, 96)), quality=95),
        "odd.heic": heic(Image.fromarray(picture("smooth", 51, 67)), quality=80, chroma=444),
        "turned.heic": heic(Image.fromarray(picture("smooth", 64, 96)), quality=95, exif=exif.tobytes()),
    }


def main() -> None:
    lines = [line for line in (DATA / "goldens.txt").read_text().splitlines() if not line.startswith("optional ")]
    for name, content in files().items():
        (DATA / name).write_bytes(content)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        if name in ROUNDED:
            continue
        lines.append(f"optional {name} {image.width} {image.height} {zlib.crc32(np.asarray(image).tobytes()):08x}")
    Path(DATA / "goldens.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
