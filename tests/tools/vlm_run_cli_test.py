#!/usr/bin/env python3
"""Runs vlm-run as a person would who gives it something wrong.

Every failure is one line on stderr, "vlm-run: " and a sentence that names the thing, with nothing
on stdout, exit status 1 (a file, a device, memory) or 2 (usage), and no finding of a sanitizer.
The checkpoints are damaged copies of a tiny golden one. KVLM_BUILD is the build folder.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import unittest
import zlib
from pathlib import Path

from vlm_run_case import MODEL, PICTURE, PROGRAM, ROOT, TIMEOUT_S, VlmRun, run

SHARDED = ROOT / "tests/golden/llava_gqa_sharded"
JPEG = ROOT / "tests/vision/data/rgb.jpg"


# ---- what is done to a checkpoint or a file; each takes the path it damages ----


def write(text):
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def remove(path):
    path.unlink()


def cut(keep):
    """Keeps the first bytes (a count) or part (a fraction) of a file."""
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[:keep if isinstance(keep, int) else int(len(data) * keep)])
    return damage


def append(data):
    return lambda path: path.write_bytes(path.read_bytes() + data)


def edit_json(change):
    """change(object) of a JSON file."""
    def damage(path):
        content = json.loads(path.read_bytes())
        change(content)
        path.write_text(json.dumps(content))
    return damage


def put(*keys, value):
    """Sets a nested key of a JSON file."""
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value
    return edit_json(change)


def edit_header(change, length=None):
    """change(header, data) gives a safetensors file's new (header, data); a header may be bytes."""
    def damage(path):
        raw = path.read_bytes()
        (size,) = struct.unpack_from("<Q", raw)
        header, data = change(json.loads(raw[8:8 + size]), raw[8 + size:])
        if not isinstance(header, bytes):
            header = json.dumps(header).encode()
        size = len(header) if length is None else length
        path.write_bytes(struct.pack("<Q", size) + header + data)
    return damage


def first(header):
    """The name of the first tensor in the file."""
    return min((name for name in header if name != "__metadata__"),
               key=lambda name: header[name]["data_offsets"])


def edit_tensor(**fields):
    """Replaces fields of the first tensor; a field may be a function of the old value."""
    def change(header, data):
        tensor = header[first(header)]
        for field, value in fields.items():
            tensor[field] = value(tensor[field]) if callable(value) else value
        return header, data
    return edit_header(change)


def drop_tensor(header, data):
    """Takes the last tensor out, consistently: the file is sound, the model incomplete."""
    name = max((name for name in header if name != "__metadata__"),
               key=lambda name: header[name]["data_offsets"])
    begin, _ = header.pop(name)["data_offsets"]
    return header, data[:begin]


def add_tensor(header, data):
    header["surplus.weight"] = {"dtype": "F32", "shape": [2],
                                "data_offsets": [len(data), len(data) + 8]}
    return header, data + bytes(8)


def overlap(header, data):
    """The second tensor starts inside the first, four bytes early."""
    tensors = sorted((t for name, t in header.items() if name != "__metadata__"),
                     key=lambda t: t["data_offsets"])
    tensors[1]["data_offsets"] = [offset - 4 for offset in tensors[1]["data_offsets"]]
    return header, data


def duplicate_name(header, data):
    name = first(header)
    entry = json.dumps(header[name])
    return b'{%s: %s, ' % (json.dumps(name).encode(), entry.encode()) + json.dumps(
        header).encode()[1:], data


def index(change):
    return edit_json(lambda content: change(content["weight_map"]))


def some_tensor(weight_map):
    return min(weight_map)


def swap_two_shards(weight_map):
    name = some_tensor(weight_map)
    weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00003-of-00005.safetensors"

# (what, file of the checkpoint, damage, words of the message); all end with status 1.
DAMAGED_MODELS = [
    ("no weights", WEIGHTS, remove, ["safetensors"]),
    ("weights in another format only", WEIGHTS,
     lambda path: path.rename(path.with_name("pytorch_model.bin")), ["safetensors"]),
    ("empty weights", WEIGHTS, write(b""), [WEIGHTS]),
    ("weights of 7 bytes", WEIGHTS, cut(7), [WEIGHTS]),
    ("weights cut in the header", WEIGHTS, cut(100), [WEIGHTS]),
    ("weights cut in the data", WEIGHTS, cut(0.9), [WEIGHTS]),
    ("weights with bytes at the end", WEIGHTS, append(b"more"), [WEIGHTS]),
    ("header longer than the file", WEIGHTS, edit_header(lambda h, d: (h, d), 10**7), [WEIGHTS]),
    ("header longer than allowed", WEIGHTS, edit_header(lambda h, d: (h, d), 10**9), [WEIGHTS]),
    ("header length that overflows", WEIGHTS, edit_header(lambda h, d: (h, d), 2**64 - 8),
     [WEIGHTS]),
    ("header that is no JSON", WEIGHTS, edit_header(lambda h, d: (b"{broken", d)), [WEIGHTS]),
    ("header that is no object", WEIGHTS, edit_header(lambda h, d: (b"[]", d)), [WEIGHTS]),
    ("header that is no UTF-8", WEIGHTS, edit_header(lambda h, d: (b'{"\xff": 1}', d)), [WEIGHTS]),
    ("header nested deeply", WEIGHTS, edit_header(lambda h, d: (b'{"a":' * 99999, d)), [WEIGHTS]),
    ("name used twice", WEIGHTS, edit_header(duplicate_name), [WEIGHTS]),
    ("tensors that overlap", WEIGHTS, edit_header(overlap), [WEIGHTS]),
    ("offsets backwards", WEIGHTS, edit_tensor(data_offsets=lambda o: o[::-1]), [WEIGHTS]),
    ("offsets out of the file", WEIGHTS, edit_tensor(data_offsets=[0, 2**62]), [WEIGHTS]),
    ("offset that is negative", WEIGHTS, edit_tensor(data_offsets=[-4, 4]), [WEIGHTS]),
    ("element type unknown", WEIGHTS, edit_tensor(dtype="F33"), ["F33"]),
    ("element type of integers", WEIGHTS, edit_tensor(dtype="I32"), ["i32"]),
    ("element type of another size", WEIGHTS, edit_tensor(dtype="F16"), [WEIGHTS]),
    ("shape of another size", WEIGHTS, edit_tensor(shape=lambda s: [*s, 2]), [WEIGHTS]),
    ("shape of another form", WEIGHTS, edit_tensor(shape=lambda s: [1, 1, *s]), []),
    ("shape that is negative", WEIGHTS, edit_tensor(shape=[-1, -1]), [WEIGHTS]),
    ("shape that overflows", WEIGHTS, edit_tensor(shape=[2**40, 2**40]), [WEIGHTS]),
    ("entry without a shape", WEIGHTS, edit_tensor(shape=None), [WEIGHTS]),
    ("tensor missing", WEIGHTS, edit_header(drop_tensor), []),
    ("tensor too many", WEIGHTS, edit_header(add_tensor), ["surplus.weight"]),
    ("no configuration", "config.json", remove, ["config.json"]),
    ("configuration empty", "config.json", write(""), ["config.json"]),
    ("configuration cut", "config.json", cut(0.5), ["config.json"]),
    ("configuration of another kind", "config.json", write("[1, 2]"), ["config.json"]),
    ("configuration with a key twice", "config.json", write('{"model_type": 1, "model_type": 2}'),
     ["config.json", "model_type"]),
    ("no model_type", "config.json", edit_json(lambda c: c.pop("model_type")), ["config.json"]),
    ("unknown architecture", "config.json",
     edit_json(lambda c: c.update(model_type="florence2", architectures=["Florence2Model"])),
     ["lorence2"]),
    ("unknown decoder", "config.json", put("text_config", "model_type", value="mamba"), ["mamba"]),
    ("unknown tower", "config.json", put("vision_config", "model_type", value="resnet"),
     ["resnet"]),
    ("unknown activation", "config.json", put("text_config", "hidden_act", value="relu7"),
     ["relu7"]),
    ("RoPE of an unknown type", "config.json",
     put("text_config", "rope_parameters", "rope_type", value="spiral"), ["spiral"]),
    ("no tokenizer", "tokenizer.json", remove, ["tokenizer"]),
    ("tokenizer empty", "tokenizer.json", write(""), ["tokenizer.json"]),
    ("tokenizer cut", "tokenizer.json", cut(0.5), ["tokenizer.json"]),
    ("tokenizer of an unknown kind", "tokenizer.json", put("model", "type", value="Telepathy"),
     ["Telepathy"]),
    ("tokenizer configuration cut", "tokenizer_config.json", cut(0.5), ["tokenizer_config.json"]),
    ("chat template broken", "chat_template.jinja", write("{% for x in %}"), ["chat_template"]),
    ("chat template unsupported", "chat_template.jinja", write("{% include 'x' %}"), ["include"]),
    ("generation settings cut", "generation_config.json", cut(0.5), ["generation_config.json"]),
]
# (key..., value): each names the key or, where another field betrays it, at least ends in one line.
for *keys, value in [
        ("text_config", "hidden_size", 0), ("text_config", "hidden_size", -3),
        ("text_config", "hidden_size", 10**18), ("text_config", "hidden_size", "large"),
        ("text_config", "hidden_size", 1.5), ("text_config", "num_hidden_layers", 10**9),
        ("text_config", "num_hidden_layers", 0), ("text_config", "vocab_size", 2**62),
        ("text_config", "vocab_size", 0), ("text_config", "num_attention_heads", 0),
        ("text_config", "num_key_value_heads", 3), ("text_config", "num_key_value_heads", -2),
        ("text_config", "head_dim", 0), ("text_config", "head_dim", 2**33),
        ("text_config", "intermediate_size", -1), ("text_config", "rms_norm_eps", "tiny"),
        ("text_config", "max_position_embeddings", -1), ("vision_config", "image_size", 0),
        ("vision_config", "image_size", 2**31), ("vision_config", "patch_size", 0),
        ("vision_config", "patch_size", -14), ("vision_config", "patch_size", 2**20),
        ("vision_config", "num_attention_heads", 5), ("vision_config", "hidden_size", 2**40),
        ("vision_config", "num_hidden_layers", -1), ("vision_config", "layer_norm_eps", []),
        ("vision_feature_layer", 99), ("vision_feature_layer", -99)]:
    DAMAGED_MODELS.append(
        (f"{'.'.join(keys)} = {value!r}", "config.json", put(*keys, value=value), []))

DAMAGED_SHARDED_MODELS = [
    ("shard missing", SHARD, remove, [SHARD]),
    ("shard cut", SHARD, cut(0.5), [SHARD]),
    ("index cut", INDEX, cut(0.5), [INDEX]),
    ("index without a map", INDEX, write("{}"), [INDEX, "weight_map"]),
    ("index that leaves the folder", INDEX,
     index(lambda m: m.update({some_tensor(m): "../../secret.safetensors"})), ["../../secret"]),
    ("index with an absolute path", INDEX,
     index(lambda m: m.update({some_tensor(m): "/etc/passwd"})), ["/etc/passwd"]),
    ("index that names the wrong shard", INDEX, index(swap_two_shards), []),
    ("index that lacks a tensor", INDEX, index(lambda m: m.pop(some_tensor(m))), []),
]

# (what, name, content, words): pictures that are none; status 1.
GIF = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"


def huge_png():
    """A sound PNG header that promises a picture of 10^10 pixels."""
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", 100000, 100000, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + ihdr +
            struct.pack(">I", zlib.crc32(ihdr)) + bytes(64))


BAD_PICTURES = [
    ("zero bytes", "empty.png", lambda: b"", ["empty"]),
    ("text", "text.png", lambda: b"This is not a picture.\n", []),
    ("text named .jpg", "text.jpg", lambda: b"<html><body>404</body></html>", []),
    ("PNG cut", "cut.png", lambda: PICTURE.read_bytes()[:2000], []),
    ("PNG cut in its header", "head.png", lambda: PICTURE.read_bytes()[:20], []),
    ("PNG of 10^10 pixels", "huge.png", huge_png, []),
    ("JPEG cut", "cut.jpg", lambda: JPEG.read_bytes()[:len(JPEG.read_bytes()) * 2 // 10], []),
    ("JPEG of three bytes", "head.jpg", lambda: b"\xff\xd8\xff", []),
    ("GIF cut", "still.gif", lambda: GIF[:-4], ["GIF", "truncated"]),
    ("TIFF", "scan.tif", lambda: b"II*\0\x08\0\0\0", ["TIFF"]),
    ("WebP damaged", "photo.webp", lambda: b"RIFF\x24\0\0\0WEBPVP8 " + bytes(40), ["WebP"]),
]

# (arguments, status, words): a request that is wrong in itself, None: with status 1 or 2.
IMAGE = ["--image", "{picture}"]
BAD_REQUESTS = [
    (["--picture", "cat.png"], 2, ["--picture"]),
    (["--imge", "{picture}"], 2, ["--imge is not an option", "did you mean --image?"]),
    (["--max-token", "20", *IMAGE], 2, ["did you mean --max-tokens?"]),
    (["--kv_memory", "1GB", *IMAGE], 2, ["did you mean --kv-memory?"]),
    ([*IMAGE, "--zzz", "x"], 2, ["--zzz is not an option", "vlm-run --help"]),
    ([*IMAGE, "--mmproj", "x.gguf"], 2, ["--mmproj", "checkpoint folder"]),
    ([*IMAGE, "--port", "8080"], 2, ["--port", "opens no port"]),
    (["-i", "{picture}"], 2, ["-i is not", "--image FILE"]),
    ([*IMAGE, "-ngl", "99"], 2, ["-ngl", "--device cuda"]),
    (["-hf", "org/name", *IMAGE], 2, ["-hf", "-m ORG/NAME"]),
    ([*IMAGE, "--max_model_len", "4096"], 2, ["--max_model_len", "--kv-memory"]),
    ([*IMAGE, "-np", "8"], 2, ["-np is not an option", "--batch-size"]),
    ([*IMAGE, "-tb=8"], 2, ["-tb is not an option", "-t N"]),
    ([*IMAGE, "-nkvo"], 2, ["-nkvo is not an option"]),
    ([*IMAGE, "-top-k", "4"], 2, ["-top-k is not an option", "did you mean --top-k?"]),
    ([*IMAGE, "-max-tokens=4"], 2, ["did you mean --max-tokens?"]),
    ([*IMAGE, "--chat-format", "x"], 2, ["--chat-format is not an option of vlm-run; see"]),
    ([*IMAGE, "--json-mode"], 2, ["--json-mode is not an option of vlm-run; see"]),
    ([*IMAGE, "--tent", "x"], 2, ["--tent is not an option of vlm-run; see"]),
    ([*IMAGE, "--flash_attn"], 2, ["--flash_attn", "drop it"]),
    ([*IMAGE, "--guided", "x"], 2, ["--guided is not an option"]),
    ([*IMAGE, "--torch_dtype", "x"], 2, ["--torch_dtype", "--dtype auto"]),
    ([*IMAGE, "--dtype", "half"], 2, ["f16 (half)"]),
    ([*IMAGE, "--device", "gpu:1"], 2, ["did you mean cuda:1?"]),
    ([*IMAGE, "--device", "cuda2"], 2, ["did you mean cuda:2?"]),
    ([*IMAGE, "--device", "vulkan"], 2, ['"vulkan"', "no other device is supported"]),
    ([*IMAGE, "--device", "cpu,,cpu"], 2, ['"cpu,,cpu"', "between commas"]),
    ([*IMAGE, "--kv", "int2"], 2, ["did you mean kivi,bits=2?"]),
    ([*IMAGE, "--top-p", "half"], 2, ['--top-p is "half"; expected a number']),
    ([*IMAGE, "-t", "2.5"], 2, ['--threads is "2.5"; expected an integer']),
    ([*IMAGE, "-n", "5000000000"], 2, ["expected a smaller integer"]),
    ([*IMAGE, "--seed", "-7"], 2, ["--seed: -7 is not an integer from 0 to 2^64 - 1"]),
    ([*IMAGE, "-t", "1", "--threads", "2"], 2, ["--threads is given 2 times"]),
    ([*IMAGE, "--top-k"], 2, ["--top-k has no value; expected an integer"]),
    ([*IMAGE, "--json=5"], 2, ["--json takes no value"]),
    ([*IMAGE, "--system", "-", "-p", "-"], 2, ["-p - and --system -"]),
    (["cat.png"], 2, ["cat.png does not exist", "did you mean --image cat.png"]),
    ([*IMAGE, "gone.jpg", "What is this?"], 2, ["gone.jpg does not exist"]),
    (["clip.mp4", "What happens?"], 2, ["did you mean --video clip.mp4"]),
    ([*IMAGE, "What", "is", "this?"], 2, ["3 words", '"What is this?"']),
    ([*IMAGE, "-p", "What?", "Where?"], 2, ["two questions", "What?", "Where?"]),
    ([*IMAGE, ""], 2, ["the question is empty"]),
    (["{batch}"], 2, ["did you mean --batch {batch} --out"]),
    (["{picture}", "--chat", "{folder}/q.txt"], 2, ["did you mean -p @{folder}/q.txt"]),
    (["{folder}"], 1, ["{folder}", "--batch {folder} --out"]),
    (["https://example.org/a.png"], 1, ["is a URL", "download it"]),
    ([*IMAGE, "--kv", "f61"], 2, ["f61", "f16"]),
    ([*IMAGE, "--kv", "f16,bits=2"], 2, ["bits"]),
    ([*IMAGE, "--kv", "f16 + "], 2, ["--kv"]),
    ([*IMAGE, "--kv", ""], 2, ["--kv"]),
    ([*IMAGE, "--kv"], 2, ["--kv"]),
    ([*IMAGE, "-n", "many"], 2, ["many"]),
    ([*IMAGE, "-n", "-1"], 2, ["-1"]),
    ([*IMAGE, "-n", "99999999999999999999"], 2, ["99999999999999999999"]),
    ([*IMAGE, "--temp", "warm"], 2, ["warm"]),
    ([*IMAGE, "--temp", "-1"], 2, ["-1"]),
    ([*IMAGE, "--temp", "nan"], 2, ["nan"]),
    ([*IMAGE, "--top-p", "1.5"], 2, ["1.5"]),
    ([*IMAGE, "--top-k", "-5"], 2, ["-5"]),
    ([*IMAGE, "--repeat-penalty", "0"], 2, ["0"]),
    ([*IMAGE, "--threads", "-1"], 2, ["-1"]),
    ([*IMAGE, "--threads", "1000000"], 2, ["1000000"]),
    ([*IMAGE, "--dtype", "f64"], 2, ["f64"]),
    ([*IMAGE, "--device", "tpu"], 2, ["tpu"]),
    (["--batch", "{folder}/in.jsonl"], 2, ["--out"]),
    (["--out", "{folder}/out.jsonl"], 2, ["--batch"]),
    (["-p", "<image>\nwhat is it?"], None, ["image"]),
    ([*IMAGE, *IMAGE, "-p", "<image>\nwhat is it?"], None, ["image", "2", "1"]),
    ([*IMAGE, "-p", "what is in the scene? " * 200], None, ["512"]),
    (["--image", "{cut}"] * 300, 2, ["300 images", "512", "--batch FOLDER"]),
    (["--image", "{folder}"], 1, ["{folder}", "director"]),
    (["--image", "{folder}/gone.png"], 1, ["{folder}/gone.png"]),
    (["--image", ""], 2, ["--image is empty"]),
    ([*IMAGE, "-n", ""], 2, ["--max-tokens is empty"]),
    ([*IMAGE, "--temp="], 2, ["--temp"]),
    ([*IMAGE, "-p", ""], 2, ["--prompt is empty"]),
    ([*IMAGE, "--kv-memory", ""], 2, ['""']),
    (["--image", "{folder}", "-p", "what?"], 1, ["{folder}", "--batch {folder} --out"]),
    (["--image", "https://example.org/a.png"], 1, ["is a URL", "download it"]),
    (["--image", "data:image/png;base64,AAAA"], 1, ["data URI"]),
    (["--image", "file://{folder}/gone%20.png"], 1, ["gone"]),
    (["--image", "-", "-p", "-"], 2, ["--image - and -p -", "standard input"]),
    (["--image", "-", "--image", "-"], 2, ["standard input can be read once"]),
    (["--batch", "-", "--out", "{folder}/out.jsonl", "-p", "-"], 2, ["-p - and --batch -"]),
    (["--image", "-", "--chat"], 2, ["--image - and --chat"]),
    (["--image", "-"], 1, ["standard input", "empty"]),
    ([*IMAGE, "-p", "-"], 1, ["-p - is empty"]),
    ([*IMAGE, "-p", "@{folder}/gone.txt"], 1, ["gone.txt", "@@TEXT"]),
    ([*IMAGE, "-p", "@/dev/zero"], 1, ["/dev/zero has more than"]),
    (["--batch", "/dev/zero", "--out", "{folder}/out.jsonl"], 1, ["/dev/zero has more than"]),
    (["--batch", "{folder}/*.tga", "--out", "{folder}/out.jsonl"], 1, ["*.tga matches no file"]),
    (["--batch", "{folder}/gone.jsonl", "--out", "{folder}/out.jsonl"], 1, ["{folder}/gone.jsonl"]),
    (["--batch", "{empty}", "--out", "{folder}/out.jsonl"], 1, ["{empty} has no image file"]),
    (["--batch", "{batch}", "--out", "{folder}/no/such/out.jsonl"], 1,
     ["{folder}/no/such", "give a file in a folder"]),
    (["--batch", "{batch}", "--out", "{folder}"], 1, ["{folder}"]),
    (["--batch", "{batch}", "--out", "/dev/full"], 1, ["/dev/full", "regular file"]),
    (["--batch", "{batch}", "--out", "/dev/stdout"], 1, ["/dev/stdout", "regular file"]),
    (["--batch", "{batch}", "--out", "/proc/version"], 1, ["/proc/version"]),
    (["--batch", "{batch}", "--out", "{batch}"], None, ["{batch}"]),
]


class Requests(VlmRun):
    def test_the_golden_model_answers(self):
        result = run("-m", MODEL, "--image", PICTURE, "-p", "what is in the scene?", "-n", 4)
        self.assert_sound(result)
        self.assertNotEqual(result.stdout.strip(), b"")

    def test_a_wrong_request_is_refused_in_one_sentence(self):
        batch = self.folder / "batch.jsonl"
        batch.write_text(json.dumps({"id": 1, "image": str(PICTURE)}) + "\n")
        notes = self.folder / "notes.png"
        notes.write_text("no picture")
        shortened = self.folder / "cut.png"  # whose headers are whole
        shortened.write_bytes(PICTURE.read_bytes()[:2000])
        names = {"folder": str(self.folder), "picture": str(PICTURE), "batch": str(batch),
                 "notes": str(notes), "cut": str(shortened), "empty": str(self.folder / "empty")}
        (self.folder / "empty").mkdir()
        (self.folder / "q.txt").write_text("What is this?")
        for arguments, status, words in BAD_REQUESTS:
            with self.subTest(" ".join(arguments)[:80]):
                arguments = [argument.format(**names) for argument in arguments]
                result = run("-m", MODEL, *arguments)
                self.assert_refused(result, status, [word.format(**names) for word in words])
        self.assertEqual(json.loads(batch.read_text())["id"], 1, "the input was overwritten")

    def test_a_bad_picture_among_many_is_found_before_the_model(self):
        notes = self.folder / "notes.png"
        notes.write_text("no picture")
        result = run("-m", self.folder / "no-model", "--image", PICTURE, "--image", notes)
        self.assert_refused(result, 1, [str(notes), "text"])

    def answer(self, *arguments, **options):
        result = run("-m", MODEL, "-n", 3, "--json", *arguments, **options)
        self.assert_sound(result)
        return json.loads(result.stdout)["tokens"]

    def test_a_picture_comes_from_standard_input_or_a_file_address(self):
        expected = self.answer("--image", PICTURE)
        with PICTURE.open("rb") as file:
            self.assertEqual(self.answer("--image", "-", stdin=file), expected)
        named = self.folder / "a picture.png"
        shutil.copy(PICTURE, named)
        address = f"file://{self.folder}/a%20picture.png"
        self.assertEqual(self.answer("--image", address), expected)

    def test_files_and_a_question_need_no_options(self):
        asked = self.answer("--image", PICTURE, "-p", "what is it?")
        self.assertEqual(self.answer("--image", PICTURE, "what is it?"), asked)
        self.assertEqual(self.answer(PICTURE, "what is it?"), asked)
        self.assertEqual(self.answer("what is it?", PICTURE), asked)
        self.assertEqual(self.answer("-p", "what is it?", PICTURE), asked)
        captioned = self.answer("--image", PICTURE)
        self.assertEqual(self.answer(PICTURE), captioned)
        self.assertEqual(self.answer("--image", PICTURE, PICTURE, "which?"),
                         self.answer("--image", PICTURE, "--image", PICTURE, "-p", "which?"))
        bracket = shutil.copy(PICTURE, self.folder / "[a,b]")
        self.assertEqual(self.answer("--image", "[a,b]", cwd=self.folder), captioned, bracket)
        self.assertEqual(self.answer(PICTURE, "--", "-p"), self.answer(PICTURE, "-p", "-p"))

    def test_subcommands_of_other_tools_are_known(self):
        for arguments, words in ((["serve", "-m", MODEL], ["serve", "opens no port"]), (["run", PICTURE], ["no subcommands"]),
                                 (["explain", "kivi"], ["vlm-kv"]), (["chat", "-m", "x"], ["write --chat"])):
            with self.subTest(arguments):
                self.assert_refused(run(*arguments), 2, words)
        self.answer(PICTURE, "explain")  # a question, where it is not the first word

    def test_options_of_other_tools_are_aliases(self):
        expected = self.answer(PICTURE, "--temp", "0.5", "--seed", 3, "--system", "be brief")
        for tokens, temperature, system in (("--max-new-tokens", "--temperature", "--system-prompt"),
                                            ("--max_tokens", "--temperature", "--system_prompt"),
                                            ("--n-predict", "--temp", "--system")):
            result = run("-m", MODEL, "--json", tokens, 3, temperature, "0.5", "--seed", 3, system, "be brief", PICTURE)
            self.assert_sound(result)
            self.assertEqual(json.loads(result.stdout)["tokens"], expected, tokens)
        self.assertNotIn(b"--max-new-tokens", run("--help").stdout)

    def test_standard_input_that_is_not_read_is_told(self):
        told = b"standard input is not read; add -p -"
        question = self.folder / "q.txt"
        question.write_text("what is it?")
        with question.open("rb") as file:
            self.assertIn(told, run("-m", MODEL, "-n", 2, "-q", PICTURE, stdin=file).stderr)
            file.seek(3)  # as a loop of a shell that has read a line
            self.assertNotIn(told, run("-m", MODEL, "-n", 2, "-q", PICTURE, stdin=file).stderr)
        self.assertIn(told, run("-m", MODEL, "-n", 2, "-q", PICTURE, input=b"what is it?").stderr)
        for arguments in ([PICTURE, "what?"], [PICTURE, "-p", "-"], ["--image", "-"]):
            data = PICTURE.read_bytes() if arguments[-1] == "-" and arguments[0] == "--image" else b"what is it?"
            self.assertNotIn(told, run("-m", MODEL, "-n", 2, "-q", *arguments, input=data).stderr)
        self.assertNotIn(told, run("-m", MODEL, "-n", 2, "-q", PICTURE).stderr)

    def test_no_argument_or_variable_reaches_the_terminal_raw(self):
        """An escape sequence in each of them, which would clear the terminal or set its title."""
        hostile = "x\x1b[2J\x1b]0;title\x07\x9b\r\u202e"
        kv = PROGRAM.with_name("vlm-kv")
        commands = [[PROGRAM, "-m", MODEL, "--image", PICTURE, option, hostile]
                    for option in ("--device", "--dtype", "--kv-memory", "--image-backend", "--image-aspect", "--seed",
                                   "--kv", "--kv-profile", "-n", "--temp", "--top-k", "--batch-size", "--shard", "-t",
                                   "--video", "--nonsense")]
        commands += [[PROGRAM, "-m", MODEL, "--image", PICTURE, "--kv", "@" + hostile], [PROGRAM, hostile + ".png"],
                     [PROGRAM, "--" + hostile], [PROGRAM, "-" + hostile], [PROGRAM, "-m", hostile, PICTURE],
                     [PROGRAM, "--batch", hostile, "--out", self.folder / "o"],
                     [PROGRAM, "-q", "-m", MODEL, "--batch", PICTURE.parent, "--out", self.folder / "no" / hostile / "o"],
                     [kv, "list", hostile], [kv, hostile], [kv, "explain", hostile, "--tokens", "5"],
                     [kv, "explain", "f16", "--tokens", hostile], [kv, "explain", "f16", "--tokens", "5", "-m", hostile],
                     [kv, "fidelity", "--kv", "f16", "--data", hostile], [kv, "profile", "--data", "x", "--out", hostile],
                     [kv, "fidelity", "--kv", "f16", "--data", "x", "--plot", PICTURE / hostile],
                     [kv, "list", "--markdown", hostile]]
        environments = [{}] * len(commands)
        for name in ("KVLM_HOME", "HF_HOME", "HF_HUB_CACHE"):
            folder = self.folder / hostile
            snapshot = folder / "hub/models--a--b/snapshots" / hostile if name == "HF_HOME" else folder / "models--a--b/snapshots" / hostile
            snapshot.mkdir(parents=True, exist_ok=True)
            commands.append([PROGRAM, "-m", "pocket" if name == "KVLM_HOME" else "a/b", PICTURE])
            environments.append({name: str(folder)})
        for command, environment in zip(commands, environments):
            if not Path(command[0]).is_file():
                continue
            with self.subTest(command=command[1:], environment=environment):
                result = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True,
                                        timeout=TIMEOUT_S, env=os.environ | environment)
                self.assertIn(result.returncode, (1, 2))
                said = (result.stdout + result.stderr).decode("utf-8")
                self.assertEqual([c for c in said if not c.isprintable() and c != "\n"], [], said)
                self.assertEqual(len(said.splitlines()), 1, said)

    def test_a_question_comes_from_standard_input_or_a_file(self):
        expected = self.answer("--image", PICTURE, "-p", "what is\nit?")
        question = self.folder / "question.txt"
        question.write_text("what is\nit?\n")
        self.assertEqual(self.answer("--image", PICTURE, "-p", f"@{question}"), expected)
        with question.open("rb") as file:
            self.assertEqual(self.answer("--image", PICTURE, "-p", "-", stdin=file), expected)
        question.write_text("@home\r\n")
        self.assertEqual(self.answer("--image", PICTURE, "-p", f"@{question}"),
                         self.answer("--image", PICTURE, "-p", "@@home"))

    def test_a_bad_picture_is_refused_in_one_sentence(self):
        for what, name, content, words in BAD_PICTURES:
            with self.subTest(what):
                picture = self.folder / name
                picture.write_bytes(content())
                result = run("-m", MODEL, "--image", picture, "-p", "what is it?")
                self.assert_refused(result, 1, [name, *words])

    def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_read(self):
        hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        for device in ("cuda", "cuda:0", "cuda:7"):
            result = run("-m", self.folder / "nowhere", "--image", PICTURE, "--device", device,
                         env=hidden)
            self.assert_refused(result, 1, ["--device cpu", "CUDA"])
        self.assert_sound(run("-m", MODEL, "--image", PICTURE, "-n", 2, "--device", "auto",
                              env=hidden))
        bench = PROGRAM.with_name("vlm-bench")
        if bench.is_file():
            for command in ("latency", "throughput", "kernels"):
                result = subprocess.run(
                    [bench, command, "--device", "cuda",
                     *(["--batch", "1"] if command == "throughput" else [])],
                    capture_output=True, timeout=TIMEOUT_S, text=True, env=hidden)
                self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
                self.assertTrue(result.stderr.startswith("vlm-bench: "), result.stderr)
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                self.assertIn("--device cpu", result.stderr)

    def test_a_full_disk_under_stdout_is_reported(self):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [PROGRAM, "-m", MODEL, "-q", "--image", PICTURE, "-n", "4"],
                stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
        result.stdout = b""
        self.assert_refused(result, 1, [])


class Help(VlmRun):
    def test_help_fits_a_terminal(self):
        result = run("--help")
        self.assert_sound(result)
        for line in result.stdout.decode().splitlines():
            self.assertLessEqual(len(line), 80, line)
        self.assertIn(b'{"id": 1, "image": "a.png"', result.stdout)
        self.assertIn(b"--kv-memory SIZE", result.stdout)
        self.assertIn(b"[FILE...] [QUESTION]", result.stdout)
        self.assertIn(b"Exit status:", result.stdout)
        self.assertIn(b"KVLM_HOME", result.stdout)


class Hints(VlmRun):
    """The bundled model answers anything, so a person must be told what it knows."""

    NOTE = b"note: the bundled models know only drawn scenes and documents"

    def setUp(self):
        super().setUp()
        self.bundled = ROOT / "tools/pocket/heldout/scenes/scene_000.png"
        self.own = shutil.copy(self.bundled, self.folder / "own.png")

    def notes(self, *arguments, **options):
        result = run("-n", 2, *arguments, **options)
        self.assert_sound(result)
        return result.stderr.count(self.NOTE)

    def test_a_picture_of_ones_own_gets_a_note_once(self):
        self.assertEqual(self.notes("--image", self.own), 1)
        with open(self.own, "rb") as file:
            self.assertEqual(self.notes("--image", "-", stdin=file), 1)
        lines = f"/image {self.own}\nwhat?\n/image {self.own}\nwhat?\n".encode()
        self.assertEqual(self.notes("--chat", input=lines), 1)
        records = self.folder / "in.jsonl"
        records.write_text("".join(json.dumps({"id": i, "image": str(self.own)}) + "\n"
                                   for i in range(3)))
        self.assertEqual(self.notes("--batch", records, "--out", self.folder / "out.jsonl"), 1)

    def test_nothing_else_gets_one(self):
        elsewhere = self.folder / "pocket/heldout/scenes/a.png"  # as of another installation
        elsewhere.parent.mkdir(parents=True)
        shutil.copy(self.bundled, elsewhere)
        self.assertEqual(self.notes("--image", elsewhere), 0)
        records = self.folder / "in.jsonl"
        records.write_text('{"id": 1, "image": "gone.png"}\n')
        result = run("-n", 2, "--batch", records, "--out", self.folder / "out.jsonl")
        self.assertEqual((result.returncode, result.stderr.count(self.NOTE)), (1, 0))
        self.assertEqual(self.notes("--image", self.own, "-q"), 0)
        self.assertEqual(self.notes("--image", self.bundled), 0)
        self.assertEqual(self.notes("--image", os.path.relpath(self.bundled)), 0)
        self.assertEqual(self.notes("--image", self.own, "-m", MODEL), 0)
        self.assertEqual(self.notes("-p", "what?"), 0)


class Models(VlmRun):
    def refused(self, folder, words):
        result = run("-m", folder, "--image", PICTURE, "-p", "what is it?", "-n", 2)
        self.assert_refused(result, 1, words)

    def test_a_model_that_is_not_there_is_refused(self):
        self.refused(self.folder / "nowhere", ["nowhere"])

    def test_an_empty_folder_is_refused(self):
        self.refused(self.folder, [str(self.folder), "config.json"])

    def test_a_file_in_place_of_a_folder_is_refused(self):
        self.refused(PICTURE, [PICTURE.name])

    def test_a_damaged_model_is_refused_in_one_sentence(self):
        for source, damages in ((MODEL, DAMAGED_MODELS), (SHARDED, DAMAGED_SHARDED_MODELS)):
            for what, file, damage, words in damages:
                with self.subTest(what):
                    folder = self.checkpoint(source)
                    damage(folder / file)
                    self.refused(folder, words)


class Policies(VlmRun):
    def test_a_spec_is_refused_before_any_weight_is_read(self):
        folder = self.folder / "model"
        shutil.copytree(MODEL, folder)
        for file in folder.glob("*.safetensors"):
            cut(0.5)(file)
        whole = run("-m", folder, "--image", PICTURE)
        self.assertIn(b"safetensors", whole.stderr)
        for spec, words in (("kivi,bits=9", b"bits=9"), ("kivi,group=32,residual=40", b"residual"),
                            ("h2o,keep=0.5 + xquant", b"xquant"), ("nothing", b"nothing")):
            result = run("-m", folder, "--image", PICTURE, "--kv", spec)
            self.assertIn(words, result.stderr)
            self.assertNotIn(b"safetensors", result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1)
            self.assertIn(result.returncode, (1, 2))


class Answers(VlmRun):
    """What --json holds (tools/run/report.h)."""

    def test_json_has_every_field(self):
        for spec in ("f16", "kivi,group=8,residual=8", "prefixkv,keep=0.5 + int4"):
            result = run("-m", MODEL, "--image", PICTURE, "-n", 3, "--json", "--kv", spec)
            self.assert_sound(result)
            answer = json.loads(result.stdout)
            self.assertEqual(set(answer), {
                "text", "tokens", "finish_reason", "model", "device", "prompt_tokens",
                "visual_tokens", "generated_tokens", "timings", "kv", "memory", "version"})
            self.assertEqual(set(answer["timings"]), {
                "load_ms", "vision_ms", "prefill_ms", "ttft_ms", "decode_ms", "prefill_tps",
                "decode_tps"})
            self.assertLessEqual({"spec", "bytes", "f16_bytes", "stored_bits", "nominal_bits",
                                  "slots"}, set(answer["kv"]))
            self.assertEqual(answer["generated_tokens"], len(answer["tokens"]))
            memory = answer["memory"]
            self.assertLessEqual({"weights_bytes", "cache_bytes", "workspace_bytes"}, set(memory))
            self.assertGreaterEqual(memory["cache_bytes"], answer["kv"]["bytes"])

    def test_bench_prints_json(self):
        bench = PROGRAM.with_name("vlm-bench")
        if not bench.is_file():
            self.skipTest(f"{bench} is not built")
        result = subprocess.run([bench, "latency", "-m", MODEL, "--prompt-tokens", "20", "--tokens",
                                 "2", "--repeats", "1", "--json"], capture_output=True,
                                timeout=TIMEOUT_S)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertGreater(json.loads(result.stdout)["decode"]["median"], 0)


class Chats(VlmRun):
    def chat(self, lines, *arguments):
        return subprocess.run([PROGRAM, "-m", MODEL, "--chat", "-n", "3", "-q",
                               *map(str, arguments)], input="\n".join(lines) + "\n",
                              capture_output=True, timeout=TIMEOUT_S, text=True)

    def test_turns_answer_one_after_the_other(self):
        for spec in ("f16", "kivi,group=8,residual=8", "calibquant", "h2o,keep=0.5"):
            result = self.chat(["what", "/clear", f"/image {PICTURE}", "and now", "again", "/quit"],
                               "--kv", spec)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(len(result.stdout.splitlines()), 3)

    def test_help_and_the_end(self):
        result = self.chat(["/help", "/?"])
        self.assertEqual((result.returncode, result.stdout), (0, ""))
        self.assertEqual(result.stderr.count("/image FILE   adds"), 2)
        for last in ("exit", "quit", "/bye"):
            self.assertEqual(len(self.chat(["what", last, "not asked"]).stdout.splitlines()), 1)

    def test_a_line_has_a_bound(self):
        with open("/dev/zero", "rb") as zero:
            result = subprocess.run([PROGRAM, "-m", MODEL, "--chat", "-q"], stdin=zero, capture_output=True, timeout=TIMEOUT_S)
        self.assert_refused(result, 1, ["--chat's input line 1 is longer than 16777216 bytes"])

    def test_lines_between_quotes_are_one_question(self):
        result = self.chat(['"""what', "", '/clear is it"""', "and now"])
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        result = self.chat(["what", '"""and', "now"])
        self.assertEqual(result.returncode, 1)
        self.assertIn('line 2 begins a question with """', result.stderr)

    def test_beyond_the_context_a_piped_chat_goes_on(self):
        long = "word " * 600
        result = self.chat(["what", long, "and now", "/clear", "again", long])
        self.assertEqual((result.returncode, len(result.stdout.splitlines())), (1, 3), result.stderr)
        self.assertEqual(result.stderr.count("start over with /clear"), 2)
        self.assertIn("vlm-run: line 2: ", result.stderr)
        self.assertNotIn("images", result.stderr)

    def test_a_command_that_fails_ends_a_piped_chat(self):
        for command, status in (("/image gone.png", 1), ("/imgae x", 2), ("/clear all", 2)):
            result = self.chat(["what", command, "not asked"])
            self.assertEqual((result.returncode, len(result.stdout.splitlines())), (status, 1), result.stderr)
            self.assertIn("line 2: ", result.stderr)
            self.assertIn("the chat ends here", result.stderr)

    def test_a_wrong_command_is_named(self):
        result = self.chat(["/nonsense"])
        self.assertEqual(result.returncode, 2)
        self.assertIn("/nonsense is not a command", result.stderr)

    def test_a_first_question_is_a_question(self):
        result = self.chat(["/quit"], "-p", "what")
        self.assertEqual((result.returncode, len(result.stdout.splitlines())), (0, 1))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    unittest.main()
