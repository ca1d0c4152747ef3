"""What scores mean: which way is better, how a split's score is made of its records', and how it is printed.

A score has an interval only where it can be made again from what Result.items has of each record; `of` finds the way, and
checks it on the whole split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from results import Result
from significance import import_numpy

SAME = 1e-6  # relative; a score that its records give again

# Of these less is better, of all others more.
LOWER_IS_BETTER = {"perplexity"}

# The score on which a task's claims are decided: the first of these that its results have. Chosen before any was measured.
PRIMARY = (
    "slots", "CIDEr", "raw CIDEr", "ANLS", "accuracy", "facts", "right", "ROUGE-L F1", "ROUGE_L", "perplexity", "answers", "exact",
)

# exp(sum / sum) over records: perplexity is of all tokens, whichever record they are of. `nll` is in nats a record.
EXPONENTIALS = {"perplexity": ("nll", "tokens")}


@dataclass(frozen=True)
class Statistic:
    """A score as a function of sums over records: of its two parts, or of one and the count."""

    metric: str
    parts: tuple[str, ...]
    exponential: bool = False

    def rows(self, result: Result, ids: list[str]) -> list[list[float]]:
        """(records, 2): numerator and denominator of each."""
        found = []
        for key in ids:
            item = result.items[key]
            found.append([float(item[part]) for part in self.parts] + [1.0] * (2 - len(self.parts)))
        return found

    def of_sums(self, sums):
        """(..., 2) sums to (...) scores."""
        quotient = sums[..., 0] / sums[..., 1]
        return import_numpy().exp(quotient) if self.exponential else quotient


def statistic(result: Result, metric: str) -> Statistic | None:
    """How `metric` is made of the records of `result`; None where they do not give its score again."""
    ways = [Statistic(metric, EXPONENTIALS[metric], True)] if metric in EXPONENTIALS else []
    for way in (*ways, Statistic(metric, (metric,))):
        if all(item.get(part) is not None for item in result.items.values() for part in way.parts):
            sums = [sum(column) for column in zip(*way.rows(result, list(result.items)))]
            if not sums or sums[1] == 0:
                continue
            value = math.exp(sums[0] / sums[1]) if way.exponential else sums[0] / sums[1]
            score = result.scores.get(metric)
            if score is not None and math.isclose(value, score, rel_tol=SAME, abs_tol=SAME):
                return way
    return None


def is_right_or_wrong(result: Result, metric: str) -> bool:
    """Every record has it as 0 or 1, so that it can be counted (McNemar)."""
    return bool(result.items) and all(item.get(metric) in (0, 1) for item in result.items.values())


def primary(scores: list[str]) -> str | None:
    """The score that decides, of those that there are; else the only one; else none is chosen after the fact."""
    chosen = [metric for metric in PRIMARY if metric in scores]
    return chosen[0] if chosen else scores[0] if len(scores) == 1 else None
