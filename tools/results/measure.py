#!/usr/bin/env python3
"""Measures what the results page shows, with one build on one machine, and writes it as rows of docs/data.

    tools/results/measure.py speed --build build/cuda --device cuda --out docs/data/speed.csv
    tools/results/measure.py captions --build build/cuda --device cuda --model synthetic:llava-1.5-7b --batch-size 128 \\
        --out docs/data/captions_speed.csv
    tools/results/measure.py answers --build build/cuda --device cuda --jobs 8 --batch-size 64 --out docs/data/answers.csv

speed: decode steps, the sequences that a memory budget holds, and prefill, of a released model's shape with random weights
(vlm-bench), under the specs of SPEED. answers: captions and documents of the three bundled models (coco.py, docvqa.py of
tools/eval) under the specs of ANSWERS, over all held-out records. captions: the bundled scenes twice, 400 files, to captions
of 64 tokens by vlm-run --batch, of a released model's shape, loading included. All print what they run. Standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import data
from data import BATCHES, BUDGETS, CALIBQUANT, EXACT_2_BITS, MODELS, ROOT, Figure

MODEL = "synthetic:internvl2.5-8b"
PROMPT = 3328
RESAMPLES = 2000

# The rows of the table to pick by budget, then what the plots show besides.
TABLE = ("f16", "int8", "int4", "kivi,residual=32", EXACT_2_BITS, CALIBQUANT[4], CALIBQUANT[2], "calibquant",
         "prefixkv,keep=0.5", "prefixkv,keep=0.5 + int4")  # fmt: skip
SPEED = (*TABLE, "kivi", "xquant", "head_quantile", "vidkv", "h2o,keep=0.5", "snapkv,keep=0.5")
CAPTIONS = ("f16", "int4", "kivi", CALIBQUANT[2], "prefixkv,keep=0.5")
ANSWERS = (*SPEED, "kivi,bits=4", "kivi,bits=1", "asymkv", "calibquant,bits=2", "head_quantile,bits=2",
           "uniform,keep=0.5", "streaming,keep=0.5", "random,keep=0.5", "prefixkv,keep=0.2", "prefixkv,keep=0.2 + int4",
           "random,keep=0.2", "vlcache,keep=0.5", "expected_attention,keep=0.5")  # fmt: skip


def commit_of(version: str) -> str:
    """The commit in a program's version line."""
    match = re.search(r"\b[0-9a-f]{7,40}\b(?!\+changes)", version)
    return match[0][:7] if match else version


def given(specs: tuple[str, ...]) -> list[str]:
    return [word for spec in specs for word in ("--kv", spec)]


class Bench:
    """Runs vlm-bench and keeps its figures as rows."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.figures: list[Figure] = []

    def run(self, *words: str) -> tuple[str, list[dict]]:
        """(the command as typed, its JSON lines)."""
        command = ["vlm-bench", *words, "-m", self.options.model, "--device", self.options.device, "--json"]
        print("$", shlex.join(command), file=sys.stderr, flush=True)
        program = [str(self.options.build / "tools" / command[0]), *command[1:]]
        done = subprocess.run(program, check=False, stdout=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        if not lines:  # a spec that does not fit is a line with its error, and status 1
            raise SystemExit(f"measure.py: {shlex.join(command)} ended with status {done.returncode} and no figures")
        return shlex.join(command), lines

    def add(self, command: str, row: dict, metric: str, value: float, spread: dict | None = None, batch: object = "",
            spec: str | None = None) -> None:  # fmt: skip
        ends = [f"{spread[key]:.6g}" for key in ("min", "max")] if spread else ["", ""]
        random = self.options.model.startswith("synthetic:")
        self.figures.append(Figure(
            datetime.date.today().isoformat(), commit_of(row["version"]), row["device"], self.options.model,
            "random" if random else "real", row["spec"] if spec is None else spec, str(batch), str(row.get("prompt_tokens", "")),
            metric, f"{value:.6g}", *ends, command))  # fmt: skip

    def steps(self, specs: tuple[str, ...]) -> None:
        command, lines = self.run("throughput", "--prompt-tokens", str(self.options.prompt_tokens), "--tokens", "16", "--repeats",
                                  str(self.options.repeats), "--batch", ",".join(map(str, self.options.batches)), *given(specs))  # fmt: skip
        for row in lines:
            if "error" in row:
                print(f"measure.py: {row['spec']}, batch {row['budget']}: {row['error']}", file=sys.stderr)
                continue
            batch = row["batch"]
            self.add(command, row, "step_ms", row["step_ms"]["median"], row["step_ms"], batch)
            self.add(command, row, "decode_tokens_s", row["tokens_per_s"], None, batch)
            self.add(command, row, "copy_percent", row["copy_percent"], None, batch)
            self.add(command, row, "stored_bits", row["stored_bits"], None, batch)
            self.add(command, row, "copy_gb_s", row["copy_bytes_per_s"] / 1e9, None, batch)

    def budgets(self, specs: tuple[str, ...]) -> None:
        command, lines = self.run("throughput", "--prompt-tokens", str(self.options.prompt_tokens), "--tokens", "16", "--repeats",
                                  "1", "--kv-memory", ",".join(self.options.budgets), *given(specs))  # fmt: skip
        for row in lines:
            if "error" in row:
                print(f"measure.py: {row['spec']}, {row['budget']}: {row['error']}", file=sys.stderr)
                continue
            self.add(command, row, f"sequences_in_{row['budget']}", row["batch"], None, row["batch"])
            self.add(command, row, f"decode_in_{row['budget']}_tokens_s", row["tokens_per_s"], None, row["batch"])

    def prefill(self, specs: tuple[str, ...]) -> None:
        command, lines = self.run("latency", "--prompt-tokens", str(self.options.prompt_tokens), "--tokens", "8", "--repeats", "5",
                                  *given(specs))  # fmt: skip
        for row in lines:
            rate = row["prefill"]
            ms = {name: 1000 * row["prompt_tokens"] / rate[key]
                  for name, key in (("median", "median"), ("min", "max"), ("max", "min"))}  # fmt: skip
            self.add(command, row, "prefill_ms", ms["median"], ms, 1)


def speed(options: argparse.Namespace) -> list[Figure]:
    bench = Bench(options)
    specs = tuple(options.kv or SPEED)
    bench.prefill(specs)
    bench.steps(specs)
    bench.budgets(specs)
    return bench.figures


def captions(options: argparse.Namespace) -> list[Figure]:
    figures = []
    options.work = options.work / "captions"
    options.work.mkdir(parents=True, exist_ok=True)
    scenes = sorted((ROOT / "tools/pocket/heldout/scenes").glob("*.png"))[: options.limit]
    lines = [json.dumps({"id": number, "image": str(path)}) for number, path in enumerate([*scenes, *scenes])]
    asked = options.work / "in.jsonl"
    asked.write_text("\n".join(lines) + "\n", "utf-8")
    for spec, size in itertools.product(options.kv or CAPTIONS, options.batch_size):
        took, row = [], {}
        command = ["vlm-run", "-m", options.model, "--device", options.device, "--batch", "in.jsonl", "--out", "out.jsonl",
                   "--batch-size", size, "-n", "64", "-q", "--kv", spec]  # fmt: skip
        program = [str(options.build / "tools" / command[0]), *command[1:]]
        words = [str(options.work / word) if word.endswith(".jsonl") else word for word in program]
        for _ in range(options.repeats):
            out = options.work / "out.jsonl"
            for old in options.work.glob("out*"):
                old.unlink()
            print("$", shlex.join(command), file=sys.stderr, flush=True)
            start = time.monotonic()
            subprocess.run(words, check=True)
            took.append(time.monotonic() - start)
            row = json.loads(out.read_text("utf-8").splitlines()[0])
        found = (shlex.join(command), spec, len(lines))
        ends = {"min": min(took), "max": max(took)}
        for metric, value, spread in (("captions_s", statistics.median(took), ends),
                                      ("captions_images_s", len(lines) / statistics.median(took),
                                       {"min": len(lines) / ends["max"], "max": len(lines) / ends["min"]})):  # fmt: skip
            figures.append(Figure(datetime.date.today().isoformat(), commit_of(row["version"]), row["device"], options.model,
                                  "random" if options.model.startswith("synthetic:") else "real", spec, size,
                                  f"{len(lines)} images", metric, f"{value:.6g}", f"{spread['min']:.6g}", f"{spread['max']:.6g}",
                                  found[0]))  # fmt: skip
    return figures


def texts(folder: Path) -> dict[str, str]:
    """id -> answer of a spec's folder."""
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()]
    return {str(row["id"]): row["text"].strip() for row in rows}


def interval(values: list[float]) -> tuple[float, float]:
    """95 % percentile interval of the mean over resamples of the records."""
    draw = random.Random(1)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def answers(options: argparse.Namespace) -> list[Figure]:
    figures = []
    for script, score in (("coco.py", "slots"), ("docvqa.py", "ANLS")):
        for model in options.models:
            out = options.work / f"{script}-{Path(model).name}"
            command = ["python3", f"tools/eval/{script}", "--out", str(out), "--model", model, "--device", options.device,
                       "--jobs", str(options.jobs), "--batch-size", options.batch_size[0], "--tune", "0",
                       "--skip", "pycocoevalcap", *given(tuple(options.kv or ANSWERS))]  # fmt: skip
            if options.limit:
                command += ["--limit", str(options.limit)]
            print("$", shlex.join(command), file=sys.stderr, flush=True)
            subprocess.run([*command, "--build", str(options.build)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            figures += rows_of(out, script, score, model)
    return figures


def rows_of(out: Path, script: str, score: str, model: str) -> list[Figure]:
    results = json.loads((out / "results.json").read_text("utf-8"))
    said = {row["spec"]: texts_of(out, row["spec"]) for row in results}
    what = {"coco.py": "captions", "docvqa.py": "documents"}[script]
    found = []
    for row in results:
        n = len(row["items"])

        def add(metric: str, value: float, ends: tuple[float, float] | None = None, row: dict = row) -> None:
            low, high = (f"{end:.6g}" for end in ends) if ends else ("", "")
            command = f"tools/eval/{script} --model {model} --kv {shlex.quote(row['spec'])} --skip pycocoevalcap"
            found.append(Figure(datetime.date.today().isoformat(), commit_of(row["versions"]["kvlm"]), row["device"], Path(model).name, "real",
                                row["spec"], "", what, metric, f"{value:.6g}", low, high, command))  # fmt: skip

        values = [item[score] for item in row["items"].values()]
        add(f"{what}_{'facts' if score == 'slots' else score.lower()}", row["scores"][score], interval(values))
        if "exact" in row["scores"]:
            add(f"{what}_right_of_{n}", round(row["scores"]["exact"] * n))
        if "f16" in said:
            same = sum(said[row["spec"]][key] == text for key, text in said["f16"].items())
            add(f"{what}_as_f16_of_{n}", same)
        if row["stored_bits"] is not None:
            add(f"{what}_stored_bits", row["stored_bits"])
        if row["kl"] is not None:
            add(f"{what}_kl_nats", row["kl"])
    return found


def texts_of(out: Path, spec: str) -> dict[str, str]:
    for path in sorted(out.rglob("run.json")):
        run = json.loads(path.read_text("utf-8"))
        if run.get("spec") == spec or run.get("kv") == spec:
            return texts(path.parent)
    raise FileNotFoundError(f"{out} has no folder of {spec}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "captions", "answers"))
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="folder of the build")
    parser.add_argument("--device", default="cpu", help="as vlm-run's")
    parser.add_argument("--kv", action="append", help="a spec in place of the usual ones; repeatable")
    parser.add_argument("--model", default=MODEL, help="speed, captions: the model")
    parser.add_argument("--models", nargs="+", default=MODELS, help="answers: the models, which may be folders")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="answers: programs at a time")
    parser.add_argument("--batch-size", nargs="+", default=["16"], help="captions, answers: records at once; captions: several")
    parser.add_argument("--limit", type=int, help="captions, answers: only the first records")
    parser.add_argument("--work", type=Path, help="captions, answers: folder for their files; answers are resumed there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        figures = {"speed": speed, "captions": captions, "answers": answers}[options.what](options)
    data.write(options.out, figures)
    print(f"{options.out}: {len(figures)} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
