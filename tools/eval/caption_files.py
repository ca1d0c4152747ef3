"""Reads captions of COCO and of sets in its formats, and refuses wrong files by the first id that is wrong.

    captions_<split>.json, image_info_<split>.json   as published; the second, of a test split, has no captions
    dataset_coco.json                                Karpathy's: its test split
    .parquet, .tsv                                   lmms-lab's COCO-Caption and RefCOCO, VLMEvalKit's COCO_VAL: images inside

Standard library only, but for parquet.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from errors import EvaluationError, guarded, printable
from formats import (JSON, answers_of, inside_of, named_otherwise, refuse_other_kind, require_answers_alike,
                     split_name, table_image)
from ids import Ids
from records import CAPTIONS, Item, Split, within
from regions import QUESTION, box_of
from rows import TSV, Table, read_table
from storage import read_json

KARPATHY = "test"  # the split of dataset_coco.json that is read


@guarded
def read_captions(path: Path, images: Path | None = None) -> Split:
    """COCO annotations: {"images": [{"id", "file_name"?}], "annotations": [{"id", "image_id", "caption"}]}, of which a test
    split has no annotations; Karpathy's {"images": [{"filename", "split", "sentences"}]}; a table with images inside."""
    if path.suffix in (".parquet", ".tsv"):
        return _caption_table(read_table(path), path, images)
    data = read_json(path)
    pictures = data.get("images") if isinstance(data, dict) else None
    if not isinstance(pictures, list) or not pictures:
        refuse_other_kind(CAPTIONS, JSON, data, path)
        raise EvaluationError(f"{path} has no list 'images'; expected COCO's captions_<split>.json (docs/evaluation.md)")
    if isinstance(pictures[0], dict) and "sentences" in pictures[0]:
        return _karpathy(pictures, data.get("dataset"), path, images)
    name = path.stem.removeprefix("captions_").removeprefix("image_info_")
    if "karpathy" in name:  # coco_karpathy_test_gt and its like
        name = name.removeprefix("coco_").removesuffix("_gt")
    captions = _captions_of(data, pictures, path)
    folder = images or _picture_folder(path, name, pictures[0].get("file_name"))
    objects = _objects_of_scenes(path)
    items = []
    for picture in pictures:
        key = picture["id"]
        file = within(folder, str(picture.get("file_name") or _picture_name(name, key)), f"image {printable(key)}", path)
        items.append(Item(key, file, captions[key], objects=objects.get(file.stem)))
    return Split(CAPTIONS, name, path, items)


def _captions_of(data: dict, pictures: list[dict], path: Path) -> dict[int | str, list[str]]:
    """The captions of each image, of which each has some; in a test split, none has."""
    ids = Ids("image", path)
    captions: dict[int | str, list[str]] = {ids.of(picture, "id"): [] for picture in pictures}
    notes = data.get("annotations") or []
    if not isinstance(notes, list):
        raise EvaluationError(f"{path} has \"annotations\" that are no list; give the file as it was published")
    ids = Ids("annotation", path)
    for note in notes:
        key = printable(ids.of(note, "id"))
        image = note.get("image_id")
        if not isinstance(image, (int, str)) or image not in captions:
            raise EvaluationError(
                f"annotation {key} of {path} is about image {printable(image)}, which is not among its images; give the "
                "file as it was published"
            )
        if not isinstance(note.get("caption"), str):
            raise EvaluationError(f"annotation {key} of {path} has no caption; instances and keypoints are other files")
        captions[image].append(note["caption"])
    for key, said in captions.items():
        if notes and not said:
            raise EvaluationError(
                f"image {printable(key)} of {path} has no caption, so it cannot be scored; take it out of the file"
            )
    return captions


def _karpathy(pictures: list, name: object, path: Path, images: Path | None) -> Split:
    """The test split of dataset_coco.json, or of another set in its format."""
    ids = Ids("image", path)
    items = []
    for picture in pictures:
        if not isinstance(picture, dict) or picture.get("split") != KARPATHY:
            continue
        key = ids.of(picture, "cocoid" if "cocoid" in picture else "imgid")
        said = [sentence.get("raw") for sentence in picture["sentences"]]
        if not said or not all(isinstance(text, str) for text in said):
            raise EvaluationError(f"image {key} of {path} has no sentences; give Karpathy's dataset_<name>.json")
        names = [str(picture["filename"])]
        names = [f"{picture['filepath']}/{names[0]}", *names] if picture.get("filepath") else names
        folders = [images] if images else [path.parent, path.parent.parent, path.parent / "images"]
        places = [within(folder, name, f"image {key}", path) for folder in folders for name in names]
        items.append(Item(key, next((place for place in places if place.exists()), places[0]), said))
    if not items:
        raise EvaluationError(f"{path} has no image of the split {KARPATHY!r}; give Karpathy's dataset_<name>.json")
    return Split(CAPTIONS, f"{'' if name in (None, 'coco') else f'{name}_'}karpathy_{KARPATHY}", path, items)


def _caption_table(table: Table, path: Path, images: Path | None) -> Split:
    """lmms-lab's COCO-Caption and COCO-Caption2017, or VLMEvalKit's COCO_VAL.tsv."""
    first = table.rows[0]
    name = "index" if table.kind == TSV else "question_id"
    if table.kind == TSV and named_otherwise(CAPTIONS, path) or name not in first or "answer" not in first or "type" in first:
        refuse_other_kind(CAPTIONS, table.kind, table.rows, path)
        raise EvaluationError(f"{path} is no {table.kind} of captions; expected columns {name} and answer (docs/evaluation.md)")
    if "bbox" in first and table.column:
        return _regions(table, path)
    ids = Ids("image", path)
    items: list[Item] = []
    for row, cells in enumerate(table.rows):
        key = ids.any(_image_number(cells[name]))
        items.append(Item(key, table_image(table, row, cells, "image_path", images, f"image {printable(key)}"),
                          answers_of(cells["answer"], table.kind, key, path), inside=inside_of(table, row)))  # fmt: skip
    require_answers_alike(items, path, "image")
    year = re.search(r"((?:train|val|test)20\d\d)", str(first.get("coco_url") or first.get("file_name") or first[name]))
    return Split(CAPTIONS, year[1] if year else split_name(path), path, items)


def _regions(table: Table, path: Path) -> Split:
    """lmms-lab's RefCOCO, RefCOCO+ and RefCOCOg, known by their place in the file, as to lmms-eval."""
    items = []
    for row, cells in enumerate(table.rows):
        box = box_of(cells["bbox"], f"region {row} of {path}")
        said = answers_of(cells["answer"], table.kind, row, path)
        items.append(Item(row, table.paths[0], said, QUESTION, box=box, inside=(table, row)))
    require_answers_alike(items, path, "region")
    return Split(CAPTIONS, f"regions_{split_name(path)}", path, items)


def _image_number(key: object) -> object:
    """Of COCO's file names, the number that its servers know an image by; of other ids, themselves."""
    found = re.fullmatch(r"(?:COCO_\w+_)?0*(\d{1,12})(?:\.jpg)?", key) if isinstance(key, str) else None
    return int(found[1]) if found else key


def with_objects(split: Split, path: Path) -> Split:
    """The split with the number of objects in each image, of COCO's instances_<split>.json."""
    counts = _objects_of_images(path)
    missing = next((item.id for item in split.items if item.id not in counts), None)
    if missing is not None:
        raise EvaluationError(f"image {printable(missing)} of {split.path} is not in {path}; give the instances of this split")
    return replace(split, items=[replace(item, objects=counts[item.id]) for item in split.items])


@guarded
def _objects_of_images(path: Path) -> dict[int | str, int]:
    data = read_json(path)
    ids = Ids("image", path)
    counts = {ids.of(picture, "id"): 0 for picture in _listed(data, "images", path)}
    for note in _listed(data, "annotations", path):
        image = note.get("image_id") if isinstance(note, dict) else None
        if not isinstance(image, (int, str)) or "bbox" not in note or image not in counts:
            about = note.get("id") if isinstance(note, dict) else note
            raise EvaluationError(f"annotation {printable(about)} of {path} is no object in one of its images; give "
                                  "COCO's instances_<split>.json")
        counts[image] += 1
    return counts


def _listed(data: object, name: str, path: Path) -> list[dict]:
    if not isinstance(data, dict) or not isinstance(data.get(name), list) or not data[name]:
        raise EvaluationError(f"{path} has no list {name!r}; expected the format in docs/evaluation.md")
    return data[name]


def _picture_name(split: str, key: object) -> str:
    """How COCO names a file where the annotations do not. Karpathy's splits are of val2014's files."""
    if not isinstance(key, int):
        return str(key)
    year = "val2014" if "karpathy" in split else split
    return f"COCO_{year}_{key:012d}.jpg" if year.endswith("2014") else f"{key:012d}.jpg"


def _picture_folder(path: Path, split: str, file_name: object) -> Path:
    """COCO's own layout has annotations/captions_val2014.json next to val2014/; else the annotations' folder."""
    year = re.match(r"COCO_([a-z]+20\d\d)_", file_name) if isinstance(file_name, str) else None
    neighbour = path.parent.parent / ("val2014" if "karpathy" in split else year[1] if year else split)
    return neighbour if neighbour.is_dir() else path.parent


def _objects_of_scenes(path: Path) -> dict[str, int]:
    """Objects of every scene of our own set, by its name; of other sets nothing is known."""
    file = path.parent / "scene_facts.json"
    facts = read_json(file) if file.is_file() else {}
    if not isinstance(facts, dict) or not all(isinstance(objects, list) for objects in facts.values()):
        raise EvaluationError(f"{file} is no object with a list of facts for each scene; take it from tools/pocket/heldout")
    return {name: len(objects) for name, objects in facts.items()}
