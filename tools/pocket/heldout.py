"""Draws the held-out sets: 200 scenes to caption, 200 documents and 200 scenes to ask about.

    python3 heldout.py --out heldout

The seeds lie below `scenes.FIRST_TRAINING_SEED`, which training starts from. Pages carry no noise. Written are the
PNG files, annotations in COCO captions and DocVQA form, the facts of the scenes, and one request file per set, whose
image paths are relative to the request file's own folder.
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

COUNT = 200
CLIP_COUNT, DESCRIBED_CLIPS = 150, 50
FIRST_SEEDS = {"scenes": 1_000, "documents": 2_000, "questions": 3_000}
FIRST_CLIP_SEED = 4_000


@dataclass
class Record:
    """A held-out page or clip, what is asked about it and the accepted answers, the trained one first."""

    key: str
    layouts: list[draw.Layout]  # one, or one for each frame
    ask: str
    answers: list[str]
    facts: scenes.Scene | clips.Clip | None = None


def record(name: str, i: int) -> Record:
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
    rng = random.Random(FIRST_SEEDS[name] + i)
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
    facts: dict[str, list[dict]] = {}
    pages: dict[str, list[draw.Layout]] = {name: [] for name in FIRST_SEEDS}
    requests: dict[str, list[dict]] = {name: [] for name in FIRST_SEEDS}
    images, annotations = [], []
    asked: dict[str, list[dict]] = {"documents": [], "questions": []}
    for name in FIRST_SEEDS:
        for i in range(count):
            made = record(name, i)
            image = f"{name}/{made.key}.png"
            pages[name] += made.layouts
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
    painter = draw.Painter("cpu")
    for name, layouts in pages.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        for i, layout in enumerate(layouts):
            pixels = painter.paint(draw.to_tensors(draw.tables([layout]), "cpu"))[0]
            Image.fromarray(pixels.permute(1, 2, 0).byte().numpy()).save(out / requests[name][i]["image"], optimize=True)
    coco = {"info": {"description": "kvlm pocket scenes, held out"}, "images": images, "annotations": annotations}
    _write(out / "captions_heldout.json", coco)
    for name, data in asked.items():
        header = {"dataset_name": f"kvlm pocket {name}", "dataset_version": "1.0", "dataset_split": "heldout"}
        _write(out / f"{name}_heldout.json", {**header, "data": data})
    _write(out / "scene_facts.json", facts)
    for name, records in (("captions", requests["scenes"]), *((n, requests[n]) for n in asked)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the sets to")
    parser.add_argument("--count", type=int, default=COUNT, help="images per set")
    options = parser.parse_args()
    write(options.out, options.count)
