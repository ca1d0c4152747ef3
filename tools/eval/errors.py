"""The one exception of these scripts, what becomes of it, and what guards readers of files. Standard library only."""

from __future__ import annotations

import functools
import sys
import traceback
from pathlib import Path
from typing import Callable

# What a reader meets in contents that are not built as its format is.
STRANGE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class EvaluationError(Exception):
    """One sentence that names the thing, what was found, what was expected and what to do next."""


def printable(text: object, most: int = 120) -> str:
    """Text of a file, safe to show: escapes instead of control characters, cut where it is long."""
    shown = "".join(c if c.isprintable() else _escape(c) for c in str(text))
    return shown if len(shown) <= most else shown[:most] + "..."


def _escape(c: str) -> str:
    """Also of half a surrogate pair, which JSON may hold and file names of other encodings become."""
    return c.encode("unicode_escape").decode()


def guarded(read: Callable) -> Callable:
    """A reader of the file that is its first argument, which fails on any contents by one sentence with the file's name."""

    @functools.wraps(read)
    def safe(path: Path, *rest, **more):
        try:
            return read(path, *rest, **more)
        except STRANGE as error:
            raise EvaluationError(
                f"{path} is not built as expected ({type(error).__name__}: {printable(error)}); give the file as it was "
                "published, or see docs/evaluation.md for its format"
            ) from error

    return safe


def say(text: str) -> None:
    """A line for the person at the terminal."""
    print(printable(text, 10_000), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """What a person may not expect and need not act on, after the script's name."""
    say(f"{Path(sys.argv[0]).name}: note: {text}")


def run_main(name: str, main: Callable[[], int]) -> int:
    """The exit status of a script: 1 for a refusal, said in one line; 130 when interrupted."""
    try:
        return main()
    except (EvaluationError, OSError) as error:
        say(f"{name}: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"{name}: interrupted; start the same command again to go on")
        return 130
    except STRANGE as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        say(f"{name}: a fault of this program ({type(error).__name__}: {error}, at {Path(at.filename).name}:{at.lineno}); "
            "please report it with the command and the files it was given")  # fmt: skip
        return 1
