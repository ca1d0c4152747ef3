#!/usr/bin/env python3
"""Random checkpoints of released models' exact widths, saved by transformers in f16, against transformers.

tools/golden/full_size.py makes each checkpoint and its goldens in a temporary folder, then runtime_tests
holds the runtime against them by the gates of half-precision goldens (tests/runtime/half_golden_test.cpp) and
vlm-run answers a picture and a text. Small shapes of every family go the same way on either device; a full one
needs a GPU for the reference's f32 and room in TMPDIR (LIMITS).

KVLM_BUILD names the build folder, KVLM_TEST_DEVICE=cuda the GPU. Needs the packages of
tools/golden/requirements.txt.
"""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))
VLM_RUN, RUNTIME_TESTS = BUILD / "tools/vlm-run", BUILD / "tests/runtime_tests"
DEVICE = os.environ.get("KVLM_TEST_DEVICE", "cpu")
NEEDED = ("torch", "torchvision", "transformers", "sentencepiece")
# Bytes of the GPU's memory and of TMPDIR that a full shape needs.
LIMITS = {
    "llava-1.5-7b": (60e9, 40e9),
    "qwen2.5-vl-7b": (40e9, 8e9),
    "qwen3-vl-8b": (40e9, 8e9),
    "internvl3-8b": (40e9, 8e9),
}
TEST_CASES = 3  # of HalfGolden


def setUpModule():
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise unittest.SkipTest(f"{sys.executable} has no {', '.join(missing)}")
    for program in (VLM_RUN, RUNTIME_TESTS):
        if not program.is_file():
            raise unittest.SkipTest(f"{program} is not built")


def why_not_full_size(shape):
    """Why the full shape cannot be tested here, or None."""
    if DEVICE != "cuda":
        return "full shapes are tested on a GPU only (KVLM_TEST_DEVICE=cuda)"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    gpu_bytes, disk_bytes = LIMITS[shape]
    memory = torch.cuda.get_device_properties(0).total_memory
    if memory < gpu_bytes:
        return f"the GPU has {memory} bytes, and the reference needs {gpu_bytes:.0f}"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < disk_bytes:
        return f"{tempfile.gettempdir()} has {free} bytes free, and {disk_bytes:.0f} are needed"
    return None


def tensor(path, name, code):
    """A tensor of a safetensors file as a flat tuple; code is that of struct."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        data = file.read(end - begin)
    return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)


def question(case):
    """The text of the user's turn, which is all but the pictures."""
    if case["messages"] is None:  # LLaVA-1.5's cases are prompts
        text = case["prompt"].removeprefix("USER: ").removesuffix(" ASSISTANT:")
        return text.removeprefix("<image>\n")
    (message,) = case["messages"]
    return "".join(item.get("text", "") for item in message["content"])


class FullSize(unittest.TestCase):
    def export(self, shape):
        """Makes the checkpoint with its goldens; returns its folder."""
        scratch = tempfile.TemporaryDirectory(prefix="kvlm-full-")
        self.addCleanup(scratch.cleanup)
        self.say(shape, "is being made")
        script = ROOT / "tools/golden/full_size.py"
        subprocess.run(
            [sys.executable, script, "--shape", shape, "--out", scratch.name, "--device", DEVICE],
            check=True,
        )
        (folder,) = Path(scratch.name).iterdir()
        size = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
        self.say(shape, f"has {size} bytes of weights")
        return folder

    def say(self, *words):
        print(f"[{time.strftime('%H:%M:%S')}]", *words, file=sys.stderr, flush=True)

    def check_logits(self, folder):
        result = subprocess.run(
            [RUNTIME_TESTS, "--gtest_filter=*HalfGolden*"],
            env=os.environ | {"KVLM_TEST_GOLDEN_DIR": str(folder.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.say("\n" + result.stdout)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn(f"[  PASSED  ] {TEST_CASES} tests", result.stdout)

    def check_answers(self, folder):
        """vlm-run's greedy tokens; where they part, the reference must have been undecided."""
        manifest = json.loads((folder / "manifest.json").read_text())
        for case in manifest["cases"]:
            if case.get("videos"):
                continue  # vlm-run would take other frames than the reference was given
            text = question(case)
            pictures = [word for file in case["images"] for word in ("--image", folder / file)]
            result = subprocess.run(
                [VLM_RUN, "-m", folder, *pictures, "-p", text, "--json"]
                + ["-n", str(case["max_new_tokens"]), "--device", DEVICE],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            answer = json.loads(result.stdout)
            self.assertEqual(answer["prompt_tokens"], case["prompt_tokens"])
            self.assertEqual(answer["visual_tokens"], case["image_tokens"])
            goldens = folder / "golden.safetensors"
            expected = list(tensor(goldens, case["name"] + ".greedy_ids", "q"))
            same = [a == b for a, b in zip(answer["tokens"], expected)]
            agreeing = same.index(False) if False in same else len(same)
            self.say(case["kind"], f"{agreeing} of {len(expected)} tokens agree,", answer["timings"])
            if agreeing == len(expected):
                continue
            logits = tensor(goldens, case["name"] + ".forced_logits", "f")
            width = len(logits) // len(expected)
            row = logits[agreeing * width : (agreeing + 1) * width]
            gap = row[expected[agreeing]] - row[answer["tokens"][agreeing]]
            self.assertLess(gap, 0.1, f"{case['kind']}, token {agreeing}")

    def check(self, shape):
        folder = self.export(shape)
        self.check_logits(folder)
        self.check_answers(folder)

    def check_full(self, shape):
        reason = why_not_full_size(shape)
        if reason:
            self.skipTest(reason)
        self.check(shape)

    def test_a_small_llava_15(self):
        self.check("small-llava-1.5")

    def test_a_small_internvl(self):
        self.check("small-internvl")

    def test_a_small_qwen25_vl(self):
        self.check("small-qwen2.5-vl")

    def test_a_small_qwen3_vl(self):
        self.check("small-qwen3-vl")

    def test_the_shape_of_llava_15_7b(self):
        self.check_full("llava-1.5-7b")

    def test_the_shape_of_internvl3_8b(self):
        self.check_full("internvl3-8b")

    def test_the_shape_of_qwen25_vl_7b(self):
        self.check_full("qwen2.5-vl-7b")

    def test_the_shape_of_qwen3_vl_8b(self):
        self.check_full("qwen3-vl-8b")


if __name__ == "__main__":
    unittest.main()
