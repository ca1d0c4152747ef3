"""Writes the pictures that the tests of vision/ decode, and what the reference makes of them.

Every expected value comes from the reference libraries (Pillow, transformers), never from kvlm
itself. All pictures come from fixed formulas, so a second run with the same library versions changes
nothing. Needs: numpy, Pillow 13, transformers 5 (no torch).

Replaces the lines "decode FILE WIDTH HEIGHT CRC" of goldens.txt, which make_data.py explains, and
leaves its others alone.
"""

from __future__ import annotations

import argparse
import io
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

DATA = Path(__file__).resolve().parent / "data"


def picture(kind: str, height: int, width: int) -> np.ndarray:
    """The test picture that tests/vision/test_images.h makes, too: uint8 (height, width, 3)."""
    y, x, c = np.meshgrid(
        np.arange(height, dtype=np.uint32),
        np.arange(width, dtype=np.uint32),
        np.arange(3, dtype=np.uint32),
        indexing="ij",
    )
    mixed = y * np.uint32(73856093) ^ x * np.uint32(19349663) ^ c * np.uint32(83492791)
    mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(2654435761)
    noise = (mixed >> np.uint32(24)).astype(np.uint8)
    if kind == "noise":
        return noise
    if kind == "extremes":  # only 0 and 255: makes filters overshoot
        return np.where(noise >= 128, 255, 0).astype(np.uint8)
    if kind == "smooth":
        return ((y * 5 + x * 3 + c * 60 + (y * x) // 16) // 2 % 256).astype(np.uint8)
    raise ValueError(kind)


def crc(data: bytes) -> str:
    """zlib's CRC as goldens.txt spells it."""
    return f"{zlib.crc32(data):08x}"


def chunk(kind: bytes, data: bytes) -> bytes:
    """One PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(
    size: tuple[int, int],
    depth: int,
    color_type: int,
    rows: list[bytes],
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """A PNG of exactly this kind; Pillow cannot write all of them."""
    header = struct.pack(">IIBBBBB", *size, depth, color_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + before
        + chunk(b"IDAT", data)
        + after
        + chunk(b"IEND", b"")
    )


def interlaced_png(pixels: np.ndarray) -> bytes:
    """An Adam7 RGB PNG."""
    height, width, _ = pixels.shape
    data = b""
    for x0, y0, dx, dy in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        part = pixels[y0::dy, x0::dx]
        if part.size:
            data += b"".join(b"\0" + row.tobytes() for row in part)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(data, 9))
        + chunk(b"IEND", b"")
    )


def pack(values: np.ndarray, depth: int) -> list[bytes]:
    """Rows of samples below 2^depth, packed as PNG and BMP want them."""
    bits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
    return [row.tobytes() for row in np.packbits(bits.reshape(len(values), -1), axis=-1)]


def raw_bmp(
    size: tuple[int, int],
    bits: int,
    rows: list[bytes],
    palette: bytes = b"",
    masks: tuple[int, ...] = (),
    top_down: bool = False,
    os2: bool = False,
) -> bytes:
    """A BMP of exactly this kind; `rows` from top to bottom."""
    width, height = size
    if os2:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack(
            "<IiiHHIIiiII",
            40,
            width,
            -height if top_down else height,
            1,
            bits,
            3 if masks else 0,
            0,
            2835,
            2835,
            len(palette) // 4,
            0,
        )
    info += b"".join(struct.pack("<I", mask) for mask in masks) + palette
    body = b"".join(
        row + b"\0" * (-len(row) % 4) for row in (rows if top_down else reversed(rows))
    )
    offset = 14 + len(info)
    return b"BM" + struct.pack("<IHHI", offset + len(body), 0, 0, offset) + info + body


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    """Pillow's own file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def orientation_exif(value: int, big_endian: bool = False) -> bytes:
    """An EXIF block with one tag."""
    order = ">" if big_endian else "<"
    return (
        b"Exif\0\0"
        + (b"MM" if big_endian else b"II")
        + struct.pack(order + "HIHHHIHHI", 42, 8, 1, 274, 3, 1, value, 0, 0)
    )


def png_files() -> dict[str, bytes]:
    """PNG of every colour type and depth."""
    rng = np.random.default_rng(1)
    width, height = 13, 7
    size = (width, height)
    grey = picture("smooth", height, width)[..., 0]
    rgb = picture("smooth", height, width)
    rgba = np.dstack([rgb, picture("noise", height, width)[..., 0]])
    wide = rng.integers(0, 65536, (height, width, 4)).astype(">u2")
    palette = picture("noise", 1, 16).tobytes()
    trns_rgb = chunk(b"tRNS", struct.pack(">HHH", *(int(v) for v in rgb[0, 0])))
    files = {}
    for depth in (1, 2, 4):
        samples = (grey >> (8 - depth)).astype(np.uint8)
        files[f"grey{depth}.png"] = raw_png(size, depth, 0, pack(samples, depth))
        files[f"palette{depth}.png"] = raw_png(
            size, depth, 3, pack(samples, depth), chunk(b"PLTE", palette[: 3 << depth])
        )
    rows = [row.tobytes() for row in grey]
    files["grey8.png"] = raw_png(size, 8, 0, rows)
    files["grey8_trns.png"] = raw_png(
        size, 8, 0, rows, chunk(b"tRNS", struct.pack(">H", int(grey[0, 0])))
    )
    files["palette8_short.png"] = raw_png(size, 8, 3, rows, chunk(b"PLTE", palette))
    files["palette8_trns.png"] = raw_png(
        size,
        8,
        3,
        [(row % 16).tobytes() for row in grey],
        chunk(b"PLTE", palette) + chunk(b"tRNS", bytes(range(0, 160, 10))),
    )
    # One entry of a palette that is transparent, or a key colour: the reference makes it white.
    twice = palette[:9] + palette[:3] + palette[12:]
    files["palette8_key.png"] = raw_png(
        size,
        8,
        3,
        [(row % 16).tobytes() for row in grey],
        chunk(b"PLTE", twice) + chunk(b"tRNS", b"\xff\xff\xff\0\xff"),
    )
    files["palette8_keys.png"] = raw_png(
        size,
        8,
        3,
        [(row % 16).tobytes() for row in grey],
        chunk(b"PLTE", palette) + chunk(b"tRNS", b"\xff\0\0\xff"),
    )
    noise = rgba[..., 3]
    for depth, key in ((1, 0), (2, 1), (2, 85), (4, 51), (8, 256 + 17), (16, 0), (16, 256), (16, 4)):
        samples = (noise // 64 * 4) if depth == 16 else noise // 17 * 17 >> (8 - depth)
        keyed = samples.astype(">u2") if depth == 16 else None
        files[f"grey{depth}_key{key}.png"] = raw_png(
            size,
            depth,
            0,
            pack(samples, depth) if keyed is None else [r.tobytes() for r in keyed],
            chunk(b"tRNS", struct.pack(">H", key)),
        )
    first = [int(v) for v in wide[0, 0, :3]]
    files["rgb16_key.png"] = raw_png(
        size,
        16,
        2,
        [r.tobytes() for r in np.ascontiguousarray(wide[..., :3] // 257 * 257).astype(">u2")],
        chunk(b"tRNS", struct.pack(">HHH", *(v // 257 * 257 for v in first))),
    )
    low = np.arange(width * height).reshape(height, width) * 4 % 300
    files["grey16.png"] = raw_png(size, 16, 0, [r.tobytes() for r in low.astype(">u2")])
    files["grey16_noise.png"] = raw_png(size, 16, 0, [r.tobytes() for r in wide[..., 0]])
    files["grey_alpha8.png"] = raw_png(
        size, 8, 4, [r.tobytes() for r in np.ascontiguousarray(rgba[..., 2:])]
    )
    files["grey_alpha16.png"] = raw_png(size, 16, 4, [r.tobytes() for r in wide[..., :2]])
    files["rgb8.png"] = raw_png(size, 8, 2, [r.tobytes() for r in rgb])
    files["rgb8_trns.png"] = raw_png(size, 8, 2, [r.tobytes() for r in rgb], trns_rgb)
    files["rgb8_gamma.png"] = raw_png(
        size, 8, 2, [r.tobytes() for r in rgb], chunk(b"gAMA", struct.pack(">I", 100000))
    )
    files["rgb16.png"] = raw_png(size, 16, 2, [r.tobytes() for r in wide[..., :3]])
    files["rgba8.png"] = raw_png(size, 8, 6, [r.tobytes() for r in rgba])
    files["rgba16.png"] = raw_png(size, 16, 6, [r.tobytes() for r in wide])
    files["interlaced.png"] = interlaced_png(rgb)
    files["filtered.png"] = encode(Image.fromarray(picture("smooth", 61, 45)), "PNG")
    files["one_pixel.png"] = raw_png((1, 1), 8, 2, [bytes([10, 20, 30])])
    rows = [r.tobytes() for r in rgb]
    exif = orientation_exif(6)[6:]
    profile = b"\nexif\n%8d\n" % len(exif) + exif.hex().encode() + b"\n"
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    files["exif.png"] = raw_png(size, 8, 2, rows, chunk(b"eXIf", exif))
    files["exif_after.png"] = raw_png(size, 8, 2, rows, after=chunk(b"eXIf", exif))
    files["exif_profile.png"] = raw_png(
        size,
        8,
        2,
        rows,
        chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)),
    )
    files["xmp.png"] = raw_png(
        size, 8, 2, rows, chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    )
    return files


def jpeg_files() -> dict[str, bytes]:
    """JPEG of every kind that Pillow decodes, and the eight orientations."""
    image = Image.fromarray(picture("smooth", 45, 61))
    files = {
        "baseline.jpg": encode(image, "JPEG", quality=85),
        "progressive.jpg": encode(image, "JPEG", quality=85, progressive=True),
        "full_chroma.jpg": encode(image, "JPEG", quality=95, subsampling=0),
        "half_chroma.jpg": encode(image, "JPEG", quality=70, subsampling=1),
        "grey.jpg": encode(image.convert("L"), "JPEG", quality=85),
        "rgb.jpg": encode(image, "JPEG", quality=85, keep_rgb=True),
        "cmyk.jpg": encode(image.convert("CMYK"), "JPEG", quality=85),
        "restarts.jpg": encode(image, "JPEG", quality=85, restart_marker_blocks=2),
        "one_pixel.jpg": encode(image.crop((20, 20, 21, 21)), "JPEG"),
    }
    files["arithmetic.jpg"] = subprocess.run(
        ["jpegtran", "-arithmetic"], input=files["full_chroma.jpg"], capture_output=True, check=True
    ).stdout
    # YCCK: the same file with Adobe's transform code 2 instead of 0.
    adobe = files["cmyk.jpg"].index(b"Adobe")
    ycck = bytearray(files["cmyk.jpg"])
    ycck[adobe + 11] = 2
    files["ycck.jpg"] = bytes(ycck)
    # Without Adobe's marker; Pillow inverts the inks all the same.
    start = adobe - 4
    length = struct.unpack(">H", files["cmyk.jpg"][adobe - 2 : adobe])[0]
    files["cmyk_plain.jpg"] = files["cmyk.jpg"][:start] + files["cmyk.jpg"][start + 2 + length :]
    files["stray_bytes.jpg"] = files["baseline.jpg"] + b"\0" * 5
    small = Image.fromarray(picture("smooth", 10, 23))
    for value in range(1, 9):
        exif = orientation_exif(value, big_endian=value % 2 == 0)
        files[f"orientation{value}.jpg"] = encode(small, "JPEG", quality=90, exif=exif)
    files["orientation_bad.jpg"] = encode(small, "JPEG", quality=90, exif=orientation_exif(9))
    xmp = b"<x:xmpmeta><tiff:Orientation>3</tiff:Orientation></x:xmpmeta>"
    files["orientation_xmp.jpg"] = encode(small, "JPEG", quality=90, xmp=xmp)
    return files


def bmp_files() -> dict[str, bytes]:
    """BMP of every depth."""
    width, height = 13, 7
    size = (width, height)
    grey = picture("noise", height, width)[..., 0]
    rgb = picture("noise", height, width)
    bgr_rows = [row.tobytes() for row in rgb[..., ::-1]]
    words = picture("noise", height, width * 2)[..., 0]
    palette = picture("noise", 1, 1024)[0, :, 0].tobytes()
    no_offset = bytearray(raw_bmp(size, 8, [r.tobytes() for r in grey], palette))
    no_offset[10:14] = bytes(4)
    files = {
        "rgb24.bmp": raw_bmp(size, 24, bgr_rows),
        "rgb24_top_down.bmp": raw_bmp(size, 24, bgr_rows, top_down=True),
        "rgb24_os2.bmp": raw_bmp(size, 24, bgr_rows, os2=True),
        "rgb32.bmp": raw_bmp(size, 32, [r.tobytes() for r in np.dstack([rgb, grey])]),
        "rgb32_masks.bmp": raw_bmp(
            size,
            32,
            [r.tobytes() for r in np.dstack([grey, rgb])],
            masks=(0xFF000000, 0xFF0000, 0xFF00),
        ),
        "rgb555.bmp": raw_bmp(size, 16, [r.tobytes() for r in words]),
        "rgb565.bmp": raw_bmp(
            size, 16, [r.tobytes() for r in words], masks=(0xF800, 0x7E0, 0x1F)
        ),
        "rgb555_masks.bmp": raw_bmp(
            size, 16, [r.tobytes() for r in words], masks=(0x7C00, 0x3E0, 0x1F)
        ),
        "palette8_os2.bmp": raw_bmp(size, 8, [r.tobytes() for r in grey], palette[:768], os2=True),
        "palette8.bmp": raw_bmp(size, 8, [r.tobytes() for r in grey], palette),
        "one_pixel.bmp": raw_bmp((1, 1), 24, [bytes([1, 2, 3])]),
        "no_offset.bmp": bytes(no_offset),
        "pillow_l.bmp": encode(Image.fromarray(grey), "BMP"),
        "pillow_1.bmp": encode(Image.fromarray(grey).convert("1"), "BMP"),
        "pillow_rgba.bmp": encode(Image.fromarray(np.dstack([rgb, grey])), "BMP"),
    }
    for depth in (1, 4):
        rows = pack(grey >> (8 - depth), depth)
        files[f"palette{depth}.bmp"] = raw_bmp(size, depth, rows, palette[: 4 << depth])
    return files


def webp_files() -> dict[str, bytes]:
    """WebP of every kind; an animation is its first picture."""
    rgb = picture("smooth", 45, 61)
    alpha = picture("noise", 45, 61)[..., :1]
    image = Image.fromarray(rgb)
    clear = Image.fromarray(np.dstack([rgb, np.where(alpha < 128, 0, alpha)]))
    small = Image.fromarray(picture("smooth", 10, 23))
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    frames = [Image.fromarray(picture(kind, 20, 30)) for kind in ("smooth", "noise")]
    files = {
        "lossy.webp": encode(image, "WEBP", quality=80),
        "lossy_alpha.webp": encode(clear, "WEBP", quality=80),
        "lossless.webp": encode(image, "WEBP", lossless=True),
        "lossless_alpha.webp": encode(clear, "WEBP", lossless=True),
        "lossless_exact.webp": encode(clear, "WEBP", lossless=True, exact=True),
        "one_pixel.webp": encode(image.crop((20, 20, 21, 21)), "WEBP"),
        "animated.webp": encode(
            frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True
        ),
        "orientation6.webp": encode(small, "WEBP", exif=orientation_exif(6)),
        "orientation_xmp.webp": encode(small, "WEBP", xmp=xmp),
    }
    # A first picture that leaves some of the canvas: Pillow writes none, so it is put together.
    frame = files["lossless.webp"][12:]
    header = b"".join(v.to_bytes(3, "little") for v in (6 // 2, 4 // 2, 60, 44, 100)) + b"\0"
    chunks = (
        riff(b"VP8X", b"\x12\0\0\0" + (79).to_bytes(3, "little") + (59).to_bytes(3, "little"))
        + riff(b"ANIM", b"\x20\x40\x60\xff\0\0")
        + riff(b"ANMF", header + frame)
    )
    files["animated_part.webp"] = riff(b"RIFF", b"WEBP" + chunks)
    return files


def riff(kind: bytes, data: bytes) -> bytes:
    """One RIFF chunk."""
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def lzw(indices: bytes, bits: int, end: bool = True) -> bytes:
    """GIF's codes of these indices, with a clear code so often that their length never changes."""
    clear = 1 << bits
    codes = []
    for i, index in enumerate(indices):
        if i % (clear - 2) == 0:
            codes.append(clear)
        codes.append(index)
    if end:
        codes.append(clear + 1)
    value = sum(code << (bits + 1) * i for i, code in enumerate(codes))
    data = value.to_bytes(((bits + 1) * len(codes) + 7) // 8, "little")
    pieces = [data[i : i + 255] for i in range(0, len(data), 255)]
    return bytes([bits]) + b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\0"


def raw_gif(
    canvas: tuple[int, int],
    frame: tuple[int, int, int, int],
    indices: bytes,
    bits: int,
    palette: bytes = b"",
    local: bytes = b"",
    transparent: int | None = None,
    background: int = 0,
    interlaced: bool = False,
) -> bytes:
    """A GIF of exactly this kind, with a comment in it."""

    def flags(colours: bytes) -> int:
        return 0x80 | (len(colours) // 3).bit_length() - 2 if colours else 0

    data = b"GIF89a" + struct.pack("<HHBBB", *canvas, flags(palette), background, 0) + palette
    data += b"!\xfe\x05hello\0"
    if transparent is not None:
        data += b"!\xf9\x04\x01\0\0" + bytes([transparent]) + b"\0"
    data += b"," + struct.pack("<HHHHB", *frame, flags(local) | (0x40 if interlaced else 0)) + local
    return data + lzw(indices, bits) + b";"


def gif_files() -> dict[str, bytes]:
    """GIF with palettes of every kind, pictures beside the canvas, and what is transparent."""
    noise = picture("noise", 9, 17)[..., 0]
    colours = picture("noise", 1, 256).tobytes()
    whole = (0, 0, 17, 9)
    size = (17, 9)
    image = Image.fromarray(picture("smooth", 45, 61))
    frames = [Image.fromarray(picture(kind, 20, 30)) for kind in ("noise", "smooth")]
    low = (noise % 8).tobytes()
    twice = colours[:9] + colours[:3] + colours[12:24]
    ramp = bytes(v for v in range(8) for _ in range(3))
    return {
        "pillow.gif": encode(image, "GIF"),
        "pillow_interlaced.gif": encode(image, "GIF", interlace=1),
        "pillow_grey.gif": encode(image.convert("L"), "GIF"),
        "animated.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "global.gif": raw_gif(size, whole, noise.tobytes(), 8, colours),
        "interlaced.gif": raw_gif(size, whole, low, 3, colours[:24], interlaced=True),
        "local.gif": raw_gif(size, whole, low, 3, colours[:24], colours[24:48]),
        "no_palette.gif": raw_gif(size, whole, noise.tobytes(), 8),
        "short_palette.gif": raw_gif(size, whole, noise.tobytes(), 8, colours[:24]),
        "short_local.gif": raw_gif(size, whole, noise.tobytes(), 8, colours, colours[:24]),
        "ramp.gif": raw_gif(size, whole, noise.tobytes(), 8, colours, ramp),
        "transparent.gif": raw_gif(size, whole, low, 3, colours[:24], transparent=5),
        "transparent_twice.gif": raw_gif(size, whole, low, 3, twice, transparent=3),
        "transparent_grey.gif": raw_gif(size, whole, noise.tobytes(), 8, transparent=noise[0, 0]),
        "part.gif": raw_gif((23, 14), (3, 2, 17, 9), low, 3, colours[:24], background=2),
        "part_transparent.gif": raw_gif(
            (23, 14), (3, 2, 17, 9), low, 3, colours[:24], transparent=4
        ),
        "beyond.gif": raw_gif((10, 20), (3, 2, 17, 9), low, 3, colours[:24]),
    }


def pnm_files() -> dict[str, bytes]:
    """PNM of bytes and words, and greatest values that are none of these."""
    rgb = picture("noise", 7, 13)
    grey = rgb[..., 0]
    words = grey.astype(np.uint16) * 5 + 3
    colour_words = rgb.astype(np.uint16) * 257
    return {
        "grey.pgm": b"P5\n# a comment\n13 7\n255\n" + grey.tobytes(),
        "rgb.ppm": b"P6 13\t7\r\n# a comment\n255\n" + rgb.tobytes(),
        "grey_short.pgm": b"P5\n13 7\n100\n" + grey.tobytes(),
        "rgb_short.ppm": b"P6\n13 7\n31\n" + (rgb // 8).tobytes(),
        "grey16.pgm": b"P5\n13 7\n65535\n" + words.astype(">u2").tobytes(),
        "grey12.pgm": b"P5\n13 7\n4095\n" + (words // 256).astype(">u2").tobytes(),
        "rgb16.ppm": b"P6\n13 7\n65535\n" + colour_words.astype(">u2").tobytes(),
        "rgb10.ppm": b"P6\n13 7\n1023\n" + (colour_words // 64).astype(">u2").tobytes(),
        "one_pixel.ppm": b"P6 1 1 255 abc",
    }


def raw_tga(
    kind: int,
    bits: int,
    size: tuple[int, int],
    data: bytes,
    flags: int = 0,
    palette: tuple[int, int, bytes] = (0, 0, b""),
    name: bytes = b"",
) -> bytes:
    """A TGA of exactly this kind; `palette` is its first index, bits an entry, and entries."""
    first, depth, entries = palette
    count = len(entries) * 8 // depth if depth else 0
    return (
        struct.pack("<BBB", len(name), 1 if depth else 0, kind)
        + struct.pack("<HHB", first, count, depth)
        + struct.pack("<HHHHBB", 0, 0, *size, bits, flags)
        + name
        + entries
        + data
    )


def tga_files() -> dict[str, bytes]:
    """TGA of every kind and orientation."""
    size = (13, 7)
    rgb = picture("noise", 7, 13)
    grey = np.ascontiguousarray(rgb[..., 0])
    indices = grey % 16
    words = picture("noise", 7, 26)[..., 0]
    colours = picture("noise", 1, 64)[0, :, 0].tobytes()
    image = Image.fromarray(picture("smooth", 21, 300) // 64 * 64)
    files = {
        "rgb24.tga": raw_tga(2, 24, size, rgb.tobytes()),
        "rgba32.tga": raw_tga(2, 32, size, np.dstack([rgb, grey]).tobytes(), name=b"a name"),
        "rgb16.tga": raw_tga(2, 16, size, words.tobytes()),
        "grey.tga": raw_tga(3, 8, size, grey.tobytes()),
        "grey_alpha.tga": raw_tga(3, 16, size, words.tobytes()),
        "palette24.tga": raw_tga(1, 8, size, indices.tobytes(), palette=(0, 24, colours[:48])),
        "palette32.tga": raw_tga(1, 8, size, indices.tobytes(), palette=(0, 32, colours)),
        "palette_first.tga": raw_tga(1, 8, size, indices.tobytes(), palette=(3, 24, colours[:48])),
        "palette_short.tga": raw_tga(1, 8, size, grey.tobytes(), palette=(0, 24, colours[:48])),
        "pillow.tga": encode(image, "TGA"),
        "pillow_rle.tga": encode(image, "TGA", compression="tga_rle"),
        "pillow_rle_grey.tga": encode(image.convert("L"), "TGA", compression="tga_rle"),
        "pillow_rle_palette.tga": encode(image.quantize(16), "TGA", compression="tga_rle"),
        "pillow_rle_rgba.tga": encode(image.convert("RGBA"), "TGA", compression="tga_rle"),
    }
    for flags in (0x10, 0x20, 0x30):
        files[f"turned{flags:x}.tga"] = raw_tga(2, 24, size, rgb.tobytes(), flags)
    return files


def shape(levels: int) -> Image.Image:
    """A disk that alpha alone shows: every pixel is of one colour."""
    y, x = np.mgrid[:24, :32]
    alpha = np.clip(12 - np.hypot(y - 12, x - 16), 0, levels) * (255 // levels)
    image = Image.new("RGBA", (32, 24), (20, 40, 60))
    image.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    return image


def alpha_files() -> dict[str, bytes]:
    """A shape of alpha alone in every format that has some."""
    soft = shape(levels=5)
    palette = [r.tobytes() for r in np.asarray(shape(levels=1))[..., 3] // 255]
    transparency = chunk(b"PLTE", bytes([20, 40, 60] * 2)) + chunk(b"tRNS", bytes([10, 200]))
    bmp = np.asarray(soft)[::-1, :, [2, 1, 0, 3]].tobytes()
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 56, 32, 24, 1, 32, 3, len(bmp), 0, 0, 0, 0) + masks
    return {
        "shape.png": encode(soft, "PNG"),
        "shape_grey.png": encode(soft.convert("LA"), "PNG"),
        "shape_palette.png": raw_png((32, 24), 8, 3, palette, transparency),
        "shape.webp": encode(soft, "WEBP", lossless=True, exact=True),
        "shape.tga": encode(soft, "TGA"),
        "shape.bmp": b"BM" + struct.pack("<III", 70 + len(bmp), 0, 70) + header + bmp,
    }


def reference_pixels(data: bytes) -> np.ndarray:
    """What transformers makes of a file: its load_image, then the RGB of its image processors."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    return convert_to_rgb(image, return_numpy=True)


def decode_cases(folder: Path) -> list[str]:
    """Writes the pictures and returns their lines of goldens.txt."""
    lines = []
    groups = (png_files, jpeg_files, bmp_files, webp_files, gif_files, pnm_files, tga_files)
    groups += (alpha_files,)
    for name, data in (item for group in groups for item in group().items()):
        (folder / name).write_bytes(data)
        pixels = reference_pixels(data)
        height, width, _ = pixels.shape
        lines.append(f"decode {name} {width} {height} {crc(pixels.tobytes())}")
    return lines


def main() -> None:
    """Writes the pictures and their lines into one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=DATA, help="folder of goldens.txt (default: data/ beside this)"
    )
    folder = parser.parse_args().out
    goldens = folder / "goldens.txt"
    first, *others = goldens.read_text().splitlines()
    others = [line for line in others if not line.startswith("decode ")]
    goldens.write_text("\n".join([first, *decode_cases(folder), *others]) + "\n")


if __name__ == "__main__":
    main()
