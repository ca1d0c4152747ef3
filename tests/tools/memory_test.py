#!/usr/bin/env python3
"""The memory object of --json: what the programs say that they hold, and on a GPU what its driver says.

There weights, cache, workspaces and the pages that they are rounded to, the context and the kernels that
the driver loaded add up to the driver's own figure within 2 %. KVLM_BUILD names the build folder,
KVLM_TEST_DEVICE=cuda the GPU, on which nothing else may run meanwhile. Standard library only.
"""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools"
DEVICE = os.environ.get("KVLM_TEST_DEVICE", "cpu")
TINY = ROOT / "tests/golden/llava_gqa"
PICTURE = TINY / "image0.png"
HELD = ("weights_bytes", "cache_bytes", "workspace_bytes")
ON_GPU = ("rounding_bytes", "context_bytes", "code_bytes", "device_bytes")
BOUND = 0.02


def setUpModule():
    for program in ("vlm-run", "vlm-bench"):
        if not (TOOLS / program).is_file():
            raise unittest.SkipTest(f"{TOOLS / program} is not built")


def run(program, *arguments):
    """The JSON lines that a program prints."""
    result = subprocess.run(
        [TOOLS / program, *map(str, arguments), "--json", "--device", DEVICE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return [json.loads(line) for line in result.stdout.splitlines()]


def reserved(row):
    """What the cache of a row of `vlm-bench throughput` sets aside, in whole units of 64 bytes."""
    return -(-(row["batch"] * row["sequence_bytes"] + row["staging_bytes"]) // 64) * 64


def weights_read(folder):
    """Bytes of the weights that are read: of every tensor of a checkpoint but the last vision block,
    whose output reaches nobody, and what is too small to be counted: the decoder's norms and the
    projector's biases."""
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    last = f".encoder.layers.{vision['num_hidden_layers'] - 1}."
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return sum(tensor["data_offsets"][1] - tensor["data_offsets"][0]
               for name, tensor in header.items()
               if last not in name and "post_layernorm" not in name
               and not ("norm" in name and "vision" not in name)
               and not ("projector" in name and name.endswith(".bias")))


class Memory(unittest.TestCase):
    def check(self, memory):
        """The fields, and on a GPU their sum. Returns what of the driver's figure is not explained."""
        self.assertEqual(set(memory), {"weights_format", *HELD, *(ON_GPU if DEVICE == "cuda" else ())})
        self.assertIn(memory["weights_format"], ("bf16", "f16", "f32"))
        for name in HELD:
            self.assertGreater(memory[name], 0, name)
        if DEVICE != "cuda":
            return 0
        explained = sum(memory[name] for name in HELD + ON_GPU[:3])
        missing = memory["device_bytes"] - explained
        print(f"{memory}: {missing} bytes not explained, "
              f"{100 * missing / memory['device_bytes']:.3f} %", file=sys.stderr)
        self.assertLessEqual(abs(missing), BOUND * memory["device_bytes"], memory)
        return missing

    def test_vlm_run_lists_what_it_holds(self):
        for spec in ("f16", "calibquant"):
            (answer,) = run("vlm-run", "-m", "pocket", "--image", PICTURE, "-n", 8, "--kv", spec)
            self.check(answer["memory"])
            self.assertGreaterEqual(answer["memory"]["cache_bytes"], answer["kv"]["bytes"])

    def test_the_reservation_is_what_was_asked_for(self):
        (answer,) = run("vlm-run", "-m", "pocket", "--image", PICTURE, "-n", 8, "--kv-memory", "64MiB")
        self.check(answer["memory"])
        self.assertEqual(answer["memory"]["cache_bytes"], 64 << 20)

    def test_vlm_bench_lists_what_it_holds(self):
        sizes = ("--prompt-tokens", 40, "--tokens", 2, "--repeats", 1)
        (row,) = run("vlm-bench", "latency", "-m", TINY, *sizes)
        self.check(row["memory"])
        if DEVICE == "cpu":
            self.assertEqual(row["memory"]["weights_bytes"], weights_read(TINY))
        rows = run("vlm-bench", "throughput", "-m", TINY, "--kv-memory", "200K,1M", "--kv", "f16",
                   "--kv", "calibquant", *sizes)
        for row in rows:
            self.check(row["memory"])
            self.assertEqual(row["memory"]["cache_bytes"], reserved(row))

    @unittest.skipUnless(DEVICE == "cuda", "KVLM_TEST_DEVICE is not cuda")
    def test_a_released_shape_fills_the_gpu_as_it_says(self):
        model = ("-m", "synthetic:internvl2.5-8b")
        rows = run("vlm-bench", "throughput", *model, "--kv-memory", "30G", "--kv", "f16", "--kv",
                   "calibquant", "--tokens", 4, "--repeats", 1)
        rows += run("vlm-bench", "latency", *model, "--tokens", 4, "--repeats", 1)
        for row in rows:
            memory = row["memory"]
            self.check(memory)
            # Without the driver's own: what was taken since the context is what we say we took.
            taken = memory["device_bytes"] - memory["context_bytes"]
            listed = sum(memory[name] for name in HELD) + memory["rounding_bytes"]
            self.assertLessEqual(abs(taken - listed), BOUND * taken, memory)
            if "batch" in row:
                self.assertEqual(memory["cache_bytes"], reserved(row))
                self.assertLessEqual(row["kv_bytes"], memory["cache_bytes"])


if __name__ == "__main__":
    unittest.main()
