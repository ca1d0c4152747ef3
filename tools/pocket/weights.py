"""Weights of a model in training: bf16, in two files of equal size, under the module's own names."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILES = 2


def save(model: torch.nn.Module, folder: Path) -> None:
    """Writes weights-1.safetensors and so on; each file is complete or the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    share, part, parts = sum(v.numel() for v in state.values()) / FILES, {}, []
    for name, value in state.items():
        part[name] = value
        if len(parts) < FILES - 1 and sum(v.numel() for v in part.values()) >= share:
            parts.append(part)
            part = {}
    for k, part in enumerate([*parts, part], 1):
        path = folder / f"weights-{k}.safetensors"
        save_file(part, path.with_suffix(".part"), metadata={"format": "pt"})
        path.with_suffix(".part").chmod(0o644)
        os.replace(path.with_suffix(".part"), path)


def load(model: torch.nn.Module, folder: Path) -> None:
    """Reads what `save` wrote; every weight must be there."""
    state = {k: v.float() for path in sorted(folder.glob("weights-*.safetensors")) for k, v in load_file(path).items()}
    model.load_state_dict(state)


def copy(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@torch.no_grad()
def restore(model: torch.nn.Module, kept: list[torch.Tensor]) -> None:
    for p, value in zip(model.parameters(), kept):
        p.copy_(value)


def is_finite(model: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())
