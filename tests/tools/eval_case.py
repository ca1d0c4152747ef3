"""What the tests of tools/eval share. KVLM_BUILD is the build folder; KVLM_EVAL_VENV the folder of tools/eval/setup.sh."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve()
VENV = Path(os.environ.get("KVLM_EVAL_VENV", ROOT / "build/eval-venv")) / "bin/python3"
HELDOUT = ROOT / "tools/pocket/heldout"
TIMEOUT_S = 300
sys.path.insert(0, str(ROOT / "tools/eval"))


def python_with_scorers():
    """An interpreter that has pycocoevalcap, or None."""
    if importlib.util.find_spec("pycocoevalcap"):
        return sys.executable
    return str(VENV) if VENV.is_file() else None


def environment():
    """Ours, without what a scheduler says: a test is not a part of its own set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
    return kept | {"KVLM_BUILD": str(BUILD), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}


class EvalCase(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="kvlm-eval-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def start(self, script, *arguments, folder=None, python=sys.executable, env=None, **options):
        return subprocess.Popen(
            [python, ROOT / "tools/eval" / script, *map(str, arguments)], cwd=folder or self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment() | (env or {}), **options,
        )  # fmt: skip

    def run_script(self, script, *arguments, **options):
        """Status, standard output and standard error."""
        with self.start(script, *arguments, **options) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def run_well(self, script, *arguments, **options):
        status, out, err = self.run_script(script, *arguments, **options)
        self.assertEqual(status, 0, err)
        return out

    def assert_refused(self, answer, *words):
        """Status 1 and, last, one sentence with these words; no table."""
        status, out, err = answer
        self.assertEqual((status, out), (1, ""), err)
        self.assertNotIn("Traceback", err)
        self.assertRegex(err.splitlines()[-1], r"^(coco|docvqa|vqa|video|fidelity|tables|report)\.py: ")
        for word in words:
            self.assertIn(word, err.splitlines()[-1])

    def write(self, name, value):
        path = self.folder / name
        path.write_text(json.dumps(value), encoding="utf-8")
        return path


class WithModel(EvalCase):
    """Runs of the bundled model on the CPU."""

    @classmethod
    def setUpClass(cls):
        if not (BUILD / "tools/vlm-run").is_file():
            raise unittest.SkipTest(f"{BUILD} has no vlm-run")
        if os.environ.get("KVLM_SANITIZE"):
            raise unittest.SkipTest("tens of times slower; the release build runs it")


def results_of(path):
    """results.json without what a machine's load and a command line decide."""
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "command")}
            for row in json.loads(path.read_text())]  # fmt: skip
