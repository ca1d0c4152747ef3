"""Tests of tools/pocket/score.py; run by `python3 pocket_score_test.py`, needs the standard library only."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path

POCKET = Path(__file__).resolve().parents[2] / "tools" / "pocket"
sys.path.insert(0, str(POCKET))

import score  # noqa: E402

HELDOUT = POCKET / "heldout"
TWO_OBJECTS = [
    {"size": "small", "colour": "red", "shape": "circle", "mark": "K", "row": 1, "column": 2},
    {"size": "large", "colour": "blue", "shape": "ring", "mark": "7", "row": 2, "column": 4},
]
TWO_TOLD = (
    "There are two objects: a small red circle marked K in row 1, column 2; "
    "a large blue ring marked 7 in row 2, column 4."
)
CLIP = (
    "There are two objects: a red ring marked K in row 1, column 2; an orange cross marked 7 in row 2, column 4. "
    "First K moves up; then 7 vanishes; then a blue ring marked B appears in row 3, column 1."
)


def perfect_answers() -> dict[str, str]:
    """The first accepted text of every held-out image."""
    coco = json.loads((HELDOUT / "captions_heldout.json").read_text())
    stems = {image["id"]: Path(image["file_name"]).stem for image in coco["images"]}
    answers: dict[str, str] = {}
    for note in coco["annotations"]:
        answers.setdefault(stems[note["image_id"]], note["caption"])
    for name in ("documents", "questions"):
        for record in json.loads((HELDOUT / f"{name}_heldout.json").read_text())["data"]:
            answers[Path(record["image"]).stem] = record["answers"][0]
    return answers


def held_out_clips() -> list[dict]:
    return json.loads((HELDOUT / "clips_heldout.json").read_text())["data"]


def perfect_clips() -> dict[str, str]:
    return {Path(record["video"]).stem: record["answers"][0] for record in held_out_clips()}


def run_score(answers: dict[str, str], *options: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the scorer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.jsonl"
        path.write_text("".join(json.dumps({"id": k, "text": v}) + "\n" for k, v in answers.items()))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = score.main([str(path), *options])
        return status, out.getvalue(), err.getvalue()


class Slots(unittest.TestCase):
    def test_every_slot_of_a_right_caption_counts(self):
        self.assertEqual(score.slots(TWO_TOLD, TWO_OBJECTS), (13, 13))

    def test_each_wrong_word_costs_one_slot(self):
        for old, new in (
            ("two", "three"), ("small", "large"), ("red", "green"), ("circle", "square"), ("marked K", "marked B"),
            ("row 1", "row 3"), ("column 2", "column 1"), ("marked 7", "marked 1"),
        ):  # fmt: skip
            self.assertEqual(score.slots(TWO_TOLD.replace(old, new), TWO_OBJECTS), (12, 13), new)

    def test_missing_and_surplus_objects_cost_six(self):
        self.assertEqual(score.slots(TWO_TOLD.split(";")[0] + ".", TWO_OBJECTS), (7, 13))
        surplus = TWO_TOLD[:-1] + "; a large blue ring marked 7 in row 3, column 4."
        self.assertEqual(score.slots(surplus, TWO_OBJECTS), (13, 19))
        self.assertEqual(score.slots("", TWO_OBJECTS), (0, 13))

    def test_swapped_objects_are_wrong(self):
        swapped = (
            "There are two objects: a large blue ring marked 7 in row 2, column 4; "
            "a small red circle marked K in row 1, column 2."
        )
        self.assertEqual(score.slots(swapped, TWO_OBJECTS), (1, 13))

    def test_all_paraphrases_of_the_held_out_scenes_are_read(self):
        facts = json.loads((HELDOUT / "scene_facts.json").read_text())
        coco = json.loads((HELDOUT / "captions_heldout.json").read_text())
        stems = {image["id"]: Path(image["file_name"]).stem for image in coco["images"]}
        self.assertEqual(len(coco["annotations"]), 5 * len(coco["images"]))
        for note in coco["annotations"]:
            right, asked = score.slots(note["caption"], facts[stems[note["image_id"]]])
            self.assertEqual(right, asked, note["caption"])


class Descriptions(unittest.TestCase):
    def test_objects_come_in_any_order_and_events_in_that_of_time(self):
        self.assertEqual(score.description_facts(CLIP, CLIP), (6, 6))
        first, second = "a red ring marked K in row 1, column 2", "an orange cross marked 7 in row 2, column 4"
        self.assertEqual(score.description_facts(CLIP.replace(f"{first}; {second}", f"{second}; {first}"), CLIP), (6, 6))
        other = CLIP.replace("K moves up; then 7 vanishes", "7 vanishes; then K moves up")
        self.assertEqual(score.description_facts(other, CLIP), (4, 6))

    def test_each_wrong_word_costs_its_fact(self):
        for old, new in (
            ("two", "three"), ("red", "green"), ("cross", "square"), ("marked K", "marked B"), ("row 1", "row 3"),
            ("column 4", "column 1"), ("up", "down"), ("7 vanishes", "K vanishes"), ("vanishes", "moves left"),
            ("blue", "white"), ("row 3", "row 4"), ("moves", "jumps"),
        ):  # fmt: skip
            self.assertEqual(score.description_facts(CLIP.replace(old, new), CLIP), (5, 6), new)

    def test_missing_and_surplus_facts(self):
        self.assertEqual(score.description_facts("", CLIP), (0, 6))
        self.assertEqual(score.description_facts(CLIP.partition("; then a")[0] + ".", CLIP), (5, 6))
        self.assertEqual(score.description_facts(CLIP[:-1] + "; then K vanishes.", CLIP), (6, 7))
        twice = CLIP.replace(". First", "; an orange cross marked 7 in row 2, column 4. First")
        self.assertEqual(score.description_facts(twice, CLIP), (6, 7))

    def test_the_held_out_descriptions_say_what_the_annotations_do(self):
        clips = [record for record in held_out_clips() if record["kind"] == "description"]
        self.assertEqual(len(clips), 50)
        for record in clips:
            named = {thing["mark"]: thing for thing in record["objects"]}
            number, objects, events = score.read_description(record["answers"][0])
            there = [thing for thing in record["objects"] if thing["cells"][0]]
            self.assertEqual(score.NUMBERS.index(number) + 1, len(there))
            self.assertEqual(
                objects, [(t["colour"], t["shape"], t["mark"], *map(str, t["cells"][0])) for t in there]
            )  # fmt: skip
            expected = []
            for event in record["events"]:
                thing = named[event["mark"]]
                if event["action"] == "appear":
                    cell = thing["cells"][round(event["time_s"] * 2)]
                    expected.append((thing["colour"], thing["shape"], thing["mark"], "appear", *map(str, cell)))
                else:
                    expected.append((event["mark"], event["action"]))
            self.assertEqual(events, expected)


class Similarity(unittest.TestCase):
    def test_levenshtein(self):
        for a, b, distance in (("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)):
            self.assertEqual(score.levenshtein(a, b), distance)
            self.assertEqual(score.levenshtein(b, a), distance)

    def test_anls(self):
        self.assertEqual(score.anls(" Blue Harbor ", ["blue harbor"]), 1.0)
        self.assertAlmostEqual(score.anls("$12.51", ["$12.50"]), 5 / 6)
        self.assertEqual(score.anls("abcd", ["abxyzw"]), 0.0)  # 1/3 is below the threshold
        self.assertAlmostEqual(score.anls("12.50", ["$12.50", "12.50"]), 1.0)
        self.assertEqual(score.anls("", ["x"]), 0.0)

    def test_answers(self):
        self.assertTrue(score.is_answer("Three.", ["three", "3"]))
        self.assertFalse(score.is_answer("thirteen", ["three", "3"]))
        self.assertFalse(score.is_answer("", ["three"]))


class Program(unittest.TestCase):
    def test_perfect_answers_meet_the_gates(self):
        status, out, _ = run_score(perfect_answers(), "--gate", "--json")
        self.assertEqual(status, 0)
        figures = json.loads(out)["figures"]
        self.assertEqual(figures["captions"], 200)
        for name in score.GATES:
            self.assertEqual(figures[name], 1.0, name)

    def test_clips_are_asked_for_by_name(self):
        pictures, clips = perfect_answers(), perfect_clips()
        status, out, _ = run_score(pictures, "--gate", "--clips", "--json")
        self.assertEqual((status, json.loads(out)["below_gate"]), (1, list(score.CLIP_GATES)))
        status, out, _ = run_score(pictures | clips, "--gate", "--clips", "--json")
        self.assertEqual(status, 0)
        figures = json.loads(out)["figures"]
        self.assertEqual((figures["descriptions"], figures["clip_questions"]), (50, 100))
        for name in score.CLIP_GATES:
            self.assertEqual(figures[name], 1.0, name)

    def test_wrong_answers_on_clips_fail_the_gate(self):
        answers = perfect_answers() | perfect_clips()
        for i in range(6):
            answers[f"clip_{i:03d}"] = answers[f"clip_{i:03d}"].replace("First", "Then")
            answers[f"clip_{50 + i:03d}"] = "no idea"
        status, out, _ = run_score(answers, "--gate", "--json")
        self.assertEqual((status, json.loads(out)["below_gate"]), (1, list(score.CLIP_GATES)))
        figures = json.loads(out)["figures"]
        self.assertAlmostEqual(figures["descriptions_exact"], 44 / 50)
        self.assertAlmostEqual(figures["clip_questions_accuracy"], 94 / 100)

    def test_wrong_answers_fail_the_gate_and_are_listed(self):
        answers = perfect_answers()
        for i in range(11):
            answers[f"question_{i:03d}"] = "no idea"
        status, out, _ = run_score(answers, "--gate", "--json")
        self.assertEqual(status, 1)
        result = json.loads(out)
        self.assertEqual(result["below_gate"], ["questions_accuracy"])
        self.assertAlmostEqual(result["figures"]["questions_accuracy"], 189 / 200)
        self.assertEqual([f["id"] for f in result["failures"]], [f"question_{i:03d}" for i in range(11)])

    def test_one_wrong_letter_is_not_exact(self):
        answers = perfect_answers()
        answers["scene_000"] = answers["scene_000"].replace("marked ", "marked?", 1)
        _, out, _ = run_score(answers, "--json")
        self.assertAlmostEqual(json.loads(out)["figures"]["captions_exact"], 199 / 200)

    def test_a_missing_set_fails_the_gate_but_not_the_scoring(self):
        scenes = {k: v for k, v in perfect_answers().items() if k.startswith("scene")}
        self.assertEqual(run_score(scenes)[0], 0)
        status, out, _ = run_score(scenes, "--gate")
        self.assertEqual(status, 1)
        self.assertIn("below the gate: documents_anls, questions_accuracy", out)

    def test_unanswered_images_count_as_wrong(self):
        answers = perfect_answers()
        del answers["document_007"], answers["scene_008"], answers["question_009"]
        figures = json.loads(run_score(answers, "--json")[1])["figures"]
        for name in ("documents_anls", "captions_exact", "questions_accuracy"):
            self.assertAlmostEqual(figures[name], 199 / 200)

    def test_bad_input_is_refused_in_one_sentence(self):
        self.assertIn("in none of the held-out sets", run_score({"cat": "x"})[2])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "p.jsonl"
            good = '{"id": "scene_000", "text": "x"}\n'
            for text, message in (
                ("{\n", "line 1: expected a JSON object"),
                ('{"id": "scene_000"}\n', "line 1: expected a JSON object"),
                ("[1]\n", "line 1: expected a JSON object"),
                ('{"id": "scene_000", "text": 3}\n', "line 1: id and text must be strings"),
                (good + good, "line 2: id 'scene_000' was answered before"),
            ):
                path.write_text(text)
                err = io.StringIO()
                with contextlib.redirect_stderr(err):
                    self.assertEqual(score.main([str(path)]), 2)
                self.assertIn(message, err.getvalue())
                self.assertEqual(err.getvalue().count("\n"), 1)


if __name__ == "__main__":
    unittest.main()
