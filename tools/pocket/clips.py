"""Clips of one to three marked objects that move about, appear and vanish: their facts, descriptions and questions.

A clip shows a 4 x 4 grid. Between one frame and the next at most one thing happens: an object moves one cell left,
right, up or down, appears, or vanishes. Objects differ in their mark and in (colour, shape). This module knows words
and facts only; draw.py makes pixels of them. As in scenes.py, everything is drawn from the `random.Random` given.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scenes import COLOUR_NAMES, GRID, MARKS, NUMBERS, SHAPES, Question, _number

FRAMES = 8
FRAMES_PER_SECOND = 2
MAX_OBJECTS = 3
MAX_EVENTS = 5
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
CAPTION_PROMPT = "Describe the video."
CAPTION_PROMPTS = (CAPTION_PROMPT, "What happens in the video?")

Cell = tuple[int, int]  # row, column, from 1


@dataclass(frozen=True)
class Actor:
    """One object of a clip."""

    colour: str
    shape: str
    mark: str

    @property
    def noun(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def full(self) -> str:
        return f"the {self.noun} marked {self.mark}"


@dataclass(frozen=True)
class Event:
    """What happens between frame `frame - 1` and `frame`; action is a key of MOVES, "appear" or "vanish"."""

    frame: int
    actor: int
    action: str

    @property
    def is_move(self) -> bool:
        return self.action in MOVES


@dataclass(frozen=True)
class Clip:
    """Objects, what happens to them in order of time, and where each is in each frame (None: not there)."""

    actors: tuple[Actor, ...]
    events: tuple[Event, ...]
    cells: tuple[tuple[Cell | None, ...], ...]  # frame, actor

    def moves(self, actor: int) -> list[str]:
        return [e.action for e in self.events if e.actor == actor and e.is_move]


def make_clip(
    rng: random.Random, frames: int = FRAMES, max_objects: int = MAX_OBJECTS, max_events: int = MAX_EVENTS
) -> Clip:
    """Draws a clip in which at least one thing happens; at least one object is always to be seen."""
    count = rng.randint(1, max_objects)
    nouns = rng.sample([(c, s) for c in COLOUR_NAMES for s in SHAPES], count)
    actors = [Actor(*noun, mark) for noun, mark in zip(nouns, rng.sample(MARKS, count))]
    places = rng.sample([(r, c) for r in range(1, GRID + 1) for c in range(1, GRID + 1)], count)
    waiting = [k for k in range(1, count) if rng.random() < 0.25]
    now: list[Cell | None] = [None if k in waiting else place for k, place in enumerate(places)]
    times = set(rng.sample(range(1, frames), rng.randint(1, min(max_events, frames - 1))))
    events, cells = [], [tuple(now)]
    for frame in range(1, frames):
        if frame in times:
            actor, action, cell = rng.choice(_choices(now, waiting, rng))
            events.append(Event(frame, actor, action))
            now[actor] = cell
            if actor in waiting:
                waiting.remove(actor)
        cells.append(tuple(now))
    seen = [k for k in range(count) if k not in waiting]
    kept = {k: i for i, k in enumerate(seen)}
    return Clip(
        tuple(actors[k] for k in seen),
        tuple(Event(e.frame, kept[e.actor], e.action) for e in events),
        tuple(tuple(row[k] for k in seen) for row in cells),
    )


def _choices(now: list[Cell | None], waiting: list[int], rng: random.Random) -> list[tuple[int, str, Cell | None]]:
    """What may happen next: one entry for each move that is free, appearing and vanishing now and then."""
    taken = {cell for cell in now if cell}
    found: list[tuple[int, str, Cell | None]] = []
    for k, cell in enumerate(now):
        if cell is None:
            continue
        for action, (down, right) in MOVES.items():
            to = (cell[0] + down, cell[1] + right)
            if 1 <= to[0] <= GRID and 1 <= to[1] <= GRID and to not in taken:
                found.append((k, action, to))
        if len(taken) > 1 and rng.random() < 0.6:
            found.append((k, "vanish", None))
    free = [(r, c) for r in range(1, GRID + 1) for c in range(1, GRID + 1) if (r, c) not in taken]
    found += [(k, "appear", rng.choice(free)) for k in waiting for _ in range(3)]
    return found


def place(cell: Cell) -> str:
    return f"row {cell[0]}, column {cell[1]}"


def _article(noun: str) -> str:
    return f"{'an' if noun[0] == 'o' else 'a'} {noun}"


def _sentence(clip: Clip, event: Event) -> str:
    actor = clip.actors[event.actor]
    if event.is_move:
        return f"{actor.mark} moves {event.action}"
    if event.action == "vanish":
        return f"{actor.mark} vanishes"
    return f"{_article(actor.noun)} marked {actor.mark} appears in {place(clip.cells[event.frame][event.actor])}"


def description(clip: Clip) -> str:
    """What stands where at the start, then all that happens, in order."""
    start = [(a, cell) for a, cell in zip(clip.actors, clip.cells[0]) if cell]
    be, noun = ("is", "object") if len(start) == 1 else ("are", "objects")
    parts = "; ".join(f"{_article(a.noun)} marked {a.mark} in {place(cell)}" for a, cell in start)
    told = "; then ".join(_sentence(clip, e) for e in clip.events)
    return f"There {be} {NUMBERS[len(start)]} {noun}: {parts}. First {told}."


def questions(clip: Clip, rng: random.Random, count: int) -> list[Question]:
    """Draws up to `count` different questions on a clip, each with its accepted answers, the trained one first."""
    found: dict[str, list[str]] = {}
    for kind in rng.choices(_KINDS, weights=_WEIGHTS, k=4 * count):
        made = kind(clip, rng)
        if made is not None:
            found.setdefault(made[0], made[1])
        if len(found) == count:
            break
    return list(found.items())


def _name(actor: Actor, rng: random.Random) -> str:
    return f"the object marked {actor.mark}" if rng.random() < 0.5 else f"the {actor.noun}"


def _pick(clip: Clip, rng: random.Random) -> int:
    """An object, more often one to which something happens."""
    return rng.choice(clip.events).actor if rng.random() < 0.7 else rng.randrange(len(clip.actors))


def _how_often(clip: Clip, rng: random.Random) -> Question:
    k = _pick(clip, rng)
    return f"How many times does {_name(clip.actors[k], rng)} move?", _number(len(clip.moves(k)))


def _which_way(clip: Clip, rng: random.Random) -> Question | None:
    k, last = _pick(clip, rng), rng.random() < 0.5
    moves = clip.moves(k)
    if not moves:
        return None
    when = "last" if last else "first"
    return f"Which way does {_name(clip.actors[k], rng)} move {when}?", [moves[-1 if last else 0]]


def _how(clip: Clip, rng: random.Random) -> Question:
    k = _pick(clip, rng)
    return f"How does {_name(clip.actors[k], rng)} move?", [", ".join(clip.moves(k)) or "not at all"]


def _which_moves(clip: Clip, rng: random.Random) -> Question | None:
    moves, last = [e for e in clip.events if e.is_move], rng.random() < 0.5
    if not moves:
        return None
    return f"Which object moves {'last' if last else 'first'}?", [clip.actors[moves[-1 if last else 0].actor].full]


def _order(clip: Clip, rng: random.Random) -> Question | None:
    marks = [clip.actors[e.actor].mark for e in clip.events if e.is_move]
    return ("In which order do the objects move?", [", ".join(marks)]) if len(marks) > 1 else None


def _where(clip: Clip, rng: random.Random) -> Question:
    k, end = _pick(clip, rng), rng.random() < 0.65
    cell = clip.cells[-1 if end else 0][k]
    ask = f"Where is {_name(clip.actors[k], rng)} at the {'end' if end else 'start'}?"
    return ask, [place(cell) if cell else "nowhere"]


def _which_vanishes(clip: Clip, rng: random.Random) -> Question | None:
    action = rng.choice(("appear", "vanish"))
    found = [clip.actors[e.actor].full for e in clip.events if e.action == action]
    if len(found) > 1:
        return None
    return f"Which object {'appears' if action == 'appear' else 'vanishes'}?", found or ["none"]


def _how_many(clip: Clip, rng: random.Random) -> Question:
    end = rng.random() < 0.6
    there = sum(cell is not None for cell in clip.cells[-1 if end else 0])
    return f"How many objects are there at the {'end' if end else 'start'}?", _number(there)


def _how_many_move(clip: Clip, rng: random.Random) -> Question:
    return "How many objects move?", _number(len({e.actor for e in clip.events if e.is_move}))


def _what_happens(clip: Clip, rng: random.Random) -> Question:
    last = rng.random() < 0.5
    event = clip.events[-1 if last else 0]
    verb = f"moves {event.action}" if event.is_move else f"{event.action}{'s' if event.action == 'appear' else 'es'}"
    return f"What happens {'last' if last else 'first'}?", [f"{clip.actors[event.actor].mark} {verb}"]


_KINDS = (
    _how_often, _which_way, _how, _which_moves, _order, _where, _which_vanishes, _how_many, _how_many_move, _what_happens
)  # fmt: skip
_WEIGHTS = (3, 2, 3, 2, 3, 3, 1, 1, 1, 2)
