#!/usr/bin/env python3
"""Draws a scene that the bundled models know, from words.

    tools/pocket/draw_scene.py "large red circle marked A, row 2 column 3" "small blue ring marked 7, row 1 column 1"
    tools/pocket/draw_scene.py --out mine.png "a green square; a white cross"

An object has a colour and a shape; its size (large), mark and place in the 4 x 4 grid may be left out. Objects are
arguments of their own or parted by semicolons, eight at most. Needs Pillow, numpy and the DejaVu fonts.
"""

from __future__ import annotations

import argparse
import difflib
import random
import re
import sys
from pathlib import Path

import scenes

FILLERS = {"a", "an", "the", "with", "at", "in", "on", "and", "object", "mark", "marked", "labelled", "labeled", "letter", "digit"}
WORDS = [*scenes.SIZES, *scenes.COLOUR_NAMES, *scenes.SHAPES, "marked", "row", "column"]


def refuse(message: str) -> None:
    sys.exit(f"draw_scene.py: {message}")


def read_object(text: str) -> dict:
    """The facts that a text like "large red circle marked A, row 2 column 3" has."""
    facts: dict = {}

    def learn(key: str, value) -> None:
        if key in facts:
            refuse(f"{text!r} has two of {key}: {facts[key]} and {value}; give one")
        facts[key] = value

    words = re.findall(r"[^\s,]+", text)
    while words:
        word = words.pop(0)
        low = word.lower()
        if low in ("mark", "marked", "labelled", "labeled") and words and words[0].upper() in scenes.MARKS and len(words[0]) == 1:
            learn("mark", words.pop(0).upper())
        elif low in ("row", "column"):
            number = words.pop(0) if words else "nothing"
            if number not in map(str, range(1, scenes.GRID + 1)):
                refuse(f"{text!r} has {low} {number}; expected a number from 1 to {scenes.GRID}")
            learn(low, int(number))
        elif low in scenes.SIZES:
            learn("size", low)
        elif low in scenes.COLOURS:
            learn("colour", low)
        elif low in scenes.SHAPES:
            learn("shape", low)
        elif word.upper() in scenes.MARKS and len(word) == 1 and (low != "a" or word == "A"):
            learn("mark", word.upper())
        elif low not in FILLERS:
            near = difflib.get_close_matches(low, WORDS, 1)
            if len(word) == 1:
                refuse(f"{text!r} has the mark {word!r}; expected one of {scenes.MARKS}")
            refuse(f"{text!r} has the word {word!r}; " + (f"did you mean {near[0]}?" if near else
                   f"sizes are {', '.join(scenes.SIZES)}, colours {', '.join(scenes.COLOURS)}, shapes {', '.join(scenes.SHAPES)}"))
    for key, known in (("colour", scenes.COLOUR_NAMES), ("shape", scenes.SHAPES)):
        if key not in facts:
            refuse(f"{text!r} has no {key}; add one of {', '.join(known)}")
    return facts


def read_scene(texts: list[str]) -> scenes.Scene:
    """The scene of all objects, in reading order; what a text leaves out is the first that is free."""
    objects = [read_object(part) for text in texts for part in text.split(";") if part.strip()]
    if not 1 <= len(objects) <= scenes.MAX_OBJECTS:
        refuse(f"there are {len(objects)} objects; give 1 to {scenes.MAX_OBJECTS}")
    marks = [facts["mark"] for facts in objects if "mark" in facts]
    cells = [(facts["row"], facts["column"]) for facts in objects if "row" in facts and "column" in facts]
    for what, found in (("mark", marks), ("place", cells)):
        for one in found:
            if found.count(one) > 1:
                refuse(f"two objects have the {what} {one}; give each its own")
    scene = []
    for facts in objects:
        facts.setdefault("size", "large")
        if "mark" not in facts:
            facts["mark"] = next(mark for mark in scenes.MARKS if mark not in marks)
            marks.append(facts["mark"])
        if "row" not in facts or "column" not in facts:
            span = range(1, scenes.GRID + 1)
            free = [(row, column) for row in span for column in span
                    if (row, column) not in cells and facts.get("row", row) == row and facts.get("column", column) == column]
            if not free:
                refuse(f"no place is left for the {facts['colour']} {facts['shape']}; give it a row and a column")
            facts["row"], facts["column"] = free[0]
            cells.append(free[0])
        scene.append(scenes.SceneObject(**facts))
    return tuple(sorted(scene, key=lambda thing: (thing.row, thing.column)))


def paint(page):
    """The page of a layout, (height, width, 3) uint8: what draw.Painter paints, of one page and without torch."""
    import draw
    import numpy as np

    kind, period, *colours = (np.float32(value) for value in page.background)
    y, x = np.mgrid[0:draw.PAGE, 0:draw.PAGE].astype(np.float32)
    mix = {draw.ACROSS: x / (draw.PAGE - 1), draw.DOWN: y / (draw.PAGE - 1), draw.STRIPES: ((x + y) // period) % 2,
           draw.CHECKER: (x // period + y // period) % 2}.get(int(kind), np.zeros_like(x))
    first, second = np.array(colours[:3]), np.array(colours[3:])
    image = first + (second - first) * mix[..., None]

    def pasted(sprites) -> np.ndarray:
        """The sum of sprites (box, box) or (box, box, 3) at their places; what falls outside is cut off."""
        canvas = np.zeros_like(image)
        for sprite, left, top in sprites:
            box = sprite.shape[0]
            rows = slice(max(top, 0), min(top + box, draw.PAGE))
            columns = slice(max(left, 0), min(left + box, draw.PAGE))
            cut = sprite[rows.start - top:rows.stop - top, columns.start - left:columns.stop - left]
            canvas[rows, columns] += cut if cut.ndim == 3 else cut[..., None]
        return canvas

    shapes, glyphs = draw.shape_atlas().astype(np.float32) / 255, draw.glyph_atlas().astype(np.float32) / 255
    rgb = np.array([scenes.COLOURS[name] for name in scenes.COLOUR_NAMES], np.float32)
    image = image * (1 - pasted((shapes[s], at_x, at_y) for s, _, at_x, at_y in page.shapes))
    image += pasted((shapes[s][..., None] * rgb[c], at_x, at_y) for s, c, at_x, at_y in page.shapes)
    cover, grey = (sprite.astype(np.float32) for sprite in draw.badge_sprite())
    cover /= 255
    image = image * (1 - pasted((cover, *at) for at in page.badges)) + pasted((cover * grey, *at) for at in page.badges)
    alpha = np.minimum(pasted((glyphs[g], at_x, at_y) for g, at_x, at_y in page.glyphs), 1)
    image = image * (1 - alpha) + alpha * np.array(page.ink, np.float32)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", metavar="OBJECT", help="as in the examples")
    parser.add_argument("--out", type=Path, default=Path("scene.png"), help="PNG file (default: scene.png)")
    parser.add_argument("--seed", type=int, default=1, help="of the background, the fonts and places within cells")
    arguments = parser.parse_args()
    scene = read_scene(arguments.objects)
    try:
        from PIL import Image

        import draw
    except ImportError as error:
        refuse(f"{error.name} is not installed; apt install python3-pil python3-numpy fonts-dejavu-core")
    picture = Image.fromarray(paint(draw.layout_scene(scene, random.Random(arguments.seed))))
    try:
        picture.save(arguments.out, format="PNG")
    except OSError as error:
        refuse(f"{str(arguments.out)!r} cannot be written: {error.strerror}; give --out a file in a folder that exists")
    print(scenes.captions(scene)[0])
    print(f"wrote {str(arguments.out)!r}; now: vlm-run --image {str(arguments.out)!r}", file=sys.stderr)


if __name__ == "__main__":
    main()
