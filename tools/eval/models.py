"""What a script must know of a model before it runs: where its files are and of which family it is.

Standard library only; names are resolved as vlm-run does it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from errors import EvaluationError
from storage import digest, read_json

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = {"pocket": "pocket-llava"} | {name: name for name in ("pocket-llava", "pocket-internvl", "pocket-qwen")}


@dataclass(frozen=True)
class Model:
    name: str  # as --model has it
    folder: Path
    family: str  # llava, internvl, qwen2, qwen2_5, qwen3, or what config.json says of another
    fingerprint: str  # of config.json and of the names and sizes of the weights


def find_model(name: str) -> Model:
    """A bundled name, a folder, or org/name in the Hugging Face cache; EvaluationError where there is none."""
    folder = _folder(name)
    if folder is None:
        raise EvaluationError(
            f"--model {name} is no folder, none of {', '.join(BUNDLED)}, and not in the Hugging Face cache; give a folder"
        )
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type", "")) if isinstance(config, dict) else ""
    weights = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    return Model(name, folder, family_of(kind), digest(json.dumps([config, weights], sort_keys=True)))


def family_of(model_type: str) -> str:
    """The families that protocols tell apart, of config.json's model_type."""
    for start, family in (
        ("qwen2_5_vl", "qwen2_5"), ("qwen2_vl", "qwen2"), ("qwen3_vl", "qwen3"), ("internvl", "internvl"),
        ("llava", "llava"),
    ):  # fmt: skip
        if model_type.startswith(start):
            return family
    return model_type


def _folder(name: str) -> Path | None:
    if name in BUNDLED:
        return ROOT / "tools" / "pocket" / BUNDLED[name]
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if name.count("/") != 1:
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    main = hub / "refs" / "main"
    snapshots = [hub / "snapshots" / main.read_text().strip()] if main.is_file() else []
    snapshots += sorted(hub.glob("snapshots/*"))
    return next((folder for folder in snapshots if (folder / "config.json").is_file()), None)
