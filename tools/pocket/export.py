"""Writes trained weights of a pocket model as a Hugging Face checkpoint folder.

    python3 export.py qwen --weights WEIGHTS --tokenizer FOLDER --out pocket-qwen
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import weights

SHARD = "14MB"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def save(family, model: torch.nn.Module, tokenizer: Path, out: Path) -> None:
    """Writes weights (bf16, shards under 14 MB), configuration, tokenizer, processor and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(device="cpu", dtype=torch.bfloat16).save_pretrained(out, max_shard_size=SHARD)
    if hasattr(family, "hub_name"):
        _rename(out, family.hub_name)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, out / name)
    for name, value in family.processor_files().items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(family.CHAT_TEMPLATE)
    for path in out.iterdir():
        path.chmod(0o644)


def _rename(out: Path, name_of) -> None:
    """Gives the saved weights the names of released checkpoints."""
    for path in sorted(out.glob("*.safetensors")):
        save_file({name_of(k): v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    index = out / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] = {name_of(k): v for k, v in sorted(value["weight_map"].items())}
    index.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    from train import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--weights", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer's files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    options = parser.parse_args()
    family = FAMILIES[options.family]
    model = family.build()
    weights.load(model, options.weights)
    save(family, model, options.tokenizer, options.out)


if __name__ == "__main__":
    main()
