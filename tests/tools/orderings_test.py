"""tools/eval/orderings.py on answers made up here: a verdict follows the interval, and bytes are looked at."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "eval"))
import orderings  # noqa: E402
import policies  # noqa: E402

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

    def verdict(self, better, worse, bits=(2.0, 2.0)) -> list[str]:
        self.write("a", better, bits[0])
        self.write("b", worse, bits[1])
        return orderings.compare(self.work, orderings.Claim("claim", "a", "b", "all"))

    def test_the_interval_decides(self):
        right = right_captions()
        wrong = {key: "nothing" for key in right}
        self.assertEqual(self.verdict(right, wrong)[-1], "**holds**")
        self.assertEqual(self.verdict(wrong, right)[-1], "**does not**")
        self.assertEqual(self.verdict(right, right)[-1], "**not decided**")
        one_wrong = right | {next(iter(right)): "nothing"}
        self.assertEqual(self.verdict(right, one_wrong)[-1], "**not decided**")

    def test_exact_captions_and_their_p(self):
        right = right_captions()
        wrong = {key: "nothing" for key in right}
        self.assertIn(f"{IMAGES}, 0 (p {2 / 2**IMAGES:.2g})", self.verdict(right, wrong))

    def test_more_bytes_are_named(self):
        right = right_captions()
        wrong = {key: "nothing" for key in right}
        self.assertEqual(self.verdict(right, wrong, (2.1, 2.0))[-1], "**holds, with more bytes**")
        self.assertEqual(self.verdict(right, wrong, (1.5, 2.0))[-1], "**holds**")
        self.assertEqual(self.verdict(wrong, right, (1.5, 2.0))[-1], "**does not, with more bytes**")

    def test_other_images_are_refused(self):
        right = right_captions()
        fewer = dict(list(right.items())[1:])
        with self.assertRaisesRegex(SystemExit, "one of the specs only"):
            self.verdict(right, fewer)

    def test_every_claim_compares_specs_that_are_run(self):
        run = set(policies.all_specs())
        for claim in orderings.CLAIMS:
            self.assertIn(claim.better, run, claim.text)
            self.assertIn(claim.worse, run, claim.text)


if __name__ == "__main__":
    unittest.main()
