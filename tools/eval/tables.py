#!/usr/bin/env python3
"""Every quality table of the bundled models: what each cache policy does to their answers, on one page.

    tools/eval/tables.py --out OUT --device cuda --jobs 8 --batch-size 64

Runs coco.py and docvqa.py over all 200 records of our held-out sets for every model and every spec below and of
claims.py; fidelity.py, PrefixKV's protocol, at its nine budgets over captions; video.py over pocket-qwen's videos under
VidKV. Settings are calibrated on the images of tools/pocket/tuning. report.py makes the page: OUT/report/report.md.
Start it again to continue where it ended. --model, which may be a folder, and --set run a part; parts may run at the
same time, since each has a folder of its own. The report covers all finished parts. On a machine without the scorers' packages give --skip
pycocoevalcap, then --merge --report on one that has them: no model runs again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import arguments
import claims
from errors import EvaluationError, run_main
from factors import normal
from models import ROOT
from runs import slug
from scorers import PACKAGE
from shards import shard_of
from significance import import_numpy

POCKET = ROOT / "tools" / "pocket"
MODELS = ("pocket-llava", "pocket-internvl", "pocket-qwen")
FORCED = 100  # records of KL, top-1 and stored bits
TUNED = 16  # records that settings are calibrated on
SKIPPABLE = (PACKAGE, "plots")

# Every policy at its paper's setting, by bit width and by share of tokens kept, and compositions; the pairs that decide an ordering
# are those of claims.py.
SPECS = """
f16
int8
int4
turboquant
turboquant,key_bits=3,value_bits=3
nf4
kivi,bits=8
kivi,bits=4
kivi
kivi,residual=32
kivi,bits=1
kivi,bits=1,residual=32
asymkv
head_quantile,bits=8
head_quantile,bits=4
head_quantile,bits=2
head_quantile
head_quantile,key_bits=16,value_bits=1
head_quantile,key_bits=1,value_bits=16
head_quantile,key_bits=2,value_bits=1
head_quantile,key_bits=1,value_bits=2
calibquant,bits=8
calibquant,bits=4
calibquant,bits=2
calibquant
xquant
xquant,dominant=1
xquant,layer_group=3
xquant,layer_group=4
vidkv,key_bits=2,value_bits=2
vidkv,key_bits=2,value_bits=2,residual=32
vidkv,value_bits=2
vidkv
vidkv,residual=32
vidkv,value_bits=1
vidkv,key_bits=1.25
vidkv,profile=official
random,keep=0.5
uniform,keep=0.5
prefixkv,keep=0.5
streaming,keep=0.5
h2o,keep=0.5
snapkv,keep=0.5
pyramidkv,keep=0.5
tova,keep=0.5
elastic,keep=0.5
vlcache,keep=0.5
elastic,keep=0.5,profile=official
vlcache,keep=0.5,profile=paper
pyramidinfer,keep=0.5
knorm,keep=0.5
keydiff,keep=0.5
expected_attention,keep=0.5
mixkv,keep=0.5
tgv,keep=0.5
calibquant,bits=2 + int4,scope=text
calibquant,bits=2,rotate=hadamard + int4,scope=text,rotate=hadamard
calibquant,key_bits=2,value_bits=1,rotate=hadamard + int4,scope=text,rotate=hadamard
head_quantile,bits=2,rotate=hadamard + int4,scope=text,rotate=hadamard
calibquant,bits=4 + int4,scope=text
head_quantile,bits=4 + int4,scope=text
vidkv,key_bits=2,value_bits=2,residual=32,scope=visual + int4,scope=text
prefixkv,keep=0.5 + int4
prefixkv,keep=0.9 + int4
h2o,keep=0.5 + int4
prefixkv,keep=0.5 + calibquant,bits=4 + int4,scope=text
prefixkv,keep=0.5 + vidkv
prefixkv,keep=0.5 + xquant
int4 + share=codes
"""


@dataclass(frozen=True)
class Part:
    """A set of tables: its script, its records of tools/pocket/heldout and /tuning, its specs."""

    script: str
    records: str
    specs: Callable[[], list[str]]
    tuned: bool = True
    models: tuple[str, ...] = MODELS
    packages: bool = False  # whether its scores need pycocoevalcap


def _alone() -> list[str]:
    return [normal(line) for line in SPECS.splitlines() if line]


def all_specs() -> list[str]:
    return _once(_alone() + claims.specs())


def budget_specs() -> list[str]:
    """Of the claims that PrefixKV's tables make at its nine budgets."""
    return _once(["f16", *claims.specs(lambda claim: claim.text.startswith("PrefixKV is above"))])


def clip_specs() -> list[str]:
    """VidKV's, and KIVI's, which it is compared with."""
    alone = [spec for spec in _alone() if spec.startswith(("kivi", "vidkv"))]
    return _once(["f16", *alone, *claims.specs(lambda claim: "vidkv" in claim.better)])


def _once(found: list[str]) -> list[str]:
    return list(dict.fromkeys(found))


PARTS = {
    "captions": Part("coco.py", "captions", all_specs, packages=True),
    "documents": Part("docvqa.py", "documents", all_specs),
    "budgets": Part("fidelity.py", "captions", budget_specs),
    "clips": Part("video.py", "clips", clip_specs, tuned=False, models=("pocket-qwen",)),
}


def command(part: Part, folder: Path, model: str, options: argparse.Namespace) -> list[str]:
    made = [sys.executable, str(ROOT / "tools" / "eval" / part.script), "--out", str(folder), "--model", model]
    made += ["--annotations", str(POCKET / "heldout" / f"{part.records}_heldout.json")]
    made += ["--fidelity", str(options.fidelity), "--layer-records", str(options.layer_records)]
    if options.tune and part.tuned:
        made += ["--tune-on", str(POCKET / "tuning" / f"{part.records}_tuning.json"), "--tune", str(options.tune)]
    made += ["--device", options.device, "--jobs", str(options.jobs), "--batch-size", str(options.batch_size)]
    made += ["--threads", str(options.threads), "--build", str(options.build)]
    made += [word for path in options.rules for word in ("--rules", str(path))]
    made += ["--limit", str(options.limit)] if options.limit else []
    made += ["--skip", PACKAGE] if part.packages and PACKAGE in options.skip else []
    made += ["--merge"] if options.merge else []
    for spec in options.kv or part.specs():
        made += ["--kv", spec]
    return made


def main() -> int:
    parser = arguments.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=arguments.folder, required=True, help="folder for answers, scores and the page")
    add("--model", action="append", help=f"repeatable; default: {', '.join(MODELS)}")
    add("--set", action="append", choices=PARTS, help="repeatable; default: all")
    add("--kv", action="append", help="these specs instead of all; repeatable")
    add("--device", default="auto", help="as vlm-run's")
    add("--jobs", type=arguments.at_least(1), default=1, help="specs at a time")
    add("--batch-size", type=arguments.at_least(1), default=8, help="as vlm-run's")
    add("--threads", type=arguments.at_least(0), default=0, help="as vlm-run's")
    add("--limit", type=arguments.at_least(1), help="the first records of each set only")
    add("--fidelity", type=arguments.at_least(0), default=FORCED, help=f"records of KL, top-1 and stored bits (default: {FORCED})")
    add("--layer-records", type=arguments.at_least(0), default=2, help="of those, records of the error of each layer (default: 2)")
    add("--tune", type=arguments.at_least(0), default=TUNED, help=f"records that settings are calibrated on; 0: no calibration (default: {TUNED})")
    add("--skip", action="append", default=[], choices=SKIPPABLE, help="leave out what needs these packages; repeatable")
    add("--merge", action="store_true", help="run no model: score the answers that exist")
    add("--report", action=argparse.BooleanOptionalAction, default=True, help="make the page of all finished parts")
    arguments.add_build(parser)
    options = parser.parse_args()
    if shard_of(os.environ).count > 1:
        raise EvaluationError(
            f"this is one of {shard_of(os.environ).count} tasks by its environment, and tables.py makes one page; start it once, "
            "and other parts at the same time by --model and --set"
        )
    if options.report:
        import_numpy()  # which the page needs, before hours of answers
    for model in options.model or MODELS:
        for name in options.set or PARTS:
            folder = options.out / f"{slug(Path(model).name)}-{name}"
            if model in MODELS and model not in PARTS[name].models:
                continue
            if options.merge and not folder.exists():
                print(f"tables.py: {folder} is not there, so nothing of it is merged", file=sys.stderr)
                continue
            _run(command(PARTS[name], folder, model, options))
    if not options.report:
        return 0
    results = sorted(options.out.glob("*/results.json"))
    if not results:
        raise EvaluationError(f"{options.out} has no results yet; run a part to its end")
    page = [sys.executable, str(ROOT / "tools" / "eval" / "report.py"), "--out", str(options.out / "report")]
    page += ["--build", str(options.build), *(["--skip", "plots"] if "plots" in options.skip else [])]
    page += [word for path in options.rules for word in ("--rules", str(path))]
    _run([*page, *map(str, results)])
    return 0


def _run(words: list[str]) -> None:
    if subprocess.run(words, stdin=subprocess.DEVNULL).returncode != 0:
        raise EvaluationError(f"{Path(words[1]).name} failed; fix what it reports and start the same command again")


if __name__ == "__main__":
    sys.exit(run_main("tables.py", main))
