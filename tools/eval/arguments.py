"""The options that the scripts of data sets share. Standard library only."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Callable

import protocols
from errors import printable
from models import ROOT
from runs import Programs
from shards import Shard, parse_shard, shard_of

BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build" / "release"))


class Parser(argparse.ArgumentParser):
    """Whose messages show control characters of arguments as escapes."""

    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {printable(message, 1000)}\n")


def parser(
    description: str, annotations: str | None, annotations_help: str, *, names: tuple[str, ...] = protocols.NAMES,
    default: str = "native for our own sets, lmms-eval for others", pictures: tuple[str, ...] = ("images",),
    model: str = "pocket", policies: str = "f16", limit: int | None = None, results: bool = True,
) -> argparse.ArgumentParser:  # fmt: skip
    """`names`: protocols, of which `default` is said to be the default; `pictures`: names of their folder's option."""
    made = Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Start the same command again to go on where a run ended. Files, protocols and shards: docs/evaluation.md.",
    )  # fmt: skip
    _add_data(made, annotations, annotations_help, pictures, limit)
    made.add_argument("--model", action="append", help=f"as vlm-run's -m; repeatable; default: {model}")
    made.add_argument("--kv", action="append", help=f"a cache policy; repeatable; default: {policies}")
    made.add_argument("--bits", type=positive, help="solve keep= of every --kv that has a retention rule for so many stored bits per "
                                                    "element of the first record's prompt, as vlm-kv's --bits")  # fmt: skip
    made.add_argument("--protocol", choices=names, help=f"prompts, limits and metrics of a harness; default: {default}")
    _add_run(made)
    _add_scores(made, results)
    made.set_defaults(results=None, default_model=model)
    add_build(made)
    return made


def _add_data(
    made: argparse.ArgumentParser, annotations: str | None, annotations_help: str, pictures: tuple[str, ...], limit: int | None
) -> None:
    """Which records are scored, and which settings are fitted to."""
    add = made.add_argument
    heldout = ROOT / "tools" / "pocket" / "heldout" / annotations if annotations else None
    add("--out", type=folder, required=True, help="folder for answers, results and scores; of one command's settings")
    add("--annotations", type=Path, default=heldout, help=f"{annotations_help}; default: our own held-out set")
    add(*(f"--{name}" for name in pictures), dest="images", metavar="FOLDER", type=Path,
        help=f"folder of the {' or '.join(pictures)}; default: where the data set has it, next to the annotations")
    add("--limit", type=at_least(1), default=limit,
        help="score the first records only" + (f" (default: {limit})" if limit else ""))
    add("--tune", type=at_least(0), default=0,
        help="calibrate the policies' settings with vlm-kv profile on this many records from the end, which are never scored")
    add("--tune-on", type=Path, metavar="FILE",
        help="calibrate on the records of this file instead, its first --tune if that is given; all of --annotations is scored")
    add("--fidelity", type=at_least(0), default=100,
        help="records over whose references KL, top-1 and stored bits are measured; 0 leaves them out (default: 100)")
    add("--layer-records", type=at_least(0), default=2,
        help="of those, records of the error of each layer, which takes longer than all else; 0: no such curve (default: 2)")


def _add_run(made: argparse.ArgumentParser) -> None:
    """How the programs are run; nothing of it decides the answers but the device."""
    add = made.add_argument
    add("--device", default="auto", help="as vlm-run's --device")
    add("--batch-size", type=at_least(1), default=8, help="as vlm-run's; decoding's speed is reported at 1 alone (default: 8)")
    add("--threads", type=at_least(0), default=0, help="as vlm-run's")
    add("--jobs", type=at_least(1), default=1, help="models and specs at a time (default: 1)")
    add("--shard", type=shard, metavar="I/N",
        help="do part I of N; default: what Slurm or Open MPI say; the last part that ends merges them")


def _add_scores(made: argparse.ArgumentParser, results: bool) -> None:
    add = made.add_argument
    add("--skip", action="append", default=[], metavar="NAME", help="leave out a scorer; repeatable")
    add("--seed", type=at_least(0), default=1, help="of the intervals (default: 1)")
    add("--merge", action="store_true", help="run nothing: merge the shards that are done, and score them")
    if results:
        add("--results", type=Path, help="run nothing: score this file of standard results")


def add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=Path, default=BUILD,
                        help="build folder; default: what KVLM_BUILD says, else build/release")  # fmt: skip
    parser.add_argument("--rules", action="append", type=rules, default=[], metavar="FILE.py",
                        help="file that makes policies in Python (docs/python.md); repeatable")  # fmt: skip


def programs(options: argparse.Namespace) -> Programs:
    return Programs(options.build, tuple(options.rules))


def add_frames(parser: argparse.ArgumentParser) -> None:
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--frames", type=at_least(1), help="frames of a video; default: the protocol's, else the model's")
    many.add_argument("--fps", type=positive, help="frames a second instead")


def place(options: argparse.Namespace) -> Shard:
    """Of --shard, else of the environment."""
    return options.shard or shard_of(os.environ)


def rules(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; give one that makes policies")
    return Path(text).resolve()


def folder(text: str) -> Path:
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; several files are written, so give a folder's name")
    return Path(text)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return number


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below 1000")
    return value


def shard(text: str) -> Shard:
    try:
        return parse_shard(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
