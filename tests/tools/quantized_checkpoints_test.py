#!/usr/bin/env python3
"""Checkpoints of every family with decoders packed by compressed-tensors: vlm-run answers as transformers does with them.

tools/golden/quantized.py packs the decoders of tests/golden and records the answers in
tests/runtime/data/weights/golden/FOLDER.safetensors. Here each is put together with the rest of its folder. KVLM_BUILD names
the build folder. Standard library only, but for checkpoints of --save-weights that transformers reads: these need torch,
transformers, torchvision and compressed-tensors.
"""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))
GOLDEN = ROOT / "tests/golden"
PACKED = ROOT / "tests/runtime/data/weights/golden"
RECORDED = ("greedy_ids", "greedy_logits")
NEEDED = ("torch", "torchvision", "transformers", "compressed_tensors")


def read_tensors(path):
    """name -> (dtype, shape, bytes) of a safetensors file, and its metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    head = json.loads(content[8 : 8 + length])
    metadata = head.pop("__metadata__", {})
    data = memoryview(content)[8 + length :]
    tensors = {name: (entry["dtype"], entry["shape"], bytes(data[slice(*entry["data_offsets"])])) for name, entry in head.items()}
    return tensors, metadata


def write_tensors(path, tensors):
    head, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def setUpModule():
    if not (BUILD / "tools/vlm-run").is_file():
        raise unittest.SkipTest(f"{BUILD} has no vlm-run")


def vlm_run(*arguments):
    """Its JSON, of exact products on the CPU."""
    command = [BUILD / "tools/vlm-run", "--device", "cpu", "--dtype", "f32", "--activations", "16", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


class Packed(unittest.TestCase):

    def put_together(self, name):
        """A folder with the packed checkpoint, and the ids that are expected."""
        scratch = tempfile.TemporaryDirectory(prefix="kvlm-packed-")
        self.addCleanup(scratch.cleanup)
        folder = Path(scratch.name) / name
        shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("model*.safetensors*", "golden.safetensors"))
        tensors = {}
        for path in (GOLDEN / name).glob("model*.safetensors"):
            tensors |= read_tensors(path)[0]
        packed, metadata = read_tensors(PACKED / f"{name}.safetensors")
        ids = packed["greedy_ids"][2]
        for part, tensor in packed.items():
            if part not in RECORDED:
                tensors.pop(part.removesuffix("_packed"), None)  # a name ends in .weight, another in .weight_packed
                tensors[part] = tensor
        write_tensors(folder / "model.safetensors", tensors)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = json.loads(metadata["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
        return folder, list(struct.unpack(f"<{len(ids) // 8}q", ids))

    def test_every_folder_has_a_packed_twin(self):
        self.assertEqual(sorted(path.parent.name for path in GOLDEN.glob("*/manifest.json")),
                         sorted(path.stem for path in PACKED.glob("*.safetensors")))

    def test_answers_are_those_of_transformers(self):
        for path in sorted(PACKED.glob("*.safetensors")):
            with self.subTest(path.stem):
                self.check(path.stem)

    def check(self, name):
        folder, expected = self.put_together(name)
        goldens = GOLDEN / json.loads((folder / "manifest.json").read_text()).get("goldens_of", name)
        case = json.loads((goldens / "manifest.json").read_text())["cases"][0]
        (image,) = case["images"]
        # LLaVA-1.5's cases are prompts without messages.
        question = "".join(item.get("text", "") for message in case["messages"] or [] for item in message["content"])
        question = question or case["prompt"].removeprefix("USER: <image>\n").removesuffix(" ASSISTANT:")
        system = ["--system", "be brief"] if name == "internvl_original_internlm2" else []
        answer = vlm_run("-m", folder, "--image", goldens / image, "-p", question, "-n", str(len(expected)), *system)
        self.assertEqual(answer["memory"]["weights_format"], "int4 per output")
        if not system:
            self.assertEqual(answer["prompt_tokens"], case["prompt_tokens"])
        # The context of llava_rope_dynamic ends before its answer; a golden of transformers goes on.
        short = answer["finish_reason"] == "length" and len(answer["tokens"]) < len(expected)
        self.assertEqual(answer["tokens"], expected[:-1] if short else expected)


class Saved(unittest.TestCase):
    """--save-weights, read by transformers."""

    def setUp(self):
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            self.skipTest(f"{sys.executable} has no {', '.join(missing)}")

    def test_transformers_reads_saved_checkpoints(self):
        for model in ("pocket-llava", "pocket-internvl", "pocket-qwen"):
            for weights in ("int4", "int8"):
                with self.subTest(model=model, weights=weights), tempfile.TemporaryDirectory() as scratch:
                    folder = Path(scratch) / model
                    done = subprocess.run([BUILD / "tools/vlm-run", "-m", model, "--weights", weights, "--save-weights", folder])
                    self.assertEqual(done.returncode, 0)
                    self.compare(folder)

    def compare(self, folder):
        import PIL.Image
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model, report = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        self.assertFalse(report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"], report)
        self.assertTrue(any(hasattr(module, "weight_packed") for module in model.modules()))
        processor = AutoProcessor.from_pretrained(folder)
        for number in range(3):
            path = ROOT / f"tools/pocket/heldout/scenes/scene_00{number}.png"
            answer = vlm_run("-m", folder, "--image", path, "-p", "Describe the image.", "-n", "24")
            turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Describe the image."}]}
            text = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
            inputs = processor(text=[text], images=[PIL.Image.open(path).convert("RGB")], return_tensors="pt")
            inputs.pop("token_type_ids", None)
            with torch.no_grad():
                made = model.generate(**inputs, max_new_tokens=24, do_sample=False)
            self.assertEqual(made[0, inputs["input_ids"].shape[1] :].tolist()[: len(answer["tokens"])], answer["tokens"])


if __name__ == "__main__":
    unittest.main()
