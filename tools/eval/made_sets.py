"""Our held-out questions in the published form of each task, so that every task runs without a download.

They are of our documents (DocVQA, ChartQA) and scenes (TextVQA, VizWiz): they show that a pipeline works, and what a policy
does to the bundled models, not how a model does at the task. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

from models import ROOT
from records import CHARTQA, DOCUMENTS, TEXTVQA, VIZWIZ
from storage import read_json, write_json

HELDOUT = ROOT / "tools" / "pocket" / "heldout"
ANSWERS = 10  # of TextVQA's and VizWiz's questions
SOURCES = {CHARTQA: "documents", TEXTVQA: "questions", VIZWIZ: "questions"}


def name_of(task: str) -> str:
    return f"{task}_heldout.json"


def made_set(task: str, folder: Path) -> tuple[Path, Path]:
    """The annotation file of `task`, which is written to `folder` unless it is DocVQA's, and the folder of its images."""
    if task == DOCUMENTS:
        return HELDOUT / name_of(task), HELDOUT
    rows = read_json(HELDOUT / f"{SOURCES[task]}_heldout.json")["data"]
    made: object = [_record(task, row) for row in rows]
    path = folder / name_of(task)
    write_json(path, {"dataset_split": "heldout", "data": made} if task == TEXTVQA else made)
    return path, HELDOUT


def _record(task: str, row: dict) -> dict:
    if task == CHARTQA:
        return {"imgname": row["image"], "query": row["question"], "label": row["answers"][0]}
    answers = (row["answers"] * ANSWERS)[:ANSWERS]
    if task == TEXTVQA:
        return {"question_id": row["questionId"], "image_id": row["image"], "question": row["question"], "answers": answers}
    return {"image": row["image"], "question": row["question"], "answers": [{"answer": text} for text in answers]}
