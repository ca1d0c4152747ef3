"""lmms-eval, unmodified, on 50 bundled documents: its answers and its score are those of `vlm-run --batch`, through vlm-serve with
1 and with 64 requests at once, and with kvlm in its own process. Runs where lmms-eval is installed beside kvlm:

    build/python-venv/bin/pip install lmms-eval==0.7.3 'filelock<3.21'
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from module_case import HELDOUT, ROOT, RUN

sys.path.insert(0, str(ROOT / "tests/tools"))
from serve_case import Server  # noqa: E402

COUNT = 50
TASK = """task: pocket_documents
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/documents.jsonl
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_target: "answers"
generation_kwargs:
  max_new_tokens: 32
  temperature: 0
  do_sample: False
metric_list:
  - metric: anls
    aggregation: mean
    higher_is_better: true
"""
UTILS = """from PIL import Image

def visual(doc):
    return [Image.open(doc["image"]).convert("RGB")]

def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]
"""


@unittest.skipIf(importlib.util.find_spec("lmms_eval") is None, "lmms-eval is not installed")
class LmmsEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        documents = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"][:COUNT]
        for document in documents:
            document["image"] = str(HELDOUT / document["image"])
        (cls.folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        (cls.folder / "pocket_documents.yaml").write_text(TASK.format(folder=cls.folder))
        (cls.folder / "utils.py").write_text(UTILS)
        records = [{"id": d["questionId"], "image": d["image"], "prompt": d["question"]} for d in documents]
        (cls.folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def expected(self, kv):
        out = self.folder / "out.jsonl"
        out.unlink(missing_ok=True)
        subprocess.run([RUN, "-q", "--device", "cpu", "--kv", kv, "--max-tokens", "32", "--batch", self.folder / "in.jsonl", "--out", out], check=True)
        return {answer["id"]: answer["text"] for answer in map(json.loads, out.read_text().splitlines())}

    def evaluate(self, model, arguments, batch_size):
        """Its score and its answers."""
        out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", "lmms_eval", "--model", model, "--model_args", arguments, "--tasks", "pocket_documents",
                   "--include_path", self.folder, "--batch_size", str(batch_size), "--log_samples", "--output_path", out]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENAI_API_KEY": "none"}, cwd=out)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        results = json.loads(next(out.rglob("*_results.json")).read_text())["results"]["pocket_documents"]
        samples = map(json.loads, next(out.rglob("*_samples_*.jsonl")).read_text().splitlines())
        answers = {sample["doc_id"]: "".join(sample["filtered_resps"]) for sample in samples}
        return results["anls,none"], answers

    def test_through_the_endpoint(self):
        server = Server("--alias", "half=prefixkv,keep=0.5")
        self.addCleanup(server.end)
        for model, kv, together in (("pocket", "f16", 1), ("pocket", "f16", 64), ("half", "prefixkv,keep=0.5", 64)):
            with self.subTest(kv=kv, together=together):
                arguments = f"model={model},base_url=http://127.0.0.1:{server.port}/v1,num_concurrent={together}"
                score, answers = self.evaluate("openai", arguments, 1)
                self.assertEqual(answers, self.expected(kv))
                self.assertEqual(score == 1, kv == "f16")

    def test_in_its_own_process(self):
        for kv in ("f16", "prefixkv,keep=0.5 + kivi"):
            with self.subTest(kv=kv):
                score, answers = self.evaluate("kvlm", f'pretrained=pocket,device=cpu,kv="{kv}"', 16)
                self.assertEqual(answers, self.expected(kv))
                self.assertEqual(score == 1, kv == "f16")


if __name__ == "__main__":
    unittest.main()
