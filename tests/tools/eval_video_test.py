"""tools/eval/video.py: annotation files in the published formats, letters by the harnesses' rules, scores by hand."""

import csv
import importlib.util
import json
import math
import shutil
import unittest

from eval_case import HELDOUT, EvalCase, WithModel, results_of

import breakdown  # noqa: E402  (of tools/eval)
import choices  # noqa: E402
import files  # noqa: E402
import protocols  # noqa: E402
import video_files  # noqa: E402
import video_protocols  # noqa: E402
from errors import EvaluationError  # noqa: E402

# (answer, letter of Video-MME by lmms-eval, by VLMEvalKit, of MVBench by lmms-eval)
LETTERS = [
    ("A", "A", "A", "A"),
    (" D. ", "D", "D", "D"),
    ("(B)", "B", "B", "B"),
    ("(B) Berries.", "B", "B", "B"),
    ("C. Berries.", "C", "C", "C"),
    ("c. berries", "", "", "C"),  # Video-MME's rules know capitals only
    ("Answer: C.", "A", "C", "C"),  # lmms-eval finds the capital of "Answer"
    ("Option: D", "D", "D", "D"),
    ("The answer is D", "D", "D", "D"),
    ("The best answer is: B.", "B", "B", "B"),
    ("The best option is C", "C", "C", "C"),
    ("Best answer: C", "B", "B", "C"),  # the phrase is in the lists without its comma, so its B stays
    ("There is a dog", "", "", "A"),  # MVBench's rule takes the word for the letter
    ("A dog runs", "A", "A", "A"),
    ("It is the blue ring, I think, that was moved to the left at the end", "", "", ""),
    ("", "", "", ""),
    ("\n", "", "", ""),
    ("B and C", "B", "B", "B"),
    ("Both C and D", "B", "B", "C"),
    ("neither", "", "", ""),
    ("E", "", "", "E"),
    ("A/B", "A", "A", "A"),
    ("1,000 (C)", "C", "C", "C"),
    ("Q.D", "D", "D", ""),  # the stop goes and leaves one word
    ("x-b", "", "", "B"),  # the dash becomes a blank
]
OPTIONS = ["A. Apples.", "B. Candles.", "C. Berries.", "D. All alike."]


def question(key, answer="C", **changes):
    return {"question_id": key, "task_type": "Counting Problem", "question": f"What is {key}?", "options": OPTIONS,
            "answer": answer} | changes  # fmt: skip


def video(name, *questions, duration="short", domain="Knowledge"):
    return {"video_id": name, "duration": duration, "domain": domain, "sub_category": "Law",
            "url": f"https://www.youtube.com/watch?v=clip-{name}", "videoID": f"clip-{name}", "questions": list(questions)}


def benchmark():
    """Three videos and five questions."""
    return [video("001", question("001-1"), question("001-2", "A")),
            video("002", question("002-1", "B", task_type="OCR Problems"), duration="long", domain="Multilingual"),
            video("003", question("003-1", "D"), question("003-2", "B"), duration="long")]  # fmt: skip


def flat(data):
    """Rows of the published table."""
    return [{k: v for k, v in of.items() if k != "questions"} | q for of in data for q in of["questions"]]


def task(*changes):
    rows = [{"video": f"v{n}.webp", "question": f"What is {n}?", "candidates": ["left", "right", "up"], "answer": "right"}
            for n in range(2)]  # fmt: skip
    for number, change in enumerate(changes):
        rows[number] = {k: v for k, v in (rows[number] | change).items() if v is not None}
    return rows


class Letters(unittest.TestCase):
    def test_rules_of_the_harnesses(self):
        for answer, *expected in LETTERS:
            found = [rule(answer) for rule in
                     (choices.video_mme_lmms_eval, choices.video_mme_vlmevalkit, choices.mvbench_lmms_eval)]  # fmt: skip
            self.assertEqual(found, expected, repr(answer))


class VideoCase(EvalCase):
    def clips(self, *names):
        """Held-out clips under other names, below the folder of the test."""
        for number, name in enumerate(names):
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HELDOUT / f"clips/clip_{60 + number:03d}.webp", place)

    def table(self, name, rows):
        """As pandas writes it: lists in Python's own notation."""
        with (self.folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return self.folder / name

    def refused(self, path, *words):
        with self.assertRaises(EvaluationError) as caught:
            video_files.read_videos(path)
        self.assertEqual(len(str(caught.exception).splitlines()), 1)
        for word in (path.name, *words):
            self.assertIn(word, str(caught.exception))


class Annotations(VideoCase):
    def test_video_mme(self):
        self.clips("data/clip-001.webp", "data/clip-002.webp", "data/clip-003.webp")
        rows = flat(benchmark())
        of_vlmevalkit = [
            {"index": n, "video": row["videoID"], "video_path": f"./video/{row['videoID']}.mp4", "candidates": row["options"],
             "subtitle_path": f"./subtitle/{row['videoID']}.srt"}
            | {k: row[k] for k in ("duration", "domain", "sub_category", "task_type", "question", "answer")}
            for n, row in enumerate(rows)
        ]  # fmt: skip
        for path, ids, videos in (
            (self.write("template.json", benchmark()), [row["question_id"] for row in rows],
             ["001", "001", "002", "003", "003"]),
            (self.table("Video-MME.tsv", of_vlmevalkit), list(range(5)), [row["videoID"] for row in rows]),
        ):
            split = video_files.read_videos(path)
            self.assertEqual((split.task, split.name), ("video-mme", path.stem + "-without-subtitles"))
            self.assertEqual([item.id for item in split.items], ids)
            self.assertEqual([item.video for item in split.items], videos)
            self.assertEqual([item.letter for item in split.items], list("CABDB"))
            self.assertEqual(split.items[2].references, ["B. Candles."])
            self.assertEqual(split.items[2].image, self.folder / "data/clip-002.webp")
            self.assertEqual(split.items[2].groups, {"duration": "long", "domain": "Multilingual", "sub_category": "Law",
                                                     "task_type": "OCR Problems"})  # fmt: skip
            split.require_pictures()
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte-order mark is no content
            self.assertEqual(video_files.read_videos(path), split)

    def test_video_mme_as_published(self):
        path = self.folder / "Video-MME/videomme/test-00000-of-00001.parquet"
        path.parent.mkdir(parents=True)
        if importlib.util.find_spec("pyarrow") is None:
            path.write_bytes(b"PAR1")
            return self.refused(path, "pyarrow", "tools/eval/setup.sh")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat(benchmark())), path)
        self.clips("Video-MME/data/clip-001.webp")
        split = video_files.read_videos(path)
        self.assertEqual((split.name, len(split.items)), ("test-without-subtitles", 5))
        self.assertEqual(split.items[0].image, self.folder / "Video-MME/data/clip-001.webp")
        self.assertEqual(split.items[0].choices, tuple(OPTIONS))
        path.write_bytes(b"PAR1 torn")
        self.refused(path, "no parquet file")

    def test_mvbench(self):
        self.clips("video/star/Charades_segment/v0.webp", "video/data0613/clevrer/video_validation/v0.webp", "up/v0.webp")
        (self.folder / "json").mkdir()
        for name in ("action_sequence", "moving_count"):
            self.write(f"json/{name}.json", task())
        split = video_files.read_videos(self.folder / "json")
        self.assertEqual([item.id for item in split.items],
                         ["action_sequence-0", "action_sequence-1", "moving_count-0", "moving_count-1"])  # fmt: skip
        self.assertEqual(split.items[0].image, self.folder / "video/star/Charades_segment/v0.webp")
        self.assertEqual(split.items[2].image, self.folder / "video/data0613/clevrer/video_validation/v0.webp")
        self.assertEqual((split.items[0].choices, split.items[0].letter), (("(A) left", "(B) right", "(C) up"), "B"))
        self.assertEqual(split.items[2].groups, {"task": "moving_count"})
        self.assertEqual(len({item.video for item in split.items}), 4)  # of one name, in other folders
        one = video_files.read_videos(self.folder / "json/moving_count.json")
        self.assertEqual((one.name, one.items), ("moving_count", split.items[2:]))
        branch = self.write("test.json", {"root": {"moves": "up/"}, "meta": {"moves": task()}})
        rows = [{"task_type": "moves", "prefix": "up/", "index": n, **row} for n, row in enumerate(task())]
        for path, ids in ((branch, ["moves-0", "moves-1"]), (self.table("MVBench_MP4.tsv", rows), [0, 1])):
            split = video_files.read_videos(path)
            self.assertEqual([item.id for item in split.items], ids)
            self.assertEqual(split.items[0].image, self.folder / "up/v0.webp")
            self.assertEqual(split.items[0].groups, {"task": "moves"})

    def test_the_first_of_two_equal_candidates_is_right(self):
        split = video_files.read_videos(self.write("moves.json", task({"candidates": ["up", "right", "right"]})))
        self.assertEqual(split.items[0].letter, "B")

    def test_wrong_files_of_video_mme(self):
        def changed(**changes):
            return [video("001", question("001-1"), question("001-2") | changes)]

        for words, value in (
            (["question 001-1", "twice"], changed(question_id="001-1")),
            (["question 001-2", "option B", "'C. Berries.'", "'B. '"], changed(options=["A. Apples.", "C. Berries."])),
            (["question 001-2", "no list of options"], changed(options="A. Apples.")),
            (["question 001-2", "answer", "'E'", "4 options"], changed(answer="E")),
            (["question 001-2", "answer", "'Berries'"], changed(answer="Berries")),
            (["question 001-2", "'question'"], changed(question="")),
            (["question 001-2", "'task_type'"], changed(task_type=None)),
            (["question 1", "no id"], changed(question_id=None)),
            (["neither"], {"a": 1}),
            (["neither"], []),
        ):
            self.refused(self.write("template.json", value), *words)
        nameless = [{k: v for k, v in video("001", question("001-1")).items() if k not in ("videoID", "url", "video_id")}]
        self.refused(self.write("template.json", nameless), "question 001-1", "names no video")
        self.refused(self.table("Video-MME.tsv", [{"index": 4, "candidates": "[", "domain": ""}]), "question 4", "no list")
        self.refused(self.table("Video-MME.tsv", [{"question": "x"}]), "index, question, candidates, answer")

    def test_wrong_files_of_mvbench(self):
        for words, value in (
            (["question moves-1", "'down'", "left, right, up"], task({}, {"answer": "down"})),
            (["question moves-1", "list of candidates"], task({}, {"candidates": None})),
            (["question moves-0", "'video'"], task({"video": None})),
            (["question 7", "twice"], task({"index": 7}, {"index": 7})),
        ):
            self.refused(self.write("moves.json", value), *words)
        rows = [{"index": 3, "task_type": "moves", "prefix": "up", "bound": "True", **task()[0]}]
        self.refused(self.table("MVBench.tsv", rows), "question 3", "not cut")
        rows = [{"index": 3, "task_type": "moves", "prefix": "up", **row} for row in task()]
        self.refused(self.table("MVBench_MP4.tsv", rows), "question 3", "twice")
        self.refused(self.write("test.json", {"root": {}, "meta": {"moves": task()}}), "moves", "root")
        (self.folder / "none").mkdir()
        self.refused(self.folder / "none", "no *.json")

    def test_a_missing_video_is_refused_before_the_model_runs(self):
        self.clips("data/clip-001.webp")
        answer = self.run_script("video.py", "--out", "out", "--annotations", self.write("template.json", benchmark()))
        self.assert_refused(answer, "question 002-1", "video", "data/clip-002", "--videos")
        self.assertFalse((self.folder / "out").exists())

    def test_no_video_is_both_scored_and_used_for_settings(self):
        split = video_files.read_videos(self.write("template.json", benchmark())).part(limit=None, tune=1)
        self.assertEqual([item.id for item in split.tuning], ["003-2"])
        self.assertEqual([item.id for item in split.items], ["001-1", "001-2", "002-1"])
        one = video_files.read_videos(self.write("one.json", benchmark()[:1]))
        with self.assertRaisesRegex(EvaluationError, "--tune 1 takes a part of every video"):
            one.part(limit=None, tune=1)


class Protocols(VideoCase):
    def test_what_each_harness_asks(self):
        mme = video_files.read_videos(self.write("template.json", benchmark()))
        way = video_protocols.find_protocol("lmms-eval", mme, "qwen2_5", ("--frames", "32"))
        self.assertEqual((way.max_tokens, way.flags),
                         (16, ("--min-pixels", "200704", "--max-pixels", "1605632", "--frames", "32")))  # fmt: skip
        self.assertEqual(way.ask(mme.items[0]),
            "Select the best answer to the following multiple-choice question based on the video and the subtitles. Respond "
            "with only the letter (A, B, C, or D) of the correct option.\nWhat is 001-1?\nA. Apples.\nB. Candles.\nC. Berries."
            "\nD. All alike.\n\nAnswer with the option's letter from the given choices directly.")  # fmt: skip
        way = video_protocols.find_protocol("vlmevalkit", mme, "internvl", ())
        self.assertEqual((way.max_tokens, way.flags), (4096, ()))
        self.assertEqual(way.ask(mme.items[0]),
            "\nThese are the frames of a video. Select the best answer to the following multiple-choice question based on "
            "the video. Respond with only the letter (A, B, C, or D) of the correct option.\nQuestion: What is 001-1?\n"
            "A. Apples.\nB. Candles.\nC. Berries.\nD. All alike.\nAnswer: ")  # fmt: skip
        moves = video_files.read_videos(self.write("moves.json", task()))
        way = video_protocols.find_protocol("lmms-eval", moves, "llava", ())
        self.assertEqual((way.ask(moves.items[0]), way.max_tokens, way.flags),
            ("Question:What is 0?\nOption:\n(A) left\n(B) right\n(C) up\nOnly give the best option.\n", 16, ()))  # fmt: skip
        clips = video_files.read_videos(HELDOUT / "clips_heldout.json")
        way = video_protocols.find_protocol("native", clips, "qwen2_5", ())
        self.assertEqual((way.ask(clips.items[0]), way.max_tokens, way.flags), ("Describe the video.", None, ()))
        for name, split, word in (("vlmevalkit", moves, "begins the model's answer"), ("native", mme, "lmms-eval"),
                                  ("lmms-eval", clips, "native")):  # fmt: skip
            with self.assertRaisesRegex(EvaluationError, f"--protocol {name}.*{word}"):
                video_protocols.find_protocol(name, split, "llava", ())

    def test_braces_of_a_question_are_its_own(self):
        way = protocols.Protocol("x", "{question} {choices}", None, (), ())
        item = files.Item(1, HELDOUT, [], "{choices}?", choices=("{question}",))
        self.assertEqual(way.ask(item), "{choices}? {question}")

    def test_frames(self):
        for given, expected in (
            (("lmms-eval", None, None), (("--frames", "32"), "-32frames")),
            (("vlmevalkit", None, None), (("--frames", "8"), "-8frames")),
            (("vlmevalkit", 64, None), (("--frames", "64"), "-64frames")),
            (("vlmevalkit", None, 0.5), (("--fps", "0.5"), "-0.5fps")),
            (("native", None, None), ((), "")),
        ):
            self.assertEqual(video_protocols.frames_of(*given), expected)


class Scores(VideoCase):
    """Three of five are right: both of the first video, one of the last."""

    ANSWERS = {"001-1": "C. Berries.", "001-2": "The answer is A", "002-1": "C", "003-1": "D.", "003-2": "no idea"}

    def results(self, answers):
        rows = benchmark()
        for row in flat(rows):
            next(q for of in rows for q in of["questions"] if q["question_id"] == row["question_id"])["response"] = (
                answers.get(row["question_id"]))  # fmt: skip
        return rows

    def test_by_hand(self):
        annotations = self.write("template.json", benchmark())
        given = self.write("given.json", self.results(self.ANSWERS))
        out = self.run_well("video.py", "--out", "out", "--annotations", annotations, "--results", given)
        self.assertIn("| given.json | `-` | template-without-subtitles-32frames | lmms-eval | 5 | 0.6000 |", out)
        row = json.loads((self.folder / "out/results.json").read_text())[0]
        self.assertEqual({key: value["accuracy"] for key, value in row["items"].items()},
                         {"001-1": 1, "001-2": 1, "002-1": 0, "003-1": 1, "003-2": 0})  # fmt: skip
        self.assertEqual(row["clusters"], {key: key[:3] for key in self.ANSWERS})
        groups = {(x["kind"], x["group"]): x for x in json.loads((self.folder / "out/groups.json").read_text())}
        whole = groups["all", ""]
        # deviations 0.4 + 0.4, -0.6, 0.4 - 0.6 of the three videos
        self.assertAlmostEqual(whole["standard_error"], math.sqrt(0.64 + 0.36 + 0.04) / 5, 12)
        self.assertEqual((whole["n"], whole["videos"], whole["score"]), (5, 3, 0.6))
        self.assertAlmostEqual(whole["interval"][0], 0.6 - 1.96 * math.sqrt(1.04) / 5, 12)
        self.assertIsNone(groups["duration", "short"]["interval"])  # one video cannot tell
        long = groups["duration", "long"]  # 0, 1 and 0: deviations -1/3, and 2/3 - 1/3
        self.assertAlmostEqual(long["standard_error"], math.sqrt(2 / 9) / 3, 12)
        self.assertEqual((long["n"], long["videos"]), (3, 2))
        kinds = ("duration", "domain", "task_type")
        self.assertEqual({place: x["score"] for place, x in groups.items() if place[0] in kinds},
            {("duration", "short"): 1, ("duration", "long"): 1 / 3, ("domain", "Knowledge"): 0.75,
             ("domain", "Multilingual"): 0, ("task_type", "Counting Problem"): 0.75, ("task_type", "OCR Problems"): 0})

    def test_the_protocol_s_rule_decides(self):
        annotations = self.write("template.json", benchmark())
        given = self.write("given.json", self.results({key: f"Answer: {letter}" for key, letter in
                                                       zip(self.ANSWERS, "CABDB")}))  # fmt: skip
        for name, accuracy in (("lmms-eval", "0.2000"), ("vlmevalkit", "1.0000")):
            out = self.run_well("video.py", "--out", name, "--annotations", annotations, "--results", given,
                                "--protocol", name)  # fmt: skip
            self.assertIn(f"| {name} | 5 | {accuracy} |", out)

    def test_mvbench_and_wrong_results(self):
        annotations = self.write("moves.json", task())
        rows = [{"index": "moves-0", "prediction": "(B) right"}, {"index": "moves-1", "prediction": "a"}]
        command = ("video.py", "--out", "out", "--annotations", annotations, "--results")
        self.assertIn("| lmms-eval | 2 | 0.5000 |", self.run_well(*command, self.write("r.json", rows)))
        for words, wrong in (
            (["question moves-2", "not in"], [*rows, {"index": "moves-2", "prediction": ""}]),
            (["question moves-0", "twice"], [rows[0], *rows]),
            (["question moves-1 is missing"], rows[:1]),
            (["question moves-1", "'prediction'"], [rows[0], {"index": "moves-1"}]),
            (["no file of results"], {"moves-0": "B"}),
        ):
            self.assert_refused(self.run_script(*command, self.write("r.json", wrong)), "r.json", *words)

    def test_error_of_independent_and_of_equal_records(self):
        self.assertAlmostEqual(breakdown.clustered_error([1, 0, 1, 0], list("abcd")), 0.5 / 2, 12)  # sd over root of n
        self.assertAlmostEqual(breakdown.clustered_error([1, 1, 0, 0], list("aabb")), math.sqrt(2) / 4, 12)
        self.assertEqual(breakdown.clustered_error([1, 1], list("ab")), 0)


class Smoke(WithModel, VideoCase):
    """pocket-qwen over our own clips, and over the same under the names of the benchmarks."""

    def test_our_own_clips(self):
        out = self.run_well("video.py", "--out", "out", "--limit", 2, "--kv", "f16", "--kv", "kivi,residual=32",
                            "--fidelity", 1, "--device", "cpu")  # fmt: skip
        self.assertIn("| pocket-qwen | `f16` | heldout-first-2 | native | 2 | 1.0000 | 1.0000 | 16.00 |", out)
        self.assertIn("| kind | description | 2 | 2 | right | 1.0000 | 0.0000 | - |", out)
        plain, packed = results_of(self.folder / "out/results.json")
        self.assertEqual(plain["clusters"], {"0": "clips/clip_000.webp", "1": "clips/clip_001.webp"})
        self.assertTrue(packed["stored_bits"] < 16 and packed["kl"] > 0)
        row = json.loads((self.folder / "out/pocket-qwen/f16/answers.jsonl").read_text().splitlines()[0])
        self.assertEqual((row["prompt"], row["clips"][0]["frames"]), ("Describe the video.", 8))

    def test_a_harness_s_prompt_and_frames_reach_the_model(self):
        self.clips("data/clip-001.webp", "up/v0.webp")
        self.write("template.json", benchmark()[:1])
        self.write("test.json", {"root": {"moves": "up"}, "meta": {"moves": task()[:1]}})
        for annotations, frames, prompt in (("template.json", 4, "Select the best"), ("test.json", 2, "Question:What is")):
            self.run_well("video.py", "--out", frames, "--annotations", annotations, "--limit", 1, "--frames", frames,
                          "--fidelity", 1, "--kv", "f16")  # fmt: skip
            folder = self.folder / f"{frames}/pocket-qwen"
            row = json.loads((folder / "f16/answers.jsonl").read_text())
            self.assertTrue(row["prompt"].startswith(prompt), row["prompt"])
            self.assertEqual((row["clips"][0]["frames"], row["settings"]["max_tokens"]), (frames, 16))
            forced = json.loads((folder / "references.jsonl").read_text())
            self.assertIn(forced["text"], ("C. Berries.", "(B) right"))
        # Clips of a second have fewer frames than the harnesses ask for.
        self.run_well("video.py", "--out", "short", "--annotations", "test.json", "--limit", 1, "--frames", 10, "--fidelity", 1)
        short = json.loads((self.folder / "short/pocket-qwen/f16/answers.jsonl").read_text())
        self.assertEqual((short["clips"][0]["frames"], short["clips"][0]["of"]), (10, 8))
        written = json.loads(next(folder.glob("f16/mvbench_*.json")).read_text())
        self.assertEqual(written, [{"index": "moves-0", "task_type": "moves", "video": "up/v0.webp", "question": "What is 0?",
            "candidates": ["left", "right", "up"], "answer": "(B) right", "prediction": row["text"]}])  # fmt: skip
        found = next((self.folder / "4/pocket-qwen/f16").glob("video-mme_*.json"))
        written = json.loads(found.read_text())[0]
        self.assertEqual(set(written), {"video_id", "duration", "domain", "sub_category", "missing", "questions"})
        split = video_files.read_videos(found)  # the benchmark's own format, with a response
        self.assertEqual(video_files.read_video_results(found, split), {"001-1": written["questions"][0]["response"]})


if __name__ == "__main__":
    unittest.main()
