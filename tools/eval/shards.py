"""Which part of a run this process does: `--shard I/N`, or what Slurm and Open MPI say. Standard library only.

Record k of a list belongs to shard k mod N + 1, so every shard has a share of the beginning and of the end.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence, TypeVar

from errors import EvaluationError, printable

T = TypeVar("T")

# What tells a process its place; a program that it starts must not divide its records again.
VARIABLES = re.compile(r"SLURM_(ARRAY_.*|PROCID|NTASKS|NPROCS|STEP_NUM_TASKS)|OMPI_COMM_WORLD_(RANK|SIZE)")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, from 1."""

    index: int = 1
    count: int = 1

    def of(self, items: Sequence[T]) -> list[T]:
        return list(items[self.index - 1 :: self.count])

    @property
    def all(self) -> list[Shard]:
        return [Shard(index, self.count) for index in range(1, self.count + 1)]

    def name(self, path: Path) -> Path:
        """x.jsonl, or x.I-of-N.jsonl where there are several."""
        return path if self.count == 1 else path.with_name(f"{path.stem}.{self.index}-of-{self.count}{path.suffix}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """`I/N`, 1 <= I <= N; ValueError otherwise."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--shard {printable(text)} is not I/N with I from 1 to N, such as 2/8")
    return Shard(int(found[1]), int(found[2]))


def shard_of(environment: Mapping[str, str]) -> Shard:
    """The place of a task of a Slurm array, of a rank of Open MPI or of srun; of an array's ranks, both together."""
    array, ranks = _array_task(environment), _rank(environment)
    return Shard((array.index - 1) * ranks.count + ranks.index, array.count * ranks.count)


def without_shard(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a program that is given its part of the records."""
    environment = os.environ if environment is None else environment
    return {name: value for name, value in environment.items() if not VARIABLES.fullmatch(name)}


def _array_task(environment: Mapping[str, str]) -> Shard:
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return Shard()
    task, first = _number(environment, "SLURM_ARRAY_TASK_ID"), _number(environment, "SLURM_ARRAY_TASK_MIN")
    count, step = _number(environment, "SLURM_ARRAY_TASK_COUNT"), _number(environment, "SLURM_ARRAY_TASK_STEP")
    last = _number(environment, "SLURM_ARRAY_TASK_MAX") if "SLURM_ARRAY_TASK_MAX" in environment else None
    place, rest = divmod(task - first, max(step, 1))
    if rest or not 0 <= place < count or (last is not None and (last - first) // max(step, 1) + 1 != count):
        raise EvaluationError(
            f"task {task} is of a Slurm array whose {count} numbers are not evenly spaced; name the part with --shard "
            "I/N"
        )
    return Shard(place + 1, count)


def _rank(environment: Mapping[str, str]) -> Shard:
    # A job's script, which srun did not start, has SLURM_PROCID 0 whatever the job's number of tasks: it is alone.
    for rank, size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ):
        if rank in environment and size in environment:
            index, count = _number(environment, rank), _number(environment, size)
            if not 0 <= index < count:
                raise EvaluationError(f"{rank} is {index} of {count} ranks; name the part with --shard I/N")
            return Shard(index + 1, count)
    return Shard()


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise EvaluationError(f"{name} is {printable(value)!r}, not a number; name the part with --shard I/N")
    return int(value)
