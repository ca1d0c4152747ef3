#!/usr/bin/env python3
"""Measures decode under many specs with one build, or with two side by side on one card, and writes rows of docs/data.

    tools/results/builds.py --device cuda --out docs/data/decode.csv build/cuda
    tools/results/builds.py --device cuda --rounds 3 --out compare.csv OLD/build/cuda NEW/build/cuda

decode: steps of SPECS at BATCHES sequences of a released model's shape, and of SMALL_SPECS at a head_dim of 64 (vlm-bench
throughput). kernels: attention over packed tokens of every format (vlm-bench kernels). captions: 400 images of the bundled
scenes (vlm-run --batch). --only picks parts. With two builds the rounds alternate, and the table has the old build's time over
the new one's (above 1: the new one is faster), least and greatest over the rounds. Standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import data
from data import CALIBQUANT, EXACT_2_BITS, ROOT, Figure
from measure import commit_of, given

BATCHES = "1,4,16,64"
LARGE, SMALL = "synthetic:internvl2.5-8b", "synthetic:llava-tinyllama-1.1b"
QUANTIZERS = ("int8", "int4", "kivi", "kivi,residual=32", "kivi,bits=4", "kivi,bits=1", "asymkv", "xquant", "vidkv", EXACT_2_BITS,
              "vidkv,protect=0.2", "head_quantile", "head_quantile,bits=2", "calibquant", CALIBQUANT[4], CALIBQUANT[2],
              "calibquant,span=per_image")  # fmt: skip
RULES = ("h2o", "tova", "pyramidinfer", "streaming", "snapkv", "prefixkv", "vlcache", "expected_attention")
SPECS = ("f16", *QUANTIZERS, *(f"{rule},keep=0.5" for rule in RULES), "h2o,keep=0.5 + int4", "h2o,keep=0.5 + kivi",
         "tova,keep=0.5 + int4", "tova,keep=0.5 + kivi", "streaming,keep=0.5 + kivi", "prefixkv,keep=0.5 + int4",
         "h2o,keep=0.5 + vidkv", "kivi,bits=6")  # fmt: skip
SMALL_SPECS = ("f16", "int4", "kivi", "calibquant", CALIBQUANT[2], "h2o,keep=0.5", "tova,keep=0.5", "pyramidinfer,keep=0.5",
               "h2o,keep=0.5 + int4", "h2o,keep=0.5 + kivi")  # fmt: skip
CAPTIONS = ("f16", "int4", "kivi", CALIBQUANT[2], "h2o,keep=0.5")

# What identifies a figure in every build: (part, model, spec, batch, metric).
Key = tuple[str, str, str, str, str]


def lines_of(build: Path, words: list[str]) -> list[dict]:
    print("$", shlex.join(words), file=sys.stderr, flush=True)
    done = subprocess.run([str(build / "tools" / words[0]), *words[1:]], check=False, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if not rows:
        raise SystemExit(f"builds.py: {shlex.join(words)} ended with status {done.returncode} and no figures")
    return rows


def decode(build: Path, options: argparse.Namespace):
    shapes = ((LARGE, SPECS, 3328), (SMALL, SMALL_SPECS, 1536))
    for model, specs, prompt in [(options.model, SPECS, 64)] if options.model else shapes:
        words = ["vlm-bench", "throughput", "-m", model, "--device", options.device, "--prompt-tokens", str(prompt), "--tokens", "16",
                 "--repeats", "1", "--batch", options.batches, "--json", *given(tuple(options.kv or specs))]  # fmt: skip
        for row in lines_of(build, words):
            if "error" in row:
                print(f"builds.py: {row['spec']}, batch {row['budget']}: {row['error']}", file=sys.stderr)
                continue
            yield ("decode", model, row["spec"], str(row["batch"]), "builds_step_ms"), row["step_ms"]["median"], row, words


def kernels(build: Path, options: argparse.Namespace):
    cuda = options.device != "cpu"
    words = ["vlm-bench", "kernels", "--device", options.device, "--repeats", "3", "--json",
             *(["--batch", "32", "--rows", "8192"] if cuda else ["-t", "1"])]  # fmt: skip
    for row in lines_of(build, words):
        key = ("kernels", f"head_dim {row['head_dim']}, {row['q_per_kv']} queries", row["format"], str(row["batch"]), "attention_us")
        yield key, row["packed_ns_per_row"]["median"] * row["rows"] * row["batch"] / 1000, row, words


def captions(build: Path, options: argparse.Namespace):
    scenes = sorted((ROOT / "tools/pocket/heldout/scenes").glob("*.png"))
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        asked.write_text("".join(json.dumps({"id": n, "image": str(path)}) + "\n" for n, path in enumerate([*scenes, *scenes])), "utf-8")
        for spec in options.kv or CAPTIONS:
            words = ["vlm-run", "-m", options.model or LARGE, "--device", options.device, "--batch", "in.jsonl", "--out", "out.jsonl", "-n", "64", "-q",
                     "--kv", spec]  # fmt: skip
            out.unlink(missing_ok=True)
            print("$", shlex.join(words), file=sys.stderr, flush=True)
            start = time.monotonic()
            subprocess.run([str(build / "tools/vlm-run"), *words[1:]], cwd=folder, check=True)
            seconds = time.monotonic() - start
            yield ("captions", options.model or LARGE, spec, "", "captions_s"), seconds, json.loads(out.read_text("utf-8").splitlines()[0]), words


def weights_of(part: str, model: str) -> str:
    return "" if part == "kernels" else "random" if model.startswith("synthetic:") else "real"


PARTS = {"decode": decode, "kernels": kernels, "captions": captions}


def table(builds: list[Path], measured: list[dict[Key, list[float]]]) -> str:
    """A row a figure: the medians, and with two builds how much faster the second is."""
    lines = []
    for key, first in measured[0].items():
        if any(key not in of for of in measured):
            continue
        medians = [f"{statistics.median(of[key]):10.3f}" for of in measured]
        ratios = [old / new for old, new in zip(measured[0][key], measured[-1][key])] if len(builds) > 1 else []
        shown = f"  {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
        lines.append(f"{key[1]:32} {key[2]:38} {key[3]:>3} {key[4]:14} {' '.join(medians)}{shown}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", type=Path, metavar="BUILD", help="folder of a build; at most two, the old one first")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--device", default="cuda", help="as vlm-bench's; default: cuda")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="a part; repeatable; default: all")
    parser.add_argument("--kv", action="append", help="a spec in place of the usual ones; repeatable")
    parser.add_argument("--batches", default=BATCHES, help=f"sequences; default: {BATCHES}")
    parser.add_argument("--model", help="decode, captions: a model in place of the usual ones, for a trial")
    parser.add_argument("--rounds", type=int, default=2, help="times that each build is measured; default: 2")
    options = parser.parse_args()
    if len(options.builds) > 2:
        parser.error("give one build, or an old and a new one")
    for program in (build / "tools" / name for build in options.builds for name in ("vlm-bench", "vlm-run")):
        if not program.is_file():
            parser.error(f"{program} does not exist; give the folder of a build that has its programs, such as build/cuda")
    measured: list[dict[Key, list[float]]] = [{} for _ in options.builds]
    found: dict[tuple[int, Key], Figure] = {}
    for round_ in range(options.rounds):
        order = list(enumerate(options.builds))
        for which, build in order if round_ % 2 == 0 else order[::-1]:
            for part in options.only or PARTS:
                for key, value, row, words in PARTS[part](build, options):
                    values = measured[which].setdefault(key, [])
                    values.append(value)
                    found[which, key] = Figure(
                        datetime.date.today().isoformat(), commit_of(row["version"]), row["device"],
                        "" if part == "kernels" else key[1], weights_of(part, key[1]), key[2], key[3],
                        key[1] if part == "kernels" else str(row.get("prompt_tokens", "")), key[4],
                        f"{statistics.median(values):.6g}", f"{min(values):.6g}", f"{max(values):.6g}", shlex.join(words))  # fmt: skip
    data.write(options.out, list(found.values()))
    print(f"{options.out}: {len(found)} figures")
    print(table(options.builds, measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
