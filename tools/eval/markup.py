"""Text, tables and numbers in Markdown. Standard library only."""

from __future__ import annotations

import re

from errors import printable
from groups import Estimate
from significance import Interval, McNemar

NONE = "-"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def text(value: object) -> str:
    """Foreign text that Markdown shows as it is, also within a table."""
    return SPECIAL.sub(r"\\\1", printable(value, 400))


def code(value: object) -> str:
    """As code; a pipe would end the cell of a table, a backtick the code."""
    shown = printable(value, 400).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown else NONE


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return NONE
    return f"{value:.{digits if abs(value) < 10 else min(digits, 2)}f}"


def small(value: float | None) -> str:
    """A KL or p: what rounds to 0 is said to be less."""
    if value is None:
        return NONE
    return "0" if value == 0 else f"{value:.4f}" if value >= 5e-5 else "< 0.0001"


def ends(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "no interval"
    digits = 3 if max(abs(interval.low), abs(interval.high)) < 10 else 2
    return f"{interval.low:{sign}.{digits}f} to {interval.high:{sign}.{digits}f}"


def score(estimate: Estimate) -> str:
    return number(estimate.value) + (f" ({ends(estimate.interval)})" if estimate.interval else "")


def gain(estimate: Estimate) -> str:
    return f"{'+' if estimate.value >= 0 else ''}{number(estimate.value)} ({ends(estimate.interval, '+')})"


def exactness(test: McNemar) -> str:
    return f"{test.only_a} only the first, {test.only_b} only the second (p {small(test.p)})"
