"""The bundled models through vlm-run: the gates over the whole held-out sets, and parity with transformers.

KVLM_BUILD names the build folder, KVLM_TEST_DEVICE=cuda the GPU, on which f16 and bf16 weights both have to pass.
KVLM_TEST_SMALL=1, as in tools/test.sh, takes a fifth of each set and of the references: a minute would be minutes. Under a
sanitizer (KVLM_SANITIZE) a step takes tens of times as long: then three answers of each model are compared with
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
PICTURES = ("captions", "documents", "questions")
STEP = 5 if SMALL else 1


def answers(model: str, requests: Path, folder: Path, *flags: str) -> dict:
    """The records that vlm-run writes for a file of requests, by id."""
    out = folder / (requests.stem + ".out.jsonl")
    out.unlink(missing_ok=True)
    subprocess.run(
        [PROGRAM, "-q", "--device", DEVICE, "-m", POCKET / model, "--batch", requests, "--out", out]
        + ["--batch-size", "8", *flags],
        check=True,
    )
    return {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}


def held_out(folder: Path, step: int) -> Path:
    """Every `step`-th record of the held-out sets, with its annotations and requests."""
    source = POCKET / "heldout"
    folder.mkdir()
    captions = json.loads((source / "captions_heldout.json").read_text())
    captions["images"] = captions["images"][::step]
    shown = {image["id"] for image in captions["images"]}
    captions["annotations"] = [note for note in captions["annotations"] if note["image_id"] in shown]
    (folder / "captions_heldout.json").write_text(json.dumps(captions))
    (folder / "scene_facts.json").symlink_to(source / "scene_facts.json")
    for name in ("documents", "questions", "clips"):
        data = json.loads((source / f"{name}_heldout.json").read_text())
        data["data"] = data["data"][::step]
        (folder / f"{name}_heldout.json").write_text(json.dumps(data))
    for name in ("scenes", "documents", "questions", "clips"):
        (folder / name).symlink_to(source / name)
    for name in (*PICTURES, "clips"):
        lines = (source / f"{name}.jsonl").read_text().splitlines(keepends=True)[::step]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


class Gates:
    """What holds for every bundled model; the classes below name them."""

    model: str
    reference: str
    backend = "torchvision"  # that resized the pictures of the reference
    sets = PICTURES

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    @unittest.skipIf(SANITIZED, "the gates are measured on the release build")
    def test_held_out_sets_pass_the_gates(self):
        heldout = held_out(self.path / "heldout", STEP)
        for dtype in ("f16", "bf16") if DEVICE == "cuda" else ("auto",):
            files = []
            for name in self.sets:
                requests = heldout / f"{name}.jsonl"
                records = answers(self.model, requests, self.path, "--dtype", dtype)
                self.assertEqual(len(records), len(requests.read_text().splitlines()))
                self.assertEqual([r for r in records.values() if "error" in r], [])
                files.append(self.path / f"{name}.out.jsonl")
            command = [sys.executable, POCKET / "score.py", *files, "--gate", "--heldout", heldout]
            command += ["--clips"] if "clips" in self.sets else []
            score = subprocess.run(command, capture_output=True, text=True)
            print(self.model, dtype, "\n".join(score.stdout.splitlines()[:12]), file=sys.stderr)
            self.assertEqual(score.returncode, 0, score.stdout[:2000])

    def test_fifty_answers_are_the_tokens_of_transformers_in_fp32(self):
        reference = json.loads((POCKET / "reference" / self.reference).read_text())
        self.assertEqual(len(reference), 50)
        self.assertEqual({"video" in entry for entry in reference}, {False, "clips" in self.sets})
        reference = reference[:: 20 if SANITIZED else STEP]
        requests = self.path / "reference.jsonl"
        with requests.open("w") as file:
            for entry in reference:
                kind = "video" if "video" in entry else "image"
                record = {"id": entry["id"], kind: str(POCKET / "heldout" / entry[kind]), "prompt": entry["prompt"]}
                file.write(json.dumps(record) + "\n")
        exact = ("--dtype", "f32", "--kv", "f32", "--image-backend", self.backend)
        records = answers(self.model, requests, self.path, *exact)
        for entry in reference:
            record = records[entry["id"]]
            self.assertEqual(record.get("error"), None, entry["id"])
            self.assertEqual(record["prompt_tokens"], entry["input_ids_length"], entry["id"])
            self.assertEqual(record["tokens"], entry["token_ids"], entry["id"])
            self.assertEqual(record["text"].strip(), entry["text"].strip(), entry["id"])


class PocketLlava(Gates, unittest.TestCase):
    model, reference, backend = "pocket-llava", "greedy_fp32.json", "pil"


class PocketInternVl(Gates, unittest.TestCase):
    model, reference = "pocket-internvl", "greedy_fp32_internvl.json"


class PocketQwen(Gates, unittest.TestCase):
    model, reference = "pocket-qwen", "greedy_fp32_qwen.json"
    sets = (*PICTURES, "clips")


if __name__ == "__main__":
    unittest.main()
