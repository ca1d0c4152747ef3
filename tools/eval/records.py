"""What a data set is to these scripts: records with an image or video, a question and references. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from errors import EvaluationError, printable
from regions import Box
from rows import Table, store

CAPTIONS, DOCUMENTS = "captions", "documents"
CHARTQA, TEXTVQA, VIZWIZ = "chartqa", "textvqa", "vizwiz"
QUESTIONS = (DOCUMENTS, CHARTQA, TEXTVQA, VIZWIZ)  # about images


@dataclass(frozen=True)
class Item:
    """One question about one image or video: an image to caption, or a question of DocVQA or of a video set."""

    id: int | str
    image: Path  # or the video; the table, until the image inside it is written
    references: list[str]  # captions, or accepted answers; none in a test split
    question: str = ""  # none: the model's own captioning prompt
    objects: int | None = None  # in the image, where the set has it
    video: str = ""  # what the questions on one video have in common; none: it is an image
    choices: tuple[str, ...] = ()  # as they are asked, each after its letter
    letter: str = ""  # of the right choice
    groups: dict[str, str] = field(default_factory=dict)  # kind -> group whose scores are also given (duration -> short)
    box: Box | None = None  # of a region of the image, which is drawn
    inside: tuple[Table, int] | None = field(default=None, repr=False)  # the table and row that hold the image


@dataclass(frozen=True)
class Split:
    """The records of one annotation file, in its order."""

    task: str  # one of the above, or of video_files.py
    name: str  # val2014, karpathy_test, val, heldout
    path: Path
    items: list[Item] = field(repr=False)
    tuning: list[Item] = field(default_factory=list, repr=False)  # never scored

    def __post_init__(self) -> None:
        """EvaluationError for text that the programs cannot be given, since their files are UTF-8."""
        for item in self.items:
            for name, texts in (("id", (item.id,)), ("question", (item.question,)), ("options", item.choices),
                                ("references", item.references), ("video" if item.video else "image", (item.image,))):  # fmt: skip
                if bad := next((text for text in map(str, texts) if not _is_unicode(text)), None):
                    raise EvaluationError(
                        f"{self.record_name} {printable(item.id)} of {self.path}: its {name} '{printable(bad, 60)}' has half of a "
                        "surrogate pair, which no UTF-8 can hold; replace that escape in the file"
                    )

    @property
    def record_name(self) -> str:
        """What a record is called in messages."""
        return "image" if self.task == CAPTIONS else "question" if self.task in QUESTIONS or self.items[0].video else "record"

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
        """The first records of another split, whose images must not be scored."""
        if tune > len(tune_on.items):
            raise EvaluationError(f"--tune {tune} is more than the {len(tune_on.items)} records of {tune_on.path}")
        tuning = tune_on.items[: tune or None]
        _refuse_common(self.items, tuning, tune_on.path)
        return tuning

    def with_images(self, folder: Path) -> Split:
        """The split with the images that are inside tables written to `folder`, each once, by its contents."""
        wanted: dict[tuple[Path, ...], tuple[Table, set[int]]] = {}
        for item in (*self.items, *self.tuning):
            if item.inside:
                wanted.setdefault(item.inside[0].paths, (item.inside[0], set()))[1].add(item.inside[1])
        if not wanted:
            return self
        boxes = {(item.inside[0].paths, item.inside[1]): item.box for item in (*self.items, *self.tuning) if item.inside}
        files = {(paths, row): store(content, folder, boxes[paths, row])
                 for paths, (table, rows) in wanted.items() for row, content in table.images(rows)}  # fmt: skip

        def written(item: Item) -> Item:
            return replace(item, image=files[item.inside[0].paths, item.inside[1]], inside=None) if item.inside else item

        made = replace(self, items=[*map(written, self.items)], tuning=[*map(written, self.tuning)])
        if len(wanted) > 1:  # --tune-on: only now is it known what its images are
            _refuse_common(made.items, made.tuning, self.tuning[0].image)
        return made

    def require_pictures(self) -> None:
        for item in [*self.items, *self.tuning]:
            if not (item.image.exists() if item.video else item.image.is_file()):  # a video may be a folder of frames
                kind, option = ("video", "--videos") if item.video else ("image", "--images")
                raise EvaluationError(
                    f"{self.record_name} {printable(item.id)} of {self.path}: its {kind} {item.image} is not there; give the folder of "
                    f"the {kind}s with {option}"
                )


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _refuse_common(scored: list[Item], tuning: list[Item], path: Path) -> None:
    """EvaluationError for an image of a file that is scored and calibrated on."""
    known = {item.image.resolve() for item in scored if not item.inside}
    if both := next((item for item in tuning if not item.inside and item.image.resolve() in known), None):
        raise EvaluationError(
            f"record {printable(both.id)} of {path} shows {both.image}, which is scored as well; calibrate on other images"
        )


def within(folder: Path, name: str, what: str, path: Path) -> Path:
    """A file that annotations name, which must be below the folder of images. Links in the folder are its owner's choice."""
    root = os.path.abspath(folder)
    place = os.path.abspath(os.path.join(root, name))
    if "\0" in name or os.path.commonpath([root, place]) != root or place == root:
        raise EvaluationError(
            f"{what} of {path} names the file {printable(name)}, which is not in {folder}; expected a name below the folder of "
            "images or videos, which --images or --videos gives"
        )
    return folder / os.path.relpath(place, root)
