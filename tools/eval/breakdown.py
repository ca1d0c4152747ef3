"""Scores by group of questions (duration, task), with standard errors clustered by video. Standard library only.

The standard error of a mean over questions of which some share a video is the root of the sum over videos of (sum of the
deviations of its questions)^2, over n: eq. 4 of Miller 2024, "Adding Error Bars to Evals", which is also lmms-eval's. The
interval is 1.96 standard errors to either side, within 0 and 1. Where all videos score alike there is none: such a sample
does not show how far off it is. The report's intervals of the whole split are bootstrapped over the same videos.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from records import Split
from results import Result

NORMAL_95 = 1.96


@dataclass(frozen=True)
class GroupScore:
    """The mean of one metric over the questions of a group, under one model and spec."""

    model: str
    spec: str
    split: str
    protocol: str
    kind: str  # duration, task_type; "all" for the whole split
    group: str
    n: int
    videos: int
    metric: str
    score: float
    standard_error: float

    @property
    def interval(self) -> tuple[float, float] | None:
        apart = NORMAL_95 * self.standard_error
        if apart < 1e-12:
            return None
        return max(0.0, self.score - apart), min(1.0, self.score + apart)

    def to_json(self) -> dict:
        return asdict(self) | {"interval": self.interval}


def group_scores(results: list[Result], split: Split) -> list[GroupScore]:
    """Of every result, for the whole split and for its groups in the order in which they occur."""
    groups: dict[tuple[str, str], list[str]] = {("all", ""): []}
    for item in split.items:
        for place in (("all", ""), *item.groups.items()):
            groups.setdefault(place, []).append(str(item.id))
    kinds = list(dict.fromkeys(kind for kind, _ in groups))
    found = []
    for result in results:
        for kind, group in sorted(groups, key=lambda place: kinds.index(place[0])):
            ids = [key for key in groups[kind, group] if key in result.items]
            for metric in result.scores if ids else ():
                values = [result.items[key][metric] for key in ids]
                videos = [(result.clusters or {}).get(key, key) for key in ids]
                found.append(GroupScore(
                    result.model, result.spec, result.split, result.protocol, kind, group, len(ids), len(set(videos)),
                    metric, sum(values) / len(values), clustered_error(values, videos),
                ))  # fmt: skip
    return found


def clustered_error(values: list[float], clusters: list[str]) -> float:
    mean = sum(values) / len(values)
    deviations: dict[str, float] = {}
    for value, cluster in zip(values, clusters):
        deviations[cluster] = deviations.get(cluster, 0.0) + value - mean
    return math.sqrt(sum(apart**2 for apart in deviations.values())) / len(values)


def group_table(scores: list[GroupScore]) -> str:
    """Markdown; empty without scores."""
    if not scores:
        return ""
    head = ["model", "spec", "protocol", "of", "group", "n", "videos", "metric", "score", "standard error", "95 %"]
    lines = [head, ["---"] * len(head)]
    for x in scores:
        ends = x.interval
        lines.append([x.model, f"`{x.spec}`", x.protocol, x.kind, x.group or "-", str(x.n), str(x.videos), x.metric,
                      f"{x.score:.4f}", f"{x.standard_error:.4f}", f"{ends[0]:.4f} to {ends[1]:.4f}" if ends else "-"])  # fmt: skip
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
