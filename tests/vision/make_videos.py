"""Writes the clips that the tests of video decode, and what Pillow makes of their frames.

Every expected value comes from Pillow, never from kvlm itself, and all clips from fixed formulas, so
a second run with the same versions changes nothing. Needs: numpy, Pillow 13, transformers 5 (no
torch: make_pictures.py, whose helpers this uses, asks for it).

data/video/goldens.txt has one case a line; "#" begins a comment:
  frames FILE WIDTH HEIGHT DELAY:CRC ...  of every frame its delay in ms as stored, and the CRC of
                                          its RGB, which is zlib.crc32 in hexadecimal
"""

from __future__ import annotations

import argparse
import io
import random
import struct
from pathlib import Path

import PIL
from make_pictures import DATA, crc, encode, lzw, picture, riff
from PIL import Image, ImageOps, ImageSequence


class GifWriter:
    """A GIF, block by block, of kinds that Pillow does not write."""

    def __init__(
        self, size: tuple[int, int], palette: bytes = b"", background: int = 0
    ) -> None:
        self.data = b"GIF89a" + struct.pack("<HHBBB", *size, self.flags(palette), background, 0)
        self.data += palette

    @staticmethod
    def flags(palette: bytes) -> int:
        """The byte that tells of a palette."""
        return 0x80 | (len(palette) // 3).bit_length() - 2 if palette else 0

    def frame(
        self,
        area: tuple[int, int, int, int],
        indices: bytes,
        bits: int,
        delay: int | None = None,
        disposal: int = 0,
        transparent: int | None = None,
        palette: bytes = b"",
        interlaced: bool = False,
    ) -> None:
        """Adds a picture; `area` is left, top, width, height."""
        if delay is not None or disposal or transparent is not None:
            flags = disposal << 2 | (transparent is not None)
            self.data += b"!\xf9\x04" + struct.pack("<BHB", flags, delay or 0, transparent or 0)
            self.data += b"\0"
        flags = self.flags(palette) | (0x40 if interlaced else 0)
        self.data += b"," + struct.pack("<HHHHB", *area, flags) + palette + lzw(indices, bits)


def noise(height: int, width: int, seed: int, values: int) -> bytes:
    """Indices below `values`, in runs, as drawings have them."""
    generator = random.Random(seed)
    indices = b""
    while len(indices) < height * width:
        indices += bytes([generator.randrange(values)]) * generator.choice((1, 1, 2, 7))
    return indices[: height * width]


def random_gif(seed: int) -> bytes:
    """A GIF of a few pictures, each of a kind of its own."""
    generator = random.Random(seed)
    colours = picture("noise", 1, 256).tobytes()
    width, height = generator.randint(3, 17), generator.randint(3, 13)
    palette = colours[: 3 * generator.choice((8, 16))]
    writer = GifWriter((width, height), palette, background=generator.randrange(8))
    for i in range(generator.randint(3, 7)):
        w, h = generator.randint(1, width), generator.randint(1, height)
        area = (generator.randint(0, width - w), generator.randint(0, height - h), w, h)
        writer.frame(
            area,
            noise(h, w, seed * 100 + i, 8),
            3,
            delay=generator.choice((None, 0, 1, 2, 7, 100)),
            disposal=generator.choice((0, 0, 1, 2, 2, 3, 3, 5)),
            transparent=generator.choice((None, None, 1, 5, 12)),
            palette=generator.choice((b"", b"", colours[300:324], colours[30:42])),
            interlaced=generator.random() < 0.3,
        )
    return writer.data + b";"


def grey_gif(seed: int) -> bytes:
    """The same without a palette, or with greys for one, all of which Pillow keeps as grey."""
    generator = random.Random(seed)
    greys = bytes(v for v in range(256) for _ in range(3))
    palette = generator.choice((b"", greys))
    writer = GifWriter((9, 7), palette, background=generator.randrange(256))
    for i in range(5):
        w, h = generator.randint(1, 9), generator.randint(1, 7)
        writer.frame(
            (9 - w, 7 - h, w, h),
            noise(h, w, seed * 100 + i, 256),
            8,
            disposal=generator.choice((0, 1, 2, 3)),
            transparent=generator.choice((None, 3, 200)),
            palette=generator.choice((b"", greys[: 3 * 16])),
        )
    return writer.data  # without the mark of the end


def gif_files() -> dict[str, bytes]:
    """Animated GIF: as Pillow writes them, and of every disposal, transparency and palette."""
    files = {f"mixed{i}.gif": random_gif(i) for i in range(24)}
    files |= {f"grey{i}.gif": grey_gif(i) for i in range(8)}
    smooth = [Image.fromarray(picture("smooth", 12 + i, 20)[i:]) for i in range(5)]
    files["pillow.gif"] = encode(
        smooth[0], "GIF", save_all=True, append_images=smooth[1:], duration=[40, 40, 80, 120, 200]
    )
    writer = GifWriter((4, 3), picture("noise", 1, 8).tobytes())
    writer.frame((0, 0, 6, 5), noise(5, 6, 1, 8), 3, delay=5)  # extends the canvas
    writer.frame((3, 2, 3, 3), noise(3, 3, 2, 8), 3, delay=5)
    files["beyond.gif"] = writer.data + b";"
    one = GifWriter((4, 3), picture("noise", 1, 8).tobytes())
    one.frame((0, 0, 4, 3), noise(3, 4, 3, 8), 3)
    files["still.gif"] = one.data + b";"
    return files


def moving(alpha: bool) -> list[Image.Image]:
    """Frames in which a square moves, so that an encoder stores parts of the canvas."""
    frames = []
    for i in range(6):
        frame = Image.fromarray(picture("smooth", 24, 32)).convert("RGBA" if alpha else "RGB")
        square = Image.fromarray(picture("noise", 8, 8)).convert(frame.mode)
        if alpha:
            square.putalpha(Image.fromarray(picture("smooth", 8, 8)[..., 0]))
            frame.putalpha(255 if i % 2 else 90)
        frame.paste(square, (3 * i, 2 * i))
        frames.append(frame)
    return frames


def webp_files() -> dict[str, bytes]:
    """Animated WebP: lossless, lossy, with alpha, turned, and put together by hand."""
    files = {}
    for name, alpha, options in (
        ("lossless.webp", False, {"lossless": True, "duration": [30, 40, 50, 60, 10, 0]}),
        ("alpha.webp", True, {"lossless": True, "duration": 40}),
        ("lossy.webp", False, {"quality": 60, "duration": 40, "kmin": 3, "kmax": 5}),
        ("lossy_alpha.webp", True, {"quality": 60, "duration": 40, "minimize_size": True}),
    ):
        first, *rest = moving(alpha)
        files[name] = encode(first, "WEBP", save_all=True, append_images=rest, **options)
    exif = Image.Exif()
    exif[0x0112] = 6
    first, *rest = moving(False)[:2]
    files["turned.webp"] = encode(
        first, "WEBP", save_all=True, append_images=rest, lossless=True, duration=40, exif=exif
    )
    # Pictures of parts, each blended or not, disposed of or not.
    header = b"\x12\0\0\0" + (31).to_bytes(3, "little") + (23).to_bytes(3, "little")
    chunks = riff(b"VP8X", header) + riff(b"ANIM", b"\x20\x40\x60\xff\0\0")
    for i in range(6):
        part = Image.fromarray(picture("noise", 9, 8 + i)).convert("RGBA")
        part.putalpha(Image.fromarray(picture("extremes", 9, 8 + i)[..., 1]))
        data = encode(part, "WEBP", lossless=True)
        at = data.index(b"VP8L")
        fields = (2 * i // 2, 2 * (i % 3) // 2, 8 + i - 1, 9 - 1, 20 * i)
        chunks += riff(
            b"ANMF", b"".join(v.to_bytes(3, "little") for v in fields) + bytes([i % 4]) + data[at:]
        )
    files["parts.webp"] = riff(b"RIFF", b"WEBP" + chunks)
    return files


def frames_line(name: str, data: bytes) -> str:
    """The line of goldens.txt: what Pillow shows of every frame."""
    image = Image.open(io.BytesIO(data))
    cases = []
    for frame in ImageSequence.Iterator(image):
        rgb = ImageOps.exif_transpose(frame).convert("RGB")
        size = rgb.size
        cases.append(f"{frame.info.get('duration', 0)}:{crc(rgb.tobytes())}")
    return f"frames {name} {size[0]} {size[1]} {' '.join(cases)}"


def main() -> None:
    """Writes the clips and goldens.txt into one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=DATA / "video", help="folder (default: data/video/ beside this)"
    )
    folder = parser.parse_args().out
    folder.mkdir(exist_ok=True)
    lines = [f"# Made by tests/vision/make_videos.py, which explains it, with Pillow {PIL.__version__}."]
    for name, data in (item for group in (gif_files, webp_files) for item in group().items()):
        (folder / name).write_bytes(data)
        lines.append(frames_line(name, data))
    (folder / "goldens.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
