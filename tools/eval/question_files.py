"""Reads questions on images: DocVQA, ChartQA, TextVQA and VizWiz, by the rows of formats.py. Standard library only, but for parquet."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from errors import EvaluationError, guarded, printable
from formats import (FORMATS, JSON, TITLES, Format, answers_of, first_record, inside_of, named_otherwise, records_of, refuse_other_kind,
                     require_answers_alike, split_name, table_image)
from ids import Ids
from records import CHARTQA, DOCUMENTS, TEXTVQA, Item, Split, within
from rows import Table, read_table
from storage import read_json


def read_documents(path: Path, images: Path | None = None) -> Split:
    """DocVQA questions: {"data": [{"questionId", "question", "image", "answers"?}]}, or a table; a test split has no answers."""
    return read_questions(path, images, task=DOCUMENTS)


@guarded
def read_questions(path: Path, images: Path | None = None, *, task: str) -> Split:
    """The questions of `task` in any of its FORMATS; of ChartQA also the folder with both files of its test split."""
    if task == CHARTQA and path.is_dir():
        parts = [read_questions(path / f"test_{half}.json", images, task=task) for half in ("human", "augmented")]
        items = [item for part in parts for item in part.items]
        return Split(task, "test", path, [replace(item, id=number) for number, item in enumerate(items)])
    table = read_table(path) if path.suffix in (".parquet", ".tsv") else None
    kind = table.kind if table else JSON
    data = None if table else read_json(path)
    form = next(form for form in FORMATS if (form.task, form.kind) == (task, kind))
    records = table.rows if table else records_of(form, data)
    if not all(name in first_record(records) for name in form.known_by) or named_otherwise(task, path):
        refuse_other_kind(task, kind, records if table else data, path)
        if not isinstance(records, list) or not records:
            where = f"list {form.within!r}" if form.within and not table else "list of questions"
            raise EvaluationError(f"{path} has no {where}; expected {TITLES[task]}'s format in docs/evaluation.md")
    split = data.get("dataset_split") if isinstance(data, dict) else None
    name = split if isinstance(split, str) and re.fullmatch(r"[\w.-]+", split) else split_name(path)
    ids = Ids("question", path)
    items = [_question(form, table, row, record, ids, path, images) for row, record in enumerate(records)]
    require_answers_alike(items, path, "question")
    return Split(task, name, path, items)


def _question(form: Format, table: Table | None, row: int, record: dict, ids: Ids, path: Path, images: Path | None) -> Item:
    if not isinstance(record, dict):
        raise EvaluationError(f"{path}: question {row} is {printable(record, 60)}; expected a record with its fields")
    if isinstance(number := record.get(form.key), str) and re.fullmatch(r"[0-9]{1,9}", number):
        record = record | {form.key: int(number)}
    shown = key = ids.of(record, form.key) if form.key else ids.any(row)
    if isinstance(key, str):
        shown = printable(key)
    for name in (form.question, *(() if table else (form.image,))):
        if not isinstance(record.get(name), str) or not record[name]:
            raise EvaluationError(f"question {shown} of {path} has no {name!r}; give {TITLES[form.task]}'s own file")
    answers = answers_of(record.get(form.answers), form.kind, key, path)
    if table:
        file = table_image(table, row, record, form.image, images, f"question {shown}")
    else:
        name = record[form.image] + (".jpg" if form.task == TEXTVQA and not Path(record[form.image]).suffix else "")
        folders = [images] if images else [*(path.parent / folder for folder in form.folders), path.parent]
        places = [within(folder, name, f"question {shown}", path) for folder in folders]
        file = next((place for place in places if place.exists()), places[-1])
    half = str(record.get("type") or record.get("split") or path.stem) if form.task == CHARTQA else ""
    half = next((name for name in ("human", "augmented") if name in half), "")
    return Item(key, file, answers, record[form.question], groups={"split": half} if half else {},
                inside=inside_of(table, row) if table else None)  # fmt: skip
