#!/usr/bin/env python3
"""What vlm-run says of a checkpoint or a prompt that works otherwise than it looks."""

import json
import os
import resource
import struct
import subprocess
import unittest

from vlm_run_case import MODEL, PICTURE, PROGRAM, ROOT, TIMEOUT_S, VlmRun, run

POCKET = ROOT / "tools/pocket/pocket-qwen"
INTERNVL = ROOT / "tests/golden/internvl"  # takes videos, too
DATA = ROOT / "tests/vision/data"
WARNING = "vlm-run: warning: "


def tensors_of(path):
    """The bytes of a safetensors file, its header and where its data begins."""
    data = bytearray(path.read_bytes())
    size, = struct.unpack("<Q", data[:8])
    return data, json.loads(data[8:8 + size]), 8 + size


class Warnings(VlmRun):
    def stderr_of(self, *arguments, status=0):
        result = run(*arguments)
        self.assert_sound(result, result.returncode if status is None else status)
        return result.stderr.decode()

    def test_weights_cut_while_a_chat_waits_end_it_with_a_sentence(self):
        for name in ("pocket-llava", "pocket-internvl", "pocket-qwen"):
            with self.subTest(name):
                model = self.checkpoint(ROOT / "tools/pocket" / name)
                command = [PROGRAM, "-m", model, "--chat", "-t", "1", "-n", "4", "--device", "cpu"]
                with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE) as chat:
                    chat.stdin.write(b"What is this?\n")
                    chat.stdin.flush()
                    chat.stdout.read(1)  # the first word: all is loaded
                    for weights in model.glob("*.safetensors"):
                        with open(weights, "r+b") as file:
                            file.truncate(0)
                    stderr = chat.communicate(b"And this?\n", timeout=TIMEOUT_S)[1].decode()
                self.assertEqual(chat.returncode, 1, stderr)
                last = stderr.splitlines()[-1]
                self.assertRegex(last, r"^vlm-run: .*\.safetensors: became shorter while it was in "
                                       r"use.*; write the whole file again and start anew$")

    @unittest.skipIf(os.environ.get("KVLM_SANITIZE"), "sanitizers reserve more than any limit")
    def test_little_memory_ends_with_a_sentence(self):
        for megabytes in range(400, 0, -10):
            limit = megabytes << 20
            result = run("--image", PICTURE, "-n", "1", "-q", "-t", "1", "--device", "cpu",
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
            if result.returncode != 0:
                break
        self.assertEqual(result.returncode, 1, (megabytes, result.stderr))
        self.assertTrue(result.stderr.splitlines()[-1].startswith(b"vlm-run: "), result.stderr)

    def test_loud_key_biases_are_told_for_policies_that_lose_them(self):
        for source in (POCKET, ROOT / "tools/pocket/pocket-internvl"):
            for bias in (60.0, 400.0, -250.0):
                model = self.checkpoint(source)
                for path in model.glob("*.safetensors"):
                    data, header, begin = tensors_of(path)
                    for tensor, facts in header.items():
                        if tensor.endswith("self_attn.k_proj.bias") and facts["dtype"] == "BF16":
                            at = begin + facts["data_offsets"][0] + 2 * 31
                            data[at:at + 2] = struct.pack("<f", bias)[2:]
                    path.write_bytes(data)
                ask = ["-m", model, "--image", PICTURE, "-n", "1", "-q", "-t", "1", "--kv"]
                with self.subTest(source=source.name, bias=bias):
                    for spec in ("int4", "head_quantile"):
                        said = self.stderr_of(*ask, spec)
                        self.assertTrue(said.startswith(f"{WARNING}{spec} gives all channels"), said)
                        self.assertEqual(len(said.splitlines()), 1, said)
                    for spec in ("f16", "kivi"):
                        self.assertEqual(self.stderr_of(*ask, spec), "")

    def test_the_bundled_models_have_none(self):
        for name in ("pocket-llava", "pocket-internvl", "pocket-qwen"):
            for spec in ("int4", "int8", "head_quantile"):
                with self.subTest(name=name, spec=spec):
                    self.assertEqual(self.stderr_of("-m", name, "--image", PICTURE, "-n", "1", "-q",
                                                    "-t", "1", "--kv", spec), "")

    def test_a_placeholder_of_another_family_is_told(self):
        for model, text, own in ((POCKET, "<image>\nWhat?", "<|image_pad|>"),
                                 (POCKET, "What is <IMG_CONTEXT>?", "<|image_pad|>"),
                                 (MODEL, "<|image_pad|>What?", "<image>"),
                                 (ROOT / "tools/pocket/pocket-internvl", "<image> What?",
                                  "<IMG_CONTEXT>")):
            with self.subTest(model=model.name, text=text):
                ask = ["-m", model, "--image", PICTURE, "-n", "1", "-q", "-t", "1", "-p", text]
                said = self.stderr_of(*ask)
                self.assertTrue(said.startswith(f"{WARNING}the prompt has <"), said)
                self.assertIn(f"write {own} where the image belongs", said)
                result = run(*ask, "--json")
                warning, = json.loads(result.stdout)["warnings"]
                self.assertEqual(f"{WARNING}{warning}\n", result.stderr.decode())
        self.assertEqual(self.stderr_of("-m", MODEL, "--image", PICTURE, "-n", "1", "-q", "-t", "1",
                                        "-p", "<image>\nWhat?"), "")

    def cut(self, path, part):
        """The first part of a file, as an interrupted copy leaves it."""
        data = path.read_bytes()
        (self.folder / path.name).write_bytes(data[:int(len(data) * part)])
        return path.name

    def longer(self, path, tail):
        (self.folder / path.name).write_bytes(path.read_bytes() + tail)
        return path.name

    def answers(self, model, records, *more, status=0):
        """The answers to records by their id, and the lines of stderr."""
        batch, output = self.folder / "in.jsonl", self.folder / "out.jsonl"
        batch.write_text("".join(json.dumps({"id": name} | record) + "\n" for name, record in records.items()))
        said = self.stderr_of("-m", model, "--batch", batch, "--out", output, "-n", "1", "-q", "-t", "1", *more, status=status)
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        return {answer["id"]: answer for answer in answers}, said.splitlines()

    def test_a_batch_carries_the_warnings_of_its_records(self):
        """Each has the words, which stderr repeats with the record's name; or none."""
        for kind, (field, words, items) in {
                "the placeholder of another family": ("prompt", "which is plain text to", [
                    "<image>What?", "What is <|image_pad|>?", "<|vision_start|><|image_pad|><|vision_end|>", "<image_placeholder>"]),
                "no placeholder": ("prompt", None, ["What?", "<IMG_CONTEXT>What?", "<b>What?</b>"]),
                "clipped grey": ("image", "of its pixels become white", [DATA / f"grey16{end}" for end in (".png", ".pgm", "_noise.png")]),
                "other greys": ("image", None, [DATA / name for name in ("grey8.png", "grey_alpha16.png", "rgb16.ppm")]),
                "an image that ends early": ("image", "of its pixels are missing", [self.cut(DATA / name, 0.9) for name in (
                    "half_chroma.jpg", "rgb8.png", "rgb24.bmp", "interlaced.gif", "rgb.ppm", "lossless.webp")]),
                "an image with bytes after it": ("image", None, [DATA / "stray_bytes.jpg", self.longer(DATA / "grey.jpg", b"SEFT"),
                                                              self.longer(DATA / "orientation6.jpg", bytes(5000)),
                                                              self.longer(DATA / "rgb_short.ppm", b"P6")]),
                "an animation that ends early": ("video", "ends early: only its first", [self.cut(DATA / "video" / name, 0.75) for name in (
                    "pillow.gif", "lossy.webp", "mixed16.gif", "parts.webp")]),
                "a video that ends early": ("video", " missing (", [
                    self.cut(DATA / "video" / name, 0.75) for name in ("ffv1.mkv", "raw.avi", "open_gop.mkv")])}.items():
            with self.subTest(kind):
                records = {str(item): {"image": str(PICTURE)} | {field: str(item)} for item in items}
                answers, said = self.answers(INTERNVL, records, status=None)
                (self.folder / "out.jsonl").unlink()
                if any("this build has no FFmpeg" in answer.get("error", "") for answer in answers.values()):
                    continue
                expected = []
                for name, answer in answers.items():
                    self.assertIn("text", answer)
                    warnings = answer.get("warnings", [])
                    self.assertEqual(len(warnings) > 0, words is not None, answer)
                    for warning in warnings:
                        self.assertIn(words, warning)
                        expected.append(f'{WARNING}record "{name}": {warning}')
                self.assertCountEqual(said, expected)

    def test_only_the_first_warnings_are_printed(self):
        records = {str(i): {"image": str(PICTURE), "prompt": "<|image_pad|>What?"} for i in range(50)}
        answers, said = self.answers(MODEL, records)
        self.assertEqual(sum("warnings" in answer for answer in answers.values()), 50)
        self.assertEqual(sum(line.startswith(WARNING) for line in said), 20)
        self.assertEqual(sum("further warnings are in" in line for line in said), 1)
        self.assertEqual(len(said), 21)

    def test_an_answer_that_a_full_context_cuts_is_told(self):
        model = self.checkpoint(ROOT / "tests/golden/llava_next_mistral")
        config = json.loads((model / "config.json").read_text())
        ask = ["--image", PICTURE, "-p", "hi", "-t", "1", "-q", "--json", "-n"]
        for window in (150, 200, 300):
            config["text_config"]["sliding_window"] = window
            (model / "config.json").write_text(json.dumps(config))
            with self.subTest(window=window):
                result = run("-m", model, *ask, 400)
                answer = json.loads(result.stdout)
                self.assertEqual(answer["finish_reason"], "length")
                self.assertIn(f"{window} tokens (its sliding window", answer["warnings"][0])
                self.assertEqual(f"{WARNING}{answer['warnings'][0]}\n", result.stderr.decode())
                self.assertEqual(self.stderr_of("-m", model, *ask, 20), "")
        result = run("-m", MODEL, *ask, 4000)
        self.assertIn("512 tokens, is full", json.loads(result.stdout)["warnings"][0])


if __name__ == "__main__":
    unittest.main()
