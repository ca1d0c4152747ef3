"""Reads the standard files of COCO captions and DocVQA, and refuses wrong ones by the first id that is wrong.

Our held-out sets (tools/pocket/heldout) have the same formats. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from errors import EvaluationError, printable
from ids import Ids
from storage import read_json

CAPTIONS, DOCUMENTS = "captions", "documents"


@dataclass(frozen=True)
class Item:
    """One question about one picture or video: an image to caption, or a question of DocVQA or of a video set."""

    id: int | str
    image: Path  # or the video
    references: list[str]  # captions, or accepted answers; none in a test split
    question: str = ""  # none: the model's own captioning prompt
    objects: int | None = None  # in the picture, where the set says so
    video: str = ""  # what the questions on one video have in common; none: it is a picture
    choices: tuple[str, ...] = ()  # as they are asked, each behind its letter
    letter: str = ""  # of the right choice
    groups: dict[str, str] = field(default_factory=dict)  # kind -> group that scores are also told of (duration -> short)


@dataclass(frozen=True)
class Split:
    """The records of one annotation file, in its order."""

    task: str  # CAPTIONS, DOCUMENTS or one of video_files.py
    name: str  # val2014, karpathy_test, val, heldout
    path: Path
    items: list[Item] = field(repr=False)
    tuning: list[Item] = field(default_factory=list, repr=False)  # never scored

    @property
    def files(self) -> list[Path]:
        """That the records were read from; a folder holds a file a task."""
        return sorted(self.path.glob("*.json")) if self.path.is_dir() else [self.path]

    @property
    def scored(self) -> bool:
        return bool(self.items) and bool(self.items[0].references)

    def part(self, limit: int | None, tune: int, tune_on: Split | None = None) -> Split:
        """The first `limit` records to score, and `tune` that settings are fitted to and that are scored never: the first
        of `tune_on`, or else the last of the file."""
        if tune_on is not None:
            rest, name = self.items, self.name
            tuning = self._apart(tune_on, tune)
        elif tune >= len(self.items):
            raise EvaluationError(f"--tune {tune} leaves none of the {len(self.items)} records of {self.path} to score")
        else:
            rest, tuning = self.items[: len(self.items) - tune], self.items[len(self.items) - tune :]
            seen = {item.video for item in tuning if item.video}  # other questions on these videos are not scored either
            rest = [item for item in rest if item.video not in seen]
            if not rest:
                raise EvaluationError(f"--tune {tune} takes a part of every video of {self.path}, so none is left to score")
            name = self.name + (f"-without-last-{tune}" if tune else "")
        if limit is not None and limit < len(rest):
            rest, name = rest[:limit], name + f"-first-{limit}"
        return replace(self, name=name, items=rest, tuning=tuning)

    def _apart(self, tune_on: Split, tune: int) -> list[Item]:
        """The first records of another split, whose pictures must not be scored."""
        if tune > len(tune_on.items):
            raise EvaluationError(f"--tune {tune} is more than the {len(tune_on.items)} records of {tune_on.path}")
        tuning = tune_on.items[: tune or None]
        scored = {item.image.resolve() for item in self.items}
        if both := next((item for item in tuning if item.image.resolve() in scored), None):
            raise EvaluationError(
                f"record {both.id} of {tune_on.path} shows {both.image}, which is scored as well; calibrate on other images"
            )
        return tuning

    def require_pictures(self) -> None:
        what = "image" if self.task == CAPTIONS else "question"
        for item in [*self.items, *self.tuning]:
            if not (item.image.exists() if item.video else item.image.is_file()):  # a video may be a folder of frames
                kind, option = ("video", "--videos") if item.video else ("image", "--images")
                raise EvaluationError(
                    f"{what} {item.id} of {self.path}: its {kind} {item.image} is not there; give the folder of the "
                    f"{kind}s with {option}"
                )


def read_captions(path: Path, images: Path | None = None) -> Split:
    """COCO annotations: {"images": [{"id", "file_name"?}], "annotations": [{"id", "image_id", "caption"}]}."""
    data = read_json(path)
    name = path.stem.removeprefix("captions_")
    if "karpathy" in name:  # coco_karpathy_test_gt and its like
        name = name.removeprefix("coco_").removesuffix("_gt")
    pictures = _listed(data, "images", path)
    captions = _captions_of(data, pictures, path)
    folder = _picture_folder(path, name) if images is None else images
    objects = _objects_of_scenes(path)
    items = []
    for picture in pictures:
        key = picture["id"]
        file = folder / str(picture.get("file_name") or _picture_name(name, key))
        items.append(Item(key, file, captions[key], objects=objects.get(file.stem)))
    return Split(CAPTIONS, name, path, items)


def _captions_of(data: dict, pictures: list[dict], path: Path) -> dict[int, list[str]]:
    """The captions of each image, of which each has some."""
    if not isinstance(data.get("annotations"), list) or not data["annotations"]:
        raise EvaluationError(f"{path} has no captions (\"annotations\"), as files of a test split have none; give one "
                              "with captions, such as captions_val2014.json")
    ids = Ids("image", path)
    captions: dict[int, list[str]] = {ids.number(picture, "id"): [] for picture in pictures}
    ids = Ids("annotation", path)
    for note in data["annotations"]:
        key = ids.number(note, "id")
        image = note.get("image_id")
        if not isinstance(image, int) or image not in captions:
            raise EvaluationError(
                f"annotation {key} of {path} is about image {printable(image)}, which is not among its images; give the "
                "file as it was published"
            )
        if not isinstance(note.get("caption"), str):
            raise EvaluationError(f"annotation {key} of {path} has no caption; instances and keypoints are other files")
        captions[image].append(note["caption"])
    for key, said in captions.items():
        if not said:
            raise EvaluationError(f"image {key} of {path} has no caption, so it cannot be scored; take it out of the file")
    return captions


def with_objects(split: Split, path: Path) -> Split:
    """The split with the number of objects in each picture, of COCO's instances_<split>.json."""
    data = read_json(path)
    ids = Ids("image", path)
    counts = {ids.number(picture, "id"): 0 for picture in _listed(data, "images", path)}
    for note in _listed(data, "annotations", path):
        if "bbox" not in note or note.get("image_id") not in counts:
            raise EvaluationError(f"annotation {printable(note.get('id'))} of {path} is no object in one of its images; give "
                                  "COCO's instances_<split>.json")
        counts[note["image_id"]] += 1
    missing = next((item.id for item in split.items if item.id not in counts), None)
    if missing is not None:
        raise EvaluationError(f"image {missing} of {split.path} is not in {path}; give the instances of this split")
    return replace(split, items=[replace(item, objects=counts[item.id]) for item in split.items])


def read_documents(path: Path, images: Path | None = None) -> Split:
    """DocVQA questions: {"data": [{"questionId", "question", "image", "answers"?}]}; a test split has no answers."""
    data = read_json(path)
    records = _listed(data, "data", path)
    split = data.get("dataset_split")
    name = split if isinstance(split, str) and re.fullmatch(r"[\w.-]+", split) else path.stem.split("_")[0]
    folder = path.parent if images is None else images
    ids = Ids("question", path)
    items: list[Item] = []
    for record in records:
        key = ids.number(record, "questionId")
        for field_name in ("question", "image"):
            if not isinstance(record.get(field_name), str) or not record[field_name]:
                raise EvaluationError(f"question {key} of {path} has no {field_name!r}; give DocVQA's own file")
        answers = record.get("answers", [])
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise EvaluationError(f"question {key} of {path} has answers that are no list of strings")
        if items and bool(answers) != bool(items[0].references):
            raise EvaluationError(
                f"question {key} of {path} has {'' if answers else 'no '}answers, unlike question {items[0].id}; a split "
                "has them for all questions or for none"
            )
        items.append(Item(key, folder / record["image"], answers, record["question"]))
    return Split(DOCUMENTS, name, path, items)


def read_caption_results(path: Path, split: Split) -> dict[int, str]:
    """Standard results, [{"image_id", "caption"}], one for every image of the split."""
    return _read_results(path, split, "image_id", "caption", "image")


def read_answer_results(path: Path, split: Split) -> dict[int, str]:
    """A submission to DocVQA, [{"questionId", "answer"}], one for every question of the split."""
    return _read_results(path, split, "questionId", "answer", "question")


def caption_results(split: Split, texts: dict[int, str]) -> list[dict]:
    return [{"image_id": item.id, "caption": texts[item.id]} for item in split.items]


def answer_results(split: Split, texts: dict[int, str]) -> list[dict]:
    return [{"questionId": item.id, "answer": texts[item.id]} for item in split.items]


def _read_results(path: Path, split: Split, id_name: str, text_name: str, what: str) -> dict:
    rows = read_json(path)
    if not isinstance(rows, list):
        raise EvaluationError(f"{path} is no array of results; expected [{{\"{id_name}\": ..., \"{text_name}\": ...}}]")
    return texts_of(rows, split, path, id_name, text_name, what)


def texts_of(rows: list, split: Split, path: Path, id_name: str, text_name: str, what: str) -> dict:
    """The text of every record of the split, by its id; EvaluationError for one that is missing, strange or there twice."""
    known = {item.id for item in split.items}
    ids = Ids(what, path)
    texts: dict = {}
    for row in rows:
        key = row.get(id_name) if isinstance(row, dict) else None
        if not isinstance(key, (int, str)) or isinstance(key, bool):
            raise EvaluationError(f"{path}: {what} {printable(row, 60)} has no {id_name!r}; expected the id of a record")
        if key not in known:
            raise EvaluationError(f"{what} {printable(key)} of {path} is not in {split.path}; give the results of this split")
        if not isinstance(row.get(text_name), str):
            raise EvaluationError(f"{what} {key} of {path} has no {text_name!r}; expected a string")
        texts[ids.any(key)] = row[text_name]
    missing = next((item.id for item in split.items if item.id not in texts), None)
    if missing is not None:
        raise EvaluationError(
            f"{path} has {len(texts)} results and {split.name} has {len(known)}: {what} {missing} is missing; give the "
            "results of this whole split"
        )
    return texts


def _listed(data: object, name: str, path: Path) -> list[dict]:
    if not isinstance(data, dict) or not isinstance(data.get(name), list) or not data[name]:
        raise EvaluationError(f"{path} has no list {name!r}; expected the format in docs/evaluation.md")
    return data[name]


def _picture_name(split: str, key: int) -> str:
    """How COCO names a file where the annotations do not. Karpathy's splits are of val2014's files."""
    year = "val2014" if "karpathy" in split else split
    return f"COCO_{year}_{key:012d}.jpg" if year.endswith("2014") else f"{key:012d}.jpg"


def _picture_folder(path: Path, split: str) -> Path:
    """COCO's own layout has annotations/captions_val2014.json beside val2014/; else the annotations' folder."""
    beside = path.parent.parent / ("val2014" if "karpathy" in split else split)
    return beside if beside.is_dir() else path.parent


def _objects_of_scenes(path: Path) -> dict[str, int]:
    """Objects of every scene of our own set, by its name; of other sets nothing is known."""
    facts = path.parent / "scene_facts.json"
    return {name: len(objects) for name, objects in read_json(facts).items()} if facts.is_file() else {}
