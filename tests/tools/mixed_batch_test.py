#!/usr/bin/env python3
"""2,000 records of images and videos: answered from the first on, stopped at any moment, continued.

How soon is a property here, not a time: how many records were opened before the first answer was written, as the kernel
saw it (inotify). KVLM_BUILD is the build folder.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import time
import unittest

from made_videos import H264, mp4
from vlm_run_case import PROGRAM, ROOT, VlmRun, run

MODEL = ROOT / "tests/golden/internvl"
CLIP = ROOT / "tests/vision/data/video/mixed3.gif"
RECORDS = 2000
MOST_OPENED = 32  # before the first answer
OBEYS_S = 10  # a signal; far above what it takes, against hangs
LIMIT_S = 60
IN_MODIFY, IN_OPEN = 0x2, 0x20


class Watch:
    """What is opened and written in some folders, in order."""

    def __init__(self, *folders):
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = libc.inotify_init()
        self.folders = {libc.inotify_add_watch(self.file, os.fsencode(folder), IN_OPEN | IN_MODIFY) for folder in folders}
        if self.file < 0 or min(self.folders) < 0:
            raise unittest.SkipTest(f"inotify: {os.strerror(ctypes.get_errno())}")

    def close(self):
        os.close(self.file)

    def events(self, process):
        """(what, name), until the process ends or is quiet for too long."""
        while True:
            if not select.select([self.file], [], [], 0.2)[0]:
                if process.poll() is not None:
                    return
                continue
            data = os.read(self.file, 1 << 16)
            while data:
                _, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16:16 + length].rstrip(b"\0").decode()
                data = data[16 + length:]
                yield mask & (IN_OPEN | IN_MODIFY), name


class MixedBatch(VlmRun):
    def setUp(self):
        super().setUp()
        self.data, self.out_folder = self.folder / "data", self.folder / "out"
        self.data.mkdir()
        self.out_folder.mkdir()
        self.output = self.out_folder / "out.jsonl"
        sources = {"image": [MODEL / "image0.png", ROOT / "tests/golden/llava_gqa/image1.png"], "video": [CLIP]}
        stream = H264(32, 32)
        (self.folder / "clip.mp4").write_bytes(mp4(stream, stream.frames([20, 200], 1)))
        result = run("-m", MODEL, "--video", self.folder / "clip.mp4", "-n", 1, "-p", "x")
        if result.returncode == 0:
            sources["video"].append(self.folder / "clip.mp4")
        else:
            self.assertIn(b"this build has no FFmpeg", result.stderr)
        self.ids = list(range(RECORDS))
        lines = []
        for i in self.ids:
            kind = "image" if i % 2 else "video"
            of_kind = sources[kind]
            source = of_kind[i // 2 % len(of_kind)]
            name = f"{i}{source.suffix}"
            first = self.data / f"first-{source.name}"
            if not first.exists():
                shutil.copy(source, first)
            os.link(first, self.data / name)
            lines.append(json.dumps({"id": i, kind: f"data/{name}", "prompt": "what?"}) + "\n")
        (self.folder / "in.jsonl").write_text("".join(lines))

    def start(self, *more):
        process = subprocess.Popen(
            [PROGRAM, "-m", MODEL, "--batch", self.folder / "in.jsonl", "--out", self.output, "-n", "1", "--frames", "2", "--lean",
             *map(str, more)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        process.kill()
        process.communicate()

    def answered(self):
        """The ids in the output, all of whose lines must be whole."""
        text = self.output.read_bytes() if self.output.exists() else b""
        self.assertTrue(not text or text.endswith(b"\n"), text[-80:])
        records = [json.loads(line) for line in text.splitlines()]
        for record in records:
            self.assertIn("text", record)
        return [record["id"] for record in records]

    def stop(self, process):
        """Sends SIGTERM, and returns what was said."""
        process.send_signal(signal.SIGTERM)
        since = time.monotonic()
        _, said = process.communicate(timeout=LIMIT_S)
        self.assertLess(time.monotonic() - since, OBEYS_S)
        self.assertEqual(process.returncode, 130, said)

    def test_few_records_are_opened_before_the_first_answer(self):
        for more in ([], ["--batch-size", 1, "-t", 1], ["--batch-size", 8], ["--device", "cpu,cpu"]):
            with self.subTest(more):
                self.output.unlink(missing_ok=True)
                watch = Watch(self.data, self.out_folder)
                process = self.start(*more)
                opened = set()
                for what, name in watch.events(process):
                    if what == IN_OPEN and name[:1].isdigit():
                        opened.add(name)
                    if what == IN_MODIFY and name == self.output.name:
                        break
                self.stop(process)
                watch.close()
                self.assertGreater(len(opened), 0)
                self.assertLess(len(opened), MOST_OPENED)
                self.assertLess(len(self.answered()), RECORDS)

    def test_a_signal_at_any_moment_loses_nothing(self):
        """While the first record is opened, at an answer, and amid: then the rest is answered, each record once."""
        moments = {"the first record is opened": lambda what, name, answers: what == IN_OPEN and name[:1].isdigit(),
                   "an answer is written": lambda what, name, answers: answers >= 1,
                   "many answers are written": lambda what, name, answers: answers >= 300}
        for more in ([], ["--device", "cpu,cpu"]):
            self.output.unlink(missing_ok=True)
            before = []
            for moment, reached in moments.items():
                with self.subTest(moment, more=more):
                    watch = Watch(self.data, self.out_folder)
                    process = self.start(*more)
                    answers = 0
                    for what, name in watch.events(process):
                        answers += what == IN_MODIFY and name == self.output.name
                        if reached(what, name, answers):
                            break
                    self.stop(process)
                    watch.close()
                    ids = self.answered()
                    self.assertEqual(ids[:len(before)], before, "what was answered stays")
                    self.assertLess(len(ids), RECORDS)
                    before = ids
            self.assertGreaterEqual(len(before), 2)
            _, said = (process := self.start(*more)).communicate(timeout=LIMIT_S)
            self.assertEqual(process.returncode, 0, said)
            ids = self.answered()
            self.assertEqual(ids[:len(before)], before)
            self.assertEqual(sorted(ids), self.ids)


if __name__ == "__main__":
    unittest.main()
