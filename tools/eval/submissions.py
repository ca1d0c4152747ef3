"""Files of results, as the servers of the data sets take them. Standard library only."""

from __future__ import annotations

from pathlib import Path

from errors import EvaluationError, guarded, printable
from ids import Ids
from records import TEXTVQA, CHARTQA, VIZWIZ, Split
from storage import read_json

ID_NAMES = {TEXTVQA: "question_id", CHARTQA: "question_id", VIZWIZ: "image"}  # of others: questionId


def read_caption_results(path: Path, split: Split) -> dict[int | str, str]:
    """Standard results, [{"image_id", "caption"}], one for every image of the split."""
    return _read_results(path, split, "image_id", "caption", "image")


def read_answer_results(path: Path, split: Split) -> dict[int | str, str]:
    """A submission to DocVQA, [{"questionId", "answer"}], or to another task, one for every question of the split."""
    return _read_results(path, split, _id_name(split), "answer", "question")


def caption_results(split: Split, texts: dict[int | str, str]) -> list[dict]:
    return [{"image_id": item.id, "caption": texts[item.id]} for item in split.items]


def answer_results(split: Split, texts: dict[int | str, str]) -> list[dict]:
    return [{_id_name(split): _submitted(split, item.id), "answer": texts[item.id]} for item in split.items]


def _id_name(split: Split) -> str:
    return ID_NAMES.get(split.task, "questionId")


def _submitted(split: Split, key: int | str) -> int | str:
    """VizWiz knows a question by its image, whose ending lmms-lab's table leaves out."""
    return f"{key}.jpg" if split.task == VIZWIZ and isinstance(key, str) and "." not in key else key


@guarded
def _read_results(path: Path, split: Split, id_name: str, text_name: str, what: str) -> dict:
    rows = read_json(path)
    if not isinstance(rows, list):
        raise EvaluationError(f"{path} is no array of results; expected [{{\"{id_name}\": ..., \"{text_name}\": ...}}]")
    own = {_submitted(split, item.id): item.id for item in split.items}
    return texts_of([row | {id_name: own.get(row[id_name], row[id_name])} if isinstance(row, dict) and
                     isinstance(row.get(id_name), (int, str)) else row for row in rows], split, path, id_name, text_name, what)


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
            raise EvaluationError(f"{what} {printable(key)} of {path} has no {text_name!r}; expected a string")
        texts[ids.any(key)] = row[text_name]
    missing = next((item.id for item in split.items if item.id not in texts), None)
    if missing is not None:
        raise EvaluationError(
            f"{path} has {len(texts)} results and {split.name} has {len(known)}: {what} {printable(missing)} is missing; give the "
            "results of this whole split"
        )
    return texts
