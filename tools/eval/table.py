"""A table of results: Markdown for files, narrower for a terminal. Standard library only."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from errors import printable
from metrics import title
from results import Result
from storage import write_text


def show(results: list[Result], out: Path) -> None:
    """Prints the table and writes it to results.md as Markdown. A terminal that is too narrow for it has a line a score."""
    markdown = table(results)
    if not markdown:
        return
    write_text(out / "results.md", markdown)
    width = shutil.get_terminal_size().columns
    wide = max(map(len, markdown.splitlines())) > width
    print(narrow(results, width) if sys.stdout.isatty() and wide else markdown, end="")


def table(results: list[Result]) -> str:
    """A row a model and spec, the protocol next to the scores; empty without results."""
    if not results:
        return ""
    metrics = list(dict.fromkeys(name for result in results for name in result.scores))
    head = ["model", "spec", "split", "protocol", "n", *map(title, metrics), "stored bits", "KL", "top-1"]
    lines = [head, ["---"] * len(head)]
    for result in results:
        cells = [_cell(result.model), f"`{_cell(result.spec)}`", _cell(result.split), result.protocol, str(len(result.items))]
        cells += [_number(result.scores.get(name), 4) for name in metrics]
        lines.append([*cells, _number(result.stored_bits, 2), _number(result.kl, 4), _number(result.top1, 4)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def narrow(results: list[Result], width: int) -> str:
    """What all have in common in one line, then a block a model and spec: its figures, as many a line as there is room for."""
    lines = []
    for result in results:
        head = f"{printable(result.split)}, protocol {result.protocol}, n = {len(result.items)}"
        if head not in lines:
            lines.append(head)
        lines.append(f"{printable(result.model)}: {printable(result.spec)}")
        figures = [f"{title(name)} {_number(value, 4)}" for name, value in result.scores.items()]
        figures += [f"{name} {_number(value, digits)}" for name, value, digits in
                    (("stored bits", result.stored_bits, 2), ("KL", result.kl, 4), ("top-1", result.top1, 4))]  # fmt: skip
        line = " "
        for figure in figures:
            if len(line) + len(figure) + 2 > width and line.strip():
                lines.append(line)
                line = " "
            line += f" {figure};" if figure is not figures[-1] else f" {figure}"
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _cell(text: str) -> str:
    return printable(text, 400).replace("|", "\\|")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
