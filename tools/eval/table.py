"""A plain Markdown table of results, for a terminal. Standard library only."""

from __future__ import annotations

from results import Result


def table(results: list[Result]) -> str:
    """A row a model and spec, the protocol beside the scores; empty without results."""
    if not results:
        return ""
    metrics = list(dict.fromkeys(name for result in results for name in result.scores))
    head = ["model", "spec", "split", "protocol", "n", *metrics, "stored bits", "KL", "top-1"]
    lines = [head, ["---"] * len(head)]
    for result in results:
        cells = [result.model, f"`{result.spec}`", result.split, result.protocol, str(len(result.items))]
        cells += [_number(result.scores.get(name), 4) for name in metrics]
        lines.append([*cells, _number(result.stored_bits, 2), _number(result.kl, 4), _number(result.top1, 4)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
