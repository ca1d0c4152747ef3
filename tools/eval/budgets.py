#!/usr/bin/env python3
"""The table of token eviction that papers of 2026 print: four tasks at 50, 20, 10 and 5 % of the tokens kept, rule by rule.

    python3 tools/eval/budgets.py --out OUT --device cuda --batch-size 64
    python3 tools/eval/budgets.py --out OUT --model MODEL --set docvqa=val_v1.0.json --set chartqa=test-00000-of-00001.parquet

Runs docvqa.py and vqa.py under f16 and under every rule at every budget, and writes OUT/budgets.md and OUT/budgets.csv. Without
--set: our own held-out questions in the form of each task. Start the same command again to continue where it ended.
"""

from __future__ import annotations

import csv
import io
import json
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
TITLES = {DOCUMENTS: "DocVQA", CHARTQA: "ChartQA", TEXTVQA: "TextVQA", VIZWIZ: "VizWiz"}
BUDGETS = (0.5, 0.2, 0.1, 0.05)
RULES = ("random", "streaming", "h2o", "snapkv", "pyramidkv", "prefixkv", "mixkv", "tgv")  # those that the build has


def named(text: str) -> tuple[str, Path]:
    """TASK=PATH of --set and --images."""
    name, equals, path = text.partition("=")
    if name not in TASKS or not equals or not path:
        raise arguments.argparse.ArgumentTypeError(f"{text!r} is not TASK=PATH with one of {', '.join(TASKS)}")
    return name, Path(path)


def rules_of(programs: Programs) -> list[str]:
    known = {policy["name"] for policy in json.loads(programs.run("vlm-kv", ["list", "--json"]))["policies"]}
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
    return made + [word for spec in specs for word in ("--kv", spec)]


def table(results: dict[str, list[Result]], rules: list[str], shares: list[float]) -> str:
    """A row a rule and budget, a column a task: the score that decides the task, and what f16 has."""
    head = ["kept", "rule", *(f"{TITLES[TASKS[name]]} ({_metric(rows)})" for name, rows in results.items()), "mean of f16's"]
    lines = [head, ["---"] * len(head)]
    for share, rule in [(None, "f16"), *((share, rule) for share in shares for rule in rules)]:
        found = [_find(rows, _spec(rule, share)) for rows in results.values()]
        plain = [_find(rows, "f16") for rows in results.values()]
        cells = [f"{row.scores[_metric(rows)]:.4f}" for row, rows in zip(found, results.values())]
        parts = [row.scores[_metric(rows)] / whole.scores[_metric(rows)]
                 for row, whole, rows in zip(found, plain, results.values()) if whole.scores[_metric(rows)]]  # fmt: skip
        mean = f"{100 * sum(parts) / len(parts):.1f} %" if parts else "-"
        lines.append(["all" if share is None else f"{100 * share:g} %", f"`{rule}`", *cells, mean])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def page(model: str, results: dict[str, list[Result]], rules: list[str], shares: list[float]) -> str:
    about = [f"{TITLES[TASKS[name]]}: {rows[0].split}, protocol {rows[0].protocol}, n = {len(rows[0].items)}"
             for name, rows in results.items()]  # fmt: skip
    return f"## {model}\n\n{table(results, rules, shares)}\n{'; '.join(about)}. Scores are of 0 to 1.\n"


def rows_of(model: str, results: dict[str, list[Result]], rules: list[str], shares: list[float]) -> list[dict]:
    return [
        {"model": model, "task": TITLES[TASKS[name]], "split": row.split, "protocol": row.protocol, "n": len(row.items),
         "kept": share if share is not None else 1, "rule": rule, "spec": row.spec, "metric": _metric(rows),
         "score": row.scores[_metric(rows)], "stored_bits": row.stored_bits}
        for name, rows in results.items()
        for share, rule in [(None, "f16"), *((share, rule) for share in shares for rule in rules)]
        for row in [_find(rows, _spec(rule, share))]
    ]  # fmt: skip


def _spec(rule: str, share: float | None) -> str:
    return rule if share is None else f"{rule},keep={share:g}"


def _find(rows: list[Result], spec: str) -> Result:
    found = next((row for row in rows if row.spec == spec), None)
    if found is None:
        raise EvaluationError(f"{spec} has no result; start the same command again")
    return found


def _metric(rows: list[Result]) -> str:
    return str(primary(list(rows[0].scores)))


def main() -> int:
    parser = arguments.Parser(description=__doc__, formatter_class=arguments.argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for answers, scores and the table")
    add("--model", action="append", help="as vlm-run's -m; repeatable; default: pocket")
    add("--set", action="append", type=named, default=[], metavar="TASK=FILE", help=f"a data set; repeatable; tasks: {', '.join(TASKS)}")
    add("--images", action="append", type=named, default=[], metavar="TASK=FOLDER", help="folder of its images; repeatable")
    add("--rule", action="append", help=f"a retention rule; repeatable; default: of {', '.join(RULES)} those that there are")
    add("--budgets", type=budgets, default=list(BUDGETS), help="shares of the tokens that are kept; default: 0.5,0.2,0.1,0.05")
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
    rules = list(dict.fromkeys(options.rule or rules_of(Programs(options.build))))
    names = [name for name in TASKS if not options.set or name in dict(options.set)]
    specs = ["f16", *(_spec(rule, share) for share in options.budgets for rule in rules)]
    pages, rows = [], []
    for model in dict.fromkeys(options.model or ["pocket"]):
        results = {}
        for name in names:
            folder = options.out / f"{slug(Path(model).name)}-{name}"
            words = command(name, model, folder, specs, options)
            if subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode != 0:
                raise EvaluationError(f"{name} failed; fix what it reports and start the same command again")
            results[name] = read_results(folder / "results.json")
            say(f"{model}: {name} is done")
        pages.append(page(model, results, rules, options.budgets))
        rows += rows_of(model, results, rules, options.budgets)
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
