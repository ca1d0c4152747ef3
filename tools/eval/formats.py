"""How the files of image sets differ, and what their readers share. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from errors import EvaluationError, printable
from records import CAPTIONS, CHARTQA, DOCUMENTS, QUESTIONS, TEXTVQA, VIZWIZ, Item, within
from rows import PARQUET, PART, TSV, Table, listed

JSON = "JSON file"
SCRIPTS = {CAPTIONS: "coco.py", DOCUMENTS: "docvqa.py", CHARTQA: "vqa.py --task chartqa", TEXTVQA: "vqa.py --task textvqa",
           VIZWIZ: "vqa.py --task vizwiz"}  # fmt: skip
TITLES = {CAPTIONS: "COCO's captions", DOCUMENTS: "DocVQA", CHARTQA: "ChartQA", TEXTVQA: "TextVQA", VIZWIZ: "VizWiz"}


@dataclass(frozen=True)
class Format:
    """How one kind of file names what a question is made of."""

    task: str
    kind: str  # JSON, PARQUET or TSV
    known_by: tuple[str, ...]  # fields of its records
    key: str  # "": the place in the file
    answers: str
    question: str = "question"
    image: str = "image"  # names the file; images inside tables have no name
    within: str = ""  # of a JSON object: the list of records; "": the file is that list
    folders: tuple[str, ...] = ()  # where the images are, next to the annotations


FORMATS = (
    Format(DOCUMENTS, JSON, ("questionId",), "questionId", "answers", within="data"),
    Format(TEXTVQA, JSON, ("question_id", "image_id"), "question_id", "answers", image="image_id", within="data",
           folders=("train_images", "test_images", "images")),
    Format(VIZWIZ, JSON, ("image", "question"), "image", "answers", folders=("val", "test", "train", "images")),
    Format(CHARTQA, JSON, ("imgname", "query"), "", "label", question="query", image="imgname", folders=("png",)),
    Format(DOCUMENTS, PARQUET, ("questionId", "question"), "questionId", "answers"),
    Format(CHARTQA, PARQUET, ("type", "question", "answer"), "", "answer"),
    Format(TEXTVQA, PARQUET, ("question_id", "image_id", "question"), "question_id", "answers"),
    Format(VIZWIZ, PARQUET, ("question_id", "question", "answers"), "question_id", "answers"),
    *(Format(task, TSV, ("index", "question"), "index", "answers" if task == VIZWIZ else "answer", image="image_path")
      for task in QUESTIONS),
)  # fmt: skip

# What else people give, by fields of its records, for messages.
OTHERS = (
    ("regions of RefCOCO, which coco.py reads", ("bbox", "segmentation")), ("COCO's captions", ("coco_url", "answer")),
    ("Video-MME", ("videoID", "options")), ("Video-MME", ("video_id", "questions")), ("MVBench", ("video", "candidates")),
    ("LLaVA's descriptions, which fidelity.py reads", ("image", "conversations")),
    ("a COCO file of captions, objects or image names", ("file_name", "id")),
)  # fmt: skip


def answers_of(found: object, kind: str, key: object, path: Path) -> list[str]:
    """One text, a list of texts or of VizWiz's {"answer"}; a list of empty ones, as tables of test splits have, is none."""
    found = listed(found) if kind == TSV else found
    found = [] if found is None or found == "" else [found] if isinstance(found, str) else found
    if isinstance(found, list):
        found = [x.get("answer") if isinstance(x, dict) else x for x in found]
        found = [str(x) for x in found] if kind == TSV else found
    if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
        raise EvaluationError(f"question {printable(key)} of {path} has answers that are no list of strings")
    return found if kind == JSON or any(found) else []


def require_answers_alike(items: list[Item], path: Path, what: str) -> None:
    for item in items:
        if bool(item.references) != bool(items[0].references):
            raise EvaluationError(
                f"{what} {printable(item.id)} of {path} has {'' if item.references else 'no '}answers, unlike {what} "
                f"{printable(items[0].id)}; a split has them for all or for none"
            )


def table_image(table: Table, row: int, record: dict, name: str, images: Path | None, what: str) -> Path:
    """The table itself where the image is inside, else the file that the row names."""
    if table.column:
        return table.paths[0]
    if not isinstance(record.get(name), str) or not record[name]:
        raise EvaluationError(f"{what} of {table.paths[0]} has no image: its columns are {printable(', '.join(record))}")
    return within(images or table.paths[0].parent, record[name], what, table.paths[0])


def inside_of(table: Table, row: int) -> tuple[Table, int] | None:
    return (table, row) if table.column else None


def split_name(path: Path) -> str:
    """Of test-00000-of-00001.parquet, TextVQA_0.5.1_val.json, val_v1.0.json, DocVQA_VAL.tsv: test, val, val, DocVQA_VAL."""
    if found := PART.fullmatch(path.name):
        return found[1]
    if path.suffix == ".json":
        words = path.stem.split("_")
        last = words[0] == "TextVQA" or words[-1] == "heldout"
        return words[-1] if last else path.stem if words[-1] in ("human", "augmented") else words[0]
    return path.stem


def named_otherwise(task: str, path: Path) -> str | None:
    """Of VLMEvalKit's tables, whose columns are alike, the task that the file's name has instead of this one."""
    named = named_tasks(path)
    return named[0] if named and task not in named else None


def named_tasks(path: Path) -> list[str]:
    words = {CAPTIONS: "coco", DOCUMENTS: "docvqa", CHARTQA: "chartqa", TEXTVQA: "textvqa", VIZWIZ: "vizwiz"}
    return [task for task, word in words.items() if word in path.stem.lower()] if path.suffix == ".tsv" else []


def task_of(kind: str, data: object, path: Path) -> str | None:
    """The task of a file of questions; None where no format of FORMATS has its fields."""
    for form in FORMATS:
        found = first_record(records_of(form, data)) if form.within or isinstance(data, list) else {}
        if form.kind == kind and all(name in found for name in form.known_by) and (kind != TSV or form.task in named_tasks(path)):
            return form.task
    return None


def first_record(data: object) -> dict:
    """Of a JSON file of any kind."""
    if isinstance(data, dict):
        data = next((value for value in data.values() if isinstance(value, list) and value and isinstance(value[0], dict)), [])
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}


def records_of(form: Format, data: object) -> object:
    """Where a file of this format has its records: rows of a table, or a list of a JSON file."""
    return data.get(form.within) if isinstance(data, dict) and form.within else data


def refuse_other_kind(task: str, kind: str, data: object, path: Path) -> None:
    """EvaluationError that names what the file (rows of a table, or what a JSON file holds) is, where that is known."""
    found = named_otherwise(task, path) or task_of(kind, data, path)
    if found and found != task:
        raise EvaluationError(f"{path} is a {kind} of {TITLES[found]}, not of {TITLES[task]}; give it to {SCRIPTS[found]}")
    record = first_record(data)
    other = next((title for title, fields in OTHERS if all(name in record for name in fields)), None)
    if other and not (task == CAPTIONS and other == TITLES[CAPTIONS]):
        raise EvaluationError(f"{path} is a {kind} of {other}; expected {TITLES[task]} (docs/evaluation.md has the formats)")
