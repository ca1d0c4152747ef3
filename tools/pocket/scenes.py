"""Scenes of one to eight marked objects: their facts, captions and questions.

A scene holds objects in distinct cells of a 4 x 4 grid, listed in reading order. An object has a size, a colour, a
shape, a mark (a letter or digit printed on a badge beside it) and a place. Marks differ within a scene, so
"the object marked K" names at most one object. This module knows words and facts only; draw.py makes pixels of them.

Every function draws from the `random.Random` it is given, so that a seed names a scene. Seeds below
`FIRST_TRAINING_SEED` belong to the held-out sets; training never uses them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_TRAINING_SEED = 1_000_000

GRID = 4
MAX_OBJECTS = 8
SHAPES = ("circle", "square", "triangle", "ring", "cross", "diamond")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 210, 40),
    "purple": (140, 50, 170),
    "orange": (240, 140, 30),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
COLOUR_NAMES = tuple(COLOURS)
SIZES = ("small", "large")
LETTERS = "ABCDEFGHJKLMNPRSTUVXYZ"  # without I, O, Q and W, which look like 1, 0, O and a wide V on a badge
MARKS = LETTERS + "0123456789"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
ORDINALS = ("first", "second", "third", "fourth")

CAPTION_PROMPT = "Describe the image."
CAPTION_PROMPTS = (CAPTION_PROMPT, "What does the image show?", "Write a caption for the image.")
# One paraphrase is the common one, so that greedy decoding does not hang on a tie at the first word.
CAPTION_WEIGHTS = (0.60, 0.10, 0.10, 0.10, 0.10)


@dataclass(frozen=True)
class SceneObject:
    """One object; row and column count from 1."""

    size: str
    colour: str
    shape: str
    mark: str
    row: int
    column: int

    @property
    def noun(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"

    @property
    def place(self) -> str:
        return f"row {self.row}, column {self.column}"


Scene = tuple[SceneObject, ...]


def make_scene(rng: random.Random, max_objects: int = MAX_OBJECTS) -> Scene:
    """Draws the facts of a scene of 1 to `max_objects` objects, in reading order."""
    count = rng.randint(1, max_objects)
    cells = sorted(rng.sample(range(GRID * GRID), count))
    marks = rng.sample(MARKS, count)
    return tuple(
        SceneObject(
            rng.choice(SIZES), rng.choice(COLOUR_NAMES), rng.choice(SHAPES), mark, cell // GRID + 1, cell % GRID + 1
        )
        for cell, mark in zip(cells, marks)
    )


def captions(scene: Scene) -> list[str]:
    """The five paraphrases of a scene. All list the objects in reading order, parted by semicolons."""
    count = len(scene)
    number, noun = NUMBERS[count], "object" if count == 1 else "objects"
    be = "is" if count == 1 else "are"

    def listed(parts: list[str]) -> str:
        return "; ".join(parts) + "."

    return [
        f"There {be} {number} {noun}: " + listed([f"a {o.noun} marked {o.mark} in {o.place}" for o in scene]),
        f"The image shows {number} {noun}: "
        + listed([f"{o.place} has a {o.noun} with the {_kind(o.mark)} {o.mark}" for o in scene]),
        f"{number.capitalize()} {noun} can be seen: "
        + listed(
            [f"a {o.noun} labelled {o.mark} in the {ORDINALS[o.row - 1]} row, {ORDINALS[o.column - 1]} column" for o in scene]
        ),
        f"In reading order, the {number} {noun} {be} "
        + listed([f"a {o.noun} with {o.mark} on its badge at {o.place}" for o in scene]),
        f"This is a scene of {number} {noun}: " + listed([f"at {o.place} a {o.noun} named {o.mark}" for o in scene]),
    ]


def _kind(mark: str) -> str:
    return "digit" if mark.isdigit() else "letter"


def questions(scene: Scene, rng: random.Random, count: int) -> list[tuple[str, list[str]]]:
    """Draws `count` different questions on a scene, each with its accepted answers, the trained one first."""
    kinds = rng.choices(_QUESTION_KINDS, weights=_QUESTION_WEIGHTS, k=4 * count)
    found: dict[str, list[str]] = {}
    for kind in kinds:
        made = kind(scene, rng)
        if made is not None:
            found.setdefault(made[0], made[1])
        if len(found) == count:
            break
    return list(found.items())


Question = tuple[str, list[str]]


def _number(count: int) -> list[str]:
    return [NUMBERS[count] if count else "none", str(count)] + (["no", "zero"] if count == 0 else [])


def _how_many(scene: Scene, rng: random.Random) -> Question:
    ask = rng.choice(("How many objects are there?", "How many objects are in the image?"))
    return ask, _number(len(scene))


def _how_many_of(scene: Scene, rng: random.Random) -> Question:
    kind = rng.randrange(3)
    like = rng.choice(scene)  # asks about what is there more often than chance would
    if kind == 0:
        colour = like.colour if rng.random() < 0.7 else rng.choice(COLOUR_NAMES)
        return f"How many {colour} objects are there?", _number(sum(o.colour == colour for o in scene))
    if kind == 1:
        shape = like.shape if rng.random() < 0.7 else rng.choice(SHAPES)
        plural = "crosses" if shape == "cross" else shape + "s"
        return f"How many {plural} are there?", _number(sum(o.shape == shape for o in scene))
    size = rng.choice(SIZES)
    return f"How many {size} objects are there?", _number(sum(o.size == size for o in scene))


def _colour(scene: Scene, rng: random.Random) -> Question | None:
    thing = rng.choice(scene)
    if rng.random() < 0.5:
        return f"What colour is the object marked {thing.mark}?", [thing.colour]
    if sum(o.shape == thing.shape for o in scene) == 1:
        return f"What colour is the {thing.shape}?", [thing.colour]
    if sum((o.shape, o.size) == (thing.shape, thing.size) for o in scene) == 1:
        return f"What colour is the {thing.size} {thing.shape}?", [thing.colour]
    return None


def _shape(scene: Scene, rng: random.Random) -> Question | None:
    thing = rng.choice(scene)
    if rng.random() < 0.6:
        return f"What shape is the object marked {thing.mark}?", [thing.shape]
    if sum(o.colour == thing.colour for o in scene) == 1:
        return f"What shape is the {thing.colour} object?", [thing.shape]
    return None


def _size(scene: Scene, rng: random.Random) -> Question | None:
    thing = rng.choice(scene)
    if rng.random() < 0.6:
        return f"Is the object marked {thing.mark} small or large?", [thing.size]
    if sum((o.colour, o.shape) == (thing.colour, thing.shape) for o in scene) == 1:
        return f"Is the {thing.colour} {thing.shape} small or large?", [thing.size]
    return None


def _mark(scene: Scene, rng: random.Random) -> Question | None:
    thing = rng.choice(scene)
    if sum((o.colour, o.shape) == (thing.colour, thing.shape) for o in scene) == 1 and rng.random() < 0.5:
        return f"Which {_kind(thing.mark)} is on the {thing.colour} {thing.shape}?", [thing.mark]
    if sum(o.noun == thing.noun for o in scene) == 1 and rng.random() < 0.6:
        return f"Which {_kind(thing.mark)} is on the {thing.noun}?", [thing.mark]
    return f"Which {_kind(thing.mark)} is in {thing.place}?", [thing.mark]


def _is_there(scene: Scene, rng: random.Random) -> Question:
    thing = rng.choice(scene)
    colour, shape = thing.colour, thing.shape
    if rng.random() < 0.55:
        if rng.random() < 0.5:
            colour = rng.choice(COLOUR_NAMES)
        else:
            shape = rng.choice(SHAPES)
    there = any((o.colour, o.shape) == (colour, shape) for o in scene)
    return f"Is there {'an' if colour == 'orange' else 'a'} {colour} {shape}?", ["yes" if there else "no"]


def _where(scene: Scene, rng: random.Random) -> Question | None:
    thing = rng.choice(scene)
    if rng.random() < 0.6:
        return f"Where is the object marked {thing.mark}?", [thing.place]
    if sum((o.colour, o.shape) == (thing.colour, thing.shape) for o in scene) == 1:
        return f"Where is the {thing.colour} {thing.shape}?", [thing.place]
    return None


def _what_at(scene: Scene, rng: random.Random) -> Question:
    if rng.random() < 0.25:
        row, column = rng.randint(1, GRID), rng.randint(1, GRID)
    else:
        thing = rng.choice(scene)
        row, column = thing.row, thing.column
    at = [o for o in scene if (o.row, o.column) == (row, column)]
    answer = f"a {at[0].noun} marked {at[0].mark}" if at else "nothing"
    return f"What is in row {row}, column {column}?", [answer]


_QUESTION_KINDS = (_how_many, _how_many_of, _colour, _shape, _size, _mark, _is_there, _where, _what_at)
_QUESTION_WEIGHTS = (1, 2, 2, 2, 1, 3, 2, 2, 2)
