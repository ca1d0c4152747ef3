#!/usr/bin/env python3
"""No request takes more memory than SECURITY.md states, whatever a few bytes claim.

Each file is made here: small, and with sizes or counts that would take gigabytes. vlm-run may refuse it or answer; its peak
of resident memory is compared with the number of the page. KVLM_BUILD is the build folder. Standard library only.
"""

import functools
import os
import re
import resource
import struct
import subprocess
import tempfile
import threading
import unittest
import zlib
from pathlib import Path

from made_videos import TICKS, H264, Transport, movie, mp4, track, ts

ROOT = Path(__file__).resolve().parents[2]
RUN = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve() / "tools/vlm-run"
DATA = ROOT / "tests/vision/data"
QWEN = ROOT / "tests/golden/qwen2_5_vl"
LLAVA = ROOT / "tests/golden/llava_gqa"
LIMIT_S = 240  # for what hangs
SIDE = 8192  # of a frame at the limit


def stated_bytes():
    """The number in SECURITY.md, without the weights and the cache, which are small here."""
    return int(re.search(r"at most (\d+) GiB", (ROOT / "SECURITY.md").read_text())[1]) << 30


def claimed(tracks, samples):
    """An MP4 that claims so many samples of one byte."""
    return movie([track(i + 1, samples, 64, 64) for i in range(tracks)], bytes(64), samples)


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


def full_webp(side, frames):
    """Every frame covers the canvas, with no bit for a pixel."""
    bits = [(0x2f, 8), (side - 1, 14), (side - 1, 14), (1, 1), (0, 3), (0, 3), *5 * [(1, 4)]]  # five codes of one symbol, 0
    text = "".join(f"{value:0{count}b}"[::-1] for value, count in bits)[::-1]
    pixels = chunk(b"VP8L", int(text, 2).to_bytes(-(-len(text) // 8), "little"))
    frame = chunk(b"ANMF", u24(0) + u24(0) + u24(side - 1) + u24(side - 1) + u24(100) + b"\0" + pixels)
    body = b"WEBP" + chunk(b"VP8X", b"\x12\0\0\0" + u24(side - 1) + u24(side - 1)) + chunk(b"ANIM", bytes(6)) + frames * frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def one_colour(pixels):
    """LZW codes of so many pixels 0: each code stands for one pixel more than the one before, up to the longest."""
    bits, width, entries, run = [(4, 3)], 3, 6, 0
    while pixels > 0:
        run = min(run + 1 if entries < 4096 else 4091, pixels)
        bits.append((0 if run == 1 else 4 + run, width))
        pixels -= run
        if run > 1 and entries < 4096:
            entries += 1
            width += entries == 1 << width and width < 12
    bits.append((5, width))
    text = "".join(f"{value:0{count}b}"[::-1] for value, count in bits)[::-1]
    return int(text, 2).to_bytes(-(-len(text) // 8), "little")


def full_gif(side, frames, disposal, pixels=None):
    """Every frame covers the canvas; `pixels`: that there are codes for."""
    codes = one_colour(side * side if pixels is None else pixels)
    blocks = b"".join(bytes([len(codes[i:i + 255])]) + codes[i:i + 255] for i in range(0, len(codes), 255))
    frame = b"!\xf9\4" + bytes([disposal << 2]) + b"\x0a\0\0\0,\0\0\0\0" + struct.pack("<HH", side, side) + b"\0\2" + blocks + b"\0"
    return b"GIF89a" + struct.pack("<HH", side, side) + b"\x80\0\0\0\0\0\xff\xff\xff" + frames * frame + b";"


@functools.cache
def png(side, frames=1):
    def part(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    parts = [part(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))]
    if frames > 1:
        parts.append(part(b"acTL", struct.pack(">II", frames, 0)))
    parts.append(part(b"IDAT", rows))
    for i in range(1, frames):
        parts.append(part(b"fcTL", struct.pack(">5IHHBB", 2 * i - 1, side, side, 0, 0, 1, 10, 0, 0)))
        parts.append(part(b"fdAT", struct.pack(">I", 2 * i) + rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + part(b"IEND", b"")


def many_streams(count):
    """A transport stream of so many small H.264 streams."""
    stream, out = H264(32, 32), Transport(count)
    for i, unit in enumerate(stream.frames([20, 200], 1)):
        for pid in range(count):
            out.frame(stream, unit, TICKS + 9000 * i, 256 + pid)
    return out.bytes()


def late_streams(count):
    """A transport stream of one small stream, to which so many of huge frames are added, of a few bytes each."""
    small, huge, out = H264(32, 32), H264(SIDE, SIDE), Transport()
    whole, huge.blocks = huge.blocks, 1
    first = huge.key()  # its other macroblocks are missing, and concealed
    huge.blocks = whole
    out.frame(small, small.key(20), TICKS)
    out.programme(1 + count, version=1)
    for i, unit in enumerate([first, huge.repeat(1), huge.repeat(2)]):
        for pid in range(count):
            out.frame(huge, unit, TICKS + 9000 * i, 257 + pid)
    out.frame(small, small.repeat(1), TICKS + 9000)
    return out.bytes()


SMALL = H264(32, 32)
HUGE = H264(SIDE, SIDE)
OVER = H264(SIDE + 16, SIDE)
FRAMES = [HUGE.key(), HUGE.repeat(1), HUGE.repeat(2)]


def images(count):
    return {f"{i}.png": png(16384) for i in range(count)}


# name: files, of a model of videos or of images
VIDEOS = {
    "an index of 40 million samples, on 8 tracks": {"a.mp4": claimed(8, 40_000_000)},
    "an index of 40 million samples, on one track": {"a.mp4": claimed(1, 40_000_000)},
    "100 tracks of H.264": {"a.mp4": claimed(100, 60)},
    "60 tracks of H.264": {"a.mp4": claimed(60, 60)},
    "a WebP of 16383 x 16383": {"a.webp": webp(16383, 4)},
    "a GIF of 16383 x 16383": {"a.gif": gif(16383, 4)},
    "a WebP at the limit of a frame": {"a.webp": webp(8192, 4)},
    "a GIF at the limit of a frame": {"a.gif": gif(8192, 4)},
    "two animations": {"a.webp": webp(8192, 4), "b.gif": gif(8192, 4)},
    "a WebP whose frames are full": {"a.webp": full_webp(SIDE, 3)},
    "a WebP of too many full frames": {"a.webp": full_webp(SIDE, 300)},
    "a GIF whose full frames are undone": {"a.gif": full_gif(SIDE, 3, 3)},
    "a GIF of too many full frames": {"a.gif": full_gif(SIDE, 300, 3, 1)},
    "a GIF of 50,000 frames": {"a.gif": gif(SIDE, 50_000)},
    "an APNG": {"a.png": png(SIDE, 100)},
    "100 tracks of decodable H.264": {"a.mp4": mp4(SMALL, SMALL.frames([20, 90, 160, 230], 2), 100)},
    "64 tracks of decodable H.264": {"a.mp4": mp4(SMALL, SMALL.frames([20, 90, 160, 230], 2), 64)},
    "100 streams of decodable H.264": {"a.ts": many_streams(100)},
    "30 streams of huge frames that appear late": {"a.ts": late_streams(30)},
    "64 tracks of huge frames": {"a.mp4": mp4(HUGE, FRAMES, 64)},
    "a transport stream of huge frames": {"a.ts": ts(HUGE, FRAMES)},
    "50,000 huge frames": {"a.mp4": mp4(HUGE, FRAMES[:1], times=50_000)},
    "frames above the limit": {"a.mp4": mp4(OVER, [OVER.key(), OVER.repeat(1)])},
    "frames above the limit after small ones": {
        "a.ts": ts(SMALL, SMALL.frames([20, 90], 1)) + ts(OVER, [OVER.key(), OVER.repeat(1)], 9 * TICKS)},
}
REFUSED = {
    "100 tracks of decodable H.264": "has 100 streams, more than the limit of 64",
    "100 streams of decodable H.264": "has 100 streams, more than the limit of 64",
    "a WebP of too many full frames": "pixels in all of its frames, the limit for an animation",
    "a GIF of too many full frames": "pixels in all of its frames, the limit for an animation",
    "an APNG": "is an image (PNG), not a video",
    "frames above the limit": "is 8208 x 8192, more than the limit of 67108864 pixels",
    "frames above the limit after small ones": "is 8208 x 8192, more than the limit of 67108864 pixels",
}
IMAGES = {"8 PNGs of 16384 x 16384": images(8), "one PNG of 16384 x 16384": images(1),
          "an APNG": {"a.png": png(SIDE, 100)}, "a full GIF": {"a.gif": full_gif(SIDE, 3, 3)}}


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
            most = stated_bytes() + (1 << 30)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)))  # so that a failure does no harm
            watch = threading.Timer(LIMIT_S, process.kill)
            watch.start()
            message = process.stderr.read()
            process.stderr.close()
            _, status, usage = os.wait4(process.pid, 0)
            watch.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
        self.assertIn(process.returncode, (0, 1, 2), message)
        self.assertNotIn("unexpected failure", message)
        if process.returncode != 0:
            self.assertEqual(len(message.splitlines()), 1, message)
            self.assertTrue(message.startswith("vlm-run: "), message)
        return usage.ru_maxrss * 1024, message

    def test_videos(self):
        for name, files in VIDEOS.items():
            with self.subTest(name):
                peak, message = self.peak(QWEN, "--video", files, "--frames", "2")
                self.assertLess(peak, stated_bytes(), message)
                if "this build has no FFmpeg" not in message:
                    self.assertIn(REFUSED.get(name, ""), message)

    def test_images(self):
        for name, files in IMAGES.items():
            with self.subTest(name):
                peak, message = self.peak(LLAVA, "--image", files)
                self.assertLess(peak, stated_bytes(), message)

    def test_the_files_are_small(self):
        for files in [*VIDEOS.values(), *IMAGES.values()]:
            for content in files.values():
                self.assertLess(len(content), 1 << 21)


if __name__ == "__main__":
    unittest.main()
