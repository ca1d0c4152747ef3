#!/usr/bin/env python3
"""vlm-run --dry-run: what images and records need, without reading a weight."""

import json
import shutil
import unittest

from vlm_run_case import MODEL, PICTURE, VlmRun, run


class DryRun(VlmRun):
    def plan(self, *arguments, status=0):
        result = run("--dry-run", "--json", *arguments)
        self.assert_sound(result, status)
        return json.loads(result.stdout)

    def test_the_prompt_and_the_cache_are_those_of_a_run(self):
        for kv in ("f16", "int4", "kivi"):
            plan = self.plan("-m", MODEL, "--image", PICTURE, "--kv", kv, "-n", 4)
            made = json.loads(run("-m", MODEL, "--image", PICTURE, "--kv", kv, "-n", 4, "--json").stdout)
            self.assertEqual(plan["prompt_tokens"], made["prompt_tokens"])
            self.assertEqual(plan["visual_tokens"], made["visual_tokens"])
            read = made["memory"]["weights_bytes"]  # of what the files hold, some is not used
            self.assertLessEqual(read, plan["weights_bytes"])
            self.assertLessEqual(plan["weights_bytes"], 1.1 * read)
            first = plan["policies"][0]
            self.assertEqual(first["spec"], kv)
            reserved = first["sequence_bytes"] + first["staging_bytes"]
            self.assertGreaterEqual(made["memory"]["cache_bytes"], 0.98 * reserved)
            self.assertLessEqual(made["memory"]["cache_bytes"], 1.25 * reserved)

    def test_what_fits_is_counted_from_the_memory_named(self):
        plan = self.plan("-m", "synthetic:internvl2.5-8b", "--image", PICTURE, "--memory", "24GB")
        first = plan["policies"][0]
        left = 24e9 - plan["weights_bytes"] - plan["activation_bytes"]
        self.assertEqual(plan["cache_bytes"], left)
        self.assertEqual(first["sequences"], int((left - first["staging_bytes"]) // first["sequence_bytes"]))
        plan = self.plan("-m", "synthetic:internvl2.5-8b", "--image", PICTURE, "--memory", "12GB", status=1)
        self.assertEqual([policy["sequences"] for policy in plan["policies"]], [0] * len(plan["policies"]))
        plan = self.plan("-m", MODEL, "--image", PICTURE, "--kv-memory", "1MB")
        self.assertEqual(plan["cache_bytes"], 1e6)

    def test_no_weight_is_read(self):
        """The files may hold anything behind their headers."""
        copy = self.folder / "model"
        shutil.copytree(MODEL, copy)
        weights = copy / "model.safetensors"
        data = bytearray(weights.read_bytes())
        size = 8 + int.from_bytes(data[:8], "little")
        weights.write_bytes(data[:size] + bytes([0xff]) * (len(data) - size))
        image = ["--image", PICTURE, "--memory", "8GB"]
        self.assertEqual(self.plan("-m", copy, *image)["policies"], self.plan("-m", MODEL, *image)["policies"])

    def test_nothing_to_answer_is_a_plan_of_nothing(self):
        empty = self.folder / "none.jsonl"
        gone = self.folder / "gone.jsonl"
        empty.write_text("")
        gone.write_text('{"id": 1, "image": "gone.png"}\n')
        for list_ in (empty, gone):
            plan = self.plan("-m", MODEL, "--batch", list_, status=1)
            self.assertEqual((plan["records"], plan["policies"][0]["sequences"]), (0, 0))

    def test_records_are_checked(self):
        list_ = self.folder / "in.jsonl"
        list_.write_text("".join(json.dumps({"id": i, "image": str(PICTURE), "prompt": "why? " * i}) + "\n" for i in range(5))
                         + '{"id": 9, "image": "gone.png"}\n')
        result = run("--dry-run", "-m", MODEL, "--batch", list_)
        self.assertEqual(result.returncode, 1)
        self.assertIn(b'record 9', result.stderr)
        self.assertIn(b"and 1 that cannot be answered", result.stdout)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["in.jsonl"])

    def test_wrong_flags_are_refused(self):
        for arguments in (["--chat"], ["--memory", "many"], ["--kv", "nope", "--image", PICTURE]):
            self.assertEqual(run("--dry-run", "-m", MODEL, *arguments).returncode, 2, arguments)
        refused = run("--memory", "1GB", "--device", "cpu", "-m", MODEL, "--image", PICTURE)
        self.assertEqual(refused.returncode, 2)
        self.assertIn(b"--memory bounds what is used of a GPU; on the CPU", refused.stderr)


if __name__ == "__main__":
    unittest.main()
