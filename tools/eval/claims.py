"""The orderings that papers claim, and this project's own, as pairs of specs: data for comparison.py.

Specs that a claim compares store the same bytes where it could be had. Budgets are matched on pocket-llava over the first
100 held-out captions, as `--fidelity 100` measures them: there `h2o`, which evicts a token at every step, not in
proportion, needs 1.112 times the budget of `prefixkv`. With other models and answers the bits differ; every row has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

from factors import normal


@dataclass(frozen=True)
class Claim:
    """`better` is said to score above `worse`.

    text        one statement, possibly at several budgets
    at          what distinguishes the rows of one statement
    source      paper and place
    alike       options that one side has so that it works as the other always does: no factors
    draws       of `worse`, under seeds 0, 1, ...; the claim is confirmed only against each
    comparable  said not to be above but about the same: within this share of the f16 score, set before measuring
    """

    text: str
    source: str
    better: str
    worse: str
    at: str = ""
    alike: tuple[str, ...] = ()
    draws: int = 1
    comparable: float | None = None

    @property
    def others(self) -> list[str]:
        """What `better` is compared with."""
        return [self.worse, *(normal(f"{self.worse},seed={seed}") for seed in range(1, self.draws))]


TENTHS = tuple(f"0.{tenth}" for tenth in range(1, 10))
H2O = dict(zip(TENTHS, ("0.111", "0.222", "0.334", "0.445", "0.556", "0.667", "0.778", "0.89", "0.99")))

KEYS = "keys need more bits than values"
CHANNEL = "a range per channel beats one per head"
REMAP = "the remap of scores helps (calibration)"
SPECTRUM = "a spectrum for 1-bit keys helps"
CRITERION = "the widest channels of keys are those that need 2 bits"
ROTATION = "rotating keys and values by a Hadamard matrix helps"
RANDOM = "{} is above the random baseline"
# As in XQuant's table 4: 2 bits, levels as they are, values shared from a low layer on.
VALUES_SHARED = "xquant,eta1=0,eta2=0,km=1024,kq=1024,vm=2,vq=1024"
PACK = "packing all tokens beats evicting some"
OWN = "this project"

_OF_QUANTIZERS = [
    Claim(
        KEYS,
        "1BitVKV 3.3, figure 3; XQuant, table 8",
        "kivi,key_bits=8,value_bits=1,residual=32",
        "kivi,key_bits=1,value_bits=8,residual=32",
        "8 and 1 bits",
    ),
    Claim(
        KEYS,
        "1BitVKV 3.3, figure 3",
        "kivi,key_bits=4,value_bits=2,residual=32",
        "kivi,key_bits=2,value_bits=4,residual=32",
        "4 and 2 bits",
    ),
    *(
        Claim(
            KEYS,
            "1BitVKV 3.3, figure 3",
            f"head_quantile,key_bits={bits},value_bits=1",
            f"head_quantile,key_bits=1,value_bits={bits}",
            f"visual tokens, {bits} and 1 bits",
        )
        for bits in (16, 4, 2)
    ),
    *(
        Claim(
            CHANNEL,
            "CalibQuant 5.5, table 4",
            "calibquant,tau=0:3",
            f"calibquant,tau=0:3,value_axis={axis}",
            f"values, one per {axis}",
        )
        for axis in ("head", "layer")
    ),
    *(
        Claim(
            "a range per head beats one per layer",
            "1BitVKV 3.4, figure 4",
            f"head_quantile,alpha={alpha}",
            f"head_quantile,alpha={alpha},group_axes=layer",
            f"1 bit, {name}",
        )
        for alpha, name in (("0", "minimum and maximum"), ("0.2", "quantiles of 0.2"))
    ),
    Claim(
        CHANNEL,
        "CalibQuant 5.5, table 4 (values)",
        "head_quantile,alpha=0,group_axes=channel",
        "head_quantile,alpha=0",
        "1 bit, minimum and maximum",
    ),
    Claim(
        CHANNEL,
        "CalibQuant 4.1",
        "head_quantile,alpha=0,bits=2,group_axes=channel",
        "head_quantile,alpha=0,bits=2",
        "2 bits, minimum and maximum",
    ),
    # alpha is fitted for one range per head alone, so it is written here, as in the claim about rounding.
    Claim(
        CHANNEL,
        "CalibQuant 4.1",
        "head_quantile,alpha=0.2,group_axes=channel",
        "head_quantile,alpha=0.2",
        "1 bit, quantiles of 0.2",
    ),
    Claim(
        CHANNEL,
        "CalibQuant 4.1",
        "head_quantile,alpha=0.0676,bits=2,group_axes=channel",
        "head_quantile,alpha=0.0676,bits=2",
        "2 bits, quantiles of 0.0676",
    ),
    Claim(
        "values per channel beat values per token",
        "VidKV 3.1, table 2 (video); CalibQuant 5.5",
        "vidkv,key_bits=2,residual=32,value_bits=2",
        "kivi,residual=32",
        "2 bits",
    ),
    Claim(
        REMAP,
        "CalibQuant 5.5, table 4",
        "calibquant,shrink=none",
        "calibquant,shrink=none,tau=0:0",
        "1 bit, the paper's setting",
    ),
    Claim(
        REMAP,
        "CalibQuant, its code",
        "calibquant,profile=official",
        "calibquant,profile=official,tau=0:0",
        "1 bit, the code's shrink",
    ),
    Claim(REMAP, OWN, "calibquant", "calibquant,tau=0:0", "1 bit, ranges shrunk by eta"),
    Claim(REMAP, "CalibQuant 4.2", "calibquant,bits=2", "calibquant,bits=2,tau=0:0", "2 bits"),
    Claim(
        "CalibQuant is above KIVI on visual tokens",
        "CalibQuant 5.1, table 1",
        "calibquant,bits=2",
        "kivi,residual=32,scope=visual",
        "2 bits",
    ),
    Claim(
        "CalibQuant is above KIVI on visual tokens",
        "CalibQuant 5.1, table 1",
        "calibquant",
        "kivi,bits=1,residual=32,scope=visual",
        "1 bit",
    ),
    Claim(
        "moved end levels help (eta)", "XQuant 4.3, table 3", "xquant", "xquant,eta1=0,eta2=0", "2 and 1 bits, shared"
    ),
    Claim(
        "moved end levels help (eta)",
        "XQuant, table 7",
        "xquant,km=1024,kq=1024,vm=1024,vq=1024",
        "xquant,eta1=0,eta2=0,km=1024,kq=1024,vm=1024,vq=1024",
        "KIVI at 2 bits",
    ),
    Claim("the first layer of a pair makes the codes best", "XQuant 4.3, tables 4 and 5", "xquant", "xquant,dominant=1"),
    *(
        Claim(
            "the first layer's codes beat averages of both", "XQuant, table 4", VALUES_SHARED, f"{VALUES_SHARED},merge=average,{how}",
            at, alike=("gamma", "round"),
        )
        for how, at in (
            ("gamma=0.3", "gamma 0.3"), ("gamma=0.2", "0.2"), ("gamma=0.5,round=floor", "0.5 rounded down"),
            ("gamma=0.5,round=ceil", "0.5 rounded up"),
        )
    ),
    Claim(
        "an average near the first layer's codes beats them", "XQuant, table 4", f"{VALUES_SHARED},merge=average,gamma=0.8",
        VALUES_SHARED, alike=("gamma",),
    ),
    *(
        Claim("pairs of layers beat larger groups", "XQuant 4.3, table 5", "xquant", f"xquant,layer_group={layers}", f"of {layers}")
        for layers in (3, 4)
    ),
    # At the residual window of the paper and of both defaults, 128 tokens; the bytes differ by 1 to 2.3 %.
    Claim("XQuant is above AsymKV", "XQuant 4.2, tables 1 and 2", "xquant", "asymkv"),
    Claim(
        SPECTRUM, "VidKV 5.3, table 3 (video)", "vidkv,value_bits=2", "vidkv,fft=off,value_bits=2", "values of 2 bits"
    ),
    Claim(SPECTRUM, "VidKV 5.3", "vidkv", "vidkv,fft=off", "ternary values"),
    *(
        Claim(CRITERION, "VidKV 4.2, table 1", "vidkv,value_bits=2", f"vidkv,criterion={other},value_bits=2", f"against {other}")
        for other in ("variance", "outliers")
    ),
    Claim("ternary values per channel beat those per token", "VidKV 3.1, table 1", "vidkv", "vidkv,value_axis=token"),
    Claim(
        "protection by meaning is above protection at random",
        "VidKV 5.3, table 3",
        "vidkv,protect=0.2",
        "vidkv,protect=0.2,protect_by=random",
        draws=2,
    ),
    Claim(
        "VidKV is above KIVI at 1 bit",
        "VidKV, appendix F, table 6",
        "vidkv,key_bits=1,residual=32,value_bits=1",
        "kivi,bits=1,residual=32",
    ),
    *(
        Claim(ROTATION, "QuaRot, for other models", f"{spec},rotate=hadamard", spec, name)
        for spec, name in (
            ("kivi,bits=1", "KIVI at 1 bit"),
            ("head_quantile,alpha=0.2", "one range per head at 1 bit"),
            ("calibquant,tau=0:3", "CalibQuant at 1 bit"),
            ("vidkv", "VidKV"),
        )
    ),
    Claim("rotating keys alone helps", "TurboQuant (arXiv 2504.19874), as in vLLM", "int4,rotate=keys", "int4", "4 bits"),
    Claim(
        "a codebook for normal numbers beats equal steps on rotated keys",
        "TurboQuant (arXiv 2504.19874), as in vLLM",
        "turboquant",
        "int4,rotate=keys",
        "4 bits",
    ),
    Claim(
        "protecting a fifth of the tokens by meaning helps", "VidKV 5.3, table 2 (video)", "vidkv,protect=0.2", "vidkv"
    ),
    Claim("a scale for ternary values beats none", OWN, "vidkv", "vidkv,scale=unit"),
    Claim("quantiles beat minimum and maximum", "1BitVKV 3.4", "head_quantile", "head_quantile,alpha=0", "1 bit"),
    Claim(
        "rounding to the nearest beats rounding down",
        OWN,
        "head_quantile,alpha=0.2",
        "head_quantile,alpha=0.2,round=floor",
        "1 bit",
    ),
    Claim("narrow tails beat alpha 0.2", OWN, "head_quantile,bits=8", "head_quantile,alpha=0.2,bits=8", "8 bits"),
]


def _prefix(rule: str, places: str, spec: str, keeps: dict[str, str] | None = None) -> list[Claim]:
    """PrefixKV above `rule`, at its nine budgets."""
    options = tuple(option.partition("=")[0] for option in spec.split(",")[1:])
    return [
        Claim(
            f"PrefixKV is above {rule}",
            f"PrefixKV {places}",
            f"prefixkv,keep={keep}",
            f"{spec},keep={keeps[keep] if keeps else keep}",
            f"{keep} of the tokens",
            alike=options,
        )
        for keep in TENTHS
    ]


def _random(rule: str, spec: str, baseline: str) -> list[Claim]:
    """A rule against tokens drawn at random that are kept and evicted as its own."""
    options = tuple(option.partition("=")[0] for half in (spec, baseline) for option in half.split(",")[1:])
    return [
        Claim(
            RANDOM.format(rule),
            "the floor of every rule",
            f"{spec},keep={keep}",
            f"{baseline},keep={keep}",
            f"{keep} of the tokens",
            alike=options,
            draws=2,
        )
        for keep in ("0.2", "0.5", "0.9")
    ]


_OF_RETENTION = [
    *_prefix("uniform budgets", "4.3, table 4", "uniform"),
    *_prefix("PyramidKV", "4.2, tables 1, 2 and 4", "pyramidkv,evict=score,no_floor=on"),
    *_prefix("H2O", "4.2, tables 1 and 2", "h2o", H2O),
    *_prefix("Elastic Cache", "4.2, tables 1 and 2", "elastic"),
    *_prefix("StreamingLLM (Local)", "4.2, tables 1 and 2", "streaming,budget=proportional"),
    *(
        Claim(
            "budgets found offline are comparable with those found online",
            "PrefixKV 4.3, table 6",
            f"prefixkv,keep={keep},mode=profile",
            f"prefixkv,keep={keep},mode=online",
            f"{keep} of the tokens",
            comparable=0.02,
        )
        for keep in ("0.2", "0.5")
    ),
    Claim(
        "averaging evicted tokens into kept ones helps",
        "PrefixKV 4.3",
        "prefixkv,keep=0.5,merge=position",
        "prefixkv,keep=0.5",
        "by position, 0.5 of the tokens",
    ),
    Claim(
        "averaging evicted tokens into kept ones helps",
        "PrefixKV 4.3",
        "prefixkv,keep=0.5,merge=feature",
        "prefixkv,keep=0.5",
        "by feature, 0.5 of the tokens",
    ),
    *(
        Claim(
            "a pyramid of budgets beats equal ones (PyramidKV above SnapKV)",
            "PyramidKV, as in kvpress",
            f"pyramidkv,keep={keep},no_floor=on",
            f"snapkv,keep={keep}",
            f"{keep} of the tokens",
            alike=("no_floor",),
        )
        for keep in ("0.2", "0.5")
    ),
    *(
        Claim(
            "VL-Cache is above uniform budgets",
            "VL-Cache (arXiv 2410.23317), heads together",
            f"vlcache,keep={keep}",
            f"uniform,keep={keep}",
            f"{keep} of the tokens",
        )
        for keep in ("0.2", "0.5")
    ),
    *_random("uniform", "uniform", "random,head_shared=on"),
    *_random("PrefixKV", "prefixkv", "random,head_shared=on"),
    *_random("Elastic Cache", "elastic", "random,head_shared=on"),
    *_random("VL-Cache", "vlcache", "random,head_shared=on"),
    *_random("StreamingLLM", "streaming,budget=proportional", "random,head_shared=on,sinks=4"),
    *_random("H2O (of the prompt)", "h2o,prefill_only=on", "random,evict=none"),
    *_random("SnapKV", "snapkv", "random,evict=none"),
    *_random("PyramidKV", "pyramidkv,no_floor=on", "random,evict=none"),
    *_random("TOVA (of the prompt)", "tova,evict=none", "random,evict=none,head_shared=on"),
    *_random("MixKV", "mixkv", "random,evict=none"),
    *_random("TGV-KV", "tgv", "random,head_shared=on"),
    *(
        Claim(text, source, f"{better},keep={keep}", f"{worse},keep={keep}", f"{keep} of the tokens")
        for text, source, better, worse in (
            ("diversity of keys helps (MixKV above SnapKV)", "MixKV (arXiv 2510.20707), abstract", "mixkv", "snapkv"),
            ("sums weighted by the text help (TGV-KV above uniform budgets)", "TGV-KV (arXiv 2606.03075), abstract", "tgv", "uniform"),
        )
        for keep in ("0.2", "0.5")
    ),
]

_OF_BOTH = [
    Claim(PACK, OWN, "int4", "vlcache,keep=0.28", "4.5 bits"),
    Claim(PACK, "CalibQuant 5.1, table 1", "calibquant,bits=4", "vlcache,keep=0.352", "CalibQuant at 4 bits"),
    Claim(PACK, "CalibQuant 5.1, table 1", "calibquant,bits=2", "vlcache,keep=0.244", "CalibQuant at 2 bits"),
    Claim(PACK, "CalibQuant 5.1, table 1", "calibquant", "vlcache,keep=0.191", "CalibQuant at 1 bit"),
    Claim(PACK, "1BitVKV 1, figure 1", "head_quantile", "vlcache,keep=0.188", "one range per head at 1 bit"),
    Claim("XQuant is above PyramidInfer", "XQuant 4.2, table 2", "xquant,residual=32", "pyramidinfer,keep=0.198"),
    Claim(
        "more tokens at 4 bits beat fewer at 16", OWN, "prefixkv,keep=0.7 + int4", "prefixkv,keep=0.23"
    ),
]

CLAIMS = [
    replace(claim, better=normal(claim.better), worse=normal(claim.worse))
    for claim in _OF_QUANTIZERS + _OF_RETENTION + _OF_BOTH
]


def specs(wanted: Callable[[Claim], bool] = lambda claim: True) -> list[str]:
    """Every spec that the wanted claims need, once."""
    found = [spec for claim in CLAIMS if wanted(claim) for spec in (claim.better, *claim.others)]
    return list(dict.fromkeys(found))
