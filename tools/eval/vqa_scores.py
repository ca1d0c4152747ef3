"""Relaxed accuracy (ChartQA) and VQA accuracy (TextVQA, VizWiz) by the rules of both harnesses. Standard library only.

lmms-eval at 75571cf, VLMEvalKit at e8e78f0. The rules are crude, and scores are comparable under the same one alone, so
their oddities are kept: a target of 0 is compared as text, one answer alone scores 0 in VQA accuracy, and of the full stops
in a text only the first 32 are looked at.
"""

from __future__ import annotations

import re
import statistics
from itertools import product
from typing import Sequence

LMMS_EVAL, VLMEVALKIT = "lmms-eval", "vlmevalkit"

WITHIN = 0.05  # of a number, for relaxed accuracy
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
FULL_STOPS = 32  # at most so many are removed
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(NUMBERS)}
ARTICLES = ("a", "an", "the")


def _contractions() -> dict[str, str]:
    """Word without an apostrophe -> the word with it, for those that the harnesses list."""
    single = """ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's
        isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've shouldn't
        somebody'll somebody's someone'd someone'll someone's something'd something'll that's there'd there're there's they'd
        they'll they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's where've
        who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've"""
    double = """couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've somebody'd've someone'd've
        something'd've there'd've they'd've we'd've who'd've wouldn't've you'd've"""
    found = {word.replace("'", ""): word for word in single.split()}
    for word in double.split():
        first, second, third = word.split("'")
        found |= {f"{first}{second}'{third}": word, f"{first}'{second}{third}": word}
    found |= dict.fromkeys(("ow's'at", "'ows'at", "'ow'sat"), "'ow's'at") | dict.fromkeys(("yall'll", "y'allll"), "y'all'll")
    return found | dict.fromkeys(("yall'd've", "y'alld've", "y'all'dve"), "y'all'd've") | {"somebody'd": "somebodyd"}


CONTRACTIONS = _contractions()


def relaxed(text: str, answers: Sequence[str], harness: str = LMMS_EVAL) -> float:
    """Whether an answer fits: a number within 5 % of an accepted one other than 0, else the same text in any case.

    Both harnesses strip the text before they compare. VLMEvalKit takes the best of several answers, and lmms-eval has one.
    """
    return float(any(_fits(text.strip(), answer) for answer in (answers if harness == VLMEVALKIT else answers[:1])))


def _fits(text: str, target: str) -> bool:
    said, wanted = _number(text), _number(target)
    if said is None or not wanted:
        return text.lower() == target.lower()
    return abs(said - wanted) / abs(wanted) <= WITHIN


def _number(text: str) -> float | None:
    """What Python takes for a number, also 1_05, inf and nan; a percentage as its share."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def vqa_accuracy(text: str, answers: Sequence[str], harness: str = LMMS_EVAL) -> float:
    """The mean, over the accepted answers, of min(1, a third of how many of the others equal the text), all normalised."""
    plain = normal_lmms_eval if harness == LMMS_EVAL else normal_vlmevalkit
    said, wanted = plain(text.strip() if harness == LMMS_EVAL else text), [plain(answer) for answer in answers]
    matches = wanted.count(said)
    shares = [min(1, float(matches - (answer == said)) / 3) for answer in wanted]
    return mean(shares, harness) if harness == VLMEVALKIT else float(statistics.mean(shares))


def normal_lmms_eval(text: str) -> str:
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return _words(_without_stops(_without_marks(_one_line(text), commas=False), r"\.(?!\d)"))


def normal_vlmevalkit(text: str) -> str:
    return _words(_without_stops(_without_marks(_one_line(text), commas=True), r"(?<!\d)\.(?!\d)"))


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def _without_marks(text: str, commas: bool) -> str:
    """A mark becomes nothing where it is next to a blank anywhere in the text, or with a comma within a number; else a blank."""
    thousands = commas and re.search(r"\d,\d", text) is not None
    plain = text
    for mark in PUNCTUATION:
        gone = thousands or f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if gone else " ")
    return plain


def _without_stops(text: str, pattern: str) -> str:
    return re.sub(pattern, "", text, count=FULL_STOPS)


def _words(text: str) -> str:
    words = [DIGITS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def mean(values: Sequence[float], harness: str) -> float:
    """To the last digit as the harness has it: lmms-eval adds in turn, VLMEvalKit as numpy does, by halves."""
    return (_sum_by_halves(values) if harness == VLMEVALKIT else sum(values)) / len(values)


def _sum_by_halves(values: Sequence[float]) -> float:
    """numpy's pairwise summation of doubles: eight sums side by side, in blocks of at most 128."""
    count = len(values)
    if count > 128:
        half = count // 2 - count // 2 % 8
        return _sum_by_halves(values[:half]) + _sum_by_halves(values[half:])
    if count < 8:
        return float(sum(values))
    whole = count - count % 8
    s = [0.0] * 8
    for first, column in product(range(0, whole, 8), range(8)):
        s[column] += values[first + column]
    total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
    for value in values[whole:]:
        total += value
    return total
