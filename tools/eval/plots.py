"""The plots of a report, one file a page of a plot. Needs matplotlib, which is loaded when it is asked for."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from groups import Estimate
from errors import EvaluationError
from metrics import title
from significance import FEWEST
from summary import KINDS, Row, Summary

sys.path.append(str(Path(__file__).resolve().parents[1] / "kv"))
from plot_data import panels  # noqa: E402

# Okabe and Ito's, told apart by the colour-blind, without yellow (pale on white); black is f16's.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
MARKERS = "osD^vPX"
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
SERIES_A_PANEL = len(COLORS)
PANELS_A_PAGE = 4
NAME_WIDTH = 46
MARKER_WIDTH, PAPER_MARKER_WIDTH = 0.009, 0.014  # of an axis
FORMATS = ("png", "svg", "pdf")
STYLES_OF_PAGES = ("screen", "paper")
FILE_NAME = re.compile(rf"\d{{2,}}_(bits|speed|retained|error|objects)(-\d+)?\.({'|'.join(FORMATS)})")
UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same bytes each time
COLUMN_INCHES = 3.3  # of a page with two columns


@dataclass(frozen=True)
class Look:
    """Files of a plot, and whether they are for a paper: one panel a file, as wide as a column, in 8 pt, without a title."""

    formats: tuple[str, ...] = ("png",)
    paper: bool = False

    @property
    def panels(self) -> int:
        return 1 if self.paper else PANELS_A_PAGE


def import_matplotlib():
    """pyplot without a display; EvaluationError says how it is had."""
    try:
        import matplotlib
        import matplotlib.pyplot
    except ImportError:
        raise EvaluationError(
            "plots cannot be drawn: this Python has no matplotlib; run tools/eval/setup.sh and start with "
            "build/eval-venv/bin/python3, or leave them out with --skip plots"
        ) from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.family": ["DejaVu Sans"],
        }
    )
    return matplotlib.pyplot


def draw(
    summaries: list[Summary], folder: Path, resamples: int, seed: int, look: Look = Look()
) -> dict[int, dict[str, list[str]]]:
    """Draws every plot that there are figures for into `folder`; file names by what they show, by setting's number. Of a plot
    in several formats the first that a page can show is named."""
    plt = import_matplotlib()
    fonts = {"font.size": 8 if look.paper else 9, "svg.hashsalt": "kvlm", "pdf.fonttype": 42}
    with plt.rc_context(fonts):
        return {summary.number: _Plotter(plt, summary, folder, resamples, seed, look).all() for summary in summaries}


class _Plotter:
    """Plots of one setting."""

    def __init__(self, plt, summary: Summary, folder: Path, resamples: int, seed: int, look: Look):
        self.plt, self.summary, self.folder, self.resamples, self.seed = plt, summary, folder, resamples, seed
        self.look = look
        self.written: dict[str, list[str]] = {}

    def all(self) -> dict[str, list[str]]:
        rows = self.summary.rows
        if self.summary.metric is not None:
            bits = "stored bits a cached number, residual window and scales included"
            self.scores("bits", bits, lambda row: row.result.stored_bits, joined=True)
            self.scores("speed", "tokens decoded a second", lambda row: row.result.tokens_per_second, joined=False)
        self.layers(
            "retained",
            "share of the tokens that are kept",
            "Tokens that each layer keeps",
            {row.number: row.result.retained for row in rows if row.result.retained},
            top=1.05,
        )
        self.layers(
            "error",
            "relative error of attention's output",
            "Error of attention's output by layer",
            {row.number: row.result.layer_error for row in rows if row.result.layer_error},
        )
        self.objects()
        return self.written

    def scores(self, kind: str, label: str, where: Callable[[Row], float | None], joined: bool) -> None:
        """The score that decides against `where`, a few policies a panel. `joined`: a curve a policy, over its widths or
        budgets, on a logarithmic scale. Points that would cover one another stand side by side."""
        metric, plain = self.summary.metric, self.summary.plain
        placed = [row for row in self.summary.rows if where(row) and row is not plain]
        if not placed:
            return
        pages = panels(_families(placed, where), self.look.panels)
        shown_rows = [*placed, *([plain] if plain else [])]
        values = [x for row in shown_rows for x in _span(row.scores[metric])]
        xs = [where(row) for row in shown_rows if where(row)]
        for page, shown in enumerate(pages):
            figure, axes = self._figure(len(shown))
            for axis, (heading, families) in zip(axes, shown):
                if joined:
                    _log2(axis, xs)
                else:
                    axis.set_xlim(0, 1.05 * max(xs))
                    axis.tick_params(labelbottom=True)
                self._band(axis, plain, metric)
                self._curves(axis, families, where, joined)
                if plain and where(plain):
                    axis.plot([where(plain)], [plain.scores[metric].value], color="black", marker="*", ms=9, ls="")
                if not self.look.paper:
                    axis.set_title(heading, fontsize=9, loc="left")
                axis.set_ylabel(_plain(title(metric)))
                _limits(axis, values)
                self._legend(axis)
            places = "\npoints that would cover one another are side by side; ticks at the foot: their true places"
            axes[-1].set_xlabel(label.split(",")[0] if self.look.paper else label + places)
            about = f"{title(metric)} against {'stored bits' if kind == 'bits' else 'speed of decoding'}"
            self._finish(figure, kind, page, len(pages), about, interval=True)

    def _curves(self, axis, families: list[tuple[str, list[Row]]], where: Callable[[Row], float], joined: bool) -> None:
        """A curve a policy, and where its points truly are at the foot. The limits of the axis are set before."""
        true = [where(row) for _, rows in families for row in rows]
        axis.plot(true, [0.015] * len(true), transform=axis.get_xaxis_transform(), color="black", marker="|", ms=5, ls="")
        apart = PAPER_MARKER_WIDTH if self.look.paper else MARKER_WIDTH
        places = iter(_side_by_side(true, *axis.get_xlim(), log=joined, apart=apart))
        for i, (family, rows) in enumerate(families):
            found = [row.scores[self.summary.metric] for row in rows]
            axis.errorbar(
                [next(places) for _ in rows],
                [x.value for x in found],
                yerr=_reach(found),
                color=COLORS[i],
                marker=MARKERS[i],
                ls=STYLES[i] if joined and len(rows) > 1 else "",
                ms=3.5 if self.look.paper else 5,
                lw=1.1,
                elinewidth=1,
                capsize=2,
                label=_name(family, rows),
            )

    def layers(
        self, kind: str, label: str, heading: str, curves: dict[int, list[float]], top: float | None = None
    ) -> None:
        """A figure of each layer, up to `top` or on a logarithmic scale; specs whose curves are the same to four digits
        are one line."""
        same: dict[tuple, list[int]] = {}
        for number, curve in curves.items():
            same.setdefault(tuple(float(f"{value:.4g}") for value in curve), []).append(number)
        rows = panels(list(same.items()), SERIES_A_PANEL)
        pages = panels(rows, self.look.panels)
        positive = [value for curve in same for value in curve if value > 0]
        for page, shown in enumerate(pages):
            figure, axes = self._figure(len(shown))
            for axis, some in zip(axes, shown):
                for i, (curve, numbers) in enumerate(some):
                    axis.plot(
                        range(len(curve)),
                        curve if top else [value if value > 0 else math.nan for value in curve],
                        color=COLORS[i],
                        marker=MARKERS[i],
                        ls=STYLES[i],
                        ms=4,
                        lw=1.2,
                        label=self._names(numbers) + ("" if top or any(curve) else "\n    0 in every layer"),
                    )
                axis.set_ylabel(label)
                if top:
                    axis.set_ylim(0, top)
                elif positive:
                    _log_y(axis, positive)
                axis.xaxis.get_major_locator().set_params(integer=True)
                self._legend(axis)
            axes[-1].set_xlabel("layer")
            self._finish(figure, kind, page, len(pages), heading + "; equal curves are one line")

    def objects(self) -> None:
        """As 1BitVKV's figure 1."""
        objects = self.summary.objects
        if not objects:
            return
        plain = self.summary.plain
        rows = [
            row for row in self.summary.rows if row is not plain and any(row.result.spec in x.scores for x in objects)
        ]
        groups = panels(rows, SERIES_A_PANEL) or ([[]] if plain else [])
        pages = panels(groups, self.look.panels)
        values = [end for x in objects for estimate in x.scores.values() for end in _span(estimate)]
        for page, shown in enumerate(pages):
            figure, axes = self._figure(len(shown))
            for axis, some in zip(axes, shown):
                if plain:
                    self._by_count(
                        axis, plain, 0, 1 + len(some), color="black", marker="*", ls="-", label=_name("f16", [plain])
                    )
                for i, row in enumerate(some):
                    self._by_count(
                        axis,
                        row,
                        i + 1,
                        1 + len(some),
                        color=COLORS[i],
                        marker=MARKERS[i],
                        ls=STYLES[i],
                        label=_name(row.result.spec, [row]),
                    )
                axis.set_ylabel(_plain(title(self.summary.metric)))
                _limits(axis, values)
                axis.set_xticks([x.count for x in objects], [f"{x.label}\nn = {x.n}" for x in objects])
                axis.tick_params(labelbottom=True)
                self._legend(axis)
            axes[-1].set_xlabel("objects in the image")
            self._finish(
                figure, "objects", page, len(pages), f"{title(self.summary.metric)} by number of objects", interval=True
            )

    def _by_count(self, axis, row: Row, place: int, places: int, **style) -> None:
        """A curve, beside the others' so that no bar hides another."""
        shown = [(x.count, x.scores[row.result.spec]) for x in self.summary.objects if row.result.spec in x.scores]
        shift = _beside(place, places)
        axis.errorbar(
            [count + shift for count, _ in shown],
            [x.value for _, x in shown],
            yerr=_reach([x for _, x in shown]),
            ms=5,
            lw=1.1,
            elinewidth=1,
            capsize=2,
            **style,
        )

    def _band(self, axis, plain: Row | None, metric: str) -> None:
        if plain is None:
            return
        found = plain.scores[metric]
        axis.axhline(found.value, color="black", lw=1, ls="--", label=f"({plain.number}) f16")
        if found.interval:
            axis.axhspan(found.interval.low, found.interval.high, color="black", alpha=0.08, lw=0)

    def _names(self, numbers: list[int]) -> str:
        of = {row.number: row.result.spec for row in self.summary.rows}
        names = [_name(of[number], [], f"({number}) ") for number in numbers[:3]]
        return "\n= ".join(names) + (f"\nand {len(numbers) - 3} more" if len(numbers) > 3 else "")

    def _figure(self, count: int):
        size = (COLUMN_INCHES, 3.6) if self.look.paper else (10, 3.1 * count + 0.9)
        figure, axes = self.plt.subplots(
            count, 1, figsize=size, squeeze=False, sharex=True, layout="constrained"
        )
        return figure, [row[0] for row in axes]

    def _legend(self, axis) -> None:
        if self.look.paper:  # below, where a column has room
            axis.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.28), fontsize=6, frameon=False, borderaxespad=0)
            return
        axis.legend(
            loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False, borderaxespad=0, labelspacing=0.6
        )

    def _finish(self, figure, kind: str, page: int, pages: int, heading: str, interval: bool = False) -> None:
        summary, setting = self.summary, self.summary.group.setting
        if pages > 1:
            heading += f" (page {page + 1} of {pages})"
        length = (
            f"{summary.prompt_tokens:.0f} prompt tokens"
            if summary.prompt_tokens is not None
            else "prompt length not known"
        )
        about = f"{setting.model}, {setting.task}, {setting.split}, protocol {setting.protocol}"
        clusters = f" in {summary.group.clusters} clusters" if summary.group.clusters else ""
        counts = f"n = {len(summary.group.ids)}{clusters}, {length}, seed {', '.join(map(str, summary.seeds))}"
        if interval:
            few = f", of {FEWEST} images or more" if kind == "objects" else ""
            counts += f"; 95 % bootstrap intervals ({self.resamples} resamples, seed {self.seed}){few}"
        lines = [line for text in (about, counts) for line in textwrap.wrap(text, 110)]
        if not self.look.paper:
            figure.suptitle(_plain("\n".join([heading, *lines])), fontsize=9, x=0.01, ha="left")
        name = f"{summary.number:02}_{kind}{f'-{page + 1}' if page else ''}"
        for ending in self.look.formats:
            figure.savefig(self.folder / f"{name}.{ending}", dpi=300 if self.look.paper else 110, metadata=UNDATED[ending])
        self.plt.close(figure)
        shown = next((ending for ending in self.look.formats if ending != "pdf"), "pdf")
        self.written.setdefault(kind, []).append(f"{name}.{shown}")


def _families(rows: list[Row], where: Callable[[Row], float]) -> list[tuple[str, list[tuple[str, list[Row]]]]]:
    """Panels with their titles: policies of one kind, each with its rows in the order of `where`."""
    groups = []
    for key, title in KINDS.items():
        families: dict[str, list[Row]] = {}
        for row in sorted((row for row in rows if row.kind == key), key=lambda row: (row.family, where(row))):
            families.setdefault(row.family, []).append(row)
        cut = panels(list(families.items()), SERIES_A_PANEL)
        groups += [(f"{title} ({i + 1} of {len(cut)})" if len(cut) > 1 else title, some) for i, some in enumerate(cut)]
    return groups


def _side_by_side(xs: list[float], low: float, high: float, log: bool, apart: float = MARKER_WIDTH) -> list[float]:
    """Places from `low` to `high` that are `apart`, as a share of that axis, and as near to `xs` as can be, in their order.

    Neighbours that are too near are one block, centred on the mean of its members, and blocks that then meet are one.
    """
    there, back = (math.log2, lambda place: 2.0**place) if log else (float, float)
    step = apart * (there(high) - there(low))
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    blocks: list[tuple[float, list[int]]] = []  # where the first would stand, and the members
    for i in order:
        first, members = there(xs[i]), [i]
        while blocks and blocks[-1][0] + step * len(blocks[-1][1]) > first:
            before, others = blocks.pop()
            count = len(others) + len(members)
            first = (before * len(others) + (first - step * len(others)) * len(members)) / count
            members = others + members
        blocks.append((max(first, there(low) + step / 2), members))
    places = dict.fromkeys(order, 0.0)
    for first, members in blocks:
        for k, i in enumerate(members):
            places[i] = back(first + k * step) if len(members) > 1 else xs[i]
    return [places[i] for i in range(len(xs))]


def _beside(place: int, places: int) -> float:
    """How far a bar stands beside its count: as near as bars can be told apart, for the lines between shifted points
    make one curve look better than another that is the same."""
    step = min(0.03, 0.5 / places)
    return step * (place - (places - 1) / 2)


def _plain(text: str) -> str:
    """Without matplotlib's formulas."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text).replace("$", r"\$")


def _name(text: str, rows: list[Row], before: str = "") -> str:
    """A legend's line: the numbers of the table, then the name, broken after a comma or space where it is long."""
    if rows:
        numbers = [str(row.number) for row in rows]
        before = f"({', '.join(numbers) if len(numbers) < 5 else f'{numbers[0]} ... {numbers[-1]}'}) "
    lines = [before]
    for piece in re.findall(r"[^, ]*[, ]?", text):
        while len(lines[-1]) + len(piece.rstrip()) > NAME_WIDTH and piece:
            room = 0 if len(piece) <= NAME_WIDTH - 4 else NAME_WIDTH - len(lines[-1])
            lines[-1] += piece[:room]
            lines.append("    ")
            piece = piece[room:]
        lines[-1] += piece
    return _plain("\n".join(lines[:3] + (["    ..."] if len(lines) > 3 else [])))


def _span(estimate: Estimate) -> tuple[float, ...]:
    return (estimate.interval.low, estimate.interval.high) if estimate.interval else (estimate.value,)


def _reach(estimates: list[Estimate]) -> list[list[float]]:
    """How far the bars go down and up; not at all without an interval."""
    spans = [x.interval for x in estimates]
    return [
        [max(0.0, x.value - span.low) if span else 0.0 for x, span in zip(estimates, spans)],
        [max(0.0, span.high - x.value) if span else 0.0 for x, span in zip(estimates, spans)],
    ]


def _limits(axis, values: list[float]) -> None:
    """The same in all panels, with some room; nothing that is measured is cut off."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    axis.set_ylim(low - room, high + room)


def _log_y(axis, values: list[float]) -> None:
    """The same in all panels, with ticks at 1, 2 and 5 of every power of ten."""
    low, high = min(values) / 1.2, max(values) * 1.2
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 100 else (1,)
    shown = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
    if shown:
        axis.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()


def _log2(axis, values: list[float]) -> None:
    """Powers of two, so that halving is one step."""
    low, high = min(values) / 1.08, max(values) * 1.08
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    ticks = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    if len(ticks) < 2:
        ticks = sorted({float(f"{value:.3g}") for value in (min(values), max(values))})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.tick_params(labelbottom=True)
