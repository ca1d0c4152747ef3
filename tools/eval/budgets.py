#!/usr/bin/env python3
"""The table of token eviction that papers of 2026 print: four tasks at 50, 20, 10 and 5 % of the tokens kept, rule by rule;
or, with --bits, at equal stored bits.

    python3 tools/eval/budgets.py --out OUT --device cuda --batch-size 64
    python3 tools/eval/budgets.py --out OUT --bits 8,4,2
    python3 tools/eval/budgets.py --out OUT --model MODEL --set docvqa=val_v1.0.json --set chartqa=test-00000-of-00001.parquet

Runs docvqa.py and vqa.py under f16 and under every rule at every budget, and writes OUT/budgets.md and OUT/budgets.csv. Without
--set: our own held-out questions in the form of each task. Start the same command again to continue where it ended.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import arguments
from errors import EvaluationError, run_main, say
from fidelity import budgets
from files import CHARTQA, DOCUMENTS, TEXTVQA, VIZWIZ
from metrics import primary
from models import ROOT
from results import Result, read_results
from runs import Programs, slug
from shards import shard_of
from storage import write_text

TASKS = {"docvqa": DOCUMENTS, "chartqa": CHARTQA, "textvqa": TEXTVQA, "vizwiz": VIZWIZ}
Rows = dict[tuple[float | None, str], Result]  # of one model and task, by budget (of f16 none) and rule
TITLES = {DOCUMENTS: "DocVQA", CHARTQA: "ChartQA", TEXTVQA: "TextVQA", VIZWIZ: "VizWiz"}
BUDGETS = (0.5, 0.2, 0.1, 0.05)
MORE_THAN_ASKED = 0.1  # of a budget: rounding to whole tokens stores less than this above it
RULES = ("random", "streaming", "h2o", "snapkv", "pyramidkv", "prefixkv", "mixkv", "tgv")  # those that the build has


def named(text: str) -> tuple[str, Path]:
    """TASK=PATH of --set and --images."""
    name, equals, path = text.partition("=")
    if name not in TASKS or not equals or not path:
        raise arguments.argparse.ArgumentTypeError(f"{text!r} is not TASK=PATH with one of {', '.join(TASKS)}")
    return name, Path(path)


def bits(text: str) -> list[float]:
    return [arguments.positive(part) for part in text.split(",")]


def rules_of(programs: Programs) -> list[str]:
    known = {policy["name"] for policy in programs.policies()["policies"]}
    return [rule for rule in RULES if rule in known]


def command(name: str, model: str, folder: Path, specs: list[str], options) -> list[str]:
    script = ["docvqa.py"] if TASKS[name] == DOCUMENTS else ["vqa.py", "--task", TASKS[name]]
    made = [sys.executable, str(ROOT / "tools" / "eval" / script[0]), *script[1:], "--out", str(folder), "--model", model]
    for option, given in (("--annotations", options.set), ("--images", options.images)):
        made += [option, str(dict(given)[name])] if name in dict(given) else []
    for option in ("limit", "protocol"):
        made += [f"--{option}", str(getattr(options, option))] if getattr(options, option) is not None else []
    for option in ("fidelity", "device", "jobs", "batch_size", "threads", "build"):
        made += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    made += [word for path in options.rules for word in ("--rules", str(path))]
    return made + [word for spec in specs for word in ("--kv", spec)]


def run(name: str, model: str, rules: list[str], options) -> Rows:
    """One start of the task's script, or one for each of --bits, which share f16's answers."""
    folder = options.out / f"{slug(Path(model).name)}-{name}"
    found: Rows = {}
    for levels in [[level] for level in options.bits] if options.bits else [options.budgets]:
        keys = [(level, rule) for level in levels for rule in rules]
        specs = [rule if options.bits else f"{rule},keep={level:g}" for level, rule in keys]
        words = command(name, model, folder, ["f16", *specs], options) + (["--bits", f"{levels[0]:g}"] if options.bits else [])
        if subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode != 0:
            raise EvaluationError(f"{name} failed; fix what it reports and start the same command again")
        found |= zip([(None, "f16"), *keys], read_results(folder / "results.json"), strict=True)
    return found


def table(results: dict[str, Rows], share: bool = True) -> str:
    """A row a budget and rule, a column a task: the score that decides the task, and what f16 has. Budgets are a share of the
    tokens, or bits."""
    metrics = {name: _metric(rows) for name, rows in results.items()}
    plain = {name: rows[None, "f16"].scores[metrics[name]] for name, rows in results.items()}
    head = ["kept" if share else "bits", "rule", *(f"{TITLES[TASKS[name]]} ({metrics[name]})" for name in results), "mean of f16's"]
    lines = [head, ["---"] * len(head)]
    for level, rule in next(iter(results.values())):
        found = {name: rows[level, rule].scores[metrics[name]] for name, rows in results.items()}
        parts = [found[name] / plain[name] for name in results if plain[name]]
        mean = f"{100 * sum(parts) / len(parts):.1f} %" if parts else "-"
        kept = "all" if level is None else _share(level, [rows[level, rule] for rows in results.values()]) if share else f"{level:g}"
        lines.append([kept, f"`{rule}`", *(f"{score:.4f}" for score in found.values()), mean])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _share(level: float, rows: list[Result]) -> str:
    """A budget; and the most that a task stores, if what the rule always keeps, such as SnapKV's window, is more."""
    stored = max((row.stored_bits or 0) / 16 for row in rows)
    return f"{100 * level:g} %" + (f" ({100 * stored:.0f} % stored)" if stored > level * (1 + MORE_THAN_ASKED) else "")


def page(model: str, results: dict[str, Rows], share: bool) -> str:
    plain = {name: rows[None, "f16"] for name, rows in results.items()}
    about = [f"{TITLES[TASKS[name]]}: {row.split}, protocol {row.protocol}, n = {len(row.items)}" for name, row in plain.items()]
    return f"## {model}\n\n{table(results, share)}\n{'; '.join(about)}. Scores are of 0 to 1.\n"


def rows_of(model: str, results: dict[str, Rows], share: bool) -> list[dict]:
    return [
        {"model": model, "task": TITLES[TASKS[name]], "split": row.split, "protocol": row.protocol, "n": len(row.items),
         "kept" if share else "bits": level or (1 if share else 16), "rule": rule, "spec": row.spec, "metric": _metric(rows),
         "score": row.scores[_metric(rows)], "stored_bits": row.stored_bits}
        for name, rows in results.items()
        for (level, rule), row in rows.items()
    ]  # fmt: skip


def _metric(rows: Rows) -> str:
    return str(primary(list(rows[None, "f16"].scores)))


def main() -> int:
    parser = arguments.Parser(description=__doc__, formatter_class=arguments.argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=arguments.folder, required=True, help="folder for answers, scores and the table")
    add("--model", action="append", help="as vlm-run's -m; repeatable; default: pocket")
    add("--set", action="append", type=named, default=[], metavar="TASK=FILE", help=f"a data set; repeatable; tasks: {', '.join(TASKS)}")
    add("--images", action="append", type=named, default=[], metavar="TASK=FOLDER", help="folder of its images; repeatable")
    add("--rule", action="append", help=f"a retention rule; repeatable; default: of {', '.join(RULES)} those that there are")
    levels = parser.add_mutually_exclusive_group()
    levels.add_argument("--budgets", type=budgets, default=BUDGETS, help="shares of the tokens that are kept; default: 0.5,0.2,0.1,0.05")
    levels.add_argument("--bits", type=bits, help="stored bits per element of a prompt instead, such as 8,4,2; solved for each task")
    add("--protocol", choices=("native", "lmms-eval", "vlmevalkit"), help="default: native for our own sets, lmms-eval for others")
    add("--limit", type=arguments.at_least(1), help="the first records of each set only")
    add("--fidelity", type=arguments.at_least(0), default=16, help="records over which stored bits are measured (default: 16)")
    add("--device", default="auto", help="as vlm-run's")
    add("--jobs", type=arguments.at_least(1), default=1, help="specs at a time")
    add("--batch-size", type=arguments.at_least(1), default=8, help="as vlm-run's")
    add("--threads", type=arguments.at_least(0), default=0, help="as vlm-run's")
    arguments.add_build(parser)
    options = parser.parse_args()
    if shard_of(os.environ).count > 1:
        raise EvaluationError("budgets.py makes one table, so start it once; --jobs and --batch-size use a machine fully")
    if repeated := [name for name, _ in options.set if [x for x, _ in options.set].count(name) > 1]:
        raise EvaluationError(f"--set {repeated[0]} is given twice; give one file of each task")
    options.budgets = list(dict.fromkeys(options.budgets))
    rules = list(dict.fromkeys(options.rule or rules_of(arguments.programs(options))))
    names = [name for name in TASKS if not options.set or name in dict(options.set)]
    pages, rows = [], []
    for model in dict.fromkeys(options.model or ["pocket"]):
        results = {}
        for name in names:
            results[name] = run(name, model, rules, options)
            say(f"{model}: {name} is done")
        pages.append(page(model, results, share=not options.bits))
        rows += rows_of(model, results, share=not options.bits)
        made = io.StringIO()
        writer = csv.DictWriter(made, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(options.out / "budgets.csv", made.getvalue())
        write_text(options.out / "budgets.md", "\n".join(pages))
    print("\n".join(pages), end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_main("budgets.py", main))
