"""ROUGE-L F1 between two texts, as the code of PrefixKV computes it. Standard library only.

That code (eval_rouge.py) calls the package `rouge` 1.0.1, whose "rouge-l" is the summary-level ROUGE-L of Lin 2004,
section 3.2, with beta 1, over *sets* of words:

- a text is cut at every full stop, also within 3.5, and each sentence at white space; case and punctuation stay
- of every pair of a reference's and an answer's sentence one longest common subsequence is taken; where there are several,
  the one that is found from the ends by leaving out the answer's word
- recall is the number of different words in all those subsequences by the number of different words of the reference,
  precision the same by the number of different words of the answer; F1 is their harmonic mean, to which the package adds
  1e-8 in the denominator and this module nothing

A word that comes ten times counts once, so a text with many repeated words is judged by few. Where the package fails
(a text without a sentence), two such texts are equal and score 1, and one scores 0.
"""

from __future__ import annotations


def f1(answer: str, reference: str) -> float:
    """0 to 1; symmetric but for the choice among equally long subsequences."""
    said, wanted = _pieces(answer), _pieces(reference)
    if not said or not wanted:
        return float(not said and not wanted)
    common: set[str] = set()
    for piece in wanted:
        for other in said:
            common.update(_common_subsequence(piece, other))
    precision = len(common) / len({word for piece in said for word in piece})
    recall = len(common) / len({word for piece in wanted for word in piece})
    return 2 * precision * recall / (precision + recall) if common else 0.0


def _pieces(text: str) -> list[list[str]]:
    """Words of what stands between full stops. A piece of white space has one empty word, as in the package."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def _common_subsequence(a: list[str], b: list[str]) -> list[str]:
    lengths = [[0] * (len(b) + 1)]  # of the longest one of a's first i and b's first j words
    for word in a:
        before, row = lengths[-1], [0]
        for j, other in enumerate(b):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
        lengths.append(row)
    found = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
