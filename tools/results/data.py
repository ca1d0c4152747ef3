"""The measured figures of docs/data: one row a figure, read by the results page, the plots and the tests.

    date,commit,device,model,weights,spec,batch,prompt,metric,value,min,max,command

`weights` is "real" (a trained checkpoint), "random" (a released model's shape with random weights) or empty. A metric's name
ends with its unit (UNITS) or, for counts, with _of_N. `value` is the median or mean, `min` and `max` its spread or its 95 %
interval. Files of other columns (quality.csv, mutants.csv) are not read here. Standard library only.
"""

from __future__ import annotations

import csv
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "data"

# The end of a metric's name, and how people write the unit.
UNITS = {
    "_ms": "ms", "_us": "us", "_s": "s", "_min": "minutes", "_x": "x", "_percent": "%", "_gb_s": "GB/s", "_tb_s": "TB/s",
    "_tflop_s": "TFLOP/s", "_gflop_s": "GFLOP/s", "_tokens_s": "tokens/s", "_images_s": "images/s", "_nats": "nats",
    "_bits": "bits", "_gb": "GB", "_mb": "MB",
}  # fmt: skip

# What is measured: the bundled models, batches of decode, memory budgets, and specs that several tables show.
MODELS = ("pocket-llava", "pocket-internvl", "pocket-qwen")
BATCHES = (1, 16, 64)
BUDGETS = ("5GB", "10GB", "20GB", "30GB")
EXACT_2_BITS = "vidkv,key_bits=2,residual=32,value_bits=2"
CALIBQUANT = {bits: f"calibquant,bits={bits} + int4,scope=text" for bits in (4, 2)}


@dataclass(frozen=True)
class Figure:
    """One measured value. `value`, `min` and `max` are text, as written; value_of() is the number."""

    date: str
    commit: str
    device: str
    model: str
    weights: str
    spec: str
    batch: str
    prompt: str
    metric: str
    value: str
    min: str
    max: str
    command: str

    def number(self) -> float:
        return float(self.value)


COLUMNS = [field.name for field in fields(Figure)]


def read(path: Path) -> list[Figure]:
    """The figures of a file; none if its columns are others. ValueError names a line that is wrong."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        if next(lines, None) != COLUMNS:
            return []
        found = []
        for number, cells in enumerate(lines, 2):
            where = f"{path.name}:{number}"
            if len(cells) != len(COLUMNS):
                raise ValueError(f"{where} has {len(cells)} columns, expected {len(COLUMNS)}: {','.join(COLUMNS)}")
            figure = Figure(*cells)
            try:
                figure.number()
            except ValueError:
                raise ValueError(f"{where}: value {figure.value!r} is no number") from None
            if figure.weights not in ("real", "random", ""):
                raise ValueError(f"{where}: weights is {figure.weights!r}, expected real, random or nothing")
            found.append(figure)
    return found


def load(folder: Path = FOLDER) -> list[Figure]:
    """Every figure of the folder's CSV files."""
    return [figure for path in sorted(folder.glob("*.csv")) for figure in read(path)]


def write(path: Path, figures: list[Figure]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows(astuple(figure) for figure in figures)


def find(figures: list[Figure], **asked: str) -> Figure:
    """The one figure with these columns. LookupError if there is none, or more than one."""
    found = [figure for figure in figures if all(getattr(figure, key) == value for key, value in asked.items())]
    if len(found) != 1:
        raise LookupError(f"docs/data has {len(found)} figures with {asked}, expected 1")
    return found[0]


def derived(figures: list[Figure]) -> list[Figure]:
    """Ratios over f16 of one run, and sums over the three bundled models, which pages print as well."""
    found = []
    for metric, name in (("step_ms", "decode_over_f16_x"), ("prefill_ms", "prefill_over_f16_x")):
        base = {(f.model, f.commit, f.device, f.batch): f.number() for f in figures if f.metric == metric and f.spec == "f16"}
        for figure in figures:
            of = base.get((figure.model, figure.commit, figure.device, figure.batch))
            if figure.metric == metric and of:
                ratio = of / figure.number() if metric == "step_ms" else figure.number() / of
                found.append(replace(figure, metric=name, value=f"{ratio:.6g}", min="", max=""))
    sums: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        if figure.metric in ("captions_as_f16_of_200", "captions_right_of_200"):
            sums.setdefault((figure.spec, figure.commit, figure.metric), []).append(figure)
    for (_, _, metric), rows in sums.items():
        if len(rows) == 3:
            total = sum(row.number() for row in rows)
            found.append(replace(rows[0], model="all", metric=metric.replace("_200", "_600"), value=f"{total:.0f}"))
    return found
