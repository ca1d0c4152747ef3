"""Training batches of pages and clips: pixels to be painted, conversations as token ids, and what lies where.

A batch holds one or two groups; all pages of a group have one canvas, so that they have one number of visual tokens.
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path

import clips
import documents
import draw
import numpy as np
import scenes
from conversations import (
    IGNORE, TEXT_LENGTH, Encoder, Turn, caption_turns, clip_turns, conversation, document_turns, encoder, question_turns
)  # fmt: skip

@dataclass(frozen=True)
class Group:
    """Pages or clips of one canvas: how many of each kind; they come in this order."""

    height: int
    width: int
    frames: int = 1  # more than one: clips
    captions: int = 0
    questions: int = 0
    documents: int = 0

    @property
    def size(self) -> int:
        return self.captions + self.questions + self.documents

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        asked = self.captions + self.questions
        return slice(0, self.captions), slice(self.captions, asked), slice(asked, self.size)


def one_page(group: Group, kind: str, rng: random.Random, max_objects: int) -> tuple[list[draw.Layout], list[Turn]]:
    """The layouts of one page or of a clip's frames, and a conversation on it."""
    if group.frames > 1:
        clip = clips.make_clip(rng, group.frames, min(max_objects, clips.MAX_OBJECTS), max(1, max_objects * 5 // 8))
        return draw.layout_clip(clip, rng), clip_turns(clip, rng, kind == "captions")
    if kind == "documents":
        doc = documents.make_document(rng)
        page, turns = draw.layout_document(doc, rng), document_turns(doc, rng)
        dx, dy = rng.randint(0, group.width - draw.PAGE), rng.randint(0, group.height - draw.PAGE)
        return [draw.shifted(page, dx, dy)], turns
    scene = scenes.make_scene(rng, max_objects)
    page = draw.layout_scene(scene, rng, group.height, group.width)
    return [page], caption_turns(scene, rng) if kind == "captions" else question_turns(scene, rng, 12)


def make_group(
    encode: Encoder, first_seed: int, group: Group, grid: tuple[int, int], max_objects: int
) -> dict[str, np.ndarray]:
    """Draws a group from consecutive seeds as flat arrays; grid: patches that a page or frame has (rows, columns)."""
    pages: list[draw.Layout] = []
    ids = np.full((group.size, TEXT_LENGTH), encode.pad, np.int32)
    labels = np.full((group.size, TEXT_LENGTH), IGNORE, np.int32)
    for i in range(group.size):
        kind = "captions" if i < group.captions else "questions" if i < group.captions + group.questions else "documents"
        rng = random.Random(first_seed + i)
        layouts, turns = one_page(group, kind, rng, max_objects)
        pages += layouts
        text, wanted = conversation(encode, turns, rng)
        ids[i, : len(text)] = text
        labels[i, : len(wanted)] = wanted
    characters, objects = draw.patch_labels(pages, *grid, group.height, group.width)
    return {**draw.tables(pages), "ids": ids, "labels": labels, "characters": characters, "objects": objects}


@dataclass(frozen=True)
class Plan:
    """What a step learns from: groups of every step, and groups of other shapes that take turns every `often` steps."""

    always: tuple[Group, ...]
    others: tuple[Group, ...] = ()
    often: int = 4

    @property
    def size(self) -> int:
        return sum(g.size for g in self.always)

    @property
    def seeds(self) -> int:
        """Seeds that a batch may use up."""
        return self.size + max((g.size for g in self.others), default=0)


class Feed:
    """Batches from worker processes. `max_objects` may be raised while training; it takes effect a few batches later."""

    def __init__(self, folder: Path, family: str, grid, plan: Plan, workers: int, first_seed: int):
        context = multiprocessing.get_context("spawn")
        self.max_objects = context.Value("i", 2)
        self.plan = plan
        self.always = context.Queue(maxsize=3 * workers)
        self.others = context.Queue(maxsize=workers)
        self.processes = [
            context.Process(
                target=_work,
                args=(folder, family, grid, plan, self.always, self.others, self.max_objects, first_seed, k, workers),
                daemon=True,
            )
            for k in range(workers)
        ]
        for process in self.processes:
            process.start()

    def next(self, others: bool) -> list[tuple[Group, dict[str, np.ndarray]]]:
        return (self.others if others else self.always).get(timeout=240)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def _work(folder, family, grid, plan: Plan, always, others, max_objects, first_seed: int, worker: int, workers: int):
    encode = encoder(folder, family)
    number = worker
    while True:
        seed = first_seed + number * plan.seeds
        made = []
        for group in plan.always:
            made.append((group, make_group(encode, seed, group, grid(group), max_objects.value)))
            seed += group.size
        always.put(made)
        if plan.others and (number // workers) % plan.often == 0:
            group = plan.others[(number // workers // plan.often * workers + worker) % len(plan.others)]
            others.put([(group, make_group(encode, seed, group, grid(group), max_objects.value))])
        number += workers
