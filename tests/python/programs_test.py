"""python -m kvlm: vlm-run and vlm-kv with policies in Python; what a rule spells out has the built-in policy's figures."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from module_case import ROOT, RUN, scene

import kvlm  # noqa: F401  (skips where it is not installed)

POLICIES = """
import kvlm
import numpy

@kvlm.retention("mine", needs=("keys",))
def mine(layer):
    \"\"\"the shortest keys\"\"\"
    return -numpy.linalg.norm(numpy.asarray(layer.keys, dtype=numpy.float64), axis=-1)

@kvlm.quantizer("same", bits=16)
def same(rows, *, side, layer, fails: int = 0):
    if fails:
        raise ZeroDivisionError("in the quantizer")
    return rows
"""


class Programs(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.rules = self.folder / "my.py"
        self.rules.write_text(POLICIES)

    def start(self, *words, rules=None):
        return subprocess.run([sys.executable, "-m", "kvlm", "--rules", rules or self.rules, *map(str, words)], capture_output=True, text=True, timeout=120)

    def test_fidelity_of_a_rule_is_the_built_in_one_s(self):
        data = ROOT / "tools/pocket/heldout/captions.jsonl"
        made = self.start("vlm-kv", "fidelity", "-m", "pocket", "--device", "cpu", "--data", data, "--records", 2, "--json",
                          "--kv", "mine,keep=0.3", "--kv", "knorm,keep=0.3", "--kv", "f16", "--kv", "same")  # fmt: skip
        self.assertEqual(made.returncode, 0, made.stderr)
        found = {row["spec"].split(",")[0].rpartition(":")[2]: {k: v for k, v in row.items() if k != "spec"} for row in map(json.loads, made.stdout.splitlines())}
        self.assertEqual(found["mine"], found["knorm"])
        self.assertEqual(found["same"], found["f16"])
        self.assertNotEqual(found["mine"], found["f16"])

    def test_answers_are_the_program_s(self):
        words = ["-m", "pocket", "--device", "cpu", "--image", scene(1), "--json"]
        mine = self.start("vlm-run", *words, "--kv", "mine,keep=0.3 + int4")
        self.assertEqual(mine.returncode, 0, mine.stderr)
        program = json.loads(subprocess.run([RUN, *words, "--kv", "knorm,keep=0.3 + int4"], capture_output=True, check=True, text=True).stdout)
        self.assertEqual(json.loads(mine.stdout)["tokens"], program["tokens"])

    def test_a_batch_goes_on_with_the_same_rules_alone(self):
        batch = self.folder / "two.jsonl"
        batch.write_text("".join(json.dumps({"id": str(n), "image": str(scene(n))}) + "\n" for n in (1, 2)))
        words = ["vlm-run", "-q", "-m", "pocket", "--device", "cpu", "--batch", batch, "--out", self.folder / "out.jsonl", "--max-tokens", 4, "--kv"]
        self.assertEqual(self.start(*words, "mine,keep=0.3").returncode, 0)
        self.assertEqual(self.start(*words, "mine,keep=0.3").returncode, 0)
        settings = json.loads((self.folder / "out.jsonl").read_text().splitlines()[0])["settings"]
        self.assertEqual(settings["rules"].keys(), {"file", "hash"})
        self.rules.write_text(POLICIES.replace("-numpy", "numpy"))
        changed = self.start(*words, "mine,keep=0.3")
        self.assertEqual(changed.returncode, 2, changed.stderr)
        self.assertRegex(changed.stderr, r"--rules \S*my\.py \(of content \w+\), but this run has --rules")
        words[words.index(self.folder / "out.jsonl")] = self.folder / "plain.jsonl"
        self.assertEqual(self.start(*words, "int4").returncode, 0)
        self.rules.write_text(POLICIES)
        self.assertEqual(self.start(*words, "int4").returncode, 0, "int4 is none of the rules")

    def test_it_is_listed(self):
        self.assertIn("source    Python", self.start("vlm-kv", "list", "mine").stdout)
        self.assertIn("simulated quantizer", self.start("vlm-kv", "list", "same").stdout)
        self.assertIn("python:mine,keep=0.5", self.start("vlm-kv", "explain", "mine,keep=0.5", "-m", "pocket", "--tokens", 100).stdout)

    def test_evaluation_scores_them(self):
        """A rule that spells out knorm has its answers and bytes, and the report its name."""
        specs = ["f16", "mine,keep=0.3", "knorm,keep=0.3", "same"]
        words = [sys.executable, ROOT / "tools/eval/docvqa.py", "--out", self.folder / "out", "--rules", self.rules, "--device", "cpu", "--limit", "2",
                 "--fidelity", "2", *(word for spec in specs for word in ("--kv", spec))]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        rows = json.loads((self.folder / "out/results.json").read_text())
        plain, mine, knorm, same = ({k: v for k, v in row.items() if k not in ("command", "tokens_per_second", "versions")} for row in rows)
        self.assertEqual((mine.pop("spec"), knorm.pop("spec")), ("python:mine,keep=0.3", "knorm,keep=0.3"))
        self.assertEqual((same.pop("spec"), plain.pop("spec")), ("python:simulated:same", "f16"))
        self.assertEqual(mine, knorm)
        self.assertEqual(same, plain)
        self.assertEqual(["1, my.py" in row["versions"] for row in rows], [False, True, False, True])
        self.rules.write_text(POLICIES.replace("-numpy", "numpy"))
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertIn("rules was", done.stderr)
        words[words.index("mine,keep=0.3")] = " mine , keep=0.3"  # which tools/eval does not parse
        self.assertIn("rules was", subprocess.run(words, capture_output=True, text=True, timeout=120).stderr)
        self.rules.write_text(POLICIES)
        report = [sys.executable, ROOT / "tools/eval/report.py", "--out", self.folder / "report", "--skip", "plots", "--rules", self.rules, self.folder / "out/results.json"]
        done = subprocess.run(report, check=True, capture_output=True, text=True, timeout=120)
        self.assertNotIn("unknown", done.stderr)
        self.assertIn("`python:simulated:same`", (self.folder / "report/report.md").read_text())

    def test_what_is_wrong_is_said(self):
        for words, status, said in ((("vlm-run", "-m", "pocket", "--kv", "same,fails=1", "--image", scene(1)), 2, "raised ZeroDivisionError: in the quantizer"),
                                    (("vlm-run", "-m", "pocket", "--kv", "mien,keep=0.5", "--image", scene(1)), 2, "did you mean mine?"),
                                    (("vlm-run", "-m", "pocket", "--chat"), 1, "needs the program vlm-run"),
                                    (("vlm-run", "--gpus", "2"), 2, "--gpus starts programs"), (("vlm-walk",), 2, "invalid choice")):  # fmt: skip
            with self.subTest(words):
                done = self.start(*words)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(said, done.stderr)
        self.assertIn("is not a file", self.start("vlm-kv", "list", rules=self.folder / "gone.py").stderr)
        (self.folder / "beside.py").write_text("import my")
        self.assertIn("source    Python", self.start("vlm-kv", "list", "mine", rules=self.folder / "beside.py").stdout)
        (self.folder / "bad.py").write_text("1 / 0")
        self.assertIn("ZeroDivisionError", self.start("vlm-kv", "list", rules=self.folder / "bad.py").stderr)


if __name__ == "__main__":
    os.environ.pop("KVLM_HOME", None)
    unittest.main()
