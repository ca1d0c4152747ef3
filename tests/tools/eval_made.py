"""Results made up for the tests of comparison.py, summary.py and report.py."""

import importlib.util
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "eval"))
from factors import Catalogue  # noqa: E402
from results import Result  # noqa: E402

NUMPY = "numpy is not installed (tools/setup.sh --test)"
needs_numpy = unittest.skipUnless(importlib.util.find_spec("numpy"), NUMPY)
needs_matplotlib = unittest.skipUnless(
    importlib.util.find_spec("matplotlib"), "matplotlib is not installed (tools/setup.sh --test)"
)


def option(key, default, words=""):
    return {"key": key, "default": default, "official": default, "paper": default, "help": words}


def policy(name, kind, *options, plain=False):
    scope = [option("scope", "all"), option("layers", "")] if kind == "quantizer" else []
    return {"name": name, "kind": kind, "plain": plain, "options": [*options, *scope]}


# As `vlm-kv list --json` has it, with fewer policies.
CATALOGUE = Catalogue.from_json(
    {
        "policies": [
            policy("f16", "quantizer", plain=True),
            policy("int4", "quantizer"),
            policy("kivi", "quantizer", option("bits", "2"), option("residual", "128")),
            policy("uniform", "retention", option("keep", "0.5"), option("evict", "score")),
            policy("prefixkv", "retention", option("keep", "0.5"), option("evict", "score"), option("mode", "auto")),
            policy("snapkv", "retention", option("keep", "0.5"), option("evict", "none")),
            policy(
                "random",
                "retention",
                option("keep", "0.5"),
                option("seed", "0"),
                option("head_shared", "off"),
                option("evict", "score"),
            ),
        ]
    }
)


def result(spec, values, bits=4.0, metric="ANLS", task="documents", exact=None, **others):
    """A result over records r00, r01, ... whose values of `metric` these are; `exact` is 0 or 1 of each."""
    items = {f"r{i:02}": {metric: float(value)} for i, value in enumerate(values)}
    for item, right in zip(items.values(), exact or []):
        item["exact"] = float(right)
    scores = {name: sum(item[name] for item in items.values()) / len(items) for name in next(iter(items.values()))}
    settings = {
        "model": "pocket-llava",
        "split": "heldout",
        "protocol": "native",
        "prompt_tokens": 610.0,
        "device": "cpu",
        "versions": {"kvlm": "1.0"},
        "command": "docvqa.py --out OUT",
        "seed": 7,
    } | others
    return Result(spec=spec, task=task, items=items, scores=scores, stored_bits=bits, **settings)
