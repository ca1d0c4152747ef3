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
LOWER_IS_BETTER = {"perplexity", "KL"}

# Of teacher-forced text, not of answers, and only of the records that were forced: they decide nothing about answers.
FORCED = ("KL", "top1", "perplexity")

# The score on which a task's claims are decided: the first of these that its results have. Chosen before any was measured.
PRIMARY = (
    "slots", "CIDEr", "raw CIDEr", "ANLS", "relaxed accuracy", "VQA accuracy", "accuracy", "facts", "right", "ROUGE-L F1",
    "ROUGE_L", "answers", "exact",
)

# exp(sum / sum) over records: perplexity is of all tokens, whichever record they are of. `nll` is in nats a record.
EXPONENTIALS = {"perplexity": ("nll", "tokens")}
WEIGHTED = {"KL": "tokens", "top1": "tokens"}  # means over all tokens, of which a record has so many


# What people read for a score whose key in stored results is another word.
TITLES = {"slots": "facts"}


def title(metric: str) -> str:
    return TITLES.get(metric, metric)


@dataclass(frozen=True)
class Statistic:
    """A score as a function of sums over records: of its two parts, or of one and the count."""

    metric: str
    parts: tuple[str, ...]
    exponential: bool = False
    weight: str | None = None  # the mean of a record counts so many times

    def rows(self, result: Result, ids: list[str]) -> list[list[float]]:
        """(records, 2): numerator and denominator of each."""
        found = []
        for key in ids:
            item = result.items[key]
            if self.weight:
                found.append([float(item[self.metric]) * item[self.weight], float(item[self.weight])])
            else:
                found.append([float(item[part]) for part in self.parts] + [1.0] * (2 - len(self.parts)))
        return found

    def of_sums(self, sums):
        """(..., 2) sums to (...) scores."""
        quotient = sums[..., 0] / sums[..., 1]
        return import_numpy().exp(quotient) if self.exponential else quotient


def records(result: Result, metric: str) -> list[str]:
    """The records that a metric is of: all, or those that were forced."""
    if metric not in FORCED:
        return sorted(result.items)
    return sorted(key for key, item in result.items.items() if item.get("tokens"))


def of_forced_text(result: Result) -> dict[str, float]:
    """What was measured over teacher-forced text, apart from the scores of answers."""
    found = {"KL": result.kl, "top1": result.top1}
    ids = [key for key in records(result, "KL") if result.items[key].get("nll") is not None]
    if ids:
        nll, tokens = (sum(result.items[key][part] for key in ids) for part in ("nll", "tokens"))
        found["perplexity"] = math.exp(nll / tokens)
    return {metric: value for metric, value in found.items() if value is not None}


def statistic(result: Result, metric: str) -> Statistic | None:
    """How `metric` is made of the records of `result`; None where they do not give its score again."""
    ways = [Statistic(metric, EXPONENTIALS[metric], True)] if metric in EXPONENTIALS else []
    if metric in WEIGHTED:
        ways.append(Statistic(metric, (metric, WEIGHTED[metric]), weight=WEIGHTED[metric]))
    ids = records(result, metric)
    for way in (*ways, Statistic(metric, (metric,))):
        if all(result.items[key].get(part) is not None for key in ids for part in way.parts):
            sums = [sum(column) for column in zip(*way.rows(result, ids))]
            if not sums or sums[1] == 0:
                continue
            value = math.exp(sums[0] / sums[1]) if way.exponential else sums[0] / sums[1]
            score = result.scores.get(metric, of_forced_text(result).get(metric) if metric in FORCED else None)
            if score is not None and math.isclose(value, score, rel_tol=SAME, abs_tol=SAME):
                return way
    return None


def is_right_or_wrong(result: Result, metric: str) -> bool:
    """Every record has it as 0 or 1, so that it can be counted (McNemar)."""
    return bool(result.items) and all(item.get(metric) in (0, 1) for item in result.items.values())


def primary(scores: list[str]) -> str | None:
    """The score that decides, of those that there are; else the only one; else none is chosen after the fact."""
    scores = [metric for metric in scores if metric not in FORCED]
    chosen = [metric for metric in PRIMARY if metric in scores]
    return chosen[0] if chosen else scores[0] if len(scores) == 1 else None
