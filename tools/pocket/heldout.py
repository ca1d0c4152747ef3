"""Draws the held-out sets: 200 scenes to caption, 200 documents, 200 scenes to ask about, and 150 clips.

    python3 heldout.py --out heldout
    python3 heldout.py --out tuning --tuning

With --tuning 32 scenes and 32 documents that settings of policies may be fitted to, in the same formats: no picture is
in both. The seeds lie below `scenes.FIRST_TRAINING_SEED`, which training starts from. Pages carry no noise. Written are PNG files
and animated WebP files (lossless), annotations in COCO captions and DocVQA form, the facts of the scenes and clips, and
one request file per set, whose paths are relative to the request file's own folder.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

import clips
import documents
import draw
import scenes

COUNT, TUNING_COUNT = 200, 32
CLIP_COUNT, DESCRIBED_CLIPS = 150, 50
FIRST_SEEDS = {"scenes": 1_000, "documents": 2_000, "questions": 3_000}
FIRST_CLIP_SEED = 4_000
FIRST_TUNING_SEEDS = {"scenes": 5_000, "documents": 6_000}


@dataclass
class Record:
    """A held-out page or clip, what is asked about it and the accepted answers, the trained one first."""

    key: str
    layouts: list[draw.Layout]  # one, or one for each frame
    ask: str
    answers: list[str]
    facts: scenes.Scene | clips.Clip | None = None


def record(name: str, i: int, first_seeds: dict[str, int] = FIRST_SEEDS) -> Record:
    """The i-th record of a set: "scenes", "documents", "questions" or "clips"."""
    key = f"{name[:-1]}_{i:03d}"
    if name == "clips":
        rng = random.Random(FIRST_CLIP_SEED + i)
        clip = clips.make_clip(rng)
        layouts = draw.layout_clip(clip, rng)
        if i < DESCRIBED_CLIPS:
            return Record(key, layouts, clips.CAPTION_PROMPT, [clips.description(clip)], clip)
        ((ask, answers),) = clips.questions(clip, rng, 1)
        return Record(key, layouts, ask, answers, clip)
    rng = random.Random(first_seeds[name] + i)
    if name == "documents":
        doc = documents.make_document(rng)
        page = draw.layout_document(doc, rng)
        ask, answers = rng.choice(doc.questions)
        return Record(key, [page], ask, answers)
    scene = scenes.make_scene(rng)
    page = draw.layout_scene(scene, rng)
    if name == "scenes":
        return Record(key, [page], scenes.CAPTION_PROMPT, scenes.captions(scene), scene)
    ((ask, answers),) = scenes.questions(scene, rng, 1)
    return Record(key, [page], ask, answers, scene)


def write(out: Path, count: int) -> None:
    painter = draw.Painter("cpu")
    _write_pages(out, count, painter, "heldout", FIRST_SEEDS)
    _write_clips(out, min(count, CLIP_COUNT), painter)


def write_tuning(out: Path, count: int) -> None:
    _write_pages(out, count, draw.Painter("cpu"), "tuning", FIRST_TUNING_SEEDS)


def _write_pages(out: Path, count: int, painter: draw.Painter, split: str, first_seeds: dict[str, int]) -> None:
    facts: dict[str, list[dict]] = {}
    requests: dict[str, list[dict]] = {name: [] for name in first_seeds}
    images, annotations = [], []
    asked: dict[str, list[dict]] = {name: [] for name in first_seeds if name != "scenes"}
    for name in first_seeds:
        (out / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            made = record(name, i, first_seeds)
            image = f"{name}/{made.key}.png"
            _pictures(painter, made.layouts, draw.PAGE)[0].save(out / image, optimize=True)
            requests[name].append({"id": made.key, "image": image, "prompt": made.ask})
            if made.facts:
                facts[made.key] = [dict(vars(thing)) for thing in made.facts]
            if name == "scenes":
                images.append({"id": i, "file_name": image, "height": draw.PAGE, "width": draw.PAGE})
                for caption in made.answers:
                    annotations.append({"id": len(annotations), "image_id": i, "caption": caption})
            else:
                entry = {"questionId": i, "question": made.ask, "image": image, "docId": i, "answers": made.answers}
                asked[name].append(entry)
    what = "held out" if split == "heldout" else f"for {split}"
    coco = {"info": {"description": f"kvlm pocket scenes, {what}"}, "images": images, "annotations": annotations}
    _write(out / f"captions_{split}.json", coco)
    for name, data in asked.items():
        _write(out / f"{name}_{split}.json", {**_header(name, split), "data": data})
    _write(out / "scene_facts.json", facts)
    for name, records in (("captions", requests["scenes"]), *((n, requests[n]) for n in asked)):
        _write_requests(out / f"{name}.jsonl", records)


def _write_clips(out: Path, count: int, painter: draw.Painter) -> None:
    requests, data = [], []
    (out / "clips").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        made = record("clips", i)
        video = f"clips/{made.key}.webp"
        first, *rest = _pictures(painter, made.layouts, draw.FRAME)
        first.save(
            out / video, save_all=True, append_images=rest, duration=1000 // clips.FRAMES_PER_SECOND, lossless=True,
            quality=100, method=4, exact=True, minimize_size=True,
        )  # fmt: skip
        requests.append({"id": made.key, "video": video, "prompt": made.ask})
        kind = "description" if i < DESCRIBED_CLIPS else "question"
        entry = {"questionId": i, "kind": kind, "question": made.ask, "video": video, "answers": made.answers}
        data.append({**entry, **clip_facts(made.facts)})
    shape = {"frames": clips.FRAMES, "frames_per_second": clips.FRAMES_PER_SECOND, "height": draw.FRAME, "width": draw.FRAME}
    lines = ",\n  ".join(map(json.dumps, data))  # a line for each clip
    header = json.dumps({**_header("clips"), **shape}, indent=1)[:-2]
    (out / "clips_heldout.json").write_text(f'{header},\n "data": [\n  {lines}\n ]\n}}\n')
    _write_requests(out / "clips.jsonl", requests)


def clip_facts(clip: clips.Clip) -> dict:
    """The objects of a clip with their cells (row, column) frame by frame, null where they are not there; its events.

    An event is seen from the frame at `time_s` on.
    """
    objects = [
        {"colour": a.colour, "shape": a.shape, "mark": a.mark, "cells": [row[k] for row in clip.cells]}
        for k, a in enumerate(clip.actors)
    ]
    events = [
        {"time_s": e.frame / clips.FRAMES_PER_SECOND, "mark": clip.actors[e.actor].mark, "action": e.action}
        for e in clip.events
    ]
    return {"objects": objects, "events": events}


def _pictures(painter: draw.Painter, layouts: list[draw.Layout], side: int) -> list[Image.Image]:
    pixels = painter.paint(draw.to_tensors(draw.tables(layouts), "cpu"), side, side)
    return [Image.fromarray(page.permute(1, 2, 0).byte().numpy()) for page in pixels]


def _header(name: str, split: str = "heldout") -> dict:
    return {"dataset_name": f"kvlm pocket {name}", "dataset_version": "1.0", "dataset_split": split}


def _write_requests(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the sets to")
    parser.add_argument("--tuning", action="store_true", help="draw the sets that settings are fitted to")
    parser.add_argument("--count", type=int, help=f"images per set; default: {COUNT}, with --tuning {TUNING_COUNT}")
    options = parser.parse_args()
    if options.tuning:
        write_tuning(options.out, options.count or TUNING_COUNT)
    else:
        write(options.out, options.count or COUNT)
