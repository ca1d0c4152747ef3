"""Scores answers on the held-out sets.

    python3 score.py PREDICTIONS.jsonl [MORE.jsonl ...] [--heldout FOLDER] [--json] [--gate] [--clips]

Predictions are lines {"id": "scene_000", "text": "..."}, as asked for by captions.jsonl, documents.jsonl,
questions.jsonl and clips.jsonl. A set is scored when any of its ids is predicted; its missing answers then count as
wrong. The gate asks for the three sets of pictures and, with --clips, for the clips.

  captions exact   share of scenes whose text equals one of the five paraphrases, after trimming blanks
  slots            share of facts told rightly. A scene has one slot for the number of objects and six for each object
                   (size, colour, shape, mark, row, column). The text is cut at semicolons, its k-th part compared with
                   the k-th object in reading order; what is missing is wrong, and every part too many counts as six
                   wrong slots.
  documents ANLS   average normalised Levenshtein similarity as in DocVQA: the best of the accepted answers, compared
                   without case and outer blanks; a similarity below 0.5 counts as 0
  answers          share of questions answered by one of the accepted answers, without case, outer blanks and a final stop
  descriptions     of clips, compared as facts: the number of objects at the start; each of these objects (colour, shape,
                   mark and place as one fact), in any order, for the pictures do not tell which comes first; each event,
                   at its place in the order of time. "exact" is the share of clips of which all is told and nothing
                   else; "facts" the share of facts told rightly, where what is told too much counts as wrong.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

GATES = {"captions_exact": 0.90, "captions_slots": 0.99, "documents_anls": 0.90, "questions_accuracy": 0.95}
CLIP_GATES = {"descriptions_exact": 0.90, "descriptions_facts": 0.99, "clip_questions_accuracy": 0.95}

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
ORDINALS = ("first", "second", "third", "fourth")
SIZES = ("small", "large")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
SHAPES = ("circle", "square", "triangle", "ring", "cross", "diamond")
SLOTS = ("size", "colour", "shape", "mark", "row", "column")

OBJECT = rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) marked ([A-Z0-9])"
PLACE = r"in row (\d), column (\d)"
EVENTS = (r"([A-Z0-9]) moves (left|right|up|down)", r"([A-Z0-9]) (vanish)es", rf"{OBJECT} (appear)s {PLACE}")
Fact = tuple[str, ...]


def levenshtein(a: str, b: str) -> int:
    """Least number of insertions, deletions and replacements that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def anls(text: str, answers: list[str]) -> float:
    """Similarity of DocVQA (Biten et al. 2019, eq. 1), threshold 0.5."""
    text = text.strip().lower()
    best = 0.0
    for answer in answers:
        answer = answer.strip().lower()
        longest = max(len(text), len(answer))
        best = max(best, 1 - levenshtein(text, answer) / longest if longest else 1.0)
    return best if best >= 0.5 else 0.0


def is_answer(text: str, answers: list[str]) -> bool:
    def plain(s: str) -> str:
        return s.strip().rstrip(".").strip().lower()

    return plain(text) in {plain(answer) for answer in answers}


def read_caption(text: str) -> tuple[str | None, list[dict]]:
    """The number word of a caption, and the facts told in each of its parts."""
    found = []
    for part in text.split(";"):
        words = re.findall(r"[A-Za-z0-9]+", part)
        fact: dict = {
            "size": next((w for w in words if w in SIZES), None),
            "colour": next((w for w in words if w in COLOURS), None),
            "shape": next((w for w in words if w in SHAPES), None),
            "mark": next((m for m in re.findall(r"(?<!row )(?<!column )\b([A-Z0-9])\b", part)), None),
        }
        for name in ("row", "column"):
            number = re.search(rf"\b{name} (\d)\b", part)
            word = re.search(rf"\b({'|'.join(ORDINALS)}) {name}\b", part)
            fact[name] = int(number[1]) if number else ORDINALS.index(word[1]) + 1 if word else None
        if any(fact[name] is not None for name in SLOTS):
            found.append(fact)
    number = re.search(rf"\b({'|'.join(NUMBERS)})\b", text.lower())
    return (number[1] if number else None), found


def slots(text: str, objects: list[dict]) -> tuple[int, int]:
    """Slots told rightly and slots in all, of one caption."""
    number, found = read_caption(text)
    right = int(number == NUMBERS[len(objects) - 1])
    for told, true in zip(found, objects):
        right += sum(told[name] == true[name] for name in SLOTS)
    return right, 1 + len(SLOTS) * max(len(objects), len(found))


def read_description(text: str) -> tuple[str | None, list[Fact], list[Fact]]:
    """The number word of a clip's description, the objects at the start and the events; what is unclear as it stands."""
    start, _, told = text.strip().removesuffix(".").partition(". First ")
    head, _, listed = start.partition(": ")
    number = re.fullmatch(rf"There (?:is|are) ({'|'.join(NUMBERS)}) objects?", head)

    def read(part: str, patterns: tuple[str, ...]) -> Fact:
        matches = (re.fullmatch(pattern, part) for pattern in patterns)
        return next((m.groups() for m in matches if m), (part,))

    objects = [read(part, (f"{OBJECT} {PLACE}",)) for part in listed.split("; ") if listed]
    events = [read(part, EVENTS) for part in told.split("; then ") if told]
    return (number[1] if number else None), objects, events


def description_facts(text: str, answer: str) -> tuple[int, int]:
    """Facts told rightly and facts in all, of one description of a clip."""
    (number, objects, events), (true_number, true_objects, true_events) = map(read_description, (text, answer))
    right = (number == true_number) + sum((Counter(objects) & Counter(true_objects)).values())
    right += sum(told == true for told, true in zip(events, true_events))
    return right, 1 + max(len(objects), len(true_objects)) + max(len(events), len(true_events))


def score_clips(predictions: dict[str, str], records: list[dict]) -> tuple[dict[str, float], list[dict]]:
    """Figures of the clips, and the answers that are not exactly right."""
    found: dict[str, list[tuple[int, int]]] = {"description": [], "question": []}
    failures = []
    for record in records:
        key = Path(record["video"]).stem
        text, answers = predictions.get(key, ""), record["answers"]
        if record["kind"] == "description":
            right, asked = description_facts(text, answers[0])
        else:
            right, asked = int(is_answer(text, answers)), 1
        found[record["kind"]].append((right, asked))
        if right < asked:
            failures.append({"id": key, "question": record["question"], "text": text, "expected": answers[0]})
    figures: dict[str, float] = {}
    if told := found["description"]:
        figures["descriptions"] = len(told)
        figures["descriptions_exact"] = sum(right == asked for right, asked in told) / len(told)
        figures["descriptions_facts"] = sum(right for right, _ in told) / sum(asked for _, asked in told)
    if asked := found["question"]:
        figures["clip_questions"] = len(asked)
        figures["clip_questions_accuracy"] = sum(right for right, _ in asked) / len(asked)
    return figures, failures


def score(predictions: dict[str, str], heldout: Path) -> tuple[dict[str, float], list[dict]]:
    """Figures of every set that is predicted, and the answers that are not exactly right."""
    figures: dict[str, float] = {}
    failures: list[dict] = []
    facts = json.loads((heldout / "scene_facts.json").read_text())
    coco = json.loads((heldout / "captions_heldout.json").read_text())
    keys = {image["id"]: Path(image["file_name"]).stem for image in coco["images"]}
    captions: dict[str, list[str]] = {}
    for note in coco["annotations"]:
        captions.setdefault(keys[note["image_id"]], []).append(note["caption"])
    known = set(captions)
    if predictions.keys() & captions.keys():
        exact = right = total = 0
        for key, accepted in captions.items():
            text = predictions.get(key, "").strip()
            exact += text in accepted
            told, asked = slots(text, facts[key])
            right, total = right + told, total + asked
            if text not in accepted:
                failures.append({"id": key, "text": text, "expected": accepted[0]})
        figures |= {"captions": len(captions), "captions_exact": exact / len(captions), "captions_slots": right / total}
    for name in ("documents", "questions"):
        data = json.loads((heldout / f"{name}_heldout.json").read_text())["data"]
        asked_of = {Path(record["image"]).stem: record for record in data}
        known |= asked_of.keys()
        if not predictions.keys() & asked_of.keys():
            continue
        similar = accurate = 0.0
        for key, record in asked_of.items():
            text = predictions.get(key, "")
            similar += anls(text, record["answers"])
            accurate += is_answer(text, record["answers"])
            if not is_answer(text, record["answers"]):
                failures.append(
                    {"id": key, "question": record["question"], "text": text, "expected": record["answers"][0]}
                )
        figures |= {name: len(data), f"{name}_accuracy": accurate / len(data)}
        if name == "documents":
            figures["documents_anls"] = similar / len(data)
    clips = json.loads((heldout / "clips_heldout.json").read_text())["data"]
    names = {Path(record["video"]).stem for record in clips}
    known |= names
    if predictions.keys() & names:
        more, wrong = score_clips(predictions, clips)
        figures |= more
        failures += wrong
    strange = sorted(predictions.keys() - known)
    if strange:
        raise ValueError(f"id {strange[0]!r} is in none of the held-out sets in {heldout}")
    return figures, failures


def read_predictions(paths: list[Path]) -> dict[str, str]:
    """Reads {"id", "text"} lines; an id must not come twice."""
    found: dict[str, str] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                key, text = record["id"], record["text"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(f"{path}, line {number}: expected a JSON object with id and text") from None
            if not isinstance(key, str) or not isinstance(text, str):
                raise ValueError(f"{path}, line {number}: id and text must be strings")
            if key in found:
                raise ValueError(f"{path}, line {number}: id {key!r} was answered before")
            found[key] = text
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("predictions", type=Path, nargs="+", help="JSONL of {id, text}")
    parser.add_argument("--heldout", type=Path, default=Path(__file__).parent / "heldout", help="folder of the sets")
    parser.add_argument("--json", action="store_true", help="print the figures and failures as JSON")
    parser.add_argument("--gate", action="store_true", help="exit 1 if a set is missing or below its gate")
    parser.add_argument("--clips", action="store_true", help="the gate asks for the clips, too")
    options = parser.parse_args(arguments)
    try:
        figures, failures = score(read_predictions(options.predictions), options.heldout)
    except (OSError, ValueError) as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    gates = GATES | (CLIP_GATES if options.clips or figures.keys() & CLIP_GATES.keys() else {})
    below = [name for name, least in gates.items() if figures.get(name, 0.0) < least]
    if options.json:
        print(json.dumps({"figures": figures, "failures": failures, "below_gate": below}, indent=1))
    else:
        for name, value in figures.items():
            gate = f"   (gate {gates[name]:.0%})" if name in gates else ""
            print(f"{name:23s} {value:7d}" if isinstance(value, int) else f"{name:23s} {value:7.2%}{gate}")
        for failure in failures:
            print("wrong: " + ", ".join(f"{k} {v!r}" for k, v in failure.items()))
        if options.gate:
            print("below the gate: " + ", ".join(below) if below else "all gates are met")
    return 1 if options.gate and below else 0


if __name__ == "__main__":
    sys.exit(main())
