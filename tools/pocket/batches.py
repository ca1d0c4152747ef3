"""Training batches of pages and clips: pixels to be painted, conversations as token ids, and what lies where.

A batch holds one or two groups; all pages of a group have one canvas, so that they have one number of visual tokens. A
conversation is rendered as the chat template of the family does, with the placeholder rows between `prefix` (before
the picture) and the text that make_group gives (after it).
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
from byte_level import END, END_OF_TEXT, START

IGNORE = -100
TEXT_LENGTH = 256  # ids after the visual rows


@dataclass(frozen=True)
class Style:
    """How a family's template surrounds a picture: texts before it and between it and the question."""

    before: str
    after: str


STYLES = {
    "internvl": Style(f"{START}user\n<img>", "</img>\n"),
    "qwen": Style(
        f"{START}system\nYou are a helpful assistant.{END}\n{START}user\n<|vision_start|>", "<|vision_end|>"
    ),
}


class Encoder:
    """Encodes text as the fast tokenizer does. No token crosses a space, so words are encoded once and kept."""

    def __init__(self, folder: Path, family: str):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        style = STYLES[family]
        self.prefix, self.after = self.exactly(style.before), self.exactly(style.after)
        self.answer = self.exactly(f"{END}\n{START}assistant\n")
        self.again = self.exactly(f"\n{START}user\n")
        self.end, self.pad = self.tokenizer.token_to_id(END), self.tokenizer.token_to_id(END_OF_TEXT)
        self.words: dict[str, list[int]] = {}

    def exactly(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def __call__(self, text: str) -> list[int]:
        """Ids of a text without leading, trailing or double spaces or special tokens."""
        ids: list[int] = []
        for i, word in enumerate(text.split(" ")):
            word = f" {word}" if i else word
            known = self.words.get(word)
            if known is None:
                known = self.exactly(word)
                if len(self.words) < 50_000:
                    self.words[word] = known
            ids += known
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


Turn = tuple[str, str]


def caption_turns(scene: scenes.Scene, rng: random.Random) -> list[Turn]:
    """A conversation that starts with the caption and goes on with questions."""
    caption = rng.choices(scenes.captions(scene), weights=scenes.CAPTION_WEIGHTS)[0]
    ask = scenes.CAPTION_PROMPT if rng.random() < 0.7 else rng.choice(scenes.CAPTION_PROMPTS)
    return [(ask, caption), *question_turns(scene, rng, rng.randint(2, 6))]


def question_turns(scene: scenes.Scene, rng: random.Random, count: int) -> list[Turn]:
    """A conversation of questions alone, which must be answered from the image."""
    return [(ask, answers[0]) for ask, answers in scenes.questions(scene, rng, count)]


def document_turns(doc: documents.Document, rng: random.Random) -> list[Turn]:
    """A conversation about a document: its questions in any order, sometimes its description first."""
    turns = [(ask, answers[0]) for ask, answers in doc.questions]
    rng.shuffle(turns)
    if rng.random() < 0.08:
        turns.insert(0, (scenes.CAPTION_PROMPT, doc.description))
    return turns


def clip_turns(clip: clips.Clip, rng: random.Random, described: bool) -> list[Turn]:
    """A conversation about a clip: questions alone, or its description and some questions."""
    turns = [(ask, answers[0]) for ask, answers in clips.questions(clip, rng, 3 if described else 10)]
    if described:
        ask = clips.CAPTION_PROMPT if rng.random() < 0.7 else rng.choice(clips.CAPTION_PROMPTS)
        turns.insert(0, (ask, clips.description(clip)))
    return turns


def conversation(encode: Encoder, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Ids after the visual rows and, for each position, the id to predict there (IGNORE where nothing is taught)."""
    ids: list[int] = []
    labels: list[int] = []
    for ask, answer in turns:
        prompt = [*(encode.again if ids else encode.after), *encode(ask), *encode.answer]
        reply = [*encode(answer), encode.end]
        if len(ids) + len(prompt) + len(reply) > TEXT_LENGTH:
            continue
        ids += prompt + reply
        labels += [IGNORE] * (len(prompt) - 1) + reply + [IGNORE]
    return ids, labels


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
    ids = np.full((group.size, TEXT_LENGTH), encode.pad, np.int16)
    labels = np.full((group.size, TEXT_LENGTH), IGNORE, np.int16)
    for i in range(group.size):
        kind = "captions" if i < group.captions else "questions" if i < group.captions + group.questions else "documents"
        layouts, turns = one_page(group, kind, random.Random(first_seed + i), max_objects)
        pages += layouts
        text, wanted = conversation(encode, turns)
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
    encode = Encoder(folder, family)
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
