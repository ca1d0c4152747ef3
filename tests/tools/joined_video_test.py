#!/usr/bin/env python3
"""Transport streams that were joined (cat a.ts b.ts) are one video: every frame counts, or a sentence says why not.

The parts are written by made_videos.py, the same frames also as an MP4, whose answer is expected. KVLM_BUILD is the build folder.
"""

import json
import unittest

from made_videos import H264, TICKS, WRAP, Transport, mp4, ts
from vlm_run_case import ROOT, VlmRun, run

MODEL = ROOT / "tests/golden/internvl"
STEP = TICKS // 10
STREAM = H264(32, 32)
FIRST = STREAM.frames([10, 60, 110, 160], 2)
SECOND = STREAM.frames([240, 200, 150, 30], 2)
LENGTH = len(FIRST) * STEP
# When the first frame of each part is shown.
JOINED = {
    "times go on": (TICKS, TICKS + LENGTH),
    "the same times again": (TICKS, TICKS),
    "times of half of it again": (TICKS, TICKS + LENGTH // 2),
    "a jump of ten hours": (TICKS, 36_000 * TICKS),
    "back by an hour": (3600 * TICKS, TICKS),
    "the times wrap within the first part": (WRAP - 5 * STEP, WRAP + 7 * STEP),
    "the times wrap where they are joined": (WRAP - LENGTH, WRAP),
}
# Times of both parts between each other.
INTERLEAVED = {
    "back by half of it and half a frame": (TICKS, TICKS + LENGTH // 2 + STEP // 2),
    "back to before the first": (TICKS, TICKS // 2 + STEP // 2),
    "each part wraps": (WRAP - 5 * STEP, WRAP - 5 * STEP + 40),
}


def joined(first, second, stream=STREAM, frames=None):
    return ts(STREAM, FIRST, first) + ts(stream, frames or SECOND, second)


class JoinedVideos(VlmRun):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        result = run("-m", MODEL, "--video", ROOT / "tests/vision/data/video/reordered.mp4", "-n", 1, "-p", "x")
        if b"this build has no FFmpeg" in result.stderr:
            raise unittest.SkipTest("this build has no FFmpeg")

    def ask(self, content, *arguments):
        path = self.folder / "video"
        path.write_bytes(content)
        return run("-m", MODEL, "--video", path, "-n", 6, "-p", "x", "--json", *arguments)

    def answer(self, content, *arguments):
        result = self.ask(content, *arguments)
        self.assert_sound(result)
        answer = json.loads(result.stdout)
        (clip,) = answer["clips"]
        return clip["frames"], clip["of"], answer["visual_tokens"], answer["tokens"]

    def assert_whole(self, cases):
        for frames in (24, 8, 5):
            expected = self.answer(mp4(STREAM, FIRST + SECOND), "--frames", frames)
            self.assertEqual(expected[:2], (frames, 24))
            for name, times in cases.items():
                with self.subTest(name, frames=frames):
                    self.assertEqual(self.answer(joined(*times), "--frames", frames), expected)

    def test_every_frame_of_both_parts_is_there(self):
        self.assert_whole(JOINED)

    def test_times_of_the_second_part_between_those_of_the_first(self):
        self.assert_whole(INTERLEAVED)

    def test_a_larger_second_part_of_as_many_macroblocks_is_not_cropped(self):
        for width, height in ((24, 32), (32, 20), (18, 18)):
            first = H264(width, height)
            for second in (TICKS + LENGTH, TICKS):
                with self.subTest(f"{width} x {height} from {second}"):
                    content = ts(first, first.frames([10, 60, 110, 160], 2)) + ts(STREAM, SECOND, second)
                    self.assert_refused(self.ask(content), 1, [f"frame 12 is 32 x 32, the first is {width} x {height}"])

    def test_a_second_part_in_another_stream_is_told(self):
        other = Transport(pid=300)
        for i, unit in enumerate(SECOND):
            other.frame(STREAM, unit, TICKS + LENGTH + i * STEP, 300)
        result = self.ask(ts(STREAM, FIRST) + other.bytes())
        self.assert_sound(result)
        self.assertEqual(json.loads(result.stdout)["clips"][0]["of"], 12)
        self.assertRegex(result.stderr.decode(), r"(?m)^vlm-run: warning: .*2 video streams")

    def test_three_parts(self):
        clip = ts(STREAM, FIRST) + ts(STREAM, SECOND) + ts(STREAM, FIRST, TICKS + 3 * STEP)
        expected = self.answer(mp4(STREAM, FIRST + SECOND + FIRST), "--frames", 12)
        self.assertEqual(self.answer(clip, "--frames", 12), expected)

    def test_bytes_between_the_parts(self):
        whole = self.answer(mp4(STREAM, FIRST + SECOND), "--frames", 24)
        for between in (bytes(1000), b"\x47" * 77, b"not a packet"):
            with self.subTest(between[:4]):
                self.assertEqual(self.answer(ts(STREAM, FIRST) + between + ts(STREAM, SECOND, TICKS + LENGTH), "--frames", 24), whole)

    def test_a_first_part_that_ends_early_loses_no_frame_of_the_second(self):
        """A packet or two of the first part are gone, and each frame there takes one."""
        for cut, lost in ((188, 1), (288, 2)):
            frames, of, *_ = self.answer(ts(STREAM, FIRST)[:-cut] + ts(STREAM, SECOND, TICKS + LENGTH))
            self.assertEqual((frames, of), (24 - lost, 24 - lost))

    def test_a_second_part_of_another_size_is_refused(self):
        for width, height in ((48, 48), (64, 32), (24, 32), (16, 16)):
            other = H264(width, height)
            frames = other.frames([240, 200, 150, 30], 2)
            for second in (TICKS + LENGTH, TICKS):
                with self.subTest(f"{width} x {height} from {second}"):
                    result = self.ask(joined(TICKS, second, other, frames))
                    self.assert_refused(result, 1, [f"frame 12 is {width} x {height}, the first is 32 x 32", "scale all to one size"])


if __name__ == "__main__":
    unittest.main()
