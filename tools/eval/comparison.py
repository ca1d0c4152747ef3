"""What the interval of a comparison decides.

An ordering is decided at equal stored bytes, or along the frontier: what is better with no more bytes is better. What is
better with more bytes decides nothing. Needs numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import metrics
from claims import Claim
from factors import BUDGET, Catalogue, Factor
from groups import Estimate, Group, NotComparable
from results import Result
from significance import Interval, McNemar

TOLERANCE = 0.02  # of stored bits; within it two specs store the same
ALPHA = 0.05  # of McNemar's test

CONFIRMED, CONTRADICTED, INCONCLUSIVE = "confirmed", "contradicted", "inconclusive"


@dataclass(frozen=True)
class Verdict:
    """CONFIRMED, CONTRADICTED or INCONCLUSIVE, and why."""

    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


def excess(a: float | None, b: float | None) -> float | None:
    """By what share a stores more than b; None where one was not measured."""
    return None if not a or not b else round(a / b - 1, 9)  # the rounding of bits is no byte


def bytes_in_words(more: float | None) -> str:
    if more is None:
        return "stored bits were not measured"
    if abs(more) <= TOLERANCE:
        return "equal bytes"
    return f"{100 * abs(more):.1f} % {'more' if more > 0 else 'fewer'} bytes"


def decide(apart: Interval | None, bits_a: float | None, bits_b: float | None) -> Verdict:
    """Whether a is better than b, by the interval of a - b (positive: a is better) and what both store."""
    if apart is None:
        return Verdict(INCONCLUSIVE, "the score has no interval")
    more = excess(bits_a, bits_b) if apart.side >= 0 else excess(bits_b, bits_a)  # of the better one
    if more is None:
        return Verdict(INCONCLUSIVE, bytes_in_words(more))
    if apart.side == 0:
        return Verdict(INCONCLUSIVE, "the interval contains 0")
    if more > TOLERANCE:
        return Verdict(INCONCLUSIVE, f"the better one stores {bytes_in_words(more)}")
    reason = "" if more >= -TOLERANCE else f"the better one stores {bytes_in_words(more)}"
    return Verdict(CONFIRMED if apart.side > 0 else CONTRADICTED, reason)


def decide_comparable(apart: Interval | None, margin: float, bits_a: float | None, bits_b: float | None) -> Verdict:
    """Whether a and b are within `margin` of each other (in the score's unit), at equal bytes."""
    if apart is None:
        return Verdict(INCONCLUSIVE, "the score has no interval")
    more = excess(bits_a, bits_b)
    if more is None or abs(more) > TOLERANCE:
        return Verdict(INCONCLUSIVE, bytes_in_words(more))
    if -margin <= apart.low and apart.high <= margin:
        return Verdict(CONFIRMED, f"within {margin:.3g}")
    if apart.high < -margin or apart.low > margin:
        return Verdict(CONTRADICTED, f"apart by more than {margin:.3g}")
    return Verdict(INCONCLUSIVE, f"the interval reaches beyond {margin:.3g}")


@dataclass(frozen=True)
class Comparison:
    """Two results, compared by the metric that decides, with what the others say.

    factors  in what the two differ; None: one of them is no spec that can be read
    matched  options that only make the two work alike, or store the same
    against  other metrics that are decided the other way
    """

    a: Result
    b: Result
    metric: str
    n: int
    difference: Estimate
    verdict: Verdict
    factors: list[Factor] | None
    matched: list[Factor] = field(default_factory=list)
    exact: dict[str, McNemar] = field(default_factory=dict)
    others: dict[str, Estimate] = field(default_factory=dict)

    @property
    def one_factor(self) -> bool:
        return self.factors is not None and len(self.factors) == 1

    @property
    def more_bytes(self) -> float | None:
        return excess(self.a.stored_bits, self.b.stored_bits)


def compare(
    group: Group,
    a: Result,
    b: Result,
    catalogue: Catalogue,
    metric: str | None = None,
    alike: tuple[str, ...] = (),
    margin: float | None = None,
) -> Comparison:
    """a compared with b. `alike` are options that one has so that it works as the other does; `margin` asks whether the two are
    comparable rather than which is better. NotComparable where no metric decides."""
    metric = metric or group.primary
    if metric is None:
        raise NotComparable(
            f"none of {', '.join(group.scores) or 'no scores'} decides {group.setting.task!r}; name the metric"
        )
    apart = group.difference(a, b, metric)
    exact = {name: test for name in group.scores if (test := group.exactness(a, b, name)) is not None}
    # Of the same answers: teacher-forced text changes no verdict.
    others = {name: group.difference(a, b, name) for name in group.scores if name not in (metric, *metrics.FORCED)}
    factors, matched = factors_apart(a.spec, b.spec, catalogue, alike)
    if a.items == b.items:
        verdict = Verdict(INCONCLUSIVE, "no record differs")
    elif margin is not None:
        verdict = decide_comparable(apart.interval, margin, a.stored_bits, b.stored_bits)
    else:
        verdict = _unless_contradicted(decide(apart.interval, a.stored_bits, b.stored_bits), metric, exact, others)
    return Comparison(a, b, metric, len(group.ids), apart, verdict, factors, matched, exact, others)


def factors_apart(
    a: str, b: str, catalogue: Catalogue, alike: tuple[str, ...]
) -> tuple[list[Factor] | None, list[Factor]]:
    """What two specs differ in; and of that, apart, budgets that make different rules store the same, and the options
    `alike` that make them work alike. None where one is no spec that can be read."""
    try:
        apart = catalogue.differences(a, b)
    except ValueError:
        return None, []

    def is_alike(factor: Factor) -> bool:
        return factor.name == BUDGET and len(apart) > 1 or factor.name.partition(" of ")[0] in alike

    return [x for x in apart if not is_alike(x)], [x for x in apart if is_alike(x)]


def _unless_contradicted(
    verdict: Verdict, metric: str, exact: dict[str, McNemar], others: dict[str, Estimate]
) -> Verdict:
    """A verdict remains only where no other metric of the same answers is decided the other way, and where exactness that
    decides is confirmed by its own test."""
    if verdict.word == INCONCLUSIVE:
        return verdict
    if metric in exact and exact[metric].p >= ALPHA:
        return Verdict(INCONCLUSIVE, f"McNemar's p is {exact[metric].p:.2g}")
    side = 1 if verdict.word == CONFIRMED else -1
    against = [
        name
        for name, other in others.items()
        if other.interval and other.interval.side == -side and not (name in exact and exact[name].p >= ALPHA)
    ]
    if against:
        return Verdict(
            INCONCLUSIVE, f"{metrics.title(metric)} {'for' if side > 0 else 'against'} it, {' and '.join(map(metrics.title, against))} the other way"
        )
    return verdict


def judge(verdicts: list[Verdict]) -> Verdict:
    """One verdict of several draws: theirs if they agree."""
    words = {verdict.word for verdict in verdicts}
    if len(words) == 1:
        return Verdict(words.pop(), "; ".join(dict.fromkeys(filter(None, (verdict.reason for verdict in verdicts)))))
    return Verdict(INCONCLUSIVE, "; ".join(f"against draw {i}: {verdict}" for i, verdict in enumerate(verdicts)))


@dataclass(frozen=True)
class ClaimRow:
    """A claim in one setting: a comparison for every draw, and what they say together."""

    claim: Claim
    comparisons: list[Comparison]
    verdict: Verdict


def weigh(group: Group, claim: Claim, catalogue: Catalogue) -> ClaimRow | None:
    """None where the group lacks one of the specs."""
    found = [group.find(spec) for spec in (claim.better, *claim.others)]
    if any(result is None for result in found) or group.primary is None:
        return None
    margin = None
    if claim.comparable is not None:
        if group.plain is None:
            return None
        margin = claim.comparable * abs(group.plain.scores[group.primary])
    rows = [compare(group, found[0], other, catalogue, alike=claim.alike, margin=margin) for other in found[1:]]
    return ClaimRow(claim, rows, judge([row.verdict for row in rows]))


def equal_bytes(group: Group) -> list[list[Result]]:
    """Sets of two or more results that store the same, each within TOLERANCE of its smallest; fewest bits first."""
    sets: list[list[Result]] = []
    for result in sorted((x for x in group.results if x.stored_bits), key=lambda x: (x.stored_bits, x.spec)):
        if sets and excess(result.stored_bits, sets[-1][0].stored_bits) <= TOLERANCE:
            sets[-1].append(result)
        else:
            sets.append([result])
    return [found for found in sets if len(found) > 1]


def frontier(group: Group, metric: str) -> list[Result]:
    """Results that no other is better than with no more bytes, by intervals; fewest bits first."""
    measured = [x for x in group.results if x.stored_bits]

    def is_beaten(result: Result) -> bool:
        for other in measured:
            if other is not result and excess(other.stored_bits, result.stored_bits) <= TOLERANCE:
                apart = group.difference(other, result, metric).interval
                if decide(apart, other.stored_bits, result.stored_bits).word == CONFIRMED:
                    return True
        return False

    return sorted((x for x in measured if not is_beaten(x)), key=lambda x: (x.stored_bits, x.spec))
