#!/usr/bin/env python3
"""How near a policy stays to the uncompressed model: KL, top-1, perplexity, error by layer, ROUGE-L of the answers.

    python3 tools/eval/fidelity.py --out OUT --kv kivi --kv "prefixkv,keep=0.5 + int4"
    python3 tools/eval/fidelity.py --out OUT --rule prefixkv --rule h2o --budgets 0.1,0.3,0.5 --annotations mm-vet.json

The first reference of every record is teacher-forced under each policy (`vlm-kv fidelity`): KL and top-1 against the model's own
f16 cache, perplexity of the reference, stored bits, error of attention and tokens kept by layer. The model answers, too
(`vlm-run --batch`), and ROUGE-L F1 compares the answer with its own answer under f16: PrefixKV's protocol, with --rule at
its nine budgets. Takes any file of coco.py, docvqa.py and video.py, and those of PrefixKV; without --annotations, our
own held-out scenes.
"""

import argparse
import functools
import sys
from dataclasses import replace

import arguments
import protocols
import video_protocols
from descriptions import DESCRIPTIONS, is_of_pictures, read_any
from errors import EvaluationError, run_main
from records import CAPTIONS, Split
from pipeline import Task, evaluate
from protocols import Protocol
from table import show

PREFIXKV = "prefixkv"
METRICS = ("ROUGE-L F1",)
BUDGETS = tuple(n / 10 for n in range(1, 10))
RECORDS, TOKENS = 100, 1024  # of PrefixKV's code


def find_protocol(name: str, split: Split, family: str, flags: tuple[str, ...]) -> Protocol:
    """PrefixKV's: the question alone and 1024 tokens; or a harness's way of asking, with these metrics."""
    if name == PREFIXKV:
        choices = any(item.choices for item in split.items)
        captions = split.task == CAPTIONS and not split.items[0].question
        prompt = None if captions else "{question}\n{choices}" if choices else "{question}"
        behind = "the image comes before the question, where PrefixKV's code has MM-Vet's after it"
        return Protocol(name, prompt, TOKENS, flags, METRICS, behind if split.task == DESCRIPTIONS else "",
                        forced_tokens=TOKENS)  # fmt: skip
    if is_of_pictures(split):
        return replace(protocols.find_protocol(name, split, family), metrics=METRICS)
    return replace(video_protocols.find_protocol(name, split, family, flags), metrics=METRICS)


def results(split: Split, texts: dict) -> list[dict]:
    return [{"id": item.id, "question": item.question, "answer": texts[item.id]} for item in split.items]


def budgets(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < budget <= 1 for budget in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of shares above 0 up to 1, such as 0.1,0.5")
    return found


def specs_of(options: argparse.Namespace) -> list[str]:
    """f16, which answers are compared with, then what was asked for; each once. --bits solves the rules' budgets."""
    rules = options.rule or ([] if options.kv else [PREFIXKV])
    at_budgets = [f"{rule},keep={budget:g}" for rule in rules for budget in options.budgets or BUDGETS]
    return list(dict.fromkeys(["f16", *(options.kv or []), *(rules if options.bits else at_budgets)]))


def main() -> int:
    parser = arguments.parser(
        __doc__, "captions_heldout.json", "annotations of any known data set", names=(PREFIXKV, *protocols.NAMES),
        default="prefixkv, the question alone", pictures=("images", "videos"), limit=RECORDS, results=False,
        policies="f16, which is always there, and --rule's",
    )  # fmt: skip
    parser.add_argument("--rule", action="append", help="a retention rule at every budget; repeatable; default: prefixkv, "
                                                        "unless --kv says what to compare")  # fmt: skip
    parser.add_argument("--budgets", type=budgets, help="shares of the tokens that --rule keeps; default: 0.1,0.2,...,0.9")
    arguments.add_frames(parser)
    options = parser.parse_args()
    split = read_any(options.annotations, options.images)
    if not split.scored:
        raise EvaluationError(f"{split.path} has no answers, so there is nothing to compare; give a split that has them")
    if is_of_pictures(split) and (options.frames or options.fps):
        raise EvaluationError(f"--frames and --fps are about videos, and {split.path} has images; leave them out")
    if options.budgets and options.kv and not options.rule:
        raise EvaluationError("--budgets is about --rule, of which there is none; add --rule prefixkv or leave it out")
    if options.budgets and options.bits:
        raise EvaluationError("--budgets and --bits both set what is kept; give one of them")
    options.protocol, options.kv = options.protocol or PREFIXKV, specs_of(options)
    flags, told = (), ""
    if not is_of_pictures(split):
        flags, told = video_protocols.frames_of(options.protocol, options.frames, options.fps)
    split = replace(split, name=split.name + told)
    task = Task(read_any, lambda split, name: f"own_{split.task}_{split.name}_{name}.json", results,
                protocol=functools.partial(find_protocol, flags=flags), against_own=True)  # fmt: skip
    show(evaluate(task, split, options), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("fidelity.py", main))
