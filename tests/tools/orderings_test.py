"""tools/eval/orderings.py on answers made up here: a verdict follows the interval, and bytes are looked at."""

import importlib.util
import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "eval"))
import orderings  # noqa: E402
import policies  # noqa: E402
from significance import Interval  # noqa: E402

HELDOUT = ROOT / "tools" / "pocket" / "heldout"
IMAGES = 12


def right_captions() -> dict[str, str]:
    coco = json.loads((HELDOUT / "captions_heldout.json").read_text())
    keys = {image["id"]: Path(image["file_name"]).stem for image in coco["images"]}
    texts: dict[str, str] = {}
    for note in coco["annotations"]:
        texts.setdefault(keys[note["image_id"]], note["caption"])
    return dict(sorted(texts.items())[:IMAGES])


def right_answers() -> dict[str, str]:
    data = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"]
    return {Path(record["image"]).stem: record["answers"][0] for record in data[:IMAGES]}


@unittest.skipUnless(importlib.util.find_spec("numpy"), "numpy is not installed (tools/setup.sh --test)")
class Orderings(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = policies.Evaluation(Path(folder.name), IMAGES, IMAGES)

    def write(self, spec: str, captions: dict[str, str], bits: float):
        for name, texts in (("captions", captions), ("documents", right_answers())):
            path = self.work.folder / f"{policies.slug(spec)}.{name}.{IMAGES}.jsonl"
            path.write_text("".join(json.dumps({"id": k, "text": t}) + "\n" for k, t in texts.items()))
        figures = {"stored_bits": bits, "nominal_bits": bits, "kl_mean": 0.0, "top1": 1.0}
        (self.work.folder / f"{policies.slug(spec)}.fidelity.{IMAGES}.json").write_text(json.dumps(figures))

    def compared(self, better, worse, bits=(2.0, 2.0)) -> orderings.Comparison:
        self.write("a", better, bits[0])
        self.write("b", worse, bits[1])
        return orderings.compare(self.work, "a", "b")

    def test_the_interval_decides(self):
        right = right_captions()
        wrong = {key: "nothing" for key in right}
        self.assertEqual(self.compared(right, wrong).verdict, "holds")
        self.assertEqual(self.compared(wrong, right).verdict, "does not")
        self.assertEqual(self.compared(right, right).verdict, "not decided")
        one_wrong = right | {next(iter(right)): "nothing"}
        self.assertEqual(self.compared(right, one_wrong).verdict, "not decided")

    def test_exact_captions_and_their_p(self):
        right = right_captions()
        wrong = {key: "nothing" for key in right}
        self.assertEqual(self.compared(right, wrong).cells()[1], f"{IMAGES}, 0 (p {2 / 2**IMAGES:.2g})")

    def test_more_bytes_are_named(self):
        right = right_captions()
        wrong = {key: "nothing" for key in right}
        self.assertEqual(self.compared(right, wrong, (2.1, 2.0)).verdict, "holds, with more bytes")
        self.assertEqual(self.compared(right, wrong, (1.5, 2.0)).verdict, "holds")
        self.assertEqual(self.compared(wrong, right, (1.5, 2.0)).verdict, "does not, with more bytes")

    def test_figures_that_point_two_ways_decide_nothing(self):
        found = self.compared(right_captions(), right_captions())
        found.slots_interval, found.exact, found.p = Interval(0.01, 0.05), (3, 9), 0.01
        self.assertEqual(found.verdict, "not decided: slots for it, exact captions the other way")
        found.p = 0.2
        self.assertEqual(found.verdict, "holds")
        found.anls_interval = Interval(-0.2, -0.1)
        self.assertEqual(found.verdict, "not decided: slots for it, documents the other way")

    def test_chance_is_asked_twice(self):
        chance = orderings.Claim("c", "paper", "uniform,keep=0.5", "random,keep=0.5", draws=2)
        self.assertEqual(chance.others, ["random,keep=0.5", "random,keep=0.5,seed=1"])
        self.assertEqual(orderings.judge(["holds", "holds"]), "holds")
        self.assertEqual(orderings.judge(["holds", "not decided"]), "not decided: holds; not decided")
        self.assertEqual(orderings.judge(["holds", "holds, with more bytes"]), "holds, with more bytes")

    def test_other_images_are_refused(self):
        right = right_captions()
        fewer = dict(list(right.items())[1:])
        with self.assertRaisesRegex(SystemExit, f"{IMAGES - 1} of {IMAGES} requests"):
            self.compared(right, fewer)
        with self.assertRaisesRegex(SystemExit, "one of the specs only"):
            self.compared(right, fewer | {"scene_199": "nothing"})

    def test_an_image_without_an_answer_is_refused(self):
        self.write("a", right_captions(), 2.0)
        path = next(self.work.folder.glob("a.captions.*"))
        path.write_text(path.read_text().replace('"text"', '"error"', 1))
        with self.assertRaisesRegex(SystemExit, "has no answer"):
            self.work.texts("a", "captions")

    def test_every_claim_compares_specs_that_are_run(self):
        run = set(policies.all_specs())
        for claim in orderings.CLAIMS:
            for spec in (claim.better, *claim.others):
                self.assertTrue(spec in run or "mode=profile" in spec, claim.text)


if __name__ == "__main__":
    unittest.main()
