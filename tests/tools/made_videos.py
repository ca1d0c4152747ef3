"""H.264 videos in MP4 and MPEG-TS, written byte by byte, so that no test needs an encoder.

A video is flat: every macroblock of a key frame has one colour, and every other frame repeats the one before in a few bytes,
whatever its size. Standard library only.
"""

import struct

TICKS = 90_000  # of a second in MPEG-TS
WRAP = 1 << 33  # a PTS has 33 bits


class Bits:
    def __init__(self):
        self.text = []

    def u(self, count, value):
        self.text.append(f"{value:0{count}b}")
        return self

    def ue(self, *values):
        """Exponential Golomb codes."""
        for value in values:
            code = f"{value + 1:b}"
            self.text.append("0" * (len(code) - 1) + code)
        return self

    def bytes(self, end="1"):
        text = "".join(self.text) + end
        text += "0" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big")


def nal(header, payload):
    """A NAL unit, in which no start code can be seen."""
    out, zeros = bytearray(), 0
    if b"\0\0" not in payload:
        return bytes([header]) + payload
    for byte in payload:
        if zeros == 2 and byte < 4:
            out.append(3)
            zeros = 0
        out.append(byte)
        zeros = zeros + 1 if byte == 0 else 0
    return bytes([header]) + bytes(out)


class H264:
    """A stream of `width` x `height`, of which the last macroblocks may be cropped."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        across, down = -(-width // 16), -(-height // 16)
        self.blocks = across * down
        crop = Bits().u(1, 1).ue(0, (across * 16 - width) // 2, 0, (down * 16 - height) // 2)
        sps = Bits().u(24, 0x42003e).ue(0, 0, 2, 1).u(1, 0).ue(across - 1, down - 1).u(2, 3)
        sps.text += crop.text
        self.sps = nal(0x67, sps.u(1, 0).bytes())
        self.pps = nal(0x68, Bits().ue(0, 0).u(2, 0).ue(0, 0, 0).u(3, 0).ue(0, 0, 0).u(3, 4).bytes())

    def key(self, grey=None):
        """A key frame: of one grey, 384 bytes a macroblock, or of the middle one, a byte a macroblock."""
        head = Bits().ue(0, 7, 0).u(4, 0).ue(0).u(2, 0).ue(0, 1)
        if grey is not None:
            start = "".join(head.ue(25).text)
            start += "0" * (-len(start) % 8)
            again = bytes([0x0d, 0x00])  # ue(25) and zeros up to the next byte
            block = bytes([grey]) * 256 + bytes([128]) * 128
            body = int(start, 2).to_bytes(len(start) // 8, "big") + again.join([block] * self.blocks)
            return nal(0x65, body + b"\x80")
        # Predicted from its neighbours, without a residual: 00100 1 1 1.
        text = "".join(head.text)
        bits = int(text, 2)
        body = int.from_bytes(b"\x27" * self.blocks, "big")
        whole = ((bits << 8 * self.blocks | body) << 1) | 1
        length = len(text) + 8 * self.blocks + 1
        pad = -length % 8
        return nal(0x65, (whole << pad).to_bytes((length + pad) // 8, "big"))

    def repeat(self, number):
        """The frame before once more; `number` frames after the key frame."""
        return nal(0x61, Bits().ue(0, 5, 0).u(4, number % 16).u(3, 0).ue(0, 1, self.blocks).bytes())

    def frames(self, greys, repeats=0):
        """A key frame of each grey, with so many repetitions of it."""
        return [unit for grey in greys for unit in [self.key(grey), *(self.repeat(i + 1) for i in range(repeats))]]


# ---- MP4 ---------------------------------------------------------------------------------------------------------------------


def box(kind, *parts):
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def full_box(kind, *numbers, tail=b""):
    return box(kind, struct.pack(f">{len(numbers) + 1}I", 0, *numbers), tail)


DATA_AT = 32  # where the data of a movie begin


def track(number, samples, width, height, *, config=b"", sizes=(1,), offsets=(DATA_AT,), keys=None):
    """An H.264 track. Sizes and offsets: of each sample, or of all and of the first; keys: from 1 on, None: all."""
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    tkhd = box(b"tkhd", struct.pack(">6I", 3, 0, 0, number, 0, samples), bytes(16), matrix,
               struct.pack(">2I", width << 16, height << 16))
    avc1 = box(b"avc1", bytes(6), struct.pack(">H", 1), bytes(16), struct.pack(">2H", width, height),
               struct.pack(">2I", 0x480000, 0x480000), bytes(4), struct.pack(">H", 1), bytes(32), struct.pack(">2H", 24, 0xffff), config)
    table = [full_box(b"stsd", 1, tail=avc1), full_box(b"stts", 1, samples, 100),
             full_box(b"stsc", 1, 1, samples if len(offsets) == 1 else 1, 1)]
    table.append(full_box(b"stsz", sizes[0], samples) if len(sizes) == 1 else full_box(b"stsz", 0, samples, *sizes))
    table.append(full_box(b"stco", len(offsets), *offsets))
    if keys is not None:
        table.append(full_box(b"stss", len(keys), *keys))
    dinf = box(b"dinf", full_box(b"dref", 1, tail=full_box(b"url ", tail=b"")))
    handler = box(b"hdlr", bytes(8), b"vide", bytes(13))
    media = box(b"mdia", full_box(b"mdhd", 0, 0, 1000, 100 * samples, 0x55c40000), handler,
                box(b"minf", full_box(b"vmhd", 0, 0), dinf, box(b"stbl", *table)))
    return box(b"trak", tkhd, media)


def movie(tracks, data, samples):
    mvhd = box(b"mvhd", struct.pack(">5I", 0, 0, 0, 1000, 100 * samples), struct.pack(">IHH", 0x10000, 0x100, 0), bytes(8 + 36 + 24),
               struct.pack(">I", len(tracks) + 1))
    return box(b"ftyp", b"isom", bytes(4), b"isomavc1") + box(b"mdat", data) + box(b"moov", mvhd, *tracks)


def mp4(stream, units, tracks=1, times=1):
    """Frames of an H264 in an MP4, so many times, as so many tracks, all of which share their bytes."""
    samples = [struct.pack(">I", len(unit)) + unit for unit in units]
    offsets = [DATA_AT + sum(map(len, samples[:i])) for i in range(len(samples))] if times > 1 else [DATA_AT]
    config = box(b"avcC", bytes([1]) + stream.sps[1:4] + b"\xff\xe1", struct.pack(">H", len(stream.sps)), stream.sps, b"\1",
                 struct.pack(">H", len(stream.pps)), stream.pps)
    count = len(units) * times
    keys = [i + 1 for i, unit in enumerate(units * times) if unit[0] == 0x65]
    sizes = [len(sample) for sample in samples] * times
    return movie([track(i + 1, count, stream.width, stream.height, config=config, sizes=sizes, offsets=offsets * times, keys=keys)
                  for i in range(tracks)], b"".join(samples), count)


# ---- MPEG-TS -----------------------------------------------------------------------------------------------------------------


def crc(data):
    value = 0xffffffff
    for byte in data:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04c11db7 if value >> 31 else 0)) & 0xffffffff
    return struct.pack(">I", value)


class Transport:
    """A transport stream under construction: `streams` of H.264 in one programme, the first in packets of `pid`."""

    def __init__(self, streams=1, pid=256):
        self.counters = {}
        self.out = []
        self.pid = pid
        self.section(0, 0, struct.pack(">HH", 1, 0xe000 | 4096))
        self.programme(streams)

    def programme(self, streams, version=0):
        body = struct.pack(">HH", 0xe000 | self.pid, 0xf000)
        body += b"".join(struct.pack(">BHH", 0x1b, 0xe000 | self.pid + i, 0xf000) for i in range(streams))
        self.section(4096, 2, body, version)

    def section(self, pid, table, body, version=0):
        head = struct.pack(">BHHBBB", table, 0xb000 | len(body) + 9, 1, 0xc1 | version << 1, 0, 0)
        section = b"\0" + head + body + crc(head + body)
        section += b"\xff" * (-len(section) % 184)
        for at in range(0, len(section), 184):
            self.packet(pid, at == 0, section[at:at + 184])

    def packet(self, pid, first, payload, clock=None):
        counter = self.counters.get(pid, 0)
        self.counters[pid] = (counter + 1) % 16
        field = b""
        room = 184 - len(payload)
        if room > 0:
            field = b"" if room == 1 else b"\0" if clock is None else b"\x10" + struct.pack(">IH", clock >> 1, (clock & 1) << 15 | 0x7e00)
            field += b"\xff" * (room - 1 - len(field))
            field = bytes([len(field)]) + field
        head = struct.pack(">BHB", 0x47, (0x4000 if first else 0) | pid, (0x30 if room > 0 else 0x10) | counter)
        self.out.append(head + field + payload)

    def frame(self, stream, unit, pts, pid=256):
        units = [b"\x09\xf0", *([stream.sps, stream.pps] if unit[0] == 0x65 else []), unit]
        pts %= WRAP
        stamp = bytes([0x21 | pts >> 29 & 14, pts >> 22 & 255, 1 | pts >> 14 & 254, pts >> 7 & 255, 1 | pts << 1 & 254])
        data = b"\0\0\1\xe0\0\0\x80\x80\5" + stamp + b"".join(b"\0\0\0\1" + one for one in units)
        self.packet(pid, True, data[:176], pts)  # room for the clock
        for at in range(176, len(data), 184):
            self.packet(pid, False, data[at:at + 184])

    def bytes(self):
        return b"".join(self.out)


def ts(stream, units, first=TICKS, step=TICKS // 10):
    """Frames of an H264 in a transport stream: when the first is shown, and how long each."""
    out = Transport()
    for i, unit in enumerate(units):
        out.frame(stream, unit, first + i * step)
    return out.bytes()
