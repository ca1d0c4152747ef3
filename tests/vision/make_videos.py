"""Writes the clips that the tests of video decode, and what Pillow makes of their frames.

Every expected value comes from Pillow, never from kvlm itself, and all clips from fixed formulas, so
a second run with the same versions gives the same frames. Needs: numpy, Pillow 13, PyAV 18 (whose own
FFmpeg encodes), transformers 5 (no torch: make_pictures.py, whose helpers this uses, asks for it).

data/video/goldens.txt has one case a line; "#" begins a comment:
  frames FILE WIDTH HEIGHT DELAY:CRC ...  of every frame its delay in ms as stored, and the CRC of
                                          its RGB, which is zlib.crc32 in hexadecimal
  coded FILE FPS COUNT                    a clip that FFmpeg reads; frame i is the picture
                                          numbered(i), without loss
"""

from __future__ import annotations

import argparse
import io
import random
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
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


def numbered(number: int) -> np.ndarray:
    """The frame that tests/vision/test_videos.h makes, too: 16 x 24, no two alike."""
    frame = picture("smooth", 16, 24)
    frame[:8, :8] = picture("noise", 8, 8 * (number + 1))[:, 8 * number :]
    return frame


def coded(
    file_format: str,
    codec: str,
    pixels: str,
    frames: list[np.ndarray],
    fps: int = 10,
    times: list[int] | None = None,
    options: dict[str, str] | None = None,
    seen_as: dict[str, int] | None = None,
    size: tuple[int, int] = (24, 16),
) -> bytes:
    """A video of these frames; `times` are in ms, and `seen_as` are fields of the stream."""
    out = io.BytesIO()
    with av.open(out, "w", format=file_format, options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for key, value in (seen_as or {}).items():
            setattr(stream.codec_context, key, value)
        container.start_encoding()
        for i, rgb in enumerate(frames):
            frame = rgb if isinstance(rgb, av.VideoFrame) else av.VideoFrame.from_ndarray(rgb)
            frame.pts = times[i] if times else i
            frame.time_base = Fraction(1, 1000) if times else Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 whose track states another matrix (a, b, c, d)."""
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (v << 16 for v in matrix)
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


def ffmpeg_files() -> dict[str, bytes]:
    """What is read through FFmpeg: in order and not, with and without times, turned, empty."""
    frames = [numbered(i) for i in range(12)]
    # x264 has no bidirectional frames without loss.
    gop = "lossless=1:keyint=5:bframes=2:b-adapt=0:scenecut=0:pools=none:frame-threads=1:info=0"
    rgb = {"x265-params": gop + ":open-gop=0:repeat-headers=1"}
    open_gop = {"x265-params": gop + ":open-gop=1"}
    mp4 = coded("mp4", "libx265", "gbrp", frames, options=rgb)
    files = {
        "reordered.mp4": mp4,
        "open_gop.mkv": coded("matroska", "libx265", "gbrp", frames, options=open_gop),
        "ffv1.mkv": coded("matroska", "ffv1", "bgr0", frames[:5], fps=25),
        "raw.avi": coded("avi", "rawvideo", "bgr24", frames[:4], fps=2),
        "no_times.hevc": coded("hevc", "libx265", "gbrp", frames, options=rgb),
        "uneven.mkv": coded(
            "matroska", "ffv1", "bgr0", frames[:4], times=[0, 40, 500, 1250], fps=25
        ),
    }
    for name, matrix in (("6", (0, 1, -1, 0)), ("3", (-1, 0, 0, -1)), ("5", (0, 1, 1, 0))):
        files[f"turned{name}.mp4"] = turned(
            coded("mp4", "libx264rgb", "rgb24", frames[:1], options={"qp": "0"}), matrix
        )
    return files


def colour_files() -> dict[str, bytes]:
    """One flat frame of Y 81, U 90, V 240 by every matrix and range, without loss."""
    files = {}
    for name, colorspace, full in (("none", 2, 0), ("bt709", 1, 1), ("bt601", 5, 1), ("full", 1, 2)):
        frame = av.VideoFrame(24, 16, "yuv420p")
        for plane, value in zip(frame.planes, (81, 90, 240)):
            plane.update(bytes([value]) * plane.buffer_size)
        fields = {"colorspace": colorspace, "color_range": full}
        files[f"colour_{name}.mkv"] = coded("matroska", "ffv1", "yuv420p", [frame], seen_as=fields)
    return files


def odd_files() -> dict[str, bytes]:
    """Files that are refused, or counted in another way."""
    flat = [np.full((16, 24, 3), 10 * i + 5, np.uint8) for i in range(24)]
    files = {
        "hidden.webm": hidden_frames(flat),
        "sizes.ts": two_sizes(),
        "no_frame.avi": coded("avi", "rawvideo", "bgr24", []),
    }
    out = io.BytesIO()
    with av.open(out, "w", format="matroska", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 80), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    files["sound.mkv"] = out.getvalue()
    return files


def hidden_frames(frames: list[np.ndarray]) -> bytes:
    """VP8 in which packets that are not shown stand between others: every third is made so."""
    out = io.BytesIO()
    with av.open(out, "w", format="webm", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libvpx", rate=10, options={"deadline": "best", "crf": "4"})
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        stream.codec_context.bit_rate = 1000000
        for i, rgb in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(rgb)
            frame.pts, frame.time_base = i, Fraction(1, 10)
            for packet in stream.encode(frame):
                if i % 3 == 1:  # the bit of a VP8 header that says whether it is shown
                    data = bytearray(bytes(packet))
                    data[0] &= ~0x10
                    hidden = av.Packet(bytes(data))
                    hidden.pts, hidden.dts = packet.pts, packet.dts
                    hidden.time_base, hidden.stream = packet.time_base, stream
                    packet = hidden
                container.mux(packet)
    return out.getvalue()


def two_sizes() -> bytes:
    """A stream whose pictures become larger, as broadcasts' do."""
    out = io.BytesIO()
    with av.open(out, "w", format="mpegts", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=10, options={"qp": "30", "bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        number = 0
        for size in ((24, 16), (32, 16)):
            encoder = av.CodecContext.create("libx264", "w")
            encoder.width, encoder.height = size
            encoder.pix_fmt, encoder.time_base = "yuv420p", Fraction(1, 10)
            encoder.options = {"qp": "30", "bf": "0", "x264-params": "repeat-headers=1:threads=1"}
            for packet in [
                p
                for i in range(3)
                for p in encoder.encode(av.VideoFrame(*size, "yuv420p"))
            ] + list(encoder.encode()):
                copy = av.Packet(bytes(packet))
                copy.pts = copy.dts = number
                copy.time_base, copy.stream, copy.is_keyframe = (
                    Fraction(1, 10),
                    stream,
                    packet.is_keyframe,
                )
                container.mux(copy)
                number += 1
    return out.getvalue()


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
    made = f"Made by tests/vision/make_videos.py, which explains it, with Pillow {PIL.__version__}"
    lines = [f"# {made}, PyAV {av.__version__}."]
    for name, data in (item for group in (gif_files, webp_files) for item in group().items()):
        (folder / name).write_bytes(data)
        lines.append(frames_line(name, data))
    for name, data in ffmpeg_files().items():
        (folder / name).write_bytes(data)
        with av.open(io.BytesIO(data)) as container:  # what was meant is what is in it
            shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            assert all(np.array_equal(frame, numbered(i)) for i, frame in enumerate(shown)), name
        rate = {"ffv1.mkv": 25, "uneven.mkv": 25, "raw.avi": 2}.get(name, 10)
        lines.append(f"coded {name} {rate} {len(shown)}")
    for name, data in (colour_files() | odd_files()).items():
        (folder / name).write_bytes(data)
    (folder / "goldens.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
