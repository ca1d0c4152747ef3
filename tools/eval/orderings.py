#!/usr/bin/env python3
"""Which of the papers' orderings the answers of tools/eval/policies.py carry, each on the same images.

    tools/eval/orderings.py --out OUT [--images 200] [--fidelity 100]

A row compares two specs that differ in one thing. The verdict is read off one figure chosen before any was measured, the
slots of captions: "holds" where the 95 % interval of the difference (paired bootstrap over images) lies above 0, "does
not" where it lies below, else "not decided". Exact captions (McNemar's exact p) and documents (ANLS, interval of the
difference) stand beside it. Stored bits are fidelity's, over the same forced text for both; where they differ by more
than 2 % in favour of the better one, the row says so, because it then also had more bytes. Standard library only.
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
    Claim("H2O above chance, at 0.5", "h2o,keep=0.5", "random,keep=0.5", "the rule"),
    Claim("SnapKV above chance, at 0.5", "snapkv,keep=0.5", "random,keep=0.5", "the rule"),
    Claim("PyramidKV above chance, at 0.5", "pyramidkv,keep=0.5", "random,keep=0.5", "the rule"),
    Claim("TOVA above chance, at 0.5", "tova,keep=0.5", "random,head_shared=on,keep=0.5", "the rule"),
    Claim("VL-Cache above chance, at 0.5", "vlcache,keep=0.5", "random,head_shared=on,keep=0.5", "the rule"),
    Claim("Elastic above chance, at 0.5", "elastic,keep=0.5", "random,head_shared=on,keep=0.5", "the rule"),
    Claim("StreamingLLM above chance, at 0.5", "streaming,keep=0.5", "random,head_shared=on,keep=0.5", "the rule"),
    Claim("chance, another seed", "random,keep=0.5,seed=1", "random,keep=0.5", "the seed"),
    Claim("packing all rows beats dropping some at equal bytes", "int4", "vlcache,keep=0.28",
          "4.5 bits of all rows, or 16 bits of 28 %"),
]


def percent(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}"


def verdict(interval: tuple[float, float]) -> str:
    if interval[0] > 0:
        return "holds"
    return "does not" if interval[1] < 0 else "not decided"


def shared(a: dict, b: dict, spec: str) -> list:
    if a.keys() != b.keys():
        missing = sorted(a.keys() ^ b.keys())[0]
        raise SystemExit(f"{missing} is answered under one of the specs only ({spec}); run policies.py to its end first")
    return sorted(a)


def compare(work: Evaluation, claim: Claim) -> list[str]:
    a = caption_scores(work.texts(claim.better, "captions"))
    b = caption_scores(work.texts(claim.worse, "captions"))
    keys = shared(a, b, claim.worse)
    exact_a, exact_b = (sum(of[key][0] for key in keys) for of in (a, b))
    p = paired.mcnemar(sum(a[k][0] and not b[k][0] for k in keys), sum(b[k][0] and not a[k][0] for k in keys))
    slots = [[of[key][1:] for key in keys] for of in (a, b)]
    share_a, share_b = (100 * sum(r for r, _ in of) / sum(t for _, t in of) for of in slots)
    interval = paired.bootstrap_difference(*slots, RESAMPLES, SEED)
    documents = [document_scores(work.texts(spec, "documents")) for spec in (claim.better, claim.worse)]
    named = shared(*documents, claim.worse)
    answers = [[(of[key], 1.0) for key in named] for of in documents]
    anls = paired.bootstrap_difference(*answers, RESAMPLES, SEED)
    mean_a, mean_b = (sum(x for x, _ in of) / len(of) for of in answers)
    found = [work.fidelity(spec) for spec in (claim.better, claim.worse)]
    bits, kl, said = "-", "-", verdict(interval)
    if all(found):
        bits = f"{found[0]['stored_bits']:.2f}, {found[1]['stored_bits']:.2f}"
        kl = f"{found[0]['kl_mean']:.4f}, {found[1]['kl_mean']:.4f}"
        favoured = found[0]["stored_bits"] / found[1]["stored_bits"]
        if (said == "holds" and favoured > 1.02) or (said == "does not" and favoured < 1 / 1.02):
            said += ", with more bytes"
    return [claim.text, f"`{claim.better}`, `{claim.worse}`", claim.apart, bits, f"{exact_a}, {exact_b} (p {p:.2g})",
            f"{share_a:.1f}, {share_b:.1f} ({percent(interval)})",
            f"{mean_a:.3f}, {mean_b:.3f} ({anls[0]:+.3f} to {anls[1]:+.3f})", kl, f"**{said}**"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of policies.py")
    parser.add_argument("--images", type=int, default=200, help="as policies.py had it")
    parser.add_argument("--fidelity", type=int, default=100, help="as policies.py had it")
    options = parser.parse_args()
    work = Evaluation(options.out, options.images, options.fidelity)
    print("| claim | specs | they differ in | stored bits | exact | slots, % (difference) | ANLS (difference) | KL | |")
    print("|---|---|---|---|---|---|---|---|---|")
    claims = [claim for claim in CLAIMS if work.answered(claim.better) and work.answered(claim.worse)]
    for claim in claims:
        print("| " + " | ".join(compare(work, claim)) + " |", flush=True)
    if len(claims) < len(CLAIMS):
        print(f"orderings.py: {len(CLAIMS) - len(claims)} of {len(CLAIMS)} claims are left out, since policies.py has "
              "not answered their specs", file=sys.stderr)
    return 0 if claims else 1


if __name__ == "__main__":
    sys.exit(main())
