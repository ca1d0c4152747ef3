#!/usr/bin/env python3
"""What bash offers after Tab for the three programs (tools/completion/kvlm.bash).

KVLM_BUILD is the build folder.
"""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))

# Words as bash gives them, then what it prints of them; the last word is the one being completed.
SCRIPT = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
__kvlm "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def setUpModule():
    if not (BUILD / "tools/vlm-run").is_file():
        raise unittest.SkipTest(f"{BUILD} has no programs")


def completed(*words, folder=ROOT):
    result = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", ROOT / "tools/completion/kvlm.bash", *words], cwd=folder,
        env={**os.environ, "PATH": f"{BUILD / 'tools'}:{os.environ['PATH']}"}, timeout=60,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert result.stderr == "", result.stderr
    return set(result.stdout.split("\n")) - {""}


class Completion(unittest.TestCase):
    def test_options(self):
        options = completed("vlm-run", "-")
        self.assertLessEqual({"-m", "--model", "--image", "--kv", "--batch", "-q", "--help"}, options)
        self.assertEqual(completed("vlm-run", "--image-b"), {"--image-backend"})

    def test_options_of_a_subcommand(self):
        self.assertEqual(completed("vlm-kv", "explain", "--vis"), {"--visual"})
        self.assertEqual(completed("vlm-kv", "list", "--vis"), set())
        self.assertEqual(completed("vlm-bench", "kernels", "--only", "x", "--ro"), {"--rows"})

    def test_subcommands(self):
        self.assertLessEqual({"list", "explain", "fidelity", "profile", "values"}, completed("vlm-kv", ""))
        self.assertEqual(completed("vlm-bench", "th"), {"throughput"})

    def test_policies(self):
        known = completed("vlm-run", "--kv", "")
        self.assertLessEqual({"f16", "kivi", "prefixkv", "h2o", "calibquant"}, known)
        self.assertEqual(completed("vlm-run", "--kv", "calib"), {"calibquant"})
        self.assertEqual(completed("vlm-kv", "explain", "calib"), {"calibquant"})

    def test_inside_a_spec(self):
        self.assertEqual(completed("vlm-run", "--kv", "snapkv+ki"), {"snapkv+kivi"})
        self.assertEqual(completed("vlm-run", "--kv", "kivi,bi"), {"kivi,bits="})
        self.assertEqual(completed("vlm-run", "--kv", "=", "kivi,resi"), {"kivi,residual="})
        self.assertEqual(completed("vlm-kv", "fidelity", "--kv", "kivi,bits", "=", "2,gr"), {"2,group="})
        self.assertEqual(completed("vlm-kv", "explain", "prefixkv,keep", "=", "0.5+cal"), {"0.5+calibquant"})
        self.assertEqual(completed("vlm-kv", "explain", "uniform,evict", "=", "sc"), {"score"})
        self.assertEqual(completed("vlm-kv", "explain", "visual", "=", "calib"), {"calibquant"})
        self.assertLessEqual({"kivi,bits=", "kivi,scope=", "kivi,group="}, completed("vlm-run", "--kv", "kivi,"))
        self.assertEqual(completed("vlm-run", "--kv", "nonsense,bi"), set())
        self.assertEqual(completed("vlm-kv", "list", "calib"), {"calibquant"})

    def test_values(self):
        self.assertEqual(completed("vlm-run", "--dtype", "b"), {"bf16"})
        self.assertEqual(completed("vlm-run", "--dtype", "=", "b"), {"bf16"})
        self.assertEqual(completed("vlm-kv", "list", "--markdown", "o"), {"overview", "options"})
        self.assertEqual(completed("vlm-run", "--image-backend", "="), {"auto", "torchvision", "pil"})
        self.assertIn("cuda", completed("vlm-bench", "latency", "--device", "c"))
        bundled = {"pocket", "pocket-llava", "pocket-internvl", "pocket-qwen"}
        self.assertEqual(completed("vlm-run", "-m", "poc"), bundled)

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "my cat.png").touch()
            self.assertEqual(completed("vlm-run", "--image", "my", folder=folder), {"my cat.png"})
            self.assertEqual(completed("vlm-run", "--video", "my", folder=folder), {"my cat.png"})
            self.assertEqual(completed("vlm-kv", "fidelity", "--data", "my", folder=folder), {"my cat.png"})


if __name__ == "__main__":
    unittest.main()
