"""Reads the files that PrefixKV's protocol is run on: images with a question and a long answer. Standard library only.

    [{"image", "conversations": [{"value": question}, {"value": answer}, ...]}]   LLaVA's descriptions (detail_1k.json)
    [{"image", "question", "answer"}]                                            MM-Vet as PrefixKV's code has it
    {id: {"imagename", "question", "answer"}}                                    MM-Vet as published
"""

from __future__ import annotations

from pathlib import Path

from caption_files import read_captions
from errors import EvaluationError, guarded, printable
from formats import JSON, named_tasks, task_of
from ids import Ids
from question_files import read_questions
from records import CAPTIONS, DOCUMENTS, QUESTIONS, Item, Split, within
from rows import read_table
from storage import read_json
from video_files import read_videos

DESCRIPTIONS = "descriptions"
IMAGE_MARK = "<image>"


@guarded
def read_any(path: Path, folder: Path | None = None) -> Split:
    """The records of any data set that is known here, by what the file holds; `folder` has its images or videos."""
    if path.is_dir():
        return read_videos(path, folder)
    if path.suffix in (".parquet", ".tsv"):
        table = read_table(path)
        if task := task_of(table.kind, table.rows, path):
            return read_questions(path, folder, task=task)
        is_captions = CAPTIONS in named_tasks(path) or {"coco_url", "bbox"} & table.rows[0].keys()
        return (read_captions if is_captions else read_videos)(path, folder)
    data = read_json(path)
    if isinstance(data, dict) and "images" in data:
        return read_captions(path, folder)
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        first = data["data"][0] if data["data"] else None
        if isinstance(first, dict) and "video" in first:
            return read_videos(path, folder)
        return read_questions(path, folder, task=task_of(JSON, data, path) or DOCUMENTS)
    if isinstance(data, dict) and data and all(isinstance(x, dict) and "imagename" in x for x in data.values()):
        return read_descriptions(path, [{"id": key, **row, "image": row["imagename"]} for key, row in data.items()], folder)
    if isinstance(data, list) and data and isinstance(data[0], dict):
        if "answers" in data[0] or "imgname" in data[0]:
            return read_questions(path, folder, task=task_of(JSON, data, path) or DOCUMENTS)
        if "image" in data[0]:
            return read_descriptions(path, data, folder)
    return read_videos(path, folder)


def read_descriptions(path: Path, rows: list, folder: Path | None) -> Split:
    """Only the first question of a conversation, and its answer, count; the image is shown before the question."""
    ids = Ids("record", path)
    items = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}: record {number} is {printable(row, 60)}; expected one with image and question")
        key = ids.any(row.get("id", number))
        said = row.get("conversations")
        if isinstance(said, list) and len(said) >= 2 and all(isinstance(turn, dict) for turn in said[:2]):
            row = row | {"question": said[0].get("value"), "answer": said[1].get("value")}
        for name in ("image", "question", "answer"):
            if not isinstance(row.get(name), str) or not row[name].strip():
                raise EvaluationError(f"record {printable(key)} of {path} has no {name!r}; expected a string")
        question = row["question"].replace(IMAGE_MARK, "").strip()
        file = within(folder or path.parent, row["image"], f"record {printable(key)}", path)
        items.append(Item(key, file, [row["answer"]], question))
    return Split(DESCRIPTIONS, path.stem, path, items)


def is_of_pictures(split: Split) -> bool:
    return split.task in (CAPTIONS, *QUESTIONS, DESCRIPTIONS)
