"""The one exception of these scripts, and what becomes of it. Standard library only."""

from __future__ import annotations

import sys
from typing import Callable


class EvaluationError(Exception):
    """One sentence that names the thing, what was found, what was expected and what to do next."""


def printable(text: object, most: int = 120) -> str:
    """Text of a file, safe to show: escapes instead of control characters, cut where it is long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return shown if len(shown) <= most else shown[:most] + "..."


def run_main(name: str, main: Callable[[], int]) -> int:
    """The exit status of a script: 1 for a refusal, said in one line; 130 when interrupted."""
    try:
        return main()
    except (EvaluationError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; start the same command again to go on", file=sys.stderr)
        return 130
