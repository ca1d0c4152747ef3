#!/usr/bin/env python3
"""tools/real/stamps.py and scans.py: sets of images that others drew, from small made-up packages. Standard library only."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import unittest
import zlib

from eval_case import BUILD, ROOT, TIMEOUT_S, EvalCase, WithModel, environment, python_with_scorers

sys.path.insert(0, str(ROOT / "tools/real"))

import files  # noqa: E402  (of tools/eval)
import scans  # noqa: E402  (of tools/real)
import stamps  # noqa: E402


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(colour, lines, depth=8, filters=(0,), more=b"", width=None, interlaced=0):
    """A PNG file of these lines of bytes, which the filters in turn have gone through already."""
    raw = b"".join(bytes([filters[i % len(filters)]]) + bytes(line) for i, line in enumerate(lines))
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    header = struct.pack(">IIBBBBB", width or len(lines[0]) // channels, len(lines), depth, colour, 0, 0, interlaced)
    return stamps.SIGNATURE + chunk(b"IHDR", header) + more + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def pixels(data):
    """Size and lines of a PNG that on_white() wrote: 8 bits without filters."""
    found = dict(stamps.chunks(data))
    width, height, _, colour = struct.unpack(">IIBB", found[b"IHDR"][:10])
    raw = zlib.decompress(found[b"IDAT"])
    stride = len(raw) // height
    return width, colour, [list(raw[i + 1 : i + stride]) for i in range(0, len(raw), stride)]


OPAQUE = png(2, [[10, 20, 30] * 4] * 4)
CLEAR = png(6, [[0, 0, 0, 0] * 4] * 4)


class OnWhite(unittest.TestCase):
    def test_alpha_is_blended(self):
        data = png(6, [[0, 0, 0, 0, 9, 8, 7, 255, 0, 100, 200, 51]])
        self.assertEqual(pixels(stamps.on_white(data)), (3, 2, [[255, 255, 255, 9, 8, 7, 204, 224, 244]]))
        data = png(4, [[0, 0, 9, 255, 0, 51]])
        self.assertEqual(pixels(stamps.on_white(data)), (3, 0, [[255, 9, 204]]))

    def test_palettes(self):
        more = chunk(b"PLTE", bytes([0, 0, 0, 10, 20, 30, 40, 50, 60])) + chunk(b"tRNS", b"\0")
        white, first, second = [255] * 3, [10, 20, 30], [40, 50, 60]
        self.assertEqual(pixels(stamps.on_white(png(3, [[0, 1, 2]], more=more))), (3, 2, [white + first + second]))
        self.assertEqual(pixels(stamps.on_white(png(3, [[0b00011000]], depth=2, more=more, width=3))),
                         (3, 2, [white + first + second]))  # fmt: skip

    def test_each_filter_is_undone(self):
        draw = random.Random(1)
        lines = [[draw.randrange(8) if i % 4 < 3 else 255 for i in range(64)] for _ in range(20)]  # few values, so many ties
        coded = []
        for number, line in enumerate(lines):
            left, above = [0] * 4 + line[:-4], lines[number - 1] if number else [0] * 64
            corner = [0] * 4 + above[:-4]
            predicted = ([0] * 64, left, above, [(a + b) // 2 for a, b in zip(left, above)],
                         [min((a, b, c), key=lambda near: abs(a + b - c - near)) for a, b, c in zip(left, above, corner)])  # fmt: skip
            coded.append([(value - guess) % 256 for value, guess in zip(line, predicted[number % 5])])
        data = png(6, coded, filters=(0, 1, 2, 3, 4))
        self.assertEqual(pixels(stamps.on_white(data))[2], [[v for i, v in enumerate(line) if i % 4 < 3] for line in lines])

    def test_files_without_alpha_stay_as_they_are(self):
        self.assertIs(stamps.on_white(OPAQUE), OPAQUE)

    def test_what_is_damaged_is_refused(self):
        for data in (b"", b"GIF89a", CLEAR[:40], CLEAR[:-20], png(6, [[0] * 16], filters=(7,)),
                     png(6, [[0] * 16], interlaced=1), png(6, [[0] * 12], width=4)):  # fmt: skip
            with self.subTest(data), self.assertRaises((ValueError, LookupError, struct.error, zlib.error)):
                stamps.on_white(data)


class RealCase(EvalCase):
    def run_real(self, script, *arguments, **env):
        done = subprocess.run([sys.executable, ROOT / "tools/real" / script, *arguments], cwd=self.folder, capture_output=True,
                              text=True, timeout=TIMEOUT_S, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | env)  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def make_stamps(self):
        folder = self.folder / "share/tuxpaint/stamps"
        for name, content in {
            "animals/cat.png": CLEAR, "animals/cat.txt": "A “grey” cat.\nde.utf8=Eine Katze.\n", "animals/cat.svg": "<svg/>",
            "food/apple.png": OPAQUE, "food/apple.txt": "An apple.", "food/apple_mirror.png": OPAQUE,
            "food/empty.png": OPAQUE, "food/empty.txt": "\nde.utf8=Leer.\n", "symbols/star.svg": "<svg/>",
            "symbols/star.txt": "A star.", "symbols/torn.png": CLEAR[:40], "symbols/torn.txt": "A torn file.",
        }.items():  # fmt: skip
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder

    def make_scans(self):
        """A source archive, and a folder with a pdfimages that writes an image of what is called page.pdf and fails on others."""
        folder = self.folder / "ocr/tests/resources"
        folder.mkdir(parents=True)
        for name, content in {"linn.png": OPAQUE, "linn.txt": b"words\n", "page.pdf": b"%PDF", "bad.pdf": b"",
                              "README.rst": b""}.items():  # fmt: skip
            (folder / name).write_bytes(content)
        (self.folder / "ocr/other.png").write_bytes(OPAQUE)
        with tarfile.open(self.folder / "ocr.tar.gz", "w:gz") as tar:
            tar.add(self.folder / "ocr", "ocrmypdf-1")
        tools = self.folder / "bin"
        tools.mkdir()
        (tools / "pdfimages").write_text('#!/bin/sh\ncase $3 in *page.pdf) cp "${3%page.pdf}linn.png" "$4-000.png";; *) exit 1;; '
                                         "esac\n")  # fmt: skip
        (tools / "pdfimages").chmod(0o755)
        return self.folder / "ocr.tar.gz", f"{tools}:{os.environ['PATH']}"


class Sets(RealCase):
    def test_stamps(self):
        status, out, err = self.run_real("stamps.py", "OUT", "--folder", self.make_stamps())
        self.assertEqual((status, out), (0, ""), err)
        self.assertIn("2 images; left out: 2 SVG files", err)
        for words in ("2 PNG files without a description", "1 PNG file that is damaged", "symbols/torn.png"):
            self.assertIn(words, err)
        split = files.read_captions(self.folder / "OUT/captions_tuxpaint.json")
        said = {item.image.relative_to(self.folder / "OUT").as_posix(): item.references for item in split.items}
        self.assertEqual(said, {"animals/cat.png": ["A “grey” cat."], "food/apple.png": ["An apple."]})
        split.require_pictures()
        self.assertEqual(pixels((self.folder / "OUT/animals/cat.png").read_bytes())[2], [[255] * 12] * 4)
        self.assertEqual((self.folder / "OUT/food/apple.png").read_bytes(), OPAQUE)
        lines = [json.loads(line) for line in (self.folder / "OUT/captions.jsonl").read_text(encoding="utf-8").splitlines()]
        self.assertEqual({line["image"]: [line["text"]] for line in lines}, said)
        self.assertEqual([line["id"] for line in lines], [item.id for item in split.items])

    @unittest.skipUnless(shutil.which("dpkg-deb"), "dpkg-deb is not installed")
    def test_stamps_of_a_package(self):
        root = self.folder / "root"
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN/control").write_text("Package: stamps\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\n"
                                             "Description: stamps\n")  # fmt: skip
        shutil.copytree(self.make_stamps(), root / "usr/share/tuxpaint/stamps")
        subprocess.run(["dpkg-deb", "--build", root, self.folder / "stamps.deb"], check=True, capture_output=True)
        status, _, err = self.run_real("stamps.py", "OUT", "--package", "stamps.deb")
        self.assertEqual((status, err[:21]), (0, "stamps.py: 2 images; "), err)

    def test_stamps_that_are_not_there(self):
        (self.folder / "a.deb").write_text("no package")
        broken = "a.deb cannot be unpacked" if shutil.which("dpkg-deb") else "dpkg-deb is missing"
        for arguments, word in ((["--folder", "none"], "none has no PNG file"), (["--package", "a.deb"], broken)):
            status, out, err = self.run_real("stamps.py", "OUT", *arguments)
            self.assertEqual((status, out, len(err.splitlines())), (1, "", 1), err)
            self.assertIn(word, err)

    def test_scans(self):
        archive, path = self.make_scans()
        status, out, err = self.run_real("scans.py", "OUT", archive, "--prompt", "Read.", PATH=path)
        self.assertEqual((status, out), (0, ""), err)
        self.assertIn("2 images, 1 with text; left out: 1 .rst files, 1 PDF file that pdfimages does not read (bad.pdf)", err)
        lines = [json.loads(line) for line in (self.folder / "OUT/scans.jsonl").read_text().splitlines()]
        self.assertEqual(lines, [{"id": name, "image": name, "prompt": "Read."} for name in ("linn.png", "page.pdf-000.png")])
        text = json.loads((self.folder / "OUT/texts.jsonl").read_text())
        self.assertEqual(text, lines[0] | {"text": "words\n"})
        self.assertEqual((self.folder / "OUT/page.pdf-000.png").read_bytes(), OPAQUE)

    def test_scans_without_pdfimages(self):
        self.make_scans()
        status, _, err = self.run_real("scans.py", "OUT", self.folder / "ocr/tests/resources", PATH="/none")
        self.assertEqual(status, 0, err)
        self.assertIn("2 PDF files, since pdfimages is missing (install Debian's poppler-utils)", err)

    def test_scans_that_are_not_there(self):
        (self.folder / "a.tar.xz").write_text("no archive")
        (self.folder / "empty").mkdir()
        for source, words in (("a.tar.xz", "no whole archive"), ("empty", "has no image"), ("none.tar.xz", "none.tar.xz")):
            status, out, err = self.run_real("scans.py", "OUT", source)
            self.assertEqual((status, out, len(err.splitlines())), (1, "", 1), err)
            self.assertIn(words, err)


class Answers(WithModel, RealCase):
    """The programs read what is made."""

    def setUp(self):
        super().setUp()
        self.assertEqual(self.run_real("stamps.py", "OUT", "--folder", self.make_stamps())[0], 0)

    def test_vlm_kv_takes_the_stamps(self):
        done = subprocess.run([BUILD / "tools/vlm-kv", "fidelity", "--data", "OUT/captions.jsonl", "--kv", "int4", "--json",
                               "--device", "cpu"], cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S,
                              env=environment())  # fmt: skip
        self.assertEqual(json.loads(done.stdout)["records"], 2, done.stderr)

    @unittest.skipUnless(python_with_scorers(), "pycocoevalcap is not installed: tools/eval/setup.sh")
    def test_coco_py_takes_the_stamps(self):
        self.run_well("coco.py", "--out", "SCORES", "--annotations", "OUT/captions_tuxpaint.json", "--images", "OUT", "--device",
                      "cpu", "--protocol", "vlmevalkit", "--fidelity", 1, python=python_with_scorers())  # fmt: skip
        (row,) = json.loads((self.folder / "SCORES/results.json").read_text())
        self.assertEqual((row["split"], len(row["items"])), ("tuxpaint", 2))

    def test_vlm_run_answers_or_refuses_each_scan(self):
        archive, path = self.make_scans()
        self.assertEqual(self.run_real("scans.py", "SCANS", archive, PATH=path)[0], 0)
        done = subprocess.run([BUILD / "tools/vlm-run", "--batch", "SCANS/scans.jsonl", "--out", "-", "-n", "4", "--device", "cpu"],
                              cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())  # fmt: skip
        self.assertEqual(sorted(json.loads(line)["id"] for line in done.stdout.splitlines()), ["linn.png", "page.pdf-000.png"])


if __name__ == "__main__":
    unittest.main()
