#!/usr/bin/env python3
"""Scanned pages that others chose to be difficult: those of the tests of Debian's source package ocrmypdf.

    apt-get source --download-only ocrmypdf        (with deb-src among apt's sources)
    python3 tools/real/scans.py OUT ocrmypdf_*.orig.tar.xz
    vlm-run --batch OUT/scans.jsonl --out answers.jsonl

Writes OUT/scans.jsonl, which asks one question about each image, and OUT/texts.jsonl, for vlm-kv --data, about those with a
.txt file. There are no answers to score: every page must be answered, or refused in one sentence. Images inside PDF files (of
1 bit, with palettes, masks, up to 35,000 pixels a side) are taken out by pdfimages of Debian's poppler-utils, JPEG as it is,
others as PNG. Else standard library only. The pages are under CC-BY-SA, MIT and others (.reuse/dep5 in the archive).
"""

import argparse
import json
import lzma
import subprocess
import sys
import tarfile
import zlib
import tempfile
from collections import Counter
from pathlib import Path, PurePosixPath

WHERE = "tests/resources"
SUFFIXES = (".png", ".jpg", ".jpeg", ".jp2", ".tif", ".tiff", ".gif", ".bmp", ".webp")
PROMPT = "What is written on this page?"
LIMIT_S = 120  # of one PDF file


class Refusal(Exception):
    """One sentence that names what was found, what was expected and what to do."""


def unpack(archive: Path, into: Path) -> Path:
    """The files of tests/resources of a source archive, without folders."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name)
                if member.isfile() and name.parent.as_posix().endswith(WHERE):
                    (into / name.name).write_bytes(tar.extractfile(member).read())
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        said = (str(error) or "ends early").splitlines()[0].rstrip(":")
        raise Refusal(f"{archive} is no whole archive ({said}); give the file that apt-get source downloaded") from None
    return into


def images_inside(pdf: Path, out: Path, left_out: Counter) -> list[Path]:
    """Images of a PDF file, written as NAME.pdf-000.png or .jpg."""
    try:
        done = subprocess.run(["pdfimages", "-png", "-j", pdf, out / pdf.name], capture_output=True, timeout=LIMIT_S)
    except FileNotFoundError:
        left_out["PDF files, since pdfimages is missing (install Debian's poppler-utils)"] += 1
        return []
    except subprocess.TimeoutExpired:
        left_out[f"PDF file that takes pdfimages more than {LIMIT_S} s ({pdf.name})"] += 1
        return []
    if done.returncode:
        left_out[f"PDF file that pdfimages does not read ({pdf.name})"] += 1
        return []
    found = sorted(out.glob(f"{pdf.name}-*"))
    left_out["PDF files without an image"] += not found
    return found


def make(folder: Path, out: Path, prompt: str) -> str:
    """Writes the set and returns the sentence that counts what is in it and what is left out."""
    scans, texts, left_out = [], [], Counter()
    out.mkdir(parents=True, exist_ok=True)
    for source in sorted(folder.iterdir()):
        if source.suffix.lower() in SUFFIXES:
            images = [out / source.name]
            images[0].write_bytes(source.read_bytes())
        elif source.suffix.lower() == ".pdf":
            images = images_inside(source, out, left_out)
        else:
            left_out[f"{source.suffix or 'other'} files"] += source.suffix != ".txt"  # of those images' texts
            continue
        text = source.with_suffix(".txt")
        for image in images:
            scans.append({"id": image.name, "image": image.name, "prompt": prompt})
            if text.is_file():
                texts.append(scans[-1] | {"text": text.read_text(encoding="utf-8", errors="replace")})
    if not scans:
        raise Refusal(f"{folder} has no image; give ocrmypdf's source archive, or its folder {WHERE}")
    for name, records in (("scans.jsonl", scans), ("texts.jsonl", texts)):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (out / name).write_text("".join(lines), encoding="utf-8")
    counted = ", ".join(f"{number} {what}" for what, number in left_out.items() if number)
    return f"{len(scans)} images, {len(texts)} with text; left out: {counted or 'none'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the records and images")
    parser.add_argument("source", type=Path, metavar="SOURCE", help=f"ocrmypdf's source archive, or its folder {WHERE}")
    parser.add_argument("--prompt", default=PROMPT, help=f"what is asked; default: {PROMPT}")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="kvlm-scans-") as scratch:
            if not options.source.exists():
                raise Refusal(f"{options.source} does not exist; name ocrmypdf's source archive, or its folder {WHERE}")
            folder = options.source if options.source.is_dir() else unpack(options.source, Path(scratch))
            print(f"scans.py: {make(folder, options.out, options.prompt)}", file=sys.stderr)
    except (Refusal, OSError) as error:
        print(f"scans.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
