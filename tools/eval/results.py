"""One row of a comparison: a model under a spec on a split of a data set, with its figures image by image.

Standard library only. coco.py, docvqa.py and the other scripts of this folder make these rows; the comparison, the report
and the plots read them, also from results.json, so that a page can be made again without a model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from errors import EvaluationError, guarded, printable
from storage import read_json, write_json

TEXTS = ("model", "spec", "task", "split", "protocol", "device", "command")
NUMBERS = ("stored_bits", "nominal_bits", "tokens_per_second", "prompt_tokens", "kl", "top1", "layer_records", "residual")


@dataclass
class Result:
    """Figures of (model, spec) on one split. A score is never read without `protocol`, `model` and the number of `items`.

    items            id -> metric -> value of that record, on the scale on which the corpus score is their mean (where it
                     is one: ROUGE_L's and CIDEr's are; those of BLEU and METEOR are made of counts over the split); of
                     the records whose text was forced also KL and top1 (means over its tokens), nll (nats, summed) and
                     tokens
    scores           metric -> value over the whole split
    clusters         id -> what records have in common (a video), for intervals; None: each stands alone
    stored_bits      bits a cached number takes, measured over the reference answers, the same text for every spec
    nominal_bits     bits a cached number takes by the spec, without scales, residual window or padding
    tokens_per_second, prompt_tokens   means over the records, of decoding and of the prompt
    kl, top1         mean divergence (nats a token) from the model's own f16 cache and agreement of the likeliest token,
                     0..1, forced over the reference answers
    retained         share of rows kept, per layer, 0..1
    layer_error      relative error of attention's output, per layer
    layer_records    records over whose forced text the two are measured, the first ones
    objects          id -> number of objects in the picture
    residual         newest tokens kept in full precision; None: the spec has no such window
    device           where it ran, as vlm-run says it
    versions         program -> version, of everything that had a hand in the figures
    command, seed    what made it
    """

    model: str
    spec: str
    task: str
    split: str
    protocol: str
    items: dict[str, dict[str, float]]
    scores: dict[str, float]
    clusters: dict[str, str] | None = None
    stored_bits: float | None = None
    nominal_bits: float | None = None
    tokens_per_second: float | None = None
    prompt_tokens: float | None = None
    kl: float | None = None
    top1: float | None = None
    retained: list[float] | None = None
    layer_error: list[float] | None = None
    layer_records: int | None = None
    objects: dict[str, int] | None = None
    residual: int | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    seed: int = 0

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict) -> Result:
        """The row that to_json wrote; ValueError names a field that is missing, unknown or of another kind."""
        known = {part.name for part in fields(cls)}
        if strange := sorted(row.keys() ^ known):
            what = "an unknown field" if strange[0] in row else "no field"
            raise ValueError(f"a result has {what} {strange[0]!r}; expected those of tools/eval/results.py")
        right = {name: isinstance(row[name], str) for name in TEXTS}
        right |= {name: row[name] is None or _is_number(row[name]) for name in NUMBERS}
        right |= {name: _is_map(row[name], _is_number) for name in ("scores", *(["objects"] if row["objects"] else []))}
        right |= {name: not row[name] or _is_map(row[name], lambda x: isinstance(x, str)) for name in ("clusters", "versions")}
        right |= {name: row[name] is None or isinstance(row[name], list) and all(map(_is_number, row[name]))
                  for name in ("retained", "layer_error")}  # fmt: skip
        right |= {"items": _is_map(row["items"], lambda x: _is_map(x, _is_number)), "seed": isinstance(row["seed"], int)}
        if wrong := next((name for name, fits in right.items() if not fits), None):
            raise ValueError(f"a result has {wrong!r} {printable(row[wrong], 60)}, which is of another kind than results.py has it")
        return cls(**row)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _is_map(value: object, fits) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def write_results(path: Path, results: list[Result]) -> None:
    write_json(path, [result.to_json() for result in results])


@guarded
def read_results(path: Path) -> list[Result]:
    """Rows of write_results; EvaluationError with the path."""
    try:
        rows = read_json(path)
    except EvaluationError as error:
        raise EvaluationError(str(error).replace("is no JSON file", "is not a file of results")) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EvaluationError(f"{path} is not a file of results: expected a list; give the results.json of a run")
    try:
        return [Result.from_json(row) for row in rows]
    except ValueError as error:
        raise EvaluationError(f"{path} is not a file of results: {error}") from None
