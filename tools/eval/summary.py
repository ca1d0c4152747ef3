"""The contents of a report as plain data, from which the page, the tables and the plots are made. Needs numpy."""

from __future__ import annotations

from dataclasses import dataclass

import comparison
import metrics
import significance
from claims import CLAIMS
from comparison import ClaimRow, Comparison
from factors import Catalogue
from groups import Estimate, Group
from results import Result

KINDS = {"quantizer": "quantization", "retention": "eviction", "both": "quantization and eviction", "other": "other"}


@dataclass(frozen=True)
class Row:
    """A spec's figures; `number` names it in tables and plots of its setting."""

    number: int
    result: Result
    family: str  # the spec without width and budget
    kind: str  # of KINDS
    scores: dict[str, Estimate]
    loss: Estimate | None  # of the metric that decides, f16's score taken off
    forced: dict[str, Estimate]  # KL, top1 and perplexity over teacher-forced text


@dataclass(frozen=True)
class EqualBytes:
    """Specs that store the same: the best one compared with each of the others."""

    bits: tuple[float, float]
    best: Row
    others: list[tuple[Row, Comparison]]


MOST_OBJECTS = 10  # images with as many or more are one


@dataclass(frozen=True)
class Objects:
    """Scores over the records with so many objects, by spec; the last may be `or_more`."""

    count: int
    or_more: bool
    n: int
    scores: dict[str, Estimate]

    @property
    def label(self) -> str:
        return f"{self.count}{'+' if self.or_more else ''}"


@dataclass(frozen=True)
class Summary:
    """Of one setting. `number` names its plots."""

    number: int
    group: Group
    rows: list[Row]
    equal_bytes: list[EqualBytes]
    frontier: list[Row]
    claims: list[ClaimRow]
    objects: list[Objects]
    notes: list[str]

    @property
    def plain(self) -> Row | None:
        return next((row for row in self.rows if row.result is self.group.plain), None)

    @property
    def metric(self) -> str | None:
        return self.group.primary

    @property
    def prompt_tokens(self) -> float | None:
        known = [row.result.prompt_tokens for row in self.rows if row.result.prompt_tokens is not None]
        return sum(known) / len(known) if known else None

    @property
    def devices(self) -> list[str]:
        return sorted({row.result.device for row in self.rows} - {""})

    @property
    def versions(self) -> dict[str, list[str]]:
        """program -> every version that took part, without the program's name, which kvlm's own begins with."""
        found: dict[str, set[str]] = {}
        for row in self.rows:
            for name, version in row.result.versions.items():
                found.setdefault(name, set()).add(version.removeprefix(f"{name} "))
        return {name: sorted(found[name]) for name in sorted(found)}

    @property
    def commands(self) -> list[str]:
        return sorted({row.result.command for row in self.rows} - {""})

    @property
    def seeds(self) -> list[int]:
        return sorted({row.result.seed for row in self.rows})


def summarise(number: int, group: Group, catalogue: Catalogue) -> Summary:
    rows = [_row(i, group, result, catalogue) for i, result in enumerate(group.results, 1)]
    of_spec = {row.result.spec: row for row in rows}
    weighed = [comparison.weigh(group, claim, catalogue) for claim in CLAIMS]
    frontier = comparison.frontier(group, group.primary) if group.primary else []
    summary = Summary(
        number,
        group,
        rows,
        _equal_bytes(group, of_spec, catalogue),
        [of_spec[x.spec] for x in frontier],
        [row for row in weighed if row is not None],
        _objects(group),
        [],
    )
    summary.notes.extend(_notes(summary))
    if unknown := catalogue.unknown([result.spec for result in group.results]):
        summary.notes.append(f"unknown to this build, so shown as other: {', '.join(unknown)}; --build names another build")
    return summary


def _row(number: int, group: Group, result: Result, catalogue: Catalogue) -> Row:
    try:
        family, kind = catalogue.family(result.spec), catalogue.kind(result.spec)
    except ValueError:  # answers of another program, or a spec file
        family, kind = result.spec, "other"
    loss = None
    if group.primary and group.plain is not None and result is not group.plain:
        loss = group.difference(result, group.plain, group.primary)
    scores = {metric: group.estimate(result, metric) for metric in group.scores}
    return Row(number, result, family, kind, scores, loss, group.forced(result))


def _equal_bytes(group: Group, of_spec: dict[str, Row], catalogue: Catalogue) -> list[EqualBytes]:
    found = []
    for results in comparison.equal_bytes(group) if group.primary else []:
        ordered = sorted(results, key=lambda x: (-group.difference(x, results[0], group.primary).value, x.spec))
        best = ordered[0]
        found.append(
            EqualBytes(
                (results[0].stored_bits, results[-1].stored_bits),
                of_spec[best.spec],
                [(of_spec[x.spec], comparison.compare(group, best, x, catalogue)) for x in ordered[1:]],
            )
        )
    return found


def _objects(group: Group) -> list[Objects]:
    counts = next((x.objects for x in group.results if x.objects), None)
    if counts is None or group.primary is None:
        return []
    by_count: dict[int, list[str]] = {}
    for key in group.ids:
        if key in counts:
            by_count.setdefault(min(counts[key], MOST_OBJECTS), []).append(key)
    made = [
        Objects(count, any(counts[key] > count for key in ids), len(ids), group.estimates(group.primary, ids))
        for count, ids in sorted(by_count.items())
    ]
    return [objects for objects in made if objects.scores]


def _notes(summary: Summary) -> list[str]:
    """What a reader has to know before he compares rows."""
    group, notes = summary.group, []
    if group.bootstrap.units < significance.FEWEST:
        notes.append(f"no intervals: there are fewer than {significance.FEWEST} records or clusters")
    if bare := [metric for metric in group.scores if not group.has_interval(metric)]:
        notes.append(
            f"no interval for {', '.join(map(metrics.title, bare))}: the score of the split is not the mean of its records' values"
        )
    if dropped := sorted({name for x in group.results for name in x.scores} - set(group.scores)):
        notes.append(f"left out, since not every spec has it: {', '.join(map(metrics.title, dropped))}")
    if counts := sorted({len(metrics.records(x, "KL")) for x in group.results if x.kl is not None}):
        many = " or ".join(map(str, counts))
        notes.append(f"KL, top-1 and perplexity are of the {many} records that were teacher-forced, and decide nothing")
    if any("CIDEr" in metric for metric in group.scores):
        notes.append("resamples take CIDEr's document frequencies from the whole split")
    if group.primary is None:
        notes.append("nothing is decided: none of these scores is known to decide the task (--metric names one)")
    if group.plain is None:
        notes.append("f16 is not among the specs, so nothing is measured against it")
    if unmeasured := [f"({row.number})" for row in summary.rows if row.result.stored_bits is None]:
        notes.append(f"stored bits of {', '.join(unmeasured)} were not measured, so their comparisons are inconclusive")
    if len(summary.devices) > 1:
        notes.append(f"specs ran on several devices: {'; '.join(summary.devices)}")
    for name, versions in summary.versions.items():
        if len(versions) > 1:
            notes.append(f"specs were made by several versions of {name}: {'; '.join(versions)}")
    lengths = {round(row.result.prompt_tokens, 1) for row in summary.rows if row.result.prompt_tokens is not None}
    if len(lengths) > 1:
        notes.append(f"prompts differ between specs: {min(lengths):g} to {max(lengths):g} tokens")
    return notes
