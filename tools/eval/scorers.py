"""Scores of captions and answers, by the community's own packages where there are any.

    BLEU-1..4, METEOR, ROUGE_L, CIDEr, SPICE   pycocoevalcap, after its PTB tokenizer (both need Java, as METEOR does)
    raw BLEU-1..4, raw ROUGE_L, raw CIDEr      the same scorers on untokenised strings, times 100, as VLMEvalKit does
    ANLS                                       as lmms-eval and VLMEvalKit compute it; see anls()
    relaxed accuracy, VQA accuracy             of ChartQA, and of TextVQA and VizWiz, by the protocol's harness (vqa_scores.py)
    accuracy                                   share of right letters, by the protocol's rule (choices.py)
    ROUGE-L F1                                 to the first reference, as PrefixKV's code has it (rouge_l.py)
    exact, slots, answers, right, facts        tools/pocket/score.py, on our own held-out sets

Every scorer gives the corpus score and the values of the records. The standard library suffices below the package's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Callable

import rouge_l
import vqa_scores
from errors import EvaluationError, printable
from models import ROOT
from protocols import Protocol
from records import Split
from storage import read_json

sys.path.append(str(ROOT / "tools" / "pocket"))
import score as pocket  # noqa: E402

Items = dict[int, dict[str, float]]
JAVA = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE_L", "CIDEr", "SPICE")
PACKAGE = "pycocoevalcap"

# str.splitlines' breaks: the tokenizer is given a caption a line.
LINE_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


@dataclass
class Scores:
    corpus: dict[str, float]
    items: Items


def plan_metrics(wanted: tuple[str, ...], skipped: list[str], spice: bool) -> tuple[str, ...]:
    """The metrics to compute. EvaluationError, before any model has run, if one cannot be and is not skipped.

    `skipped` has metrics, or the package's name for all that need it.
    """
    wanted += ("SPICE",) if spice and "CIDEr" in wanted else ()
    unknown = [name for name in skipped if name != PACKAGE and name not in wanted]
    if unknown:
        raise EvaluationError(
            f"--skip {printable(unknown[0])} is no scorer of this run; there are {', '.join([*wanted, PACKAGE])}"
        )
    metrics = tuple(name for name in wanted if name not in skipped and not (PACKAGE in skipped and _of_package(name)))
    if not metrics:
        raise EvaluationError(
            f"--skip leaves nothing to score; the scorers are {', '.join(wanted)}: leave one in (tools/eval/setup.sh installs what "
            "they need), or compare policies without scores with vlm-kv fidelity"
        )
    if needy := [name for name in metrics if _of_package(name)]:
        if importlib.util.find_spec(PACKAGE) is None:
            raise EvaluationError(
                f"{', '.join(needy)} cannot be computed: this Python has no {PACKAGE}; run tools/eval/setup.sh and start "
                f"with build/eval-venv/bin/python3, or leave them out with --skip {PACKAGE}"
            )
        if any(name in JAVA for name in needy) and shutil.which("java") is None:
            raise EvaluationError(
                f"{', '.join(needy)} cannot be computed: there is no java; install Debian's default-jre-headless, or "
                f"leave them out with --skip {PACKAGE}"
            )
    return metrics


def versions() -> dict[str, str]:
    """Of what had a hand in the scores."""
    found = {"python": sys.version.split()[0]}
    for name in (PACKAGE, "pycocotools", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Scorer:
    """Scores of one text a record, for as many specs as there are: references are tokenised and METEOR is started once."""

    def __init__(self, split: Split, metrics: tuple[str, ...], way: Protocol):
        self.split, self.metrics, self.letter = split, metrics, way.letter
        self.harness = vqa_scores.VLMEVALKIT if way.name == vqa_scores.VLMEVALKIT else vqa_scores.LMMS_EVAL
        self.references = {item.id: item.references for item in split.items}

    def score(self, texts: dict[int, str]) -> Scores:
        """EvaluationError names a scorer that fails."""
        texts = {key: texts[key] for key in self.references}
        result = Scores({}, {key: {} for key in texts})
        if tokenized := [name for name in self.metrics if name in JAVA]:
            said = tokenize({key: [text] for key, text in texts.items()})
            self._run_package(result, self._tokenized_references, said, tokenized)
        if raw := [name for name in self.metrics if name.startswith("raw ")]:
            said = {key: [text] for key, text in texts.items()}
            self._run_package(result, self.references, said, [name.removeprefix("raw ") for name in raw], "raw ", 100)
        for name, of in (("exact", _exact), ("slots", _slots), ("ANLS", _anls), ("answers", _answers), ("right", _right),
                         ("facts", _facts), ("accuracy", self._accuracy), ("ROUGE-L F1", _rouge_l),
                         ("relaxed accuracy", self._relaxed), ("VQA accuracy", self._vqa_accuracy),
                         ("human", self._half), ("augmented", self._half)):  # fmt: skip
            if name not in self.metrics:
                continue
            values = of(self.split, texts, name) if of == self._half else of(self.split, texts)
            for key, value in values.items():
                result.items[key][name] = float(value)
            if values:
                result.corpus[name] = vqa_scores.mean([float(value) for value in values.values()], self.harness)
        result.corpus = {name: result.corpus[name] for name in self.metrics if name in result.corpus}
        return result

    def _accuracy(self, split: Split, texts: dict[int, str]) -> dict[int, float]:
        assert self.letter is not None
        return {item.id: self.letter(texts[item.id]) == item.letter for item in split.items}

    def _relaxed(self, split: Split, texts: dict[int, str]) -> dict[int, float]:
        return {item.id: vqa_scores.relaxed(texts[item.id], item.references, self.harness) for item in split.items}

    def _half(self, split: Split, texts: dict[int, str], name: str) -> dict[int, float]:
        """Relaxed accuracy of ChartQA's questions that people wrote, or of those that were augmented."""
        return {key: value for item, (key, value) in zip(split.items, self._relaxed(split, texts).items())
                if item.groups.get("split") == name}  # fmt: skip

    def _vqa_accuracy(self, split: Split, texts: dict[int, str]) -> dict[int, float]:
        return {item.id: vqa_scores.vqa_accuracy(texts[item.id], item.references, self.harness) for item in split.items}

    @functools.cached_property
    def _tokenized_references(self) -> dict[int, list[str]]:
        return tokenize(self.references)

    @functools.cached_property
    def _meteor(self):
        from pycocoevalcap.meteor.meteor import Meteor

        return Meteor()

    def _run_package(
        self, result: Scores, references: dict, texts: dict, names: list[str], prefix: str = "", scale: float = 1
    ) -> None:
        from pycocoevalcap.bleu.bleu import Bleu
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.rouge.rouge import Rouge
        from pycocoevalcap.spice.spice import Spice

        bleu = tuple(f"BLEU-{n}" for n in range(1, 5))
        for make, produced in (
            (lambda: Bleu(4), bleu), (lambda: self._meteor, ("METEOR",)), (Rouge, ("ROUGE_L",)), (Cider, ("CIDEr",)),
            (Spice, ("SPICE",)),
        ):  # fmt: skip
            if not set(produced) & set(names):
                continue
            with _quiet(next(name for name in produced if name in names)):
                corpus, values = make().compute_score(references, texts)
            if len(produced) == 1:
                corpus, values = [corpus], [values]
            for name, whole, each in zip(produced, corpus, values):
                if name not in names:
                    continue
                result.corpus[prefix + name] = scale * float(whole)
                keys = sorted(references) if name == "SPICE" else references
                for key, value in zip(keys, each):
                    result.items[key][prefix + name] = scale * float(value["All"]["f"] if name == "SPICE" else value)


def tokenize(captions: dict[int, list[str]]) -> dict[int, list[str]]:
    """As pycocoevalcap's PTB tokenizer has them, in the same order; EvaluationError if it loses a line."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    lines = {key: [{"caption": LINE_BREAKS.sub(" ", text)} for text in of] for key, of in captions.items()}
    with _quiet(PACKAGE) as said:
        tokens = PTBTokenizer().tokenize(lines)
    short = next((key for key, of in captions.items() if len(tokens.get(key, [])) != len(of)), None)
    if short is not None:
        raise EvaluationError(
            f"the PTB tokenizer lost a caption of record {printable(short)} (Java printed last: {said.last}); fix that, or leave its "
            f"scorers out with --skip {PACKAGE}"
        )
    return tokens


def anls(text: str, answers: list[str]) -> float:
    """Average normalised Levenshtein similarity of one question, as lmms-eval and VLMEvalKit have it.

    The best over the answers of 1 - distance / length, below 0.5 counted 0. The distance is of lower-cased strings with
    white space collapsed; the length is that of the longer *raw* string, in upper case (where a sharp s is two letters).
    Biten et al. 2019, eq. 1 divides by the length of what it compares. Two empty strings differ by 0 of 0, which both
    harnesses take as 0: similarity 1.
    """
    def plain(s: str) -> str:
        return " ".join(s.lower().split())

    best = 0.0
    for answer in answers:
        longest = max(len(answer.upper()), len(text.upper()))
        best = max(best, 1 - pocket.levenshtein(plain(answer), plain(text)) / longest if longest else 1.0)
    return best if best >= 0.5 else 0.0


def _of_package(name: str) -> bool:
    return name in JAVA or name.startswith("raw ")


def _anls(split: Split, texts: dict[int, str]) -> dict[int, float]:
    return {item.id: anls(texts[item.id], item.references) for item in split.items}


def _answers(split: Split, texts: dict[int, str]) -> dict[int, float]:
    return {item.id: pocket.is_answer(texts[item.id], item.references) for item in split.items}


def _exact(split: Split, texts: dict[int, str]) -> dict[int, float]:
    return {item.id: texts[item.id].strip() in item.references for item in split.items}


def _slots(split: Split, texts: dict[int, str]) -> dict[int, float]:
    """Share of a caption's slots that are told rightly; the corpus score is the mean over captions."""
    file = split.path.parent / "scene_facts.json"
    facts = read_json(file)
    if missing := next((item.image.stem for item in split.items if not isinstance(facts, dict) or item.image.stem not in facts), None):
        raise EvaluationError(f"{file} has no facts of {printable(missing)}; take it from tools/pocket/heldout")
    shares = {}
    for item in split.items:
        right, asked = pocket.slots(texts[item.id], facts[item.image.stem])
        shares[item.id] = right / asked
    return shares


def _told(split: Split, texts: dict[int, str]) -> dict[int, tuple[int, int]]:
    """Facts told rightly and facts in all, of clips: those of a description; an answer is one fact."""
    return {
        item.id: pocket.description_facts(texts[item.id], item.references[0])
        if item.groups["kind"] == "description"
        else (int(pocket.is_answer(texts[item.id], item.references)), 1)
        for item in split.items
    }


def _right(split: Split, texts: dict[int, str]) -> dict[int, float]:
    return {key: right == asked for key, (right, asked) in _told(split, texts).items()}


def _facts(split: Split, texts: dict[int, str]) -> dict[int, float]:
    """Share of a record's facts that are told rightly; the corpus score is the mean over records."""
    return {key: right / asked for key, (right, asked) in _told(split, texts).items()}


def _rouge_l(split: Split, texts: dict[int, str]) -> dict[int, float]:
    return {item.id: rouge_l.f1(texts[item.id], item.references[0]) for item in split.items}


@dataclass
class Said:
    """The last line of what a package, or the Java of it, printed."""

    last: str = "nothing"


@contextlib.contextmanager
def _quiet(name: str):
    """Keeps the packages' output off the terminal, and names which of them fails, with its last line (Said).

    Java reads files in the locale's encoding, so that captions would be scored otherwise where it is not UTF-8.
    """
    before, said = os.environ.get("LC_ALL"), Said()
    os.environ["LC_ALL"] = "C.UTF-8"
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield said
        except EvaluationError:
            raise
        except Exception as error:
            said.last = _last_line(kept)
            raise EvaluationError(
                f"{name} failed ({type(error).__name__}: {printable(error, 300)}; it printed last: {said.last}); fix that, or "
                f"leave it out with --skip {name}"
            ) from error
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            if before is None:
                del os.environ["LC_ALL"]
            else:
                os.environ["LC_ALL"] = before
        said.last = _last_line(kept)


def _last_line(file) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return printable(lines[-1], 300) if lines else "nothing"
