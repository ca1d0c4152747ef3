#!/usr/bin/env python3
"""The table of docs/models.md is what tools/results/models.py makes, and that counts and tokenizes as the programs do.

KVLM_BUILD is the build folder; without its programs only what needs none is tested. Standard library only.
"""

import json
import os
import struct
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/results"))
import models  # noqa: E402

TOOLS = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools"
GOLDEN = ROOT / "tests/golden"
# Folders whose tensors are counted and whose images are shown to vlm-run.
FOLDERS = ("llava_mha", "llava_next", "llava_next_mistral", "llava_onevision", "qwen2_vl", "qwen2_vl_tied", "qwen2_5_vl",
           "qwen3_vl", "internvl", "internvl_original", "internvl_qwen3")  # the others have the 6B tower, which no row has
# Of docs/data/towers.csv: prompt tokens of a 1280 x 960 image and "What is it?", less those of the text and template.
MEASURED = {"Qwen/Qwen2.5-VL-7B-Instruct": 1564, "Qwen/Qwen3-VL-8B-Instruct": 1200, "OpenGVLab/InternVL3_5-8B": 3328,
            "llava-hf/llava-v1.6-vicuna-7b-hf": 2340, "llava-hf/llava-onevision-qwen2-7b-ov-hf": 7309}


def data():
    return json.loads(models.DATA.read_text("utf-8"))


def read(folder, name):
    return json.loads(Path(folder, name).read_text("utf-8"))


def needs(name):
    return unittest.skipUnless((TOOLS / name).is_file(), f"{TOOLS / name} is not built")


def stored(folder):
    """Elements of all tensors of a folder."""
    count = 0
    for path in folder.glob("model*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, tensor in header.items():
            if name != "__metadata__":
                elements = 1
                for size in tensor["shape"]:
                    elements *= size
                count += elements
    return count


class Page(unittest.TestCase):
    maxDiff = None

    @needs("vlm-kv")
    def test_the_table_is_made_of_the_data(self):
        text = models.PAGE.read_text("utf-8")
        made = models.page(text, models.table(data(), TOOLS / "vlm-kv"))
        self.assertEqual(text, made, "run: tools/results/models.py")

    def test_parameters_equal_the_published_counts(self):
        for entry, config, _ in models.configs(data()):
            if "parameters" in entry:
                with self.subTest(entry["id"]):
                    self.assertEqual(models.parameters(config)[0], entry["parameters"])

    def test_every_row_says_how_it_was_checked(self):
        for entry in data()["checkpoints"]:
            self.assertIn(entry["checked"], ("count", "config", "parts"))
            self.assertEqual(entry["checked"] == "count", "parameters" in entry, entry["id"])

    def test_tokens_of_a_photo_are_those_measured(self):
        tokens = {entry["id"]: models.visual_tokens(config, processor, *models.PHOTO)
                  for entry, config, processor in models.configs(data())}
        self.assertEqual(MEASURED, {name: tokens[name] for name in MEASURED})


class Goldens(unittest.TestCase):
    def test_parameters_are_the_elements_of_the_files(self):
        for name in FOLDERS:
            with self.subTest(name):
                self.assertEqual(models.parameters(read(GOLDEN / name, "config.json"))[0], stored(GOLDEN / name))

    @needs("vlm-run")
    def test_tokens_are_those_of_vlm_run(self):
        for name in FOLDERS:
            folder = GOLDEN / name
            config, processor = read(folder, "config.json"), read(folder, "preprocessor_config.json")
            for image in sorted(folder.glob("image?.png")):
                with self.subTest(f"{name}/{image.name}"):
                    width, height = struct.unpack(">II", image.read_bytes()[16:24])
                    command = [TOOLS / "vlm-run", "-m", folder, "--image", image, "-p", "a", "-n", "1", "-q", "--json"]
                    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
                                          check=True)
                    self.assertEqual(models.visual_tokens(config, processor, width, height),
                                     json.loads(done.stdout)["visual_tokens"])


if __name__ == "__main__":
    unittest.main()
