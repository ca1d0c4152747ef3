#!/usr/bin/env python3
"""Quantizes the decoders of tests/golden with compressed-tensors and records what transformers answers with them.

For every folder a file FOLDER.safetensors: the packed tensors of each decoder matrix as the package writes them (W4A16, a scale
for each output: the golden shapes have no groups of 32), the reference's `greedy_ids` and `greedy_logits` (of the
first four steps) for case 0, and in its metadata the `quantization_config`. The reference is transformers in f32 with the weights
that the package unpacks: the written checkpoint itself, loaded; for OpenGVLab's layout, which transformers does not load, the -hf
model with these weights. tests/tools/quantized_checkpoints_test.py puts folder and file together and runs vlm-run.

    venv/bin/pip install -r tools/golden/requirements.txt compressed-tensors==0.20.1 accelerate
    venv/bin/python tools/golden/quantized.py
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import internvl
import PIL.Image
import safetensors.torch
import torch
import transformers
from common import GREEDY_LOGIT_STEPS, greedy, require
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForImageTextToText, AutoProcessor

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
SURE = 0.0005  # lead of the best token, in logits; ids end before the first step with less
LEAST_STEPS = 6
SHORT_SYSTEM = "be brief"
ARGS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="channel")
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGS, format="pack-quantized")
SIXTEEN_BITS = ("lm_head", "output$", "vision_tower", "vision_model", "visual", "multi_modal_projector", "mlp1")
# A matrix of a decoder layer, in every spelling of the golden folders.
DECODER = re.compile(
    r"(language_model|^model)\.(model\.)?layers\.\d+\.(self_attn|mlp|attention|feed_forward)\.\w+\.weight$"
)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, under the names of its files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix as the package stores it."""
    weight = weight.float()
    scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), ARGS)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, SCHEME)
    return {name: tensor for name, tensor in packed.items() if tensor is not None}


def unpack(packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """The matrix that the package makes of these tensors."""
    return PackedQuantizationCompressor.decompress(dict(packed), SCHEME)["weight"].float()


def quantization_config() -> dict[str, Any]:
    """As recipes write it; transformers matches modules, whose names are not those of the files."""
    config = QuantizationConfig(
        config_groups={"group_0": SCHEME}, quant_method="compressed-tensors", format="pack-quantized",
        quantization_status="compressed", ignore=[f"re:.*{part}.*" for part in SIXTEEN_BITS],
    )  # fmt: skip
    return json.loads(config.model_dump_json(exclude_none=True))


def unpacked_model(folder: Path, quantized: Path) -> Any:
    """The model of `folder` with the matrices that transformers and the package load from `quantized`: the package's own
    modules lose the types of some families' outputs."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    loaded, report = AutoModelForImageTextToText.from_pretrained(quantized, output_loading_info=True, **options)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        require(not report[what], f"{folder.name} has {what} {sorted(report[what])}.")
    model = AutoModelForImageTextToText.from_pretrained(folder, **options)
    state = model.state_dict()
    parts = ("weight_packed", "weight_scale", "weight_shape")
    for name, module in loaded.named_modules():
        if hasattr(module, "weight_packed"):
            state[f"{name}.weight"] = unpack({part: getattr(module, part).data for part in parts})
    model.load_state_dict(state)
    return model.eval()


def pictures_of(folder: Path, case: dict[str, Any]) -> list[PIL.Image.Image]:
    """The pictures of a case."""
    return [PIL.Image.open(folder / name).convert("RGB") for name in case["images"]]


def original_reference(
    folder: Path, case: dict[str, Any], packed: dict[str, dict[str, torch.Tensor]]
) -> tuple[Any, dict[str, Any]]:
    """The -hf model of a folder in OpenGVLab's layout with these matrices, and what it is given in a case. InternLM2's own
    system text is longer than the context of its golden folder: SHORT_SYSTEM is in its place."""
    (spec,) = (spec for spec in internvl.ORIGINALS if spec.name == folder.name)
    with tempfile.TemporaryDirectory() as temporary:
        model = internvl.save_internvl(Path(temporary), spec.of).float().eval()
        processor = AutoProcessor.from_pretrained(temporary)
    prompt = case["prompt"].replace("<image>", "<IMG_CONTEXT>").replace(internvl.SYSTEM_INTERNLM2_CHAT, SHORT_SYSTEM)
    inputs = dict(processor(text=[prompt], images=pictures_of(folder, case), return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    recorded = safetensors.torch.load_file(folder / "golden.safetensors")
    inputs["pixel_values"] = recorded["case0.pixel_values.pil"]
    text = model.config.text_config
    heads, pairs = text.num_attention_heads, text.num_key_value_heads
    state = model.state_dict()
    matrices = {k: unpack(v) for k, v in packed.items()}
    for own in [own for own in state if re.search(r"language_model\.layers.*_proj\.weight$", own)]:
        new = internvl.original_name(own)
        for old, internlm in internvl.INTERNLM2_NAMES if spec.of.internlm2 else []:
            new = new.replace(old, internlm)
        part = re.search(r"self_attn\.([qkv])_proj", new) if spec.of.internlm2 else None
        if part is None:
            state[own] = matrices[new.removesuffix(".weight")]
            continue
        joined = matrices[re.sub(r"self_attn\.[qkv]_proj\.weight$", "attention.wqkv", new)]
        rows = joined.reshape(pairs, heads // pairs + 2, -1, joined.shape[1])
        chosen = {"q": rows[:, :-2], "k": rows[:, -2], "v": rows[:, -1]}[part[1]]
        state[own] = chosen.reshape(-1, joined.shape[1])
    model.load_state_dict(state)
    model.set_attn_implementation("eager")
    return model, inputs


def inputs_of(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """What the model is given in case 0."""
    processor = AutoProcessor.from_pretrained(folder)
    bos = processor.tokenizer.bos_token
    more = {"add_special_tokens": False} if bos and case["prompt"].startswith(bos) else {}
    inputs = dict(processor(text=[case["prompt"]], images=pictures_of(folder, case), return_tensors="pt", **more))
    inputs.pop("token_type_ids", None)
    return inputs


def write(folder: Path, out: Path) -> None:
    """The file of one golden folder."""
    manifest = json.loads((folder / "manifest.json").read_text())
    goldens = GOLDEN / manifest.get("goldens_of", folder.name)
    case = json.loads((goldens / "manifest.json").read_text())["cases"][0]
    tensors = tensors_of(folder)
    matrices = {name: t for name, t in tensors.items() if DECODER.search(name) and t.dim() == 2}
    packed = {name.removesuffix(".weight"): pack(t) for name, t in matrices.items()}
    require(bool(packed), f"{folder.name} has no matrices of a decoder.")
    quantization = quantization_config()
    flat = {f"{name}.{part}": tensor for name, parts in packed.items() for part, tensor in parts.items()}
    if "internvl_original" in folder.name:
        model, inputs = original_reference(folder, case, packed)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            whole = Path(temporary) / folder.name
            shutil.copytree(folder, whole, ignore=shutil.ignore_patterns("model*.safetensors*", "golden*"))
            rest = {k: t for k, t in tensors.items() if k.removesuffix(".weight") not in packed}
            safetensors.torch.save_file(rest | flat, whole / "model.safetensors", {"format": "pt"})
            config = json.loads((whole / "config.json").read_text())
            (whole / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
            model = unpacked_model(folder, whole)
        inputs = inputs_of(goldens, case)
    with torch.no_grad():
        result = greedy(model, inputs)
    top = result.scores.topk(2, dim=-1).values
    sure = ((top[:, 0] - top[:, 1]) >= SURE).tolist()
    steps = next((i for i, good in enumerate(sure) if not good), len(sure))
    require(steps >= LEAST_STEPS, f"{folder.name} has {steps} sure tokens.")
    flat["greedy_ids"] = torch.tensor(result.ids[:steps])
    flat["greedy_logits"] = result.logits[:GREEDY_LOGIT_STEPS].contiguous()
    metadata = {"quantization_config": json.dumps(quantization), "transformers": transformers.__version__}
    path = out / f"{folder.name}.safetensors"
    safetensors.torch.save_file(flat, path, metadata)
    path.chmod(0o644)
    print(f"{folder.name:28} {len(packed):3} matrices {steps:3} steps {path.stat().st_size:7} bytes", flush=True)


def main() -> None:
    """Parses the command line and writes the files."""
    parser = argparse.ArgumentParser(description="Record quantized twins of tests/golden.")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/runtime/data/weights/golden")
    parser.add_argument("--only", nargs="+", metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path.parent for path in GOLDEN.glob("*/manifest.json")):
        if not arguments.only or folder.name in arguments.only:
            write(folder, arguments.out)


if __name__ == "__main__":
    main()
