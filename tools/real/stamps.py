#!/usr/bin/env python3
"""Captions in COCO's format of images that others drew: the stamps of Debian's tuxpaint-stamps-default.

    apt-get download tuxpaint-stamps-default
    python3 tools/real/stamps.py OUT --package tuxpaint-stamps-default_*.deb

Writes the images, OUT/captions_tuxpaint.json for tools/eval/coco.py --annotations, and OUT/captions.jsonl for vlm-kv --data. A
stamp is a PNG file with a .txt file, whose first line is its description. Transparency is blended with white here, since
vlm-run, like transformers' load_image (Pillow's convert("RGB")), drops alpha and shows the colours that it hides. Images are in
an order by digest, so that the first ones are of all kinds. Standard library only. The stamps are under GPL-2 or later.
"""

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

FOLDER = Path("/usr/share/tuxpaint/stamps")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, PALETTE, GREY_ALPHA, RGBA = 0, 3, 4, 6  # PNG's colour types
ON_WHITE = bytes((value * alpha + 255 * (255 - alpha) + 127) // 255 for alpha in range(256) for value in range(256))


class Refusal(Exception):
    """One sentence that names what was found, what was expected and what to do."""


def chunks(data: bytes):
    """Kind and content of each chunk of a PNG file up to IEND."""
    if not data.startswith(SIGNATURE):
        raise ValueError("no PNG")
    at = len(SIGNATURE)
    while True:
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IEND":
            return
        yield kind, data[at + 8 : at + 8 + length]
        at += length + 12


def unfiltered(raw: bytes, height: int, stride: int, step: int):
    """Rows of a decompressed PNG, whose filters look `step` bytes to the left (PNG 1.2, section 6)."""
    if len(raw) != height * (stride + 1):
        raise ValueError("ends early")
    above = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = bytearray(raw[start + 1 : start + 1 + stride])
        match raw[start]:
            case 0:
                pass
            case 1:
                for i in range(step, stride):
                    row[i] = row[i] + row[i - step] & 255
            case 2:
                row = bytearray([a + b & 255 for a, b in zip(row, above)])
            case 3:
                for i in range(stride):
                    left = row[i - step] if i >= step else 0
                    row[i] = row[i] + (left + above[i]) // 2 & 255
            case 4:
                for i in range(min(step, stride)):
                    row[i] = row[i] + above[i] & 255
                for i in range(step, stride):
                    a, b, c = row[i - step], above[i], above[i - step]
                    to_a, to_b, to_c = abs(b - c), abs(a - c), abs(a + b - c - c)
                    row[i] = row[i] + (a if to_a <= to_b and to_a <= to_c else b if to_b <= to_c else c) & 255
            case other:
                raise ValueError(f"unknown filter {other}")
        yield row
        above = row


def on_white(data: bytes) -> bytes:
    """A PNG file without its alpha; files without alpha, or with a key colour, which vlm-run shows as white, as they are."""
    found: dict[bytes, bytes] = {}
    for kind, content in chunks(data):
        found[kind] = found.get(kind, b"") + content
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", found[b"IHDR"])
    if colour not in (GREY_ALPHA, RGBA) and not (colour == PALETTE and b"tRNS" in found):
        return data
    if interlaced or depth == 16:
        raise ValueError("interlaced or of 16 bits")
    channels = {PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}[colour]
    rows = unfiltered(zlib.decompress(found[b"IDAT"]), height, (width * channels * depth + 7) // 8, channels)
    if colour == PALETTE:
        lines = through_palette(rows, width, depth, found[b"PLTE"], found[b"tRNS"])
    else:
        lines = (blended(row, channels) for row in rows)
    made = zlib.compress(b"".join(b"\0" + line for line in lines))
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if colour == GREY_ALPHA else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", made), (b"IEND", b""))
    return SIGNATURE + b"".join(struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in parts)


def through_palette(rows, width: int, depth: int, palette: bytes, alphas: bytes):
    """Lines of RGB of palette indices of 1 to 8 bits."""
    alphas += b"\xff" * (len(palette) // 3 - len(alphas))
    colours = [bytes(ON_WHITE[alphas[i] << 8 | v] for v in palette[3 * i : 3 * i + 3]) for i in range(len(palette) // 3)]
    shifts, mask = range(8 - depth, -1, -depth), (1 << depth) - 1
    for row in rows:
        yield b"".join([colours[byte >> shift & mask] for byte in row for shift in shifts][:width])


def blended(row: bytearray, channels: int) -> bytes:
    """A line whose last channel is alpha, on white without it."""
    colours = channels - 1
    line = bytearray(len(row) // channels * colours)
    for channel in range(colours):
        line[channel::colours] = [ON_WHITE[a << 8 | v] for v, a in zip(row[channel::channels], row[colours::channels])]
    return bytes(line)


def description(png: Path) -> str:
    """First line of the .txt file: English; the others are translations."""
    try:
        with png.with_suffix(".txt").open(encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except FileNotFoundError:
        return ""


def make(folder: Path, out: Path) -> str:
    """Writes the set and returns the sentence that counts what is in it and what is left out."""
    images, notes, lines, left_out = [], [], [], Counter()
    left_out["SVG files, which vlm-run does not read"] = sum(1 for _ in folder.rglob("*.svg"))
    stamps = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.png")}
    for name in sorted(stamps, key=lambda name: hashlib.sha256(name.encode()).digest()):
        said = description(stamps[name])
        if not said:
            left_out["PNG files without a description"] += 1
            continue
        try:
            png = on_white(stamps[name].read_bytes())
        except (ValueError, LookupError, struct.error, zlib.error) as error:
            left_out[f"PNG file that is damaged or of another form ({name}: {error})"] += 1
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(png)
        key = len(images) + 1
        images.append({"id": key, "file_name": name})
        notes.append({"id": key, "image_id": key, "caption": said})
        lines.append(json.dumps({"id": key, "image": name, "text": said}, ensure_ascii=False) + "\n")
    if not images:
        raise Refusal(f"{folder} has no PNG file with a .txt file; give the folder of the stamps with --folder, or --package")
    text = json.dumps({"images": images, "annotations": notes}, ensure_ascii=False, indent=1)
    (out / "captions_tuxpaint.json").write_text(text + "\n", encoding="utf-8")
    (out / "captions.jsonl").write_text("".join(lines), encoding="utf-8")
    return f"{len(images)} images; left out: " + (", ".join(f"{n} {what}" for what, n in left_out.items() if n) or "none")


def unpack(package: Path, into: Path) -> Path:
    """The folder of the stamps of a Debian package."""
    try:
        done = subprocess.run(["dpkg-deb", "-x", package, into], capture_output=True, text=True)
    except FileNotFoundError:
        raise Refusal("dpkg-deb is missing; run on Debian, or unpack the package and give its folder with --folder") from None
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise Refusal(f"{package} cannot be unpacked ({said}); give the file that apt-get download wrote")
    return into / FOLDER.relative_to("/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the annotations and images")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, default=FOLDER, help=f"folder of the stamps; default: {FOLDER}")
    source.add_argument("--package", type=Path, metavar="FILE.deb", help="unpack this package instead")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="kvlm-stamps-") as scratch:
            folder = unpack(options.package, Path(scratch)) if options.package else options.folder
            print(f"stamps.py: {make(folder, options.out)}", file=sys.stderr)
    except (Refusal, OSError) as error:
        print(f"stamps.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
