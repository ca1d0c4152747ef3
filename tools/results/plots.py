"""The plots of the results page, as SVG that reads on a light and on a dark page: grey text, no background."""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path
from typing import Callable

from data import BATCHES, BUDGETS, CALIBQUANT, EXACT_2_BITS, MODELS, Figure, find

INK = "#7d8590"
# Colours that people with any colour vision tell apart, on white and on black.
COLOURS = ("#d9822b", "#2a9d8f", "#4c8bf5", "#c678dd", "#e5534b", "#8a9a3b", "#b58900")
SHORT = {EXACT_2_BITS: "vidkv 2 bits", CALIBQUANT[2]: "calibquant 2 bits + int4", "calibquant": "calibquant 1 bit (lossy)",
         CALIBQUANT[4]: "calibquant 4 bits + int4", "kivi,residual=32": "kivi 2 bits",
         "prefixkv,keep=0.5": "prefixkv, half", "prefixkv,keep=0.5 + int4": "prefixkv, half + int4"}  # fmt: skip


def quality_rows(figures: list[Figure]) -> list[tuple[str, float, float, float, float]]:
    """(spec, stored bits and share of facts of captions, stored bits and ANLS of documents): means over the three models."""
    mine = [f for f in figures if f.model in MODELS and f.weights == "real" and f.command.startswith("tools/eval/")]
    table: dict[str, dict[str, list[float]]] = {}
    for figure in mine:
        table.setdefault(figure.spec, {}).setdefault(figure.metric, []).append(figure.number())
    names = ("captions_stored_bits", "captions_facts", "documents_stored_bits", "documents_anls")
    whole = {spec: cells for spec, cells in table.items() if all(len(cells.get(name, ())) == len(MODELS) for name in names)}
    return [(spec, *(statistics.fmean(cells[name]) for name in names)) for spec, cells in whole.items()]


def kind(spec: str) -> str:
    rules = ("prefixkv", "uniform", "streaming", "h2o", "snapkv", "random", "vlcache", "expected_attention")
    drops = spec.startswith(rules)
    if spec.startswith("random"):
        return "random tokens (baseline)"
    return "evict and quantize" if drops and "+" in spec else "evict" if drops else "quantize"


def memory_rows(figures: list[Figure]) -> dict[str, list[tuple[int, float]]]:
    """spec -> (GB, tokens/s), and the paper's as "paper: 16 bits"."""
    specs = ("f16", "int4", EXACT_2_BITS, CALIBQUANT[2], "calibquant", "prefixkv,keep=0.5 + int4")
    found = {spec: [(int(gb[:-2]), find(figures, spec=spec, metric=f"decode_in_{gb}_tokens_s").number()) for gb in BUDGETS]
             for spec in specs}  # fmt: skip
    for bits in ("16 bits", "2 bits", "1 bit"):
        found[f"paper: {bits}"] = [(int(gb[:-2]), find(figures, spec=f"CalibQuant's paper, {bits}",
                                                       metric=f"published_in_{gb}_tokens_s").number()) for gb in BUDGETS]  # fmt: skip
    return found


def step_rows(figures: list[Figure]) -> dict[str, list[float]]:
    """spec -> step time over that of f16 at each batch size."""
    base = [find(figures, spec="f16", metric="step_ms", batch=str(batch)).number() for batch in BATCHES]
    specs = ("int8", "int4", "kivi,residual=32", EXACT_2_BITS, CALIBQUANT[2], "calibquant", "prefixkv,keep=0.5")
    return {spec: [find(figures, spec=spec, metric="step_ms", batch=str(batch)).number() / of
                   for batch, of in zip(BATCHES, base)] for spec in specs}  # fmt: skip


def digest(rows: object) -> str:
    """Of the rows that a plot shows; it is written into the file, so that a test sees one that is out of date."""
    return "data " + hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _figure(width: float, height: float, columns: int = 1):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.hashsalt": "kvlm", "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "grid.color": INK,
        "grid.alpha": 0.25, "axes.grid": True, "legend.frameon": False, "font.family": "sans-serif", "svg.fonttype": "path",
    })  # fmt: skip
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), squeeze=False, layout="constrained")


def _save(figure, path: Path, stamp: str) -> None:
    figure.savefig(path, transparent=True, metadata={"Date": None, "Description": stamp})
    lines = [line.rstrip() for line in path.read_text("utf-8").splitlines()]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def quality_vs_bits(figures: list[Figure], path: Path) -> None:
    rows = quality_rows(figures)
    figure, axes = _figure(9.5, 4.6, 2)
    looks = {"quantize": ("o", COLOURS[1]), "evict": ("s", COLOURS[0]), "evict and quantize": ("D", COLOURS[2]),
             "random tokens (baseline)": ("x", INK)}  # fmt: skip
    above = (CALIBQUANT[2], EXACT_2_BITS, "int4", "int8", "f16")
    right = ("calibquant", "kivi,bits=1", "head_quantile", "xquant", "asymkv", "streaming,keep=0.5", "prefixkv,keep=0.5",
             "prefixkv,keep=0.5 + int4", "prefixkv,keep=0.2 + int4", "random,keep=0.2")  # fmt: skip
    for axis, column, label in ((axes[0][0], 1, "captions: share of facts right"), (axes[0][1], 3, "documents: ANLS")):
        for name, (marker, colour) in looks.items():
            mine = [row for row in rows if kind(row[0]) == name]
            axis.scatter([row[column] for row in mine], [row[column + 1] for row in mine], marker=marker, color=colour,
                         label=name, s=30)  # fmt: skip
        for row in rows:
            at = (row[column], row[column + 1])
            text = SHORT.get(row[0], row[0]).replace(" (lossy)", "").replace("keep=0.2", "a fifth").replace("keep=0.5", "half")
            look = {"textcoords": "offset points", "fontsize": 8, "color": INK}
            if row[0] in above:
                axis.annotate(text, at, (-2, 6), rotation=45, **look)
            elif row[0] in right and row[column + 1] < 0.95:
                axis.annotate(text.replace(",", ", ").replace("  ", " "), at, (7, -3), **look)
        axis.set(xlabel="stored bits per element", ylabel=label, xscale="log", ylim=(0, 1.42), xlim=(1.4, 21))
        axis.set_xticks([2, 3, 4, 6, 8, 16], ["2", "3", "4", "6", "8", "16"])
        axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        axis.minorticks_off()
    axes[0][0].legend(loc="lower left", fontsize=8)
    _save(figure, path, digest(rows))


def throughput_vs_memory(figures: list[Figure], path: Path) -> None:
    rows = memory_rows(figures)
    figure, axes = _figure(7.5, 4)
    axis = axes[0][0]
    ours = [spec for spec in rows if not spec.startswith("paper")]
    for colour, spec in zip(COLOURS, ours):
        axis.plot(*zip(*rows[spec]), marker="o", markersize=4, color=colour, label=SHORT.get(spec, spec))
    for marker, spec in zip("^sv", [spec for spec in rows if spec.startswith("paper")]):
        axis.plot(*zip(*rows[spec]), marker=marker, markersize=4, linestyle="--", color=INK, label="CalibQuant's " + spec)
    axis.set(xlabel="memory of the cache, GB", ylabel="tokens/s", yscale="log", ylim=(30, 40_000), xticks=[5, 10, 20, 30])
    axis.set_yticks([100, 1000, 10_000], ["100", "1,000", "10,000"])
    axis.minorticks_off()
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    _save(figure, path, digest(rows))


def step_time_vs_batch(figures: list[Figure], path: Path) -> None:
    rows = step_rows(figures)
    figure, axes = _figure(7.5, 3.6)
    axis = axes[0][0]
    axis.axhline(1, color=INK, linestyle="--", linewidth=1)
    axis.annotate("f16", (2.0, 1.01), color=INK, fontsize=9, ha="right", va="bottom")
    for colour, spec in zip(COLOURS, rows):
        axis.plot(range(len(BATCHES)), rows[spec], marker="o", markersize=4, color=colour, label=SHORT.get(spec, spec))
    axis.set(xlabel="sequences in the batch", ylabel="step time over f16's (lower is faster)", ylim=(0, None))
    axis.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axis.legend(loc="center left", bbox_to_anchor=(1.05, 0.5), fontsize=8)
    _save(figure, path, digest(rows))


PLOTS: dict[str, tuple[Callable, Callable]] = {  # file -> what it shows, and who draws it
    "quality_vs_bits.svg": (quality_rows, quality_vs_bits),
    "throughput_vs_memory.svg": (memory_rows, throughput_vs_memory),
    "step_time_vs_batch.svg": (step_rows, step_time_vs_batch),
}
