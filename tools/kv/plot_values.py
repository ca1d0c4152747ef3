#!/usr/bin/env python3
"""Draws what `vlm-kv values --json` counted.

    tools/kv/plot_values.py FIGURES.jsonl FOLDER                     draws NAME.png and NAME.svg
    tools/kv/plot_values.py FIGURES.jsonl out/a.pdf --style paper    draws out/a-NAME.pdf, one column wide; .svg and .png likewise
    tools/kv/plot_values.py --check FOLDER                           says whether it could, before anything is counted

Writes keys_visual, keys_text, values_visual and values_text (how the numbers of every layer and KV head are distributed),
ranges (a layer's range with those of its KV heads: 1BitVKV, figures 2 and 4) and codes (2-bit codes that a layer has in
common with the next: XQuant, figure 3); what does not fit on a page goes on in NAME-2 and so on.
Needs matplotlib.
"""

import json
import sys
from pathlib import Path

from pictures import Output, import_matplotlib, read_arguments

LAYERS_A_PAGE = 12
COLUMNS = 4
PARTS, ROWS = ("keys", "values"), ("visual", "text")


def read_counts(path: Path) -> list[dict]:
    """The objects of `vlm-kv values --json`, one a line."""
    counts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            for key in ("layer", "part", "rows", "low", "high", "heads", "bins", "codes"):
                entry[key]
            counts.append(entry)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise SystemExit(f"plot_values.py: {path} line {number} is not what `vlm-kv values --json` prints ({error})")
    if not counts:
        raise SystemExit(f"plot_values.py: {path} holds no counts; make it with `vlm-kv values --json`")
    return counts


def of(counts: list[dict], part: str, rows: str) -> list[dict]:
    """The layers that have such rows, in order."""
    found = [entry for entry in counts if (entry["part"], entry["rows"]) == (part, rows)]
    return sorted((entry for entry in found if any(head["count"] for head in entry["heads"])), key=lambda entry: entry["layer"])


def shares(head: dict) -> list[float]:
    """Of a head's numbers, by bin."""
    return [count / head["count"] for count in head["histogram"]] if head["count"] else [0.0 for _ in head["histogram"]]


def in_common(layers: list[dict]) -> tuple[list[int], list[float], list[float]]:
    """Layers that have a next one; the share of codes that are the same there; and what chance would make of it."""
    pairs = [(here, there) for here, there in zip(layers, layers[1:]) if sum(here.get("code_distances", []))]
    equal = [here["code_distances"][0] / sum(here["code_distances"]) for here, _ in pairs]
    chance = [sum(a * b for a, b in zip(here["codes"], there["codes"])) / sum(here["codes"]) / sum(there["codes"])
              for here, there in pairs]
    return [here["layer"] for here, _ in pairs], equal, chance


class Plotter:
    """Pictures of one file of counts."""

    def __init__(self, plt, counts: list[dict], out: Output):
        self.plt, self.counts, self.out = plt, counts, out
        self.origin = f"model {Path(str(counts[0].get('model', '?'))).name}: {counts[0].get('records', '?')} prompts"
        heads = max(len(entry["heads"]) for entry in counts)
        self.colors = [plt.get_cmap("viridis")(0.9 * i / max(1, heads - 1)) for i in range(heads)]

    def finish(self, figure, name: str, title: str) -> None:
        self.out.title(figure, f"{title}\n{self.origin}")
        self.out.save(self.plt, figure, name)

    def histograms(self, part: str, rows: str) -> None:
        layers = of(self.counts, part, rows)
        pages = [layers[first:first + LAYERS_A_PAGE] for first in range(0, len(layers), LAYERS_A_PAGE)]
        for page, shown in enumerate(pages):
            columns = min(2 if self.out.paper else COLUMNS, len(shown))
            lines = -(-len(shown) // columns)
            figure, axes = self.plt.subplots(lines, columns, figsize=self.out.size(3 * columns + 0.5, 2.1 * lines + 0.8), squeeze=False,
                                             sharex=True, sharey=True, layout="constrained")
            for axis in axes.flat[len(shown):]:
                axis.set_visible(False)
            for axis, entry in zip(axes.flat, shown):
                self.histogram(axis, entry)
            for row in axes:
                row[0].set_ylabel("share of the numbers")
            for column in axes.T:
                bottom = [axis for axis in column if axis.get_visible()][-1]
                bottom.set_xlabel("number")
                bottom.tick_params(labelbottom=True)
            axes[0][0].legend(fontsize=self.out.points(6), frameon=False, ncol=1 if self.out.paper else 2)
            name = f"{part}_{rows}" if page == 0 else f"{part}_{rows}-{page + 1}"
            which = f" (page {page + 1} of {len(pages)})" if len(pages) > 1 else ""
            self.finish(figure, name, f"{part.capitalize()} of {rows} tokens, a line a KV head; dotted: the ends of the layer{which}")

    def histogram(self, axis, entry: dict) -> None:
        low, width = entry["bins"]["low"], entry["bins"]["width"]
        for number, head in enumerate(entry["heads"]):
            label = f"head {number}" if number in (0, len(entry["heads"]) - 1) else None
            axis.plot([low + (i + 0.5) * width for i in range(len(head["histogram"]))],
                      [share or float("nan") for share in shares(head)], color=self.colors[number], lw=0.9, label=label)
        for end in (entry["low"], entry["high"]):
            axis.axvline(end, color="0.5", lw=0.8, ls=":")
        axis.set_yscale("log")
        axis.set_title(f"layer {entry['layer']}", fontsize=self.out.points(7))

    def ranges(self) -> None:
        figure, axes = self.plt.subplots(2, 2, figsize=self.out.size(11, 4 if self.out.paper else 6), squeeze=False, sharex=True,
                                         layout="constrained")
        for row, part in zip(axes, PARTS):
            for axis, rows in zip(row, ROWS):
                for entry in of(self.counts, part, rows):
                    self.range(axis, entry)
                axis.set_title(f"{part}, {rows} tokens", fontsize=8)
                if not self.out.paper or axis is row[0]:
                    axis.set_ylabel("least to greatest number")
        for axis in axes[-1]:
            axis.set_xlabel("layer")
        self.finish(figure, "ranges", "Range of a layer (grey) and of each of its KV heads")

    def range(self, axis, entry: dict) -> None:
        heads = entry["heads"]
        axis.use_sticky_edges = False  # or nothing would lie between a bar and the frame
        axis.bar(entry["layer"], entry["high"] - entry["low"], bottom=entry["low"], width=0.9, color="0.88", zorder=1)
        for number, head in enumerate(heads):
            at = entry["layer"] + 0.8 * ((number + 0.5) / len(heads) - 0.5)
            axis.plot([at, at], [head["low"], head["high"]], color=self.colors[number], lw=max(0.6, 5 / len(heads)), zorder=2)

    def codes(self) -> None:
        figure, axis = self.plt.subplots(figsize=self.out.size(7.5, 3 if self.out.paper else 4.5), layout="constrained")
        hues = iter(self.plt.get_cmap("tab10").colors)
        for part in PARTS:
            for rows in ROWS:
                layers, equal, chance = in_common(of(self.counts, part, rows))
                color = next(hues)
                axis.plot(layers, equal, color=color, marker="o", ms=3, lw=1, label=f"{part}, {rows} tokens")
                axis.plot(layers, chance, color=color, lw=1, ls="--")
        axis.set_xlabel("layer, compared with the next")
        axis.set_ylabel("share of equal 2-bit codes" if self.out.paper else "share of 2-bit codes that are equal; dashed: random baseline")
        axis.set_ylim(bottom=0)
        self.out.legend(axis, fontsize=7)
        self.finish(figure, "codes", "Codes that a layer has in common with the next")


def main() -> int:
    arguments = read_arguments(__doc__)
    plt = import_matplotlib(__file__, arguments.target)
    if arguments.check:
        return 0
    out = Output(arguments.target, arguments.style)
    plotter = Plotter(plt, read_counts(Path(arguments.figures)), out)
    for part in PARTS:
        for rows in ROWS:
            plotter.histograms(part, rows)
    plotter.ranges()
    plotter.codes()
    out.report()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        sys.exit(f"plot_values.py: {sys.argv[1]!r} is not what `vlm-kv values --json` prints ({type(error).__name__}: {error})")
