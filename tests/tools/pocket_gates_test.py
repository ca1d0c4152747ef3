"""The bundled model through vlm-run: the gates over the whole held-out sets, and parity with transformers.

KVLM_BUILD names the build folder, KVLM_TEST_DEVICE=cuda the GPU, on which f16 and bf16 weights both have to pass.
KVLM_TEST_SMALL=1, as in tools/test.sh, takes a fifth of each set and of the references: a minute would be minutes. Under a
sanitizer (KVLM_SANITIZE) a step takes tens of times as long: then three images are compared with
transformers, and the gates are left to the release build. Standard library only.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "tools" / "pocket"
SMALL = os.environ.get("KVLM_TEST_SMALL") == "1"
SANITIZED = bool(os.environ.get("KVLM_SANITIZE"))
DEVICE = os.environ.get("KVLM_TEST_DEVICE", "cpu")
PROGRAM = Path(os.environ.get("KVLM_BUILD", ROOT / "build" / "release")) / "tools" / "vlm-run"


def answers(requests: Path, folder: Path, *flags: str) -> dict:
    """The records that vlm-run writes for a file of requests, by id."""
    out = folder / (requests.stem + ".out.jsonl")
    subprocess.run(
        [PROGRAM, "-q", "--device", DEVICE, "--batch", requests, "--out", out]
        + ["--batch-size", "8", *flags],
        check=True,
    )
    return {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}


def held_out(folder: Path, count: int) -> Path:
    """The first `count` pages of each held-out set, with their annotations and requests."""
    source = POCKET / "heldout"
    folder.mkdir()
    captions = json.loads((source / "captions_heldout.json").read_text())
    captions["images"] = captions["images"][:count]
    shown = {image["id"] for image in captions["images"]}
    captions["annotations"] = [note for note in captions["annotations"] if note["image_id"] in shown]
    (folder / "captions_heldout.json").write_text(json.dumps(captions))
    (folder / "scene_facts.json").symlink_to(source / "scene_facts.json")
    for name in ("documents", "questions"):
        data = json.loads((source / f"{name}_heldout.json").read_text())
        data["data"] = data["data"][:count]
        (folder / f"{name}_heldout.json").write_text(json.dumps(data))
    for name in ("scenes", "documents", "questions"):
        (folder / name).symlink_to(source / name)
    for name in ("captions", "documents", "questions"):
        lines = (source / f"{name}.jsonl").read_text().splitlines(keepends=True)[:count]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


class PocketGates(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)

    @unittest.skipIf(SANITIZED, "the gates are measured on the release build")
    def test_held_out_sets_pass_the_gates(self):
        count = 40 if SMALL else 200
        heldout = held_out(self.path / "heldout", count)
        for dtype in ("f16", "bf16") if DEVICE == "cuda" else ("auto",):
            files = []
            for name in ("captions", "documents", "questions"):
                (self.path / f"{name}.out.jsonl").unlink(missing_ok=True)
                records = answers(heldout / f"{name}.jsonl", self.path, "--dtype", dtype)
                self.assertEqual(len(records), count)
                files.append(self.path / f"{name}.out.jsonl")
            score = subprocess.run(
                [sys.executable, POCKET / "score.py", *files, "--gate", "--heldout", heldout], capture_output=True, text=True
            )
            print(dtype, "\n".join(score.stdout.splitlines()[:8]), file=sys.stderr)
            self.assertEqual(score.returncode, 0, score.stdout[:2000])

    def test_fifty_images_give_the_tokens_of_transformers_in_fp32(self):
        reference = json.loads((POCKET / "reference" / "greedy_fp32.json").read_text())
        self.assertEqual(len(reference), 50)
        if SANITIZED:
            reference = reference[::20]
        elif SMALL:
            reference = reference[::5]
        requests = self.path / "reference.jsonl"
        with requests.open("w") as file:
            for entry in reference:
                image = str(POCKET / "heldout" / entry["image"])
                record = {"id": entry["id"], "image": image, "prompt": entry["prompt"]}
                file.write(json.dumps(record) + "\n")
        records = answers(
            requests, self.path, "--dtype", "f32", "--kv", "f32", "--image-backend", "pil"
        )
        for entry in reference:
            record = records[entry["id"]]
            self.assertEqual(record["prompt_tokens"], entry["input_ids_length"], entry["id"])
            self.assertEqual(record["tokens"], entry["token_ids"], entry["id"])
            self.assertEqual(record["text"].strip(), entry["text"].strip(), entry["id"])


if __name__ == "__main__":
    unittest.main()
