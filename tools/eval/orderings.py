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
may be decided by chance. Standard library only.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import paired
from policies import RESAMPLES, SEED, Evaluation, caption_scores, document_scores


@dataclass
class Claim:
    text: str  # what a paper, or this project, says
    better: str
    worse: str
    apart: str  # the one thing in which they differ

    @property
    def others(self) -> list[str]:
        """What `better` is compared with: chance under two seeds, anything else as it is."""
        return [self.worse, self.worse + ",seed=1"] if self.worse.startswith("random") else [self.worse]


CLAIMS = [
    Claim("keys need more bits than values (1BitVKV, XQuant, VidKV)", "kivi,key_bits=8,value_bits=1,residual=32",
          "kivi,key_bits=1,value_bits=8,residual=32", "which of the two has 8 bits and which 1"),
    Claim("the same at 4 and 2 bits", "kivi,key_bits=4,value_bits=2,residual=32",
          "kivi,key_bits=2,value_bits=4,residual=32", "which of the two has 4 bits and which 2"),
    Claim("a range per channel beats one per head (CalibQuant)", "head_quantile,bits=2,alpha=0,group_axes=channel",
          "head_quantile,bits=2,alpha=0", "the axis; minimum and maximum, 2 bits"),
    Claim("the same under quantiles", "head_quantile,bits=2,group_axes=channel", "head_quantile,bits=2",
          "the axis; quantiles, 2 bits"),
    Claim("values per channel beat values per token (CalibQuant, VidKV)",
          "vidkv,key_bits=2,value_bits=2,residual=32", "kivi,residual=32",
          "the axis of the values; windows of 32 both"),
    Claim("the remap of scores helps at 1 bit (CalibQuant), its own setting", "calibquant,shrink=none",
          "calibquant,shrink=none,tau=0:0", "tau 0:3 or 0:0; ranges not shrunk"),
    Claim("the same on shrunk ranges, this project's default", "calibquant", "calibquant,tau=0:0",
          "tau 0:3 or 0:0; ranges shrunk"),
    Claim("moved end levels help (XQuant, eta)", "xquant", "xquant,eta1=0,eta2=0", "eta"),
    Claim("a spectrum for 1-bit keys helps (VidKV), values of 2 bits", "vidkv,value_bits=2",
          "vidkv,fft=off,value_bits=2", "the transform"),
    Claim("the same, ternary values", "vidkv", "vidkv,fft=off", "the transform"),
    Claim("protecting tokens by meaning helps (VidKV, 20 %)", "vidkv,protect=0.2", "vidkv", "protected rows"),
    Claim("quantiles beat minimum and maximum at 1 bit (1BitVKV)", "head_quantile", "head_quantile,alpha=0", "alpha"),
    Claim("rounding to the nearest beats rounding down at 1 bit", "head_quantile", "head_quantile,round=floor",
          "rounding"),
    Claim("narrow tails beat alpha 0.2 at 8 bits", "head_quantile,bits=8", "head_quantile,bits=8,alpha=0.2", "alpha"),
    Claim("a scale for ternary values beats none", "vidkv", "vidkv,scale=unit", "the scale"),
    Claim("layers want budgets of their own (PrefixKV), at 0.9", "prefixkv,keep=0.9", "uniform,keep=0.9", "budgets"),
    Claim("the same at 0.5", "prefixkv,keep=0.5", "uniform,keep=0.5", "budgets"),
    Claim("the same at 0.2", "prefixkv,keep=0.2", "uniform,keep=0.2", "budgets"),
    Claim("PrefixKV above PyramidKV, at 0.2", "prefixkv,keep=0.2", "pyramidkv,keep=0.2,no_floor=on,evict=score",
          "budgets, and the score by which rows are chosen"),
    Claim("VL-Cache above uniform budgets, at 0.5", "vlcache,keep=0.5", "uniform,keep=0.5",
          "score, budgets and recent rows together"),
    Claim("the same at 0.2", "vlcache,keep=0.2", "uniform,keep=0.2", "score, budgets and recent rows together"),
    Claim("uniform above chance, at 0.9", "uniform,keep=0.9", "random,head_shared=on,keep=0.9", "the score"),
    Claim("uniform above chance, at 0.5", "uniform,keep=0.5", "random,head_shared=on,keep=0.5", "the score"),
    Claim("uniform above chance, at 0.2", "uniform,keep=0.2", "random,head_shared=on,keep=0.2", "the score"),
    Claim("PrefixKV above chance, at 0.9", "prefixkv,keep=0.9", "random,head_shared=on,keep=0.9", "score and budgets"),
    Claim("PrefixKV above chance, at 0.5", "prefixkv,keep=0.5", "random,head_shared=on,keep=0.5", "score and budgets"),
    Claim("PrefixKV above chance, at 0.2", "prefixkv,keep=0.2", "random,head_shared=on,keep=0.2", "score and budgets"),
    Claim("H2O above chance, at 0.5", "h2o,keep=0.5", "random,keep=0.5", "rule, eviction and bits"),
    Claim("SnapKV above chance, at 0.5", "snapkv,keep=0.5", "random,keep=0.5", "rule, eviction and bits"),
    Claim("PyramidKV above chance, at 0.5", "pyramidkv,keep=0.5", "random,keep=0.5", "rule, eviction and bits"),
    Claim("TOVA above chance, at 0.5", "tova,keep=0.5", "random,head_shared=on,keep=0.5", "rule, eviction and bits"),
    Claim("VL-Cache above chance, at 0.5", "vlcache,keep=0.5", "random,head_shared=on,keep=0.5", "rule, eviction and bits"),
    Claim("Elastic above chance, at 0.5", "elastic,keep=0.5", "random,head_shared=on,keep=0.5", "rule, eviction and bits"),
    Claim("StreamingLLM above chance, at 0.5", "streaming,keep=0.5", "random,head_shared=on,keep=0.5", "rule, eviction and bits"),
    Claim("packing all rows beats dropping some at equal bytes", "int4", "vlcache,keep=0.28",
          "4.5 bits of all rows, or 16 bits of 28 %"),
]


def percent(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}"


def side(interval: tuple[float, float]) -> int:
    """1 where all of an interval is above 0, -1 where it is below, else 0."""
    return (interval[0] > 0) - (interval[1] < 0)


@dataclass
class Comparison:
    """One spec beside another, figures of the first first."""

    bits: tuple[float, float] | None
    exact: tuple[int, int]
    p: float  # of the exact captions
    slots: tuple[float, float]
    slots_interval: tuple[float, float]
    anls: tuple[float, float]
    anls_interval: tuple[float, float]
    kl: tuple[float, float] | None

    @property
    def verdict(self) -> str:
        told = side(self.slots_interval)
        exact = (self.exact[0] > self.exact[1]) - (self.exact[0] < self.exact[1]) if self.p < 0.05 else 0
        others = {"exact captions": exact, "documents": side(self.anls_interval)}
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
            f"{pair(*(f'{x:.3f}' for x in self.anls))} ({self.anls_interval[0]:+.3f} to {self.anls_interval[1]:+.3f})",
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
        p=paired.mcnemar(*only),
        slots=tuple(sum(r for r, _ in of) / sum(t for _, t in of) for of in slots),
        slots_interval=paired.bootstrap_difference(*slots, RESAMPLES, SEED),
        anls=tuple(sum(x for x, _ in of) / len(of) for of in answers),
        anls_interval=paired.bootstrap_difference(*answers, RESAMPLES, SEED),
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
    return "| " + " | ".join([claim.text, specs, claim.apart, *cells, f"**{judge([of.verdict for of in found])}**"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of policies.py")
    parser.add_argument("--images", type=int, default=200, help="as policies.py had it")
    parser.add_argument("--fidelity", type=int, default=100, help="as policies.py had it")
    options = parser.parse_args()
    work = Evaluation(options.out, options.images, options.fidelity)
    print(f"{options.images} images of each set, {options.fidelity} captions for bits and KL.\n")
    print("| claim | specs | they differ in | stored bits | exact | slots, % (difference) | ANLS (difference) | KL | |")
    print("|---|---|---|---|---|---|---|---|---|")
    claims = [claim for claim in CLAIMS if all(work.answered(spec) for spec in (claim.better, *claim.others))]
    for claim in claims:
        print(row(work, claim), flush=True)
    if len(claims) < len(CLAIMS):
        print(f"orderings.py: {len(CLAIMS) - len(claims)} of {len(CLAIMS)} claims are left out, since policies.py has "
              "not answered their specs", file=sys.stderr)
    return 0 if claims else 1


if __name__ == "__main__":
    sys.exit(main())
