#!/usr/bin/env python3
"""Which of the papers' orderings the answers of tools/eval/policies.py carry, each on the same images.

    tools/eval/orderings.py --out OUT [--images 200] [--fidelity 100]

A row compares two specs that differ in one thing, over the same images: slots of captions (95 % interval of the
difference, paired bootstrap), exact captions (McNemar's exact p) and documents (ANLS, interval of the difference).
"Holds" and "does not" say which side the interval of the slots, chosen before any was measured, lies on; where exact
captions (p < 0.05) or documents (interval) lie on the other side, the row is "not decided" and names them. What is
compared with chance is compared with it under two seeds, and is decided only if both say the same: an interval over
images knows nothing of the draw. Stored bits are fidelity's, over the same forced text for both; where they differ by
more than 2 % in favour of the better one, the row says so. No correction is made for the number of rows: of forty, two
may be decided by chance. Needs numpy.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import significance
from claims import CLAIMS, Claim
from errors import run_main
from policies import RESAMPLES, SEED, Evaluation, caption_scores, document_scores
from significance import Interval, McNemar


def percent(interval: Interval) -> str:
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


@dataclass
class Comparison:
    """One spec beside another, figures of the first first."""

    bits: tuple[float, float] | None
    exact: tuple[int, int]
    p: float  # of the exact captions
    slots: tuple[float, float]
    slots_interval: Interval
    anls: tuple[float, float]
    anls_interval: Interval
    kl: tuple[float, float] | None

    @property
    def verdict(self) -> str:
        told = self.slots_interval.side
        exact = (self.exact[0] > self.exact[1]) - (self.exact[0] < self.exact[1]) if self.p < 0.05 else 0
        others = {"exact captions": exact, "documents": self.anls_interval.side}
        if told == 0:
            return "not decided"
        against = [name for name, other in others.items() if other == -told]
        if against:
            return f"not decided: slots {'for' if told > 0 else 'against'} it, {' and '.join(against)} the other way"
        said = "holds" if told > 0 else "does not"
        if self.bits and (self.bits[0] / self.bits[1] - 1) * told > 0.02:
            said += ", with more bytes"
        return said

    def cells(self) -> list[str]:
        pair = "{}, {}".format
        return [
            pair(*(f"{x:.2f}" for x in self.bits)) if self.bits else "-",
            f"{pair(*self.exact)} (p {self.p:.2g})",
            f"{pair(*(f'{100 * x:.1f}' for x in self.slots))} ({percent(self.slots_interval)})",
            f"{pair(*(f'{x:.3f}' for x in self.anls))} ({self.anls_interval.low:+.3f} to {self.anls_interval.high:+.3f})",
            pair(*(f"{x:.4f}" for x in self.kl)) if self.kl else "-",
        ]


def shared(a: dict, b: dict, spec: str) -> list:
    if a.keys() != b.keys():
        missing = sorted(a.keys() ^ b.keys())[0]
        raise SystemExit(f"{missing} is answered under one of the specs only ({spec}); run policies.py to its end first")
    return sorted(a)


def compare(work: Evaluation, better: str, worse: str) -> Comparison:
    captions = [caption_scores(work.texts(spec, "captions")) for spec in (better, worse)]
    keys = shared(*captions, worse)
    only = [sum(x[key][0] and not y[key][0] for key in keys) for x, y in (captions, captions[::-1])]
    slots = [[of[key][1:] for key in keys] for of in captions]
    documents = [document_scores(work.texts(spec, "documents")) for spec in (better, worse)]
    named = shared(*documents, worse)
    answers = [[(of[key], 1.0) for key in named] for of in documents]
    found = [work.fidelity(spec) for spec in (better, worse)]
    return Comparison(
        bits=tuple(of["stored_bits"] for of in found) if all(found) else None,
        exact=tuple(sum(of[key][0] for key in keys) for of in captions),
        p=McNemar(*only).p,
        slots=tuple(sum(r for r, _ in of) / sum(t for _, t in of) for of in slots),
        slots_interval=significance.of_difference(*slots, RESAMPLES, SEED),
        anls=tuple(sum(x for x, _ in of) / len(of) for of in answers),
        anls_interval=significance.of_difference(*answers, RESAMPLES, SEED),
        kl=tuple(of["kl_mean"] for of in found) if all(found) else None,
    )


def judge(verdicts: list[str]) -> str:
    """One verdict of several comparisons: theirs if they agree, with whatever any of them adds."""
    if len({verdict.split(",")[0] for verdict in verdicts}) == 1:
        return max(verdicts, key=len)
    return f"not decided: {'; '.join(verdicts)}"


def row(work: Evaluation, claim: Claim) -> str:
    found = [compare(work, claim.better, other) for other in claim.others]
    cells = ["<br>".join(parts) for parts in zip(*(of.cells() for of in found))]
    specs = f"`{claim.better}`, " + ", ".join(f"`{other}`" for other in claim.others)
    text = ", ".join(filter(None, (claim.text, claim.at)))
    return "| " + " | ".join([text, claim.source, specs, *cells, f"**{judge([of.verdict for of in found])}**"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of policies.py")
    parser.add_argument("--images", type=int, default=200, help="as policies.py had it")
    parser.add_argument("--fidelity", type=int, default=100, help="as policies.py had it")
    options = parser.parse_args()
    work = Evaluation(options.out, options.images, options.fidelity)
    print(f"{options.images} images of each set, {options.fidelity} captions for bits and KL.\n")
    print("| claim | source | specs | stored bits | exact | slots, % (difference) | ANLS (difference) | KL | |")
    print("|---|---|---|---|---|---|---|---|---|")
    claims = [claim for claim in CLAIMS if all(work.answered(spec) for spec in (claim.better, *claim.others))]
    for claim in claims:
        print(row(work, claim), flush=True)
    if len(claims) < len(CLAIMS):
        print(f"orderings.py: {len(CLAIMS) - len(claims)} of {len(CLAIMS)} claims are left out, since policies.py has "
              "not answered their specs", file=sys.stderr)
    return 0 if claims else 1


if __name__ == "__main__":
    sys.exit(run_main("orderings.py", main))
