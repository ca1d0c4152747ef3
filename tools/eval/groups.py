"""Results that may stand in one table, and their scores with intervals. Needs numpy.

Results are compared within a setting (model, task, split, protocol) and over the same records, which are drawn together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, NamedTuple

import metrics
import significance
from errors import EvaluationError
from factors import same
from results import Result
from significance import Interval, McNemar


class NotComparable(EvaluationError):
    """Results that must not stand in one table; says what differs and where first."""


class Setting(NamedTuple):
    """What a score is meaningless without."""

    model: str
    task: str
    split: str
    protocol: str


@dataclass(frozen=True)
class Estimate:
    """A score, with its interval where its records allow one."""

    value: float
    interval: Interval | None


class Group:
    """All results of a setting, over the same records; what two of them differ by is drawn together.

    metrics_wanted  decide, in this order, before metrics.PRIMARY does

    NotComparable names the first record that not all have, or the spec that is there twice.
    """

    def __init__(
        self,
        results: list[Result],
        resamples: int = significance.RESAMPLES,
        seed: int = significance.SEED,
        metrics_wanted: tuple[str, ...] = (),
    ):
        settings = {setting_of(result) for result in results}
        if len(settings) != 1:
            first, second = sorted(settings)[:2] if settings else ("", "")
            raise NotComparable(
                f"{first} and {second} are not one setting; compare results of one model, task, split and protocol"
                if settings
                else "there are no results to compare"
            )
        self.setting = settings.pop()
        self.results = sorted(results, key=lambda x: (-(x.stored_bits or 0), x.spec))
        self.ids = self._same_ids()
        self._spec_once()
        clusters = self._same_clusters()
        self.bootstrap = significance.Bootstrap(
            [clusters[key] if clusters else key for key in self.ids], resamples, seed
        )
        self.clusters = self.bootstrap.units if clusters else None
        self.scores = [
            metric
            for metric in dict.fromkeys(name for x in self.results for name in x.scores)
            if all(metric in x.scores for x in self.results)
        ]
        self.primary = next((x for x in metrics_wanted if x in self.scores), None) or metrics.primary(self.scores)
        self._statistics = {
            (x.spec, metric): metrics.statistic(x, metric)
            for x in self.results
            for metric in dict.fromkeys((*self.scores, *metrics.FORCED))
        }
        self._drawn = self._draw()

    def find(self, spec: str) -> Result | None:
        """The result of a spec, however it is written."""
        return next((result for result in self.results if same(result.spec, spec)), None)

    @property
    def plain(self) -> Result | None:
        """That of f16 rows, which the others are measured against."""
        return self.find("f16")

    def estimate(self, result: Result, metric: str) -> Estimate:
        drawn = self._drawn.get((result.spec, metric))
        return Estimate(result.scores[metric], None if drawn is None else significance.interval(drawn))

    def forced(self, result: Result) -> dict[str, Estimate]:
        """KL, top1 and perplexity over forced text, those that were measured. No verdict goes by them."""
        return {
            metric: Estimate(value, None if drawn is None else significance.interval(drawn))
            for metric, value in metrics.of_forced_text(result).items()
            for drawn in [self._drawn.get((result.spec, metric))]
        }

    def difference(self, a: Result, b: Result, metric: str) -> Estimate:
        """a - b, paired over the records; positive is better for a, also where less of the metric is better."""
        sign = -1 if metric in metrics.LOWER_IS_BETTER else 1
        drawn = [self._drawn.get((x.spec, metric)) for x in (a, b)]
        if metrics.records(a, metric) != metrics.records(b, metric):  # other texts were forced
            drawn = [None]
        apart = None if any(values is None for values in drawn) else significance.interval(sign * (drawn[0] - drawn[1]))
        return Estimate(sign * (a.scores[metric] - b.scores[metric]), apart)

    def exactness(self, a: Result, b: Result, metric: str) -> McNemar | None:
        """McNemar's test, where the metric is right or wrong for every record."""
        if not all(metrics.is_right_or_wrong(x, metric) for x in (a, b)):
            return None
        pairs = [(a.items[key][metric], b.items[key][metric]) for key in self.ids]
        return McNemar(sum(x > y for x, y in pairs), sum(x < y for x, y in pairs))

    def has_interval(self, metric: str) -> bool:
        """Whether the records of every result give its score again."""
        return all(self._statistics[x.spec, metric] for x in self.results)

    def estimates(self, metric: str, ids: list[str]) -> dict[str, Estimate]:
        """Of every spec whose records give the metric, over some of the records alone; intervals as for all of them."""
        import numpy

        ids = [key for key in ids if key in set(metrics.records(self.results[0], metric))]
        rows = {x.spec: (way, way.rows(x, ids)) for x in self.results if (way := self._statistics[x.spec, metric])}
        if not rows or not ids:
            return {}
        units = [self.results[0].clusters[key] if self.results[0].clusters else key for key in ids]
        bootstrap = significance.Bootstrap(units, self.bootstrap.resamples, self.bootstrap.seed)
        columns = numpy.concatenate([numpy.asarray(of) for _, of in rows.values()], axis=1)
        whole = columns.sum(axis=0)
        sums = bootstrap.sums(columns) if bootstrap.units >= significance.FEWEST else None
        found = {}
        for i, (spec, (way, _)) in enumerate(rows.items()):
            at = slice(2 * i, 2 * i + 2)
            ends = None if sums is None else significance.interval(way.of_sums(sums[:, at]))
            found[spec] = Estimate(float(way.of_sums(whole[at])), ends)
        return found

    def _same_ids(self) -> list[str]:
        first = self.results[0]
        for other in self.results[1:]:
            if strange := sorted(first.items.keys() ^ other.items.keys()):
                has, lacks = (first, other) if strange[0] in first.items else (other, first)
                raise NotComparable(
                    f"{strange[0]!r} is a record of {has.spec!r} and not of {lacks.spec!r} "
                    f"({' / '.join(self.setting)}); give both the same records, or report them apart"
                )
        return sorted(first.items)

    def _spec_once(self) -> None:
        for i, result in enumerate(self.results):
            if any(same(result.spec, other.spec) for other in self.results[:i]):
                raise NotComparable(
                    f"{result.spec!r} is there twice ({' / '.join(self.setting)}); give each result once"
                )

    def _same_clusters(self) -> dict[str, str] | None:
        clusters = self.results[0].clusters
        for other in self.results[1:]:
            if other.clusters != clusters:
                raise NotComparable(
                    f"{self.results[0].spec!r} and {other.spec!r} have other clusters of the same records "
                    f"({' / '.join(self.setting)}); make both with the same annotations"
                )
        if clusters is not None and (missing := [key for key in self.ids if key not in clusters]):
            raise NotComparable(
                f"{missing[0]!r} is in no cluster ({' / '.join(self.setting)}); expected one for every record"
            )
        return clusters

    def _draw(self) -> dict:
        """Scores over the resamples, by (spec, metric): of all records, and of those forced by themselves."""
        import numpy

        of_spec = {result.spec: result for result in self.results}
        over: dict[tuple[str, ...], list] = {}  # records -> what is of them
        for (spec, metric), way in self._statistics.items():
            if way is not None:
                over.setdefault(tuple(metrics.records(of_spec[spec], metric)), []).append((spec, metric, way))
        found = {}
        for ids, wanted in over.items():
            bootstrap = self.bootstrap
            if list(ids) != self.ids:
                clusters = self.results[0].clusters
                units = [clusters[key] if clusters else key for key in ids]
                bootstrap = significance.Bootstrap(units, bootstrap.resamples, bootstrap.seed)
            if bootstrap.units < significance.FEWEST:
                continue
            sums = bootstrap.sums(
                numpy.concatenate([numpy.asarray(way.rows(of_spec[spec], ids)) for spec, _, way in wanted], axis=1)
            )
            for i, (spec, metric, way) in enumerate(wanted):
                found[spec, metric] = way.of_sums(sums[:, 2 * i : 2 * i + 2])
        return found


def setting_of(result: Result) -> Setting:
    return Setting(result.model, result.task, result.split, result.protocol)


def grouped(results: Iterable[Result], **options) -> list[Group]:
    """A group for every setting, in the order of their names; options as Group's."""
    settings: dict[Setting, list[Result]] = {}
    for result in results:
        settings.setdefault(setting_of(result), []).append(result)
    return [Group(settings[setting], **options) for setting in sorted(settings)]
