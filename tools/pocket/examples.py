"""Training examples: a page and a conversation about it, as token ids in the LLaVA-1.5 prompt format.

Every conversation starts `USER: <image>\\nQUESTION ASSISTANT: ANSWER`, as the chat template renders it, and goes on
with further questions while they fit. Half of the longer conversations part their turns the way the template does (a
space after the answer), half the way the original code does (`</s>`); the model is taught to end its answer with
`</s>` in both.
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import documents
import draw
import scenes
import tokenizer

TEXT_LENGTH = 220  # ids after the image
IGNORE = -100


class Encoder:
    """Encodes text as the fast tokenizer does. No token crosses a space, so words are encoded once and kept."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.words: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids of a text without leading, trailing or double spaces; no <s>."""
        ids: list[int] = []
        for word in text.split(" "):
            known = self.words.get(word)
            if known is None:
                known = self.tokenizer.encode(word, add_special_tokens=False).ids
                if len(self.words) < 50_000:
                    self.words[word] = known
            ids += known
        return ids

    def prefix(self) -> list[int]:
        """The ids before the image: `<s>` and `USER: `."""
        return self.tokenizer.encode("USER: ").ids


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


def conversation(encode: Encoder, turns: list[Turn], rng: random.Random) -> tuple[list[int], list[int]]:
    """Ids after the image and, for each position, the id to predict there (IGNORE where nothing is taught)."""
    ids: list[int] = []
    labels: list[int] = []
    with_eos = rng.random() < 0.5
    for ask, answer in turns:
        prompt = encode(f"USER: {ask} ASSISTANT:" if ids else f"\n{ask} ASSISTANT:")
        reply = encode(answer)
        if len(ids) + 1 + len(prompt) + len(reply) > TEXT_LENGTH:
            continue
        if ids and with_eos:
            ids.append(tokenizer.EOS_ID)
            labels.append(IGNORE)
        ids += prompt + reply
        labels += [IGNORE] * (len(prompt) - 1) + reply + [tokenizer.EOS_ID]
    return ids, labels


@dataclass(frozen=True)
class Mix:
    """How many pages of each kind make a batch; they come in this order."""

    captions: int
    questions: int
    documents: int

    @property
    def size(self) -> int:
        return self.captions + self.questions + self.documents

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        scene_count = self.captions + self.questions
        return slice(0, self.captions), slice(self.captions, scene_count), slice(scene_count, self.size)


def make_batch(encode: Encoder, first_seed: int, mix: Mix, max_objects: int) -> dict[str, np.ndarray]:
    """Draws a batch from consecutive seeds as flat arrays."""
    pages: list[draw.Layout] = []
    count = mix.size
    ids = np.full((count, TEXT_LENGTH), tokenizer.PAD_ID, np.int16)
    labels = np.full((count, TEXT_LENGTH), IGNORE, np.int16)
    for i in range(count):
        rng = random.Random(first_seed + i)
        if i < mix.captions + mix.questions:
            scene = scenes.make_scene(rng, max_objects)
            pages.append(draw.layout_scene(scene, rng))
            turns = caption_turns(scene, rng) if i < mix.captions else question_turns(scene, rng, 12)
        else:
            doc = documents.make_document(rng)
            pages.append(draw.layout_document(doc, rng))
            turns = document_turns(doc, rng)
        text, wanted = conversation(encode, turns, rng)
        ids[i, : len(text)] = text
        labels[i, : len(wanted)] = wanted
    characters, objects = draw.patch_labels(pages)
    return {**draw.tables(pages), "ids": ids, "labels": labels, "characters": characters, "objects": objects}


class Feed:
    """Batches from worker processes. `max_objects` may be raised while training; it takes effect a few batches later."""

    def __init__(self, folder: Path, mix: Mix, workers: int, first_seed: int):
        context = multiprocessing.get_context("spawn")
        self.max_objects = context.Value("i", 2)
        self.queue = context.Queue(maxsize=4 * workers)
        self.processes = [
            context.Process(
                target=_work,
                args=(folder, self.queue, self.max_objects, first_seed + k * mix.size, workers * mix.size, mix),
                daemon=True,
            )
            for k in range(workers)
        ]
        for process in self.processes:
            process.start()

    def next(self) -> dict[str, np.ndarray]:
        return self.queue.get(timeout=120)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def _work(folder: Path, queue, max_objects, seed: int, stride: int, mix: Mix) -> None:
    encode = Encoder(folder)
    while True:
        queue.put(make_batch(encode, seed, mix, max_objects.value))
        seed += stride
