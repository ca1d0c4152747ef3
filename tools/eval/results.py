"""One row of a comparison: a model under a spec on a split of a data set, with its figures image by image.

Standard library only. coco.py, docvqa.py and the other scripts of this folder make these rows; the comparison, the report
and the plots read them, also from results.json, so that a page can be made again without a model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from storage import write_json


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
        """The row that to_json wrote; ValueError names a field that is missing or unknown."""
        known = {part.name for part in fields(cls)}
        if strange := sorted(row.keys() ^ known):
            what = "an unknown field" if strange[0] in row else "no field"
            raise ValueError(f"a result has {what} {strange[0]!r}; expected those of tools/eval/results.py")
        return cls(**row)


def write_results(path: Path, results: list[Result]) -> None:
    write_json(path, [result.to_json() for result in results])


def read_results(path: Path) -> list[Result]:
    """Rows of write_results; ValueError with the path."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of results; give the results.json of a run")
        return [Result.from_json(row) for row in rows]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the results.json of a run") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a file of results: {error}") from None
