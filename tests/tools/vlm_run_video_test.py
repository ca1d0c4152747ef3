#!/usr/bin/env python3
"""Videos on vlm-run's command line, in a chat and in batches: folders of frames, animations, files.

KVLM_BUILD is the build folder.
"""

import json
import shutil
import subprocess
import unittest

from vlm_run_case import MODEL, PROGRAM, ROOT, VlmRun, run

INTERNVL = ROOT / "tests/golden/internvl"
QWEN = ROOT / "tests/golden/qwen2_5_vl"
FRAMES = QWEN / "video0"  # 5 frames of 35 x 21
PICTURE = INTERNVL / "image0.png"
DATA = ROOT / "tests/vision/data/video"
CLIP = DATA / "mixed3.gif"  # 7 frames


class LongVideo(VlmRun):
    def long_video(self, frames=400):
        """More frames than the context of 512 holds; all but the first are no pictures."""
        folder = self.folder / "long"
        folder.mkdir(exist_ok=True)
        shutil.copy(FRAMES / "frame00.png", folder / "f0.png")
        for i in range(1, frames):
            (folder / f"f{i}.png").write_bytes(b"damaged")
        return folder


class Videos(LongVideo):
    def ask(self, *arguments, **options):
        model = [] if "-m" in arguments else ["-m", INTERNVL]
        return run(*model, "-n", 4, *arguments, **options)

    def answer(self, *arguments):
        result = self.ask(*arguments, "--json")
        self.assert_sound(result)
        return json.loads(result.stdout)

    def test_a_video_is_answered_about_and_told_of(self):
        answer = self.answer("--video", FRAMES)
        self.assertEqual(answer["clips"], [{"frames": 5, "of": 5}])
        self.assertGreater(answer["visual_tokens"], 0)
        result = self.ask("--video", FRAMES, "--frames", 4)
        self.assert_sound(result)
        self.assertIn(b"video0: 4 of 5 frames, 35 x 21\n", result.stderr)

    def test_every_family_that_takes_videos_takes_them_here(self):
        for name in ("internvl", "internvl_original", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            with self.subTest(name):
                answer = self.answer("-m", ROOT / "tests/golden" / name, "--video", FRAMES, "--frames", 2)
                self.assertEqual(answer["clips"], [{"frames": 2, "of": 5}])
                self.assertGreater(answer["visual_tokens"], 0)

    def test_the_rate_and_the_number_of_frames_are_chosen(self):
        every = self.answer("--video", CLIP)
        some = self.answer("--video", CLIP, "--frames", 4)
        slow = self.answer("--video", CLIP, "--fps", "1.9")
        self.assertEqual([clip["frames"] for clip in every["clips"] + some["clips"] + slow["clips"]], [7, 4, 4])
        self.assertEqual(slow["clips"][0]["of"], 7)
        self.assertAlmostEqual(slow["clips"][0]["fps"], 2.966, places=3)
        self.assertEqual(some["visual_tokens"], slow["visual_tokens"])
        self.assertGreater(every["visual_tokens"], some["visual_tokens"])
        self.assertEqual(some["tokens"], slow["tokens"], "the same frames at the same times")

    def test_pictures_and_videos_stand_together(self):
        alone = self.answer("--image", PICTURE)["visual_tokens"]
        video = self.answer("--video", FRAMES)["visual_tokens"]
        both = self.answer("--image", PICTURE, "--video", FRAMES, "--video", CLIP, "--frames", 4)
        clips = [self.answer("--video", path, "--frames", 4)["visual_tokens"] for path in (FRAMES, CLIP)]
        self.assertEqual(both["visual_tokens"], alone + sum(clips))
        self.assertEqual([clip["of"] for clip in both["clips"]], [5, 7])
        self.assertNotEqual(video, 0)
        self.assertNotIn("clips", self.answer("--image", PICTURE))

    def test_an_animation_is_a_picture_or_a_video(self):
        for name in ("pillow.gif", "lossy.webp"):
            self.assertGreater(self.answer("--video", DATA / name)["clips"][0]["frames"], 4)
            self.assertNotIn("clips", self.answer("--image", DATA / name))
        self.assertEqual(self.answer("--video", DATA / "still.gif")["clips"], [{"frames": 1, "of": 1, "fps": 10.0}])

    def test_what_is_no_video_is_refused_with_the_way_out(self):
        empty = self.folder / "empty"
        empty.mkdir()
        mixed = self.folder / "mixed"
        shutil.copytree(FRAMES, mixed)
        shutil.copy(PICTURE, mixed / "frame03.png")
        for arguments, status, words in (
                (["--video", PICTURE], 1, ["an image (PNG), not a video", "give it as an image"]),
                (["--video", self.folder / "gone.mp4"], 1, ["does not exist"]),
                (["--video", empty], 1, ["without image files"]),
                (["--video", mixed], 1, ["a frame of another size", "frame 3"]),
                (["--video", "-"], 2, ["standard input", "give the path"]),
                (["--video", "https://a.org/b.mp4"], 1, ["is a URL"]),
                (["--video", ROOT / "README.md"], 1, ["video", "a folder of frames"]),
                (["--image", DATA / "ffv1.mkv"], 1, ["a video (Matroska)", "give it as a video"]),
                (["--image", FRAMES], 1, ["is a directory", f"--video {FRAMES}"]),
                (["--image", PICTURE, "--frames", 4], 2, ["--frames applies to videos", "--video"]),
                (["--video", FRAMES, "--frames", 4, "--fps", 1], 2, ["give one of them"]),
                (["--video", FRAMES, "--fps", 0], 2, ["--fps is 0"]),
                (["--video", FRAMES, "--fps", "nan"], 2, ["--fps"]),
                (["--video", FRAMES, "--frames", 32769], 2, ["--frames is 32769"]),
                (["--video", FRAMES, "--fps", 1], 2, ["has no frame rate", "number of frames"])):
            with self.subTest(arguments):
                self.assert_refused(self.ask(*arguments), status, words)

    def test_a_video_with_fewer_frames_than_asked_for_has_some_twice(self):
        for name in ("internvl", "internvl_original", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"):
            with self.subTest(name):
                answer = self.answer("-m", ROOT / "tests/golden" / name, "--video", FRAMES, "--frames", 8)
                self.assertEqual(answer["clips"], [{"frames": 8, "of": 5}])

    def test_a_folder_has_no_rate_but_what_its_family_assumes(self):
        for name in ("internvl", "internvl_original", "qwen2_vl", "qwen2_5_vl", "llava_onevision"):
            with self.subTest(name):
                result = self.ask("-m", ROOT / "tests/golden" / name, "--video", FRAMES, "--fps", 1)
                self.assert_refused(result, 2, ["video0 has no frame rate (it is a folder of images)",
                                                "give a number of frames"])
        folder = self.folder / "second"  # at 24 frames a second
        folder.mkdir()
        for frame in range(24):
            shutil.copy(FRAMES / "frame00.png", folder / f"frame{frame:02}.png")
        qwen3 = ROOT / "tests/golden/qwen3_vl"
        answer = self.answer("-m", qwen3, "--video", folder, "--fps", 6)
        self.assertEqual(answer["clips"], [{"frames": 6, "of": 24}])

    def test_a_model_without_videos_says_so(self):
        self.assert_refused(run("-m", MODEL, "--video", FRAMES), 1, ["takes no videos", "llava-1.5"])

    def test_a_build_without_ffmpeg_says_what_is_missing(self):
        result = self.ask("--video", DATA / "reordered.mp4")
        if result.returncode == 0:
            self.assertIn(b"reordered.mp4: 12 of 12 frames, 10 a second, 24 x 16\n", result.stderr)
        else:
            self.assert_refused(result, 1, ["this build has no FFmpeg", "tools/setup.sh --video"])

    def test_a_video_beyond_the_context_is_refused_before_a_frame_is_decoded(self):
        video = self.long_video()
        self.assert_refused(self.ask("--video", video), 2,
                            ["of its 1 video", "a context of 512", "fewer than 400 frames", "--frames"])
        self.assert_refused(self.ask("--video", video, "--frames", 4), 1, ["is text, not an image"])

    def test_the_size_of_pictures_is_chosen(self):
        tokens = [self.answer("--image", PICTURE, "--tiles", count)["visual_tokens"] for count in (1, 2, 12)]
        self.assertEqual(tokens, [4, 12, 36])
        for arguments, words in ((["--max-pixels", 4000], ["--max-pixels is for Qwen-VL models"]),
                                 (["--tiles", 0], ["--tiles", "1 to 1024"]),
                                 (["--min-pixels", 0], ["--min-pixels", "1 to 268435456"]),
                                 (["--max-pixels", -1], ["--max-pixels"]),
                                 (["--min-pixels", 9, "--max-pixels", 8], ["--min-pixels is 9"])):
            self.assert_refused(self.ask("--image", PICTURE, *arguments), 2, words)

    def test_pixels_bound_a_picture(self):
        def tokens(*arguments):
            result = run("-m", QWEN, "-n", 1, "--image", QWEN / "image0.png", "--json", *arguments)
            self.assert_sound(result)
            return json.loads(result.stdout)["visual_tokens"]
        self.assertGreater(tokens("--min-pixels", 3000, "--max-pixels", 9000), tokens())
        self.assertLess(tokens("--max-pixels", 800), tokens())

    # ---- batches ------------------------------------------------------------------------------------------------------

    def batch(self, records, *arguments):
        (self.folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return self.ask("--batch", self.folder / "in.jsonl", "--out", self.folder / "out.jsonl", *arguments)

    def records(self):
        return {record["id"]: record for record in map(json.loads, (self.folder / "out.jsonl").read_text().splitlines())}

    def test_records_have_videos(self):
        shutil.copytree(FRAMES, self.folder / "frames")
        shutil.copy(CLIP, self.folder / "clip.gif")
        records = [{"id": 1, "video": "frames"}, {"id": 2, "videos": ["clip.gif", "frames"], "image": str(PICTURE)},
                   {"id": 3, "prompt": "what?"}]
        for size in (1, 3):
            (self.folder / "out.jsonl").unlink(missing_ok=True)
            self.assert_sound(self.batch(records, "--frames", 4, "--batch-size", size))
            found = self.records()
            self.assertEqual(found[1]["clips"], [{"frames": 4, "of": 5}])
            self.assertEqual([clip["of"] for clip in found[2]["clips"]], [7, 5])
            self.assertEqual(found[2]["videos"], [str(self.folder / "clip.gif"), str(self.folder / "frames")])
            self.assertNotIn("clips", found[3])
            alone = self.answer("--image", PICTURE, "--video", CLIP, "--video", FRAMES, "--frames", 4)
            self.assertEqual(found[2]["tokens"], alone["tokens"])
            self.assertEqual(found[1]["settings"]["frames"], 4)

    def test_another_choice_of_frames_is_another_batch(self):
        records = [{"id": 1, "video": str(CLIP)}]
        self.assert_sound(self.batch(records, "--frames", 4))
        self.assert_refused(self.batch(records, "--frames", 2), 2, ["--frames 4", "--frames 2"])
        self.assert_refused(self.batch(records), 2, ["--frames 4", "no --frames"])
        self.assert_refused(self.batch(records, "--frames", 4, "--tiles", 3), 2, ["--tiles 3"])
        self.assert_refused(self.batch([{"id": 1, "video": str(FRAMES)}], "--frames", 4), 2,
                            [CLIP.name, FRAMES.name, "another id"])

    def test_records_without_videos_have_no_frames_to_choose(self):
        self.assert_refused(self.batch([{"id": 1, "image": str(PICTURE)}], "--fps", 1), 2, ["--fps", "no record of"])
        self.assertFalse((self.folder / "out.jsonl").exists())
        result = self.ask("--batch", FRAMES, "--out", self.folder / "out.jsonl", "--frames", 4)
        self.assert_refused(result, 2, ["--frames", "no record of"])

    def test_a_record_that_fails_says_why_and_the_others_are_done(self):
        empty = self.folder / "empty"
        empty.mkdir()
        records = [{"id": 1, "video": str(self.long_video())}, {"id": 2, "video": str(PICTURE)},
                   {"id": 3, "image": str(DATA / "ffv1.mkv")}, {"id": 4, "video": "gone"},
                   {"id": 5, "video": str(FRAMES)}, {"id": 6, "video": "empty"},
                   {"id": 7, "video": str(ROOT / "README.md")}, {"id": 8, "image": str(DATA / "reordered.mp4")},
                   {"id": 9, "image": str(DATA / "raw.avi")}, {"id": 10, "video": "https://a.org/watch?v=1"}]
        self.assert_sound(self.batch(records), 1)
        found = self.records()
        for number, words in ((1, "fewer than 400 frames"), (2, "give it as an image"), (3, "give it as a video"),
                              (4, "does not exist"), (6, "a folder without image files"), (7, "a folder of frames"),
                              (8, "a video (MP4), not an image"), (9, "give it as a video"), (10, "is a URL")):
            self.assertIn(words, found[number]["error"])
        self.assertIn("text", found[5])

    # ---- chats --------------------------------------------------------------------------------------------------------

    def chat(self, lines, *arguments):
        return self.ask("--chat", *arguments, input="\n".join(lines).encode() + b"\n")

    def test_a_chat_takes_videos(self):
        result = self.chat([f"/video {FRAMES}", "what moves?", "and then?", "/clear", f"/video {CLIP}",
                            f"/image {PICTURE}", "what?", "/quit"])
        self.assert_sound(result)
        self.assertIn(b"video 1: " + str(FRAMES).encode() + b": 5 of 5 frames, 35 x 21\n", result.stderr)
        self.assertIn(b": 7 of 7 frames", result.stderr)
        given = self.ask("--video", FRAMES, "-p", "what moves?", "-q").stdout
        self.assertTrue(result.stdout.startswith(given), (result.stdout, given))
        result = self.chat(["what moves?"], "--video", FRAMES)
        self.assert_sound(result)
        self.assertEqual(result.stdout, given)

    def test_a_chat_looks_at_the_room_before_it_decodes(self):
        video = self.long_video()
        result = self.chat([f"/video {video}"])
        self.assertEqual(result.returncode, 2)
        self.assertIn(b"fewer than 400 frames", result.stderr)
        self.assertNotIn(b"damaged", result.stderr)

    def test_frames_are_named_by_the_options_of_a_chat(self):
        result = self.chat([f"/video {CLIP}", "what?"], "--frames", 4)
        self.assert_sound(result)
        self.assertIn(b": 4 of 7 frames", result.stderr)


class Fidelity(LongVideo):
    """vlm-kv on records with videos."""

    def test_a_video_is_forced_like_a_picture(self):
        data = self.folder / "data.jsonl"
        shutil.copytree(FRAMES, self.folder / "frames")
        data.write_text(json.dumps({"id": 1, "video": "frames", "image": str(PICTURE)}) + "\n" +
                        json.dumps({"id": 2, "videos": [str(CLIP)], "prompt": "what?"}) + "\n")
        kv = PROGRAM.with_name("vlm-kv")

        def fidelity(*arguments):
            return subprocess.run([kv, "fidelity", "-m", INTERNVL, "--kv", "f16", "--data", data, "-n", "3", "--json",
                                   *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, timeout=120)

        rows = []
        for arguments in ([], ["--frames", 4]):
            result = fidelity(*arguments)
            self.assertEqual(result.returncode, 0, result.stderr)
            rows.append(json.loads(result.stdout))
            self.assertEqual(rows[-1]["records"], 2)
            self.assertEqual(rows[-1]["kl_mean"], 0)
        self.assertGreater(rows[0]["bytes"], rows[1]["bytes"])
        result = fidelity("--fps", 1, "--frames", 2)
        self.assertEqual(result.returncode, 2)
        self.assertIn(b"give one of them", result.stderr)
        result = subprocess.run([kv, "profile", "-m", INTERNVL, "--data", data, "--out", self.folder / "profile.json", "-n",
                                 "2", "--policy", "prefixkv", "--frames", "4"], stdin=subprocess.DEVNULL,
                                capture_output=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        data.write_text(json.dumps({"id": 3, "video": str(self.long_video())}) + "\n")
        result = fidelity()
        self.assertEqual(result.returncode, 2)
        self.assertIn(b"data.jsonl line 1: the prompt has", result.stderr)
        self.assertIn(b"fewer than 400 frames", result.stderr)


if __name__ == "__main__":
    unittest.main()
