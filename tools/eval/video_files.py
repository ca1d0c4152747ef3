"""Reads the annotation files of Video-MME and MVBench and our own videos, and refuses wrong ones by the first wrong id.

    Video-MME   test-00000-of-00001.parquet as published (needs pyarrow), VLMEvalKit's Video-MME.tsv, or the JSON of the
                benchmark's own scorer: [{"video_id", "duration", "domain", "sub_category", "questions": [{"question_id",
                "task_type", "question", "options", "answer"}]}]
    MVBench     a JSON file a task, [{"video", "question", "candidates", "answer"}], or the folder of them; the test.json of
                the branch `video`, {"root", "meta"}; VLMEvalKit's MVBench_MP4.tsv
    `clips`     tools/pocket/heldout/clips_heldout.json

Results are written as the benchmark's scorer (Video-MME), VLMEvalKit's table (MVBench) and DocVQA (ours) have them.
Standard library only, but for parquet.
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Iterable

from errors import EvaluationError, guarded, printable
from ids import Ids
from records import Item, Split, within as within_folder
from rows import listed, read_table
from storage import read_json
from submissions import answer_results, read_answer_results, texts_of

VIDEO_MME, MVBENCH, CLIPS = "video-mme", "mvbench", "clips"
SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".gif", ".webp", "")  # none: a folder of frames
VIDEO_MME_GROUPS = ("duration", "domain", "sub_category", "task_type")

# Where lmms-eval, and the branch `video` of MVBench, have the videos of a task, cut to the seconds that are asked about.
MVBENCH_FOLDERS = {
    "action_antonym": "ssv2_video_mp4", "action_count": "perception/videos",
    "action_localization": "sta/sta_video_segment", "action_prediction": "star/Charades_segment",
    "action_sequence": "star/Charades_segment", "character_order": "perception/videos",
    "counterfactual_inference": "clevrer/video_validation", "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/video_fps3_hq_segment", "fine_grained_action": "Moments_in_Time_Raw/videos",
    "fine_grained_pose": "nturgbd_convert", "moving_attribute": "clevrer/video_validation",
    "moving_count": "clevrer/video_validation", "moving_direction": "clevrer/video_validation",
    "object_existence": "clevrer/video_validation", "object_interaction": "star/Charades_segment",
    "object_shuffle": "perception/videos", "scene_transition": "scene_qa/video", "state_change": "perception/videos",
    "unexpected_action": "FunQA_test/test",
}  # fmt: skip


@guarded
def read_videos(path: Path, videos: Path | None = None) -> Split:
    """The questions of any of these files; `videos` is the folder that the data set's own layout starts in."""
    if path.is_dir():
        if not (files := sorted(path.glob("*.json"))):
            raise EvaluationError(f"{path} has no *.json; give the folder of MVBench's annotations, or one file")
        found = [item for file in files for item in _mvbench_items(read_json(file), file, file.stem, videos)]
        return Split(MVBENCH, "all", path, found)
    if path.suffix == ".parquet":
        return _video_mme(read_table(path).rows, path, videos)
    if path.suffix == ".tsv":
        rows = _tsv(path)
        return _video_mme(rows, path, videos) if "domain" in rows[0] else _mvbench_table(rows, path, videos)
    data = read_json(path)
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        return _clips(data["data"], path, videos)
    if isinstance(data, dict) and isinstance(data.get("meta"), dict) and isinstance(data.get("root"), dict):
        return _mvbench_branch(data, path, videos)
    if isinstance(data, list) and data and isinstance(data[0], dict):
        if isinstance(data[0].get("questions"), list):
            return _video_mme(_questions(data, path), path, videos)
        if "candidates" in data[0]:
            return Split(MVBENCH, path.stem, path, list(_mvbench_items(data, path, path.stem, videos)))
    raise EvaluationError(f"{path} is neither of Video-MME nor of MVBench; expected a format of docs/evaluation.md")


def results_name(split: Split, name: str) -> str:
    return f"{split.task}_{split.name}_{name}.json"


def video_results(split: Split, texts: dict) -> list[dict]:
    """The answers as they are, for the scorers that read these files look for the letters themselves."""
    if split.task == CLIPS:
        return answer_results(split, texts)
    if split.task == MVBENCH:
        return [
            {"index": item.id, "task_type": item.groups["task"], "video": item.video, "question": item.question,
             "candidates": [choice.partition(") ")[2] for choice in item.choices], "answer": item.references[0],
             "prediction": texts[item.id]}
            for item in split.items
        ]  # fmt: skip
    found: dict[str, dict] = {}
    for item in split.items:
        groups = {name: item.groups[name] for name in VIDEO_MME_GROUPS[:3]}
        of = found.setdefault(item.video, {"video_id": item.video, **groups, "missing": False, "questions": []})
        of["questions"].append({
            "question_id": item.id, "task_type": item.groups["task_type"], "question": item.question,
            "options": list(item.choices), "answer": item.letter, "response": texts[item.id],
        })  # fmt: skip
    return list(found.values())


@guarded
def read_video_results(path: Path, split: Split) -> dict:
    """What video_results wrote, or another program in the same format: an answer for every question of the split."""
    if split.task == CLIPS:
        return read_answer_results(path, split)
    rows = read_json(path)
    if isinstance(rows, list) and split.task == VIDEO_MME:
        of = [video.get("questions") for video in rows if isinstance(video, dict)]
        rows = [question for questions in of if isinstance(questions, list) for question in questions]
    name, text_name = ("question_id", "response") if split.task == VIDEO_MME else ("index", "prediction")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EvaluationError(f"{path} is no file of results of {split.task}; see docs/evaluation.md for its format")
    return texts_of(rows, split, path, name, text_name, "question")


def _video_mme(rows: list[dict], path: Path, videos: Path | None) -> Split:
    folders = _video_mme_folders(path) if videos is None else [videos / "data", videos / "video", videos]
    ids = Ids("question", path)
    items = []
    for row in rows:
        key = ids.any(row.get("question_id", row.get("index")))
        question = _text(row, "question", key, path)
        options = row.get("options", row.get("candidates"))
        if not isinstance(options, list) or len(options) < 2 or not all(isinstance(option, str) for option in options):
            raise EvaluationError(f"question {printable(key)} of {path} has no list of options; give Video-MME's own file")
        for letter, option in zip(string.ascii_uppercase, options):
            if not re.match(rf"\s*\(?{letter}[.):]", option):
                raise EvaluationError(
                    f"question {printable(key)} of {path}: option {letter} is {printable(option, 60)!r}; expected it to begin with "
                    f"'{letter}. '"
                )
        answer = _text(row, "answer", key, path)
        letters = string.ascii_uppercase[: len(options)]
        if len(answer) != 1 or answer not in letters:
            raise EvaluationError(
                f"question {printable(key)} of {path}: its answer {printable(answer, 60)!r} is no letter of its {len(options)} options"
            )
        name = row.get("videoID") or row.get("video") or _of_address(row.get("url")) or row.get("video_id")
        if not isinstance(name, str) or not name:
            raise EvaluationError(f"question {printable(key)} of {path} names no video; expected 'videoID'")
        groups = {kind: _text(row, kind, key, path) for kind in VIDEO_MME_GROUPS}
        items.append(Item(key, _find(name, folders, key, path), [options[letters.index(answer)]], question,
                          video=str(row.get("video_id") or name), choices=tuple(options), letter=answer, groups=groups))
    name = path.stem.split("-")[0] if path.suffix == ".parquet" else path.stem
    return Split(VIDEO_MME, name + "-without-subtitles", path, items)


def _mvbench_items(
    rows: object, path: Path, task: str, videos: Path | None, folder: str | None = None
) -> Iterable[Item]:
    """Of one task. `folder` is where its videos are, below `videos`."""
    if not isinstance(rows, list) or not rows:
        raise EvaluationError(f"{path} has no questions of {printable(task)}; give MVBench's own file")
    ids = Ids("question", path)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}: question {number} is {printable(row, 60)}; expected a JSON object")
        key = ids.any(row.get("index", f"{task}-{number}"))
        candidates = row.get("candidates")
        if not isinstance(candidates, list) or len(candidates) < 2 or not all(isinstance(c, str) for c in candidates):
            raise EvaluationError(f"question {printable(key)} of {path} has no list of candidates; give MVBench's own file")
        answer = _text(row, "answer", key, path)
        if answer not in candidates:
            raise EvaluationError(
                f"question {printable(key)} of {path}: its answer {printable(answer, 60)!r} is none of its candidates "
                f"({printable(', '.join(candidates))})"
            )
        place = candidates.index(answer)  # the first, as lmms-eval takes it
        choices = tuple(f"({letter}) {text}" for letter, text in zip(string.ascii_uppercase, candidates))
        video = _text(row, "video", key, path)
        within = folder if folder is not None else MVBENCH_FOLDERS.get(task, "")
        yield Item(key, _find_mvbench(video, within, path, videos, key), [choices[place]], _text(row, "question", key, path),
                   video=f"{within}/{video}" if within else video, choices=choices,
                   letter=string.ascii_uppercase[place], groups={"task": task})  # fmt: skip


def _mvbench_branch(data: dict, path: Path, videos: Path | None) -> Split:
    items = []
    for task, rows in data["meta"].items():
        folder = data["root"].get(task)
        if not isinstance(folder, str):
            raise EvaluationError(f"{path} has no folder (\"root\") for its task {printable(task)}")
        items += _mvbench_items(rows, path, task, videos, folder.strip("/"))
    return Split(MVBENCH, path.stem, path, items)


def _mvbench_table(rows: list[dict], path: Path, videos: Path | None) -> Split:
    items: list[Item] = []
    ids = Ids("question", path)
    for row in rows:
        key = ids.any(row.get("index"))
        if row.get("bound") == "True":
            raise EvaluationError(
                f"question {printable(key)} of {path} is about a part of its video, which is not cut here; give MVBench_MP4.tsv or "
                "the JSON files, whose videos are cut"
            )
        task, prefix = _text(row, "task_type", key, path), row.get("prefix") or ""
        items += _mvbench_items([row], path, task, videos, prefix.strip("/"))
    return Split(MVBENCH, path.stem, path, items)


def _clips(rows: list, path: Path, videos: Path | None) -> Split:
    ids = Ids("question", path)
    items = []
    for row in rows:
        key = ids.any(row.get("questionId") if isinstance(row, dict) else None)
        answers = row.get("answers")
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise EvaluationError(f"question {printable(key)} of {path} has no answers; expected a list of strings")
        if row.get("kind") not in ("description", "question"):
            raise EvaluationError(f"question {printable(key)} of {path} is of no known kind; expected description or question")
        video = _text(row, "video", key, path)
        file = within_folder(videos or path.parent, video, f"question {printable(key)}", path)
        items.append(Item(key, file, answers, _text(row, "question", key, path), video=video,
                          groups={"kind": row["kind"]}))
    if not items:
        raise EvaluationError(f"{path} has no questions")
    return Split(CLIPS, "heldout" if path.stem == "clips_heldout" else path.stem, path, items)


def _questions(data: list, path: Path) -> list[dict]:
    """Questions with what their video has of its own."""
    rows = []
    for video in data:
        if not isinstance(video, dict) or not isinstance(video.get("questions"), list):
            raise EvaluationError(f"{path}: {printable(video, 60)} is no video with questions")
        about = {key: value for key, value in video.items() if key != "questions"}
        rows += [about | question for question in video["questions"] if isinstance(question, dict)]
    if not rows:
        raise EvaluationError(f"{path} has no questions")
    return rows


def _tsv(path: Path) -> list[dict]:
    """A table of VLMEvalKit, whose lists are written as Python has them and whose index is a number."""
    rows = read_table(path).rows
    if "candidates" not in rows[0] or "index" not in rows[0]:
        raise EvaluationError(f"{path} is no table of VLMEvalKit; expected columns index, question, candidates, answer")
    for row in rows:
        row["candidates"], written = listed(row["candidates"]), row["candidates"]
        if not isinstance(row["candidates"], list):
            raise EvaluationError(
                f"question {printable(row['index'])} of {path} has candidates that are no list: {printable(written, 60)}"
            )
        row["index"] = int(row["index"]) if re.fullmatch(r"[0-9]{1,9}", row["index"] or "") else None
    return rows


def _text(row: dict, name: str, key: object, path: Path) -> str:
    if not isinstance(row.get(name), str) or not row[name]:
        raise EvaluationError(f"question {printable(key)} of {path} has no {name!r}; give the file as it was published")
    return row[name]


def _of_address(url: object) -> str | None:
    """The name of a video by its address, as in ...watch?v=NAME."""
    found = re.search(r"[?&]v=([\w-]+)", url) if isinstance(url, str) else None
    return found[1] if found else None


def _video_mme_folders(path: Path) -> list[Path]:
    """lmms-eval has the videos in data/, VLMEvalKit in video/, beside the annotations or beside their folder."""
    return [folder / name for folder in (path.parent, path.parent.parent) for name in ("data", "video")] + [path.parent]


def _find(name: str, folders: list[Path], key: object, path: Path) -> Path:
    """The video of that name; where there is none, the place where it is looked for first."""
    places = [within_folder(folder, name + suffix, f"question {printable(key)}", path) for folder in folders for suffix in SUFFIXES]
    return next((place for place in places if place.exists()), places[0])


def _find_mvbench(video: str, within: str, path: Path, videos: Path | None, key: object) -> Path:
    roots = [videos] if videos else [path.parent.parent / "video", path.parent / "video", path.parent]
    ways = (Path(within), Path("data0613") / within, Path())
    places = [within_folder(root, str(way / video), f"question {printable(key)}", path) for root in roots for way in ways]
    return next((place for place in places if place.exists()), places[-3])
