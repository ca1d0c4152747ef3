#!/usr/bin/env python3
"""No request takes more memory than SECURITY.md states, whatever a few bytes claim.

Each file is made here: small, and with sizes or counts that would take gigabytes. vlm-run may refuse it or answer; its peak
of resident memory is compared with the number of the page. KVLM_BUILD is the build folder. Standard library only.
"""

import os
import re
import struct
import subprocess
import tempfile
import unittest
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve() / "tools/vlm-run"
DATA = ROOT / "tests/vision/data"
QWEN = ROOT / "tests/golden/qwen2_5_vl"
LLAVA = ROOT / "tests/golden/llava_gqa"


def stated_bytes():
    """The number in SECURITY.md, without the weights and the cache, which are small here."""
    return int(re.search(r"at most (\d+) GiB", (ROOT / "SECURITY.md").read_text())[1]) << 30


def box(kind, *parts):
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def full_box(kind, *numbers, tail=b""):
    return box(kind, struct.pack(f">{len(numbers) + 1}I", 0, *numbers), tail)


def track(number, samples):
    """An H.264 track that claims so many samples of one byte."""
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    tkhd = box(b"tkhd", struct.pack(">6I", 3, 0, 0, number, 0, samples), bytes(16), matrix, struct.pack(">2I", 64 << 16, 64 << 16))
    avc1 = box(b"avc1", bytes(6), struct.pack(">H", 1), bytes(16), struct.pack(">2H", 64, 64), struct.pack(">2I", 0x480000, 0x480000),
               bytes(4), struct.pack(">H", 1), bytes(32), struct.pack(">2H", 24, 0xffff))
    table = box(b"stbl", full_box(b"stsd", 1, tail=avc1), full_box(b"stts", 1, samples, 1), full_box(b"stsc", 1, 1, samples, 1),
                full_box(b"stsz", 1, samples), full_box(b"stco", 1, 48))
    dinf = box(b"dinf", full_box(b"dref", 1, tail=full_box(b"url ", tail=b"")))
    handler = box(b"hdlr", bytes(8), b"vide", bytes(13))
    media = box(b"mdia", full_box(b"mdhd", 0, 0, 1000, samples, 0x55c40000), handler,
                box(b"minf", full_box(b"vmhd", 0, 0), dinf, table))
    return box(b"trak", tkhd, media)


def mp4(tracks, samples):
    mvhd = box(b"mvhd", struct.pack(">5I", 0, 0, 0, 1000, samples), struct.pack(">IHH", 0x10000, 0x100, 0), bytes(8 + 36 + 24),
               struct.pack(">I", tracks + 1))
    moov = box(b"moov", mvhd, *(track(i + 1, samples) for i in range(tracks)))
    return box(b"ftyp", b"isom", bytes(4), b"isomavc1") + moov + box(b"mdat", bytes(64))


def u24(value):
    return struct.pack("<I", value)[:3]


def chunk(kind, body):
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


def webp(side, frames):
    pixel = (DATA / "one_pixel.webp").read_bytes()[12:]
    frame = chunk(b"ANMF", u24(0) + u24(0) + u24(0) + u24(0) + u24(100) + b"\0" + pixel)
    body = b"WEBP" + chunk(b"VP8X", b"\x02\0\0\0" + u24(side - 1) + u24(side - 1)) + chunk(b"ANIM", bytes(6)) + frames * frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif(side, frames):
    frame = b"!\xf9\x04\0\x0a\0\0\0,\0\0\0\0\1\0\1\0\0\2\2\x44\1\0"
    return b"GIF89a" + struct.pack("<HH", side, side) + b"\x80\0\0\0\0\0\xff\xff\xff" + frames * frame + b";"


def png(side):
    def part(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)) + part(b"IDAT", rows) + part(b"IEND", b"")


def images(count):
    return {f"{i}.png": png(16384) for i in range(count)}


# name: files, of a model of videos or of images
VIDEOS = {
    "an index of 40 million samples, on 8 tracks": {"a.mp4": mp4(8, 40_000_000)},
    "an index of 40 million samples, on one track": {"a.mp4": mp4(1, 40_000_000)},
    "100 tracks of H.264": {"a.mp4": mp4(100, 60)},
    "60 tracks of H.264": {"a.mp4": mp4(60, 60)},
    "a WebP of 16383 x 16383": {"a.webp": webp(16383, 4)},
    "a GIF of 16383 x 16383": {"a.gif": gif(16383, 4)},
    "a WebP at the limit of a frame": {"a.webp": webp(8192, 4)},
    "a GIF at the limit of a frame": {"a.gif": gif(8192, 4)},
    "two animations": {"a.webp": webp(8192, 4), "b.gif": gif(8192, 4)},
}
IMAGES = {"8 PNGs of 16384 x 16384": images(8), "one PNG of 16384 x 16384": images(1)}


class Bombs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if os.environ.get("KVLM_SANITIZE"):
            raise unittest.SkipTest("a sanitizer takes memory of its own")
        if not RUN.is_file():
            raise unittest.SkipTest(f"{RUN} is not built")

    def peak(self, model, flag, files, *more):
        with tempfile.TemporaryDirectory(prefix="kvlm-bombs-") as name:
            command = [RUN, "-q", "--device", "cpu", "-t", "1", "-m", model, "-n", "1", "-p", "x", *more]
            for file, content in files.items():
                (Path(name) / file).write_bytes(content)
                command += [flag, Path(name) / file]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            message = process.stderr.read()
            process.stderr.close()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        self.assertGreaterEqual(process.returncode, 0, message)
        self.assertNotIn("unexpected failure", message)
        return usage.ru_maxrss * 1024, message

    def test_videos(self):
        for name, files in VIDEOS.items():
            with self.subTest(name):
                peak, message = self.peak(QWEN, "--video", files, "--frames", "4")
                self.assertLess(peak, stated_bytes(), message)

    def test_images(self):
        for name, files in IMAGES.items():
            with self.subTest(name):
                peak, message = self.peak(LLAVA, "--image", files)
                self.assertLess(peak, stated_bytes(), message)

    def test_the_files_are_small(self):
        for files in [*VIDEOS.values(), *IMAGES.values()]:
            for content in files.values():
                self.assertLess(len(content), 1 << 17)


if __name__ == "__main__":
    unittest.main()
