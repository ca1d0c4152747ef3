"""Intervals and tests over the records of a split: percentile bootstrap, and McNemar's exact test.

Whatever is compared is drawn together: two specs answered the same records, so a resample takes the same records for both
and their difference has an interval of its own. Records that have something in common (the questions on one video) are
drawn as one. Deterministic: the draws are those of the Mersenne Twister of numpy's RandomState, whose sequence is
frozen for all versions. The bootstrap needs numpy, which is loaded when it is asked for; McNemar's test does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Sequence

from errors import EvaluationError

if TYPE_CHECKING:
    import numpy

RESAMPLES = 10_000
SEED = 1
LEVEL = 0.95
FEWEST = 10  # records or clusters; resamples of fewer say too little of what they were drawn from
CHUNK = 1 << 22  # numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """Ends of a percentile interval (LEVEL)."""

    low: float
    high: float

    @property
    def side(self) -> int:
        """1 where all of it is above 0, -1 where all is below; 0 where it holds 0, also as an end."""
        return (self.low > 0) - (self.high < 0)


@dataclass(frozen=True)
class McNemar:
    """Records that only A, and that only B, got right, and the two-sided exact p of such a split."""

    only_a: int
    only_b: int

    @property
    def p(self) -> float:
        """Under equal quality each of those records is a fair coin (binomial test with p = 1/2); records on which both
        agree say nothing. 1 where there is none to tell them apart."""
        discordant = self.only_a + self.only_b
        if discordant == 0:
            return 1.0
        ways = tail = 1  # of choosing k of them, and up to k
        for k in range(min(self.only_a, self.only_b)):
            ways = ways * (discordant - k) // (k + 1)
            tail += ways
        return min(1.0, 2 * tail / 2**discordant)


class Bootstrap:
    """Resamples of the records of one split, the same for all that is compared on it.

    units  of each record, what it is drawn with: its own id, or that of its cluster
    """

    def __init__(self, units: Sequence[str], resamples: int = RESAMPLES, seed: int = SEED):
        if not units:
            raise ValueError("a bootstrap over no records; give it at least one")
        if resamples < 1:
            raise ValueError(f"{resamples} resamples; a bootstrap takes at least one (usual: {RESAMPLES})")
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        self.unit_of = [numbers[unit] for unit in units]
        self.units, self.resamples, self.seed = len(numbers), resamples, seed

    def sums(self, columns: numpy.ndarray) -> numpy.ndarray:
        """Sums of `columns` (records, k) over the records of every resample; (resamples, k)."""
        np = import_numpy()
        columns = np.asarray(columns, dtype=float)
        if columns.ndim != 2 or len(columns) != len(self.unit_of):
            raise ValueError(
                f"columns of shape {columns.shape} for {len(self.unit_of)} records; expected a row for each"
            )
        of_unit = np.zeros((self.units, columns.shape[1]))
        np.add.at(of_unit, self.unit_of, columns)
        source = np.random.RandomState(self.seed)
        rows = max(1, CHUNK // self.units)
        found = []
        for start in range(0, self.resamples, rows):
            count = min(rows, self.resamples - start)
            drawn = source.randint(0, self.units, size=(count, self.units))
            drawn += self.units * np.arange(count)[:, None]
            times = np.bincount(drawn.ravel(), minlength=count * self.units).reshape(count, self.units)
            found.append(times.astype(float) @ of_unit)
        return np.concatenate(found)


def interval(values: Sequence[float]) -> Interval:
    """The percentile interval of a statistic's values over resamples; its ends are values that occurred.

    What is smaller than 1e-12 is the rounding of sums and is 0.
    """
    np = import_numpy()
    last, tail = len(values) - 1, (1 - LEVEL) / 2
    places = math.floor(tail * last), math.ceil((1 - tail) * last)
    ordered = np.partition(np.asarray(values, dtype=float), places)
    return Interval(*(0.0 if abs(ordered[i]) < 1e-12 else float(ordered[i]) for i in places))


def import_numpy():
    """numpy, or EvaluationError that says how it is had."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise EvaluationError(
            "intervals cannot be computed: this Python has no numpy; run tools/eval/setup.sh and start with "
            "build/eval-venv/bin/python3, or install Debian's python3-numpy"
        ) from None
    return numpy
