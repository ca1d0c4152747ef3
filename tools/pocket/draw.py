"""Turns scenes and documents into pixels, a whole batch at a time, on the GPU or the CPU.

A page is first laid out as small integer tables (background, shapes, badges, glyphs); that part is cheap and runs in
worker processes. `Painter` then pastes pre-rendered sprites of all pages at once. Sprites lie on whole pixels and
values are rounded to bytes, so a page drawn for training equals the same page read back from a PNG file.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import clips
import documents
import scenes

try:
    import torch
except ImportError:  # draw_scene.py lays out one page and paints it with numpy
    torch = None

PAGE = 336
PATCH = 14
PATCHES = PAGE // PATCH
CELL = PAGE // scenes.GRID

FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf",
)
FONT_SIZES = (15, 16, 17, 18, 20)
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789$.,:-/"
RULE = len(FONTS) * len(FONT_SIZES) * len(CHARACTERS)  # the last glyph: a horizontal stroke
GLYPH_BOX = 32
GLYPH_LEFT, GLYPH_BASELINE = 4, 23  # where a glyph's origin lies in its box
SLOTS = 3  # characters told apart in one patch

SHAPE_BOX = 64
RADIUS = {"small": 16.0, "large": 27.0}
BADGE_BOX = 24
BADGE_OFFSET = 54  # from the shape's box to the badge's, right and down
OBJECT_EXTENT = 79  # a shape and its badge, and a pixel
# A clip's frame: cells of 56 px, each with a small shape whose box starts 13 px outside and a badge at its lower right.
FRAME = 224
FRAME_CELL = FRAME // scenes.GRID
FRAME_SHAPE, FRAME_BADGE = 13, 29

# Classes of a patch's object: shape, colour, size, mark, row, column; 0 is no object.
OBJECT_SIZES = (len(scenes.SHAPES), len(scenes.COLOURS), len(scenes.SIZES), len(CHARACTERS), scenes.GRID, scenes.GRID)


def font_folder() -> str:
    """The folder of the DejaVu fonts: the system's, else the copy inside matplotlib."""
    folders = ["/usr/share/fonts/truetype/dejavu"]
    try:
        import matplotlib

        folders.append(os.path.join(os.path.dirname(matplotlib.__file__), "mpl-data", "fonts", "ttf"))
    except ImportError:
        pass
    for folder in folders:
        if all(os.path.exists(os.path.join(folder, name)) for name in FONTS):
            return folder
    raise SystemExit("pocket: the DejaVu fonts were not found; install fonts-dejavu or matplotlib")


def _font(index: int, size: int) -> ImageFont.FreeTypeFont:
    path = os.path.join(font_folder(), FONTS[index])
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1)
def advances() -> np.ndarray:
    """Width of every glyph, (fonts, sizes, characters) float, space last."""
    return np.array(
        [
            [[_font(f, size).getlength(c) for c in CHARACTERS + " "] for size in FONT_SIZES]
            for f in range(len(FONTS))
        ]
    )


def glyph_atlas() -> np.ndarray:
    """Coverage of every glyph, (glyphs, GLYPH_BOX, GLYPH_BOX) uint8; the last one is RULE."""
    atlas = []
    for f in range(len(FONTS)):
        for size in FONT_SIZES:
            font = _font(f, size)
            for c in CHARACTERS:
                image = Image.new("L", (GLYPH_BOX, GLYPH_BOX), 0)
                ImageDraw.Draw(image).text((GLYPH_LEFT, GLYPH_BASELINE), c, font=font, fill=255, anchor="ls")
                atlas.append(np.array(image))
    rule = np.zeros((GLYPH_BOX, GLYPH_BOX), np.uint8)
    rule[GLYPH_BASELINE] = 255
    return np.stack(atlas + [rule])


def shape_atlas() -> np.ndarray:
    """Coverage of every (size, shape), size outermost, (12, SHAPE_BOX, SHAPE_BOX) uint8, smoothed 4 x 4."""
    fine = 4
    axis = (np.arange(SHAPE_BOX * fine) + 0.5) / fine - SHAPE_BOX / 2
    y, x = np.meshgrid(axis, axis, indexing="ij")
    atlas = []
    for size in scenes.SIZES:
        r = RADIUS[size]
        u, v = x / r, y / r
        d = np.hypot(u, v)
        masks = {
            "circle": d < 0.95,
            "square": (abs(u) < 0.8) & (abs(v) < 0.8),
            "triangle": (v < 0.8) & (v > -1 + 1.9 * abs(u)),
            "ring": (d < 0.97) & (d > 0.58),
            "cross": ((abs(u) < 0.3) & (abs(v) < 0.97)) | ((abs(v) < 0.3) & (abs(u) < 0.97)),
            "diamond": abs(u) + abs(v) < 1.05,
        }
        for shape in scenes.SHAPES:
            mask = masks[shape].reshape(SHAPE_BOX, fine, SHAPE_BOX, fine).mean((1, 3))
            atlas.append(np.rint(mask * 255).astype(np.uint8))
    return np.stack(atlas)


def badge_sprite() -> tuple[np.ndarray, np.ndarray]:
    """Coverage and grey value of the badge, (BADGE_BOX, BADGE_BOX) uint8 each."""
    cover = Image.new("L", (BADGE_BOX, BADGE_BOX), 0)
    ImageDraw.Draw(cover).rounded_rectangle((0, 0, BADGE_BOX - 1, BADGE_BOX - 1), 4, fill=255)
    grey = Image.new("L", (BADGE_BOX, BADGE_BOX), 50)
    ImageDraw.Draw(grey).rounded_rectangle((1, 1, BADGE_BOX - 2, BADGE_BOX - 2), 3, fill=250)
    return np.array(cover), np.array(grey)


@dataclass
class Layout:
    """What one page shows, as numbers. Boxes are given by their top left corner, in pixels."""

    background: list[float]  # kind, period, two RGB colours in 0..255
    ink: tuple[int, int, int]
    shapes: list[tuple[int, int, int, int]] = field(default_factory=list)  # sprite, colour, x, y
    badges: list[tuple[int, int]] = field(default_factory=list)  # x, y
    glyphs: list[tuple[int, int, int]] = field(default_factory=list)  # glyph, x, y
    characters: list[tuple[int, float, float]] = field(default_factory=list)  # character, centre x, centre y


FLAT, ACROSS, DOWN, STRIPES, CHECKER = range(5)


def _ground(rng: random.Random) -> list[float]:
    """A drawn background: one colour, or two in a gradient, stripes or a chequer."""
    base = rng.uniform(110, 185)
    first = [min(max(base + rng.uniform(-22, 22), 90), 205) for _ in range(3)]
    kind = rng.choice((FLAT, ACROSS, DOWN, STRIPES, CHECKER))
    change = rng.choice((-1, 1)) * rng.uniform(10, 28)
    second = [min(max(c + change, 80), 215) for c in first]
    return [kind, rng.randint(8, 40), *map(round, first), *map(round, second)]


def _put_mark(page: Layout, mark: str, font: int, size_index: int, bx: int, by: int) -> None:
    """A badge at (bx, by) with a mark on it."""
    page.badges.append((bx, by))
    c = CHARACTERS.index(mark)
    left = round(bx + BADGE_BOX / 2 - advances()[font, size_index, c] / 2)
    baseline = round(by + BADGE_BOX / 2 + 0.365 * FONT_SIZES[size_index])
    page.glyphs.append((_glyph(font, size_index, c), left - GLYPH_LEFT, baseline - GLYPH_BASELINE))
    page.characters.append((c, bx + BADGE_BOX / 2, by + BADGE_BOX / 2))


def _sprite(size: str, shape: str) -> int:
    return scenes.SIZES.index(size) * len(scenes.SHAPES) + scenes.SHAPES.index(shape)


def layout_scene(scene: scenes.Scene, rng: random.Random, height: int = PAGE, width: int = PAGE) -> Layout:
    """Places a scene on a drawn background; the cells of the grid share out the canvas."""
    page = Layout(_ground(rng), (15, 15, 15))
    down, across = height // scenes.GRID, width // scenes.GRID
    for thing in scene:
        x = (thing.column - 1) * across + rng.randint(0, across - OBJECT_EXTENT)
        y = (thing.row - 1) * down + rng.randint(0, down - OBJECT_EXTENT)
        page.shapes.append((_sprite(thing.size, thing.shape), scenes.COLOUR_NAMES.index(thing.colour), x, y))
        font, size_index = rng.randrange(len(FONTS)), rng.choice((3, 4))
        _put_mark(page, thing.mark, font, size_index, x + BADGE_OFFSET, y + BADGE_OFFSET)
    return page


def layout_clip(clip: clips.Clip, rng: random.Random) -> list[Layout]:
    """The frames of a clip. Objects tremble by a few pixels, so that no two frames running are equal."""
    ground = _ground(rng)
    fonts = [(rng.randrange(len(FONTS)), rng.choice((3, 4))) for _ in clip.actors]
    frames, last = [], None
    for cells in clip.cells:
        page = Layout(ground, (15, 15, 15))
        while True:
            tremble = [(rng.randint(0, 2), rng.randint(0, 2)) for _ in cells]
            shown = [t for t, cell in zip(tremble, cells) if cell]
            if shown != last:
                break
        last = shown
        for actor, cell, (dx, dy), font in zip(clip.actors, cells, tremble, fonts):
            if cell is None:
                continue
            x, y = (cell[1] - 1) * FRAME_CELL + dx, (cell[0] - 1) * FRAME_CELL + dy
            colour = scenes.COLOUR_NAMES.index(actor.colour)
            page.shapes.append((_sprite("small", actor.shape), colour, x - FRAME_SHAPE, y - FRAME_SHAPE))
            _put_mark(page, actor.mark, *font, x + FRAME_BADGE, y + FRAME_BADGE)
        frames.append(page)
    return frames


def shifted(page: Layout, dx: int, dy: int) -> Layout:
    """The same marks further right and down, for a larger canvas."""
    page.shapes = [(s, c, x + dx, y + dy) for s, c, x, y in page.shapes]
    page.badges = [(x + dx, y + dy) for x, y in page.badges]
    page.glyphs = [(g, x + dx, y + dy) for g, x, y in page.glyphs]
    page.characters = [(c, x + dx, y + dy) for c, x, y in page.characters]
    return page


def _glyph(font: int, size_index: int, character: int) -> int:
    return (font * len(FONT_SIZES) + size_index) * len(CHARACTERS) + character


def layout_document(doc: documents.Document, rng: random.Random) -> Layout:
    """Prints a document on paper."""
    paper = [rng.randint(225, 255) for _ in range(3)]
    shade = [c - rng.randint(0, 18) for c in paper]
    kind = rng.choice((FLAT, FLAT, ACROSS, DOWN))
    ink = (rng.randint(0, 60), rng.randint(0, 60), rng.randint(0, 90))
    page = Layout([kind, 8, *paper, *shade], ink)
    all_advances = advances()
    space = len(CHARACTERS)
    for line in doc.lines:
        size_index, font = FONT_SIZES.index(line.size), line.font
        run: list[tuple[int, int]] = []
        for c in line.text:
            if c == "|":
                font ^= 1
            else:
                run.append((font, space if c == " " else CHARACTERS.index(c)))
        widths = [all_advances[f, size_index, c] for f, c in run]
        total = sum(widths)
        x = line.x - (total if line.align == "right" else total / 2 if line.align == "centre" else 0)
        if x < 2 or x + total > PAGE - 2 or line.y < 18 or line.y > PAGE - 6:
            raise ValueError(f"line {line.text!r} does not fit on the page: x {x:.0f} to {x + total:.0f}, y {line.y}")
        centre = line.y - 0.36 * line.size
        for (f, c), width in zip(run, widths):
            if c != space:
                page.glyphs.append((_glyph(f, size_index, c), round(x) - GLYPH_LEFT, line.y - GLYPH_BASELINE))
                page.characters.append((c, x + width / 2, centre))
            x += width
    for x0, x1, y in doc.rules:
        for x in [*range(x0, x1 - GLYPH_BOX, GLYPH_BOX), x1 - GLYPH_BOX]:
            page.glyphs.append((RULE, x, y - GLYPH_BASELINE))
    return page


def patch_labels(
    pages: list[Layout], rows: int = PATCHES, columns: int = PATCHES, height: int = PAGE, width: int = PAGE
) -> tuple[np.ndarray, np.ndarray]:
    """What lies under each of rows x columns patches of a canvas, for the warm-up loss of the vision tower; 0 is nothing.

    Returns characters (pages, patches, SLOTS) and objects (pages, patches, shape colour size mark row column), uint8.
    An object's facts are asked for under its shape and under its badge, which binds the two.
    """
    characters = np.zeros((len(pages), rows * columns, SLOTS), np.uint8)
    objects = np.zeros((len(pages), rows * columns, len(OBJECT_SIZES)), np.uint8)
    tall, wide = height / rows, width / columns
    ys, xs = (np.arange(rows) + 0.5) * tall, (np.arange(columns) + 0.5) * wide
    down, across = height // scenes.GRID, width // scenes.GRID
    shapes = len(scenes.SHAPES)
    for i, page in enumerate(pages):
        used: dict[int, int] = {}
        for c, x, y in page.characters:
            patch = int(y / tall) * columns + int(x / wide)
            slot = used.get(patch, 0)
            if slot < SLOTS:
                characters[i, patch, slot] = c + 1
                used[patch] = slot + 1
        square = objects[i].reshape(rows, columns, -1)
        for (sprite, colour, x, y), (mark, bx, by) in zip(page.shapes, page.characters):
            radius = RADIUS[scenes.SIZES[sprite // shapes]]
            cx, cy = x + SHAPE_BOX / 2, y + SHAPE_BOX / 2
            near = (xs[None] - cx) ** 2 + (ys[:, None] - cy) ** 2 < radius**2
            near |= np.maximum(abs(xs[None] - bx), abs(ys[:, None] - by)) < BADGE_BOX / 2
            shape, size = sprite % shapes, sprite // shapes
            square[near] = (shape + 1, colour + 1, size + 1, mark + 1, int(cy) // down + 1, int(cx) // across + 1)
    return characters, objects


def tables(pages: list[Layout]) -> dict[str, np.ndarray]:
    """The layouts of a batch as flat arrays, ready to be sent to the painter."""
    return {
        "background": np.array([page.background for page in pages], np.float32),
        "ink": np.array([page.ink for page in pages], np.float32),
        "shapes": np.array([(i, *s) for i, page in enumerate(pages) for s in page.shapes], np.int32).reshape(-1, 5),
        "badges": np.array([(i, *s) for i, page in enumerate(pages) for s in page.badges], np.int32).reshape(-1, 3),
        "glyphs": np.array([(i, *s) for i, page in enumerate(pages) for s in page.glyphs], np.int32).reshape(-1, 4),
    }


class Painter:
    """Paints batches of layouts on one device."""

    def __init__(self, device: str | torch.device):
        self.device = torch.device(device)
        self.glyphs = torch.from_numpy(glyph_atlas()).to(self.device)
        self.sprites = torch.from_numpy(shape_atlas()).to(self.device)
        cover, grey = badge_sprite()
        self.badge_cover = torch.from_numpy(cover).to(self.device).float() / 255
        self.badge_grey = torch.from_numpy(grey).to(self.device).float()
        self.colours = torch.tensor([scenes.COLOURS[c] for c in scenes.COLOUR_NAMES], device=self.device).float()

    def paint(self, batch: dict[str, torch.Tensor], height: int = PAGE, width: int = PAGE) -> torch.Tensor:
        """Paints `tables(...)` as tensors on this device: (pages, 3, height, width) float32, whole values 0..255."""
        self.height, self.width = height, width
        image = self._background(batch["background"])
        pages = image.shape[0]
        shapes = batch["shapes"].long()
        if len(shapes):
            cover = self.sprites[shapes[:, 1]].float() / 255
            alpha = self._paste(pages, shapes[:, 0], shapes[:, 3], shapes[:, 4], cover)
            colour = self.colours[shapes[:, 2]]
            for channel in range(3):
                ink = self._paste(pages, shapes[:, 0], shapes[:, 3], shapes[:, 4], cover * colour[:, channel, None, None])
                image[:, channel].mul_(1 - alpha).add_(ink)
        badges = batch["badges"].long()
        if len(badges):
            cover = self.badge_cover.expand(len(badges), -1, -1)
            alpha = self._paste(pages, badges[:, 0], badges[:, 1], badges[:, 2], cover)
            grey = self._paste(pages, badges[:, 0], badges[:, 1], badges[:, 2], cover * self.badge_grey)
            image.mul_((1 - alpha)[:, None]).add_(grey[:, None])
        glyphs = batch["glyphs"].long()
        if len(glyphs):
            cover = self.glyphs[glyphs[:, 1]].float() / 255
            alpha = self._paste(pages, glyphs[:, 0], glyphs[:, 2], glyphs[:, 3], cover).clamp_(max=1)[:, None]
            image.mul_(1 - alpha).add_(alpha * batch["ink"][:, :, None, None])
        return image.round_().clamp_(0, 255)

    def _background(self, rows: torch.Tensor) -> torch.Tensor:
        kind, period = rows[:, 0, None, None], rows[:, 1, None, None]
        y = torch.arange(self.height, device=self.device, dtype=torch.float32)[None, :, None]
        x = torch.arange(self.width, device=self.device, dtype=torch.float32)[None, None, :]
        zero = torch.zeros(1, device=self.device)
        mix = torch.where(kind == ACROSS, x / (self.width - 1), zero)
        mix = torch.where(kind == DOWN, y / (self.height - 1), mix)
        mix = torch.where(kind == STRIPES, ((x + y) / period).floor() % 2, mix)
        mix = torch.where(kind == CHECKER, ((x / period).floor() + (y / period).floor()) % 2, mix)
        first, second = rows[:, 2:5, None, None], rows[:, 5:8, None, None]
        return first + (second - first) * mix[:, None]

    def _paste(
        self, pages: int, page: torch.Tensor, x: torch.Tensor, y: torch.Tensor, sprites: torch.Tensor
    ) -> torch.Tensor:
        """Sums sprites (count, box, box) into (pages, height, width) at their places; what falls outside is cut off."""
        box = sprites.shape[-1]
        step = torch.arange(box, device=self.device)
        px, py = x[:, None, None] + step[None, None, :], y[:, None, None] + step[None, :, None]
        height, width = self.height, self.width
        inside = (px >= 0) & (px < width) & (py >= 0) & (py < height)
        index = (page[:, None, None] * height + py.clamp(0, height - 1)) * width + px.clamp(0, width - 1)
        canvas = torch.zeros(pages * height * width, device=self.device)
        canvas.scatter_add_(0, index.reshape(-1), (sprites * inside).reshape(-1))
        return canvas.view(pages, height, width)


def to_tensors(batch: dict[str, np.ndarray], device: str | torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(rows).to(device, non_blocking=True) for name, rows in batch.items()}
