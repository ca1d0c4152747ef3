"""Paired statistics over images: two policies answered the same requests, so they differ image by image.

Standard library only; every function is deterministic (the seed of the bootstrap is an argument).
"""

from __future__ import annotations

import math
import random


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of McNemar's test: images that only A, and that only B, got right.

    Under equal quality each of those images is a fair coin (binomial test with p = 1/2); images on which both agree
    say nothing. Returns 1 where there is none to tell them apart.
    """
    discordant = only_a + only_b
    if discordant == 0:
        return 1.0
    tail = sum(math.comb(discordant, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def bootstrap_ratio(pairs: list[tuple[float, float]], resamples: int, seed: int) -> tuple[float, float]:
    """95 % percentile interval of sum(part) / sum(whole) over images (part, whole) drawn with replacement."""
    return _interval([(part, whole, 0.0, 1.0) for part, whole in pairs], resamples, seed)


def bootstrap_difference(
    a: list[tuple[float, float]], b: list[tuple[float, float]], resamples: int, seed: int
) -> tuple[float, float]:
    """95 % percentile interval of ratio(a) - ratio(b), the same images drawn for both.

    a, b  (images,) pairs (part, whole), in the same order of images
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} images of one policy and {len(b)} of the other; pair them by id first")
    return _interval([(*x, *y) for x, y in zip(a, b)], resamples, seed)


def _interval(rows: list[tuple[float, float, float, float]], resamples: int, seed: int) -> tuple[float, float]:
    draw = random.Random(seed)
    values = []
    for _ in range(resamples):
        part_a = whole_a = part_b = whole_b = 0.0
        for row in draw.choices(rows, k=len(rows)):
            part_a += row[0]
            whole_a += row[1]
            part_b += row[2]
            whole_b += row[3]
        values.append(part_a / whole_a - part_b / whole_b)
    values.sort()
    return values[int(0.025 * (resamples - 1))], values[math.ceil(0.975 * (resamples - 1))]
