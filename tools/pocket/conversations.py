"""Conversations about pages and clips as token ids, rendered as the chat template of each family does.

A conversation is `prefix` (ids before the picture), the placeholder rows, and what `conversation` gives (after it).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import clips
import documents
import scenes
import tokenizer
from byte_level import END, END_OF_TEXT, START

IGNORE = -100
TEXT_LENGTH = 256  # ids after the visual rows


@dataclass(frozen=True)
class Style:
    """The texts around pictures, questions and answers, and the tokens that end an answer and fill up a row.

    picture: between the picture and the first question; again: before the others; answer: after every question.
    """

    before: str
    picture: str
    answer: str
    again: str
    end: str
    pad: str


CHATML = {"answer": f"{END}\n{START}assistant\n", "again": f"\n{START}user\n", "end": END, "pad": END_OF_TEXT}
STYLES = {
    "llava": Style("USER: ", "\n", " ASSISTANT:", "USER: ", "</s>", tokenizer.PAD_TOKEN),
    "internvl": Style(f"{START}user\n<img>", "</img>\n", **CHATML),
    "qwen": Style(
        f"{START}system\nYou are a helpful assistant.{END}\n{START}user\n<|vision_start|>", "<|vision_end|>", **CHATML
    ),
}


class Encoder:
    """Encodes text as the fast tokenizer does. No token crosses a space, so words are encoded once and kept."""

    always_ends = True  # an answer is followed by its end when the talk goes on

    def __init__(self, folder: Path, family: str):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.style = STYLES[family]
        self.prefix = self.tokenizer.encode(self.style.before).ids
        self.end, self.pad = (self.tokenizer.token_to_id(token) for token in (self.style.end, self.style.pad))
        self.words: dict[str, list[int]] = {}

    def prompt(self, ask: str, first: bool) -> list[int]:
        """Ids from the end of the picture, or of the last answer, to where the answer starts."""
        before, after = self.style.picture if first else self.style.again, self.style.answer
        return [*self.word(before), *self(ask), *self.word(after)]

    def word(self, word: str) -> list[int]:
        known = self.words.get(word)
        if known is None:
            known = self.tokenizer.encode(word, add_special_tokens=False).ids
            if len(self.words) < 50_000:
                self.words[word] = known
        return known

    def __call__(self, text: str) -> list[int]:
        """Ids of a text without leading, trailing or double spaces or special tokens."""
        first, *rest = text.split(" ")
        return [*self.word(first), *(i for word in rest for i in self.word(f" {word}"))]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


class PieceEncoder(Encoder):
    """Of a sentencepiece vocabulary, where every word brings the space before it and turns are words, too.

    Half of the talks part their turns as the template does (a space after the answer), half as the original code does
    (`</s>`).
    """

    always_ends = False

    def prompt(self, ask: str, first: bool) -> list[int]:
        return self((self.style.picture if first else self.style.again) + ask + self.style.answer)

    def __call__(self, text: str) -> list[int]:
        return [i for word in text.split(" ") for i in self.word(word)]


def encoder(folder: Path, family: str) -> Encoder:
    return (PieceEncoder if family == "llava" else Encoder)(folder, family)


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


def conversation(encode: Encoder, turns: list[Turn], rng: random.Random) -> tuple[list[int], list[int]]:
    """Ids after the visual rows and, for each position, the id to predict there (IGNORE where nothing is taught)."""
    ids: list[int] = []
    labels: list[int] = []
    ends = encode.always_ends or rng.random() < 0.5
    for ask, answer in turns:
        prompt, reply = encode.prompt(ask, not ids), encode(answer)
        if len(ids) + len(prompt) + len(reply) + 1 > TEXT_LENGTH:
            continue
        ids += [*prompt, *reply, *([encode.end] if ends else [])]
        labels += [IGNORE] * (len(prompt) - 1) + [*reply, encode.end, *([IGNORE] if ends else [])]
    return ids, labels
