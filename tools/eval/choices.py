"""Which letter an answer to a multiple-choice question chooses, by the rules of the harnesses. Standard library only.

The rules are crude, and scores are only comparable under the same one, so they are kept as they are: under lmms-eval's
for Video-MME "Answer: C." chooses A, and under its rule for MVBench so does any sentence with the word "a".
Every rule gives a capital letter, or "" where it finds none, which is wrong whatever the question.
"""

from __future__ import annotations

import re

# Removed wherever they stand, in this order. The harnesses' lists miss commas, so that "The best option is", "The correct
# option is" and "Best answer:" are never removed; VLMEvalKit's goes on where lmms-eval's ends.
PREFIXES = ("The best answer is", "The correct answer is", "The answer is", "The answer",
            "The best option isThe correct option is")  # fmt: skip
LMMS_EVAL_PREFIXES = (*PREFIXES, "Best answer:Best option:")
VLMEVALKIT_PREFIXES = (*PREFIXES, "Best answer:Best option:", "Answer:", "Option:")
PUNCTUATION = (";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!")


def video_mme_lmms_eval(answer: str) -> str:
    """lmms-eval for Video-MME, which is Video-MME's own rule: the first capital A to D behind the usual phrases."""
    return _first_capital(answer, LMMS_EVAL_PREFIXES)


def video_mme_vlmevalkit(answer: str) -> str:
    """VLMEvalKit for Video-MME, where no judge is asked: the same with "Answer:" and "Option:" removed too."""
    return _first_capital(answer, VLMEVALKIT_PREFIXES)


def mvbench_lmms_eval(answer: str) -> str:
    """lmms-eval for MVBench: a letter A to E and a full stop in front, else the first that is a word, of either case.

    Before the second, punctuation becomes nothing where it stands at a blank (or where a number has a comma), else a
    blank, and full stops that no digit follows (the first 32) become nothing.
    """
    if found := re.match(r"([A-E])\.\s*.+$", answer.strip(), re.IGNORECASE):
        return found[1].upper()
    text = answer.replace("\n", " ").replace("\t", " ").strip()
    thousands = re.search(r"\d,\d", text) is not None
    plain = text
    for mark in PUNCTUATION:
        gone = thousands or f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if gone else " ")
    plain = re.sub(r"\.(?!\d)", "", plain, count=32)
    found = re.search(r"\b[a-e]\b", plain.lower())
    return found[0].upper() if found else ""


def _first_capital(answer: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        answer = answer.replace(prefix, "")
    found = re.search("[ABCD]", answer)
    return found[0] if found else ""
