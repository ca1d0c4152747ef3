#!/usr/bin/env python3
"""Exports tiny random checkpoints and their golden activations from the reference implementation.

Every folder below the output directory is a complete Hugging Face checkpoint (a program can be run
on it) together with golden.safetensors, the tensors the reference computed at named taps, and
manifest.json, which says what was run. README.md beside this file lists the commands and
tests/golden/README.md the tensors. A family is a module here that lists its folders; this file only
writes and compares them.

The bytes are a function of these files and of the library versions: seeds are fixed, no time stamp
is written, and --check re-creates everything and compares.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import transformers
from common import ExportError, require

FOLDER_LIMIT_BYTES = 2 << 20

# Modules with a function folders() -> {folder name: function that writes it below a root}.
FAMILIES = ["llava15", "qwen_vl", "internvl", "llava_next", "llava_onevision"]


# ---------------------------------------------------------------- command line


def files_below(folder: Path) -> dict[str, Path]:
    """Every file of a folder by its path inside it, sorted."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def export(root: Path, folders: dict[str, Callable[[Path], None]]) -> None:
    """Writes every folder anew below root and prints the sizes."""
    print(f"{'folder':24} {'files':>5} {'weights':>9} {'golden':>9} {'total':>9}  bytes")
    grand = 0
    for name, write in folders.items():
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
        write(root)
        files = files_below(root / name)
        for path in files.values():
            path.chmod(0o644)
        sizes = {file: path.stat().st_size for file, path in files.items()}
        weights = sum(
            size for file, size in sizes.items() if file.startswith("model") and "index" not in file
        )
        total = sum(sizes.values())
        grand += total
        golden = sizes.get("golden.safetensors", 0)
        print(
            f"{name:24} {len(sizes):5} {weights:9} {golden:9} {total:9}",
            flush=True,
        )
        require(
            total < FOLDER_LIMIT_BYTES,
            f"the folder {name} has {total} bytes, over {FOLDER_LIMIT_BYTES}.",
        )
    print(f"{'total':24} {'':5} {'':9} {'':9} {grand:9}")


def describe_difference(ours: Path, theirs: Path) -> str:
    """One line on how two files differ; safetensors are compared tensor by tensor."""
    if ours.suffix != ".safetensors":
        return "other bytes"
    a, b = safetensors.torch.load_file(ours), safetensors.torch.load_file(theirs)
    if a.keys() != b.keys():
        return f"other names: {sorted(a.keys() ^ b.keys())[:4]}"
    worst = ("", 0.0)
    for name in a:
        if a[name].shape != b[name].shape:
            return f"{name} has another shape"
        if a[name].numel():
            worst = max(
                worst,
                (name, float((a[name].double() - b[name].double()).abs().max())),
                key=lambda w: w[1],
            )
    return f"largest difference {worst[1]:.3g} in {worst[0] or 'no tensor'}"


def check(root: Path, folders: dict[str, Callable[[Path], None]]) -> int:
    """Re-creates the folders elsewhere and returns how many files differ in their bytes."""
    differing = 0
    with tempfile.TemporaryDirectory() as temporary:
        export(Path(temporary), folders)
        for name in folders:
            fresh, kept = files_below(Path(temporary) / name), files_below(root / name)
            for file in sorted(fresh.keys() | kept.keys()):
                new, old = Path(temporary) / name / file, root / name / file
                if file not in kept or file not in fresh:
                    print(f"{name}/{file}: only in the {'new' if file in fresh else 'kept'} folder")
                elif new.read_bytes() != old.read_bytes():
                    print(f"{name}/{file}: {describe_difference(new, old)}")
                else:
                    continue
                differing += 1
    print(f"{differing} files differ")
    return differing


def main() -> int:
    """Parses the command line and exports or checks."""
    available: dict[str, Callable[[Path], None]] = {}
    for family in FAMILIES:
        available |= importlib.import_module(family).folders()
    default = Path(__file__).resolve().parents[2] / "tests" / "golden"
    parser = argparse.ArgumentParser(
        description="Export golden activations of tiny random checkpoints."
    )
    parser.add_argument(
        "--out", type=Path, default=default, help="directory of the folders (default: tests/golden)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FOLDER", help="write or check only these folders"
    )
    parser.add_argument(
        "--check", action="store_true", help="re-create the folders elsewhere and compare bytes"
    )
    parser.add_argument("--list", action="store_true", help="print the folder names and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(available))
        return 0
    unknown = sorted(set(arguments.only or []) - available.keys())
    if unknown:
        print(
            f"export.py: no folder is called {unknown[0]}; --list prints the names.",
            file=sys.stderr,
        )
        return 2
    chosen = {
        name: write
        for name, write in available.items()
        if not arguments.only or name in arguments.only
    }

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if arguments.check:
            return 1 if check(arguments.out, chosen) else 0
        export(arguments.out, chosen)
    except ExportError as error:
        print(f"export.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
