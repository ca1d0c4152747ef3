"""Policies in Python: retention rules, which rows of a prompt a cache keeps, and simulated quantizers.

    @kvlm.retention("vnorm", needs=("values",))
    def vnorm(layer, *, power: float = 1.0):
        return numpy.linalg.norm(layer.values, axis=-1) ** power

    @kvlm.quantizer("nf3", bits=lambda group: 3 + 16 / group)
    def nf3(rows, *, side, layer, group: int = 64):
        return round_trip(rows, group)

    model.generate("cat.png", kv="vnorm,keep=0.3,power=2 + int4")
    model.generate("cat.png", kv="nf3,hold=32")
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from . import _core

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Choice:
    """The default of an option that is one of several words: the first."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        if not words:
            raise TypeError("kvlm.Choice has no words; give at least one")
        object.__setattr__(self, "words", words)


class Layer:
    """What a rule sees of a layer at the end of a prompt. Arrays are float32 copies in host memory, on a GPU, too, and
    are numpy arrays where numpy is installed; without it they speak DLPack and the buffer protocol.

    index    of the layer, from 0, among `layers`
    rows     n, of the prompt
    keys     (kv_heads, n, head_dim) after RoPE, as they are stored, if the rule needs "keys"
    values   (kv_heads, n, head_dim), if it needs "values"
    queries  (n, q_heads, head_dim) after RoPE, if it needs "queries"
    scale    of a query times a key
    tags     (n,) int16: -1 for text, else the number of the image or video
    visual   (n,) uint8: 1 for rows of images and videos
    """

    index: int
    layers: int
    rows: int
    scale: float
    keys: Any
    values: Any
    queries: Any
    tags: Any
    visual: Any

    def __init__(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            self.__dict__[name] = value if isinstance(value, int | float) else array(value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f'the rule does not have {name}; ask for it with needs=("{name}",)' if name in _NEEDS else name)


def array(value: Any) -> Any:
    """As numpy's, if that is there; it is imported with the first array."""
    try:
        import numpy
    except ImportError:
        return value
    return numpy.asarray(value)


_NEEDS = ("keys", "values", "queries")


@dataclass(frozen=True)
class _Rule:
    function: Callable[..., Any]
    options: dict[str, tuple[str, str, str]]  # kind, default and choices
    needs: tuple[str, ...]

    def call(self, found: dict[str, Any], texts: dict[str, str]) -> Any:
        return self.function(Layer(found), **_read(self.options, texts))


@dataclass(frozen=True)
class _Quantizer:
    function: Callable[..., Any]
    options: dict[str, tuple[str, str, str]]
    bits: float | Callable[..., float]

    def call(self, found: dict[str, Any], texts: dict[str, str]) -> Any:
        return self.function(array(found["rows"]), side=found["side"], layer=found["layer"], **_read(self.options, texts))

    def claimed(self, texts: dict[str, str]) -> float:
        if not callable(self.bits):
            return float(self.bits)
        wanted = inspect.signature(self.bits).parameters
        return float(self.bits(**{key: value for key, value in _read(self.options, texts).items() if key in wanted}))


_rules: dict[str, _Rule | _Quantizer] = {}


def _read(options: dict[str, tuple[str, str, str]], texts: dict[str, str]) -> dict[str, Any]:
    """Values of options from their text."""
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "text": str}
    return {key: kinds[options[key][0]](text) for key, text in texts.items()}


def claimed_bits(spec: str) -> float | None:
    """Bits per element that the simulated quantizer of a canonical sentence claims; None if it has none."""
    for part in spec.split(" + "):
        name, *words = part.split(",")
        known = _rules.get(name)
        if isinstance(known, _Quantizer):
            given = dict(word.split("=", 1) for word in words)
            return known.claimed({key: given.get(key, default) for key, (_, default, _) in known.options.items()})
    return None


def _options_of(function: Callable[..., Any], named: tuple[str, ...] = ()) -> dict[str, tuple[str, str, str]]:
    """The keyword-only parameters, but for those that the caller names."""
    options = {}
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise TypeError("the function takes nothing; its first parameter is what it looks at")
    first, *others = parameters
    for parameter in others:
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(f"it takes {first.name}, and options by keyword; write ({first.name}, *, {parameter.name}=...)")
        if parameter.name in named:
            continue
        default = parameter.default
        if isinstance(default, Choice):
            options[parameter.name] = ("text", default.words[0], "|".join(default.words))
        elif parameter.annotation in (float, "float") and isinstance(default, int) and not isinstance(default, bool):
            options[parameter.name] = ("float", str(default), "")
        elif isinstance(default, bool) or not isinstance(default, int | float):
            raise TypeError(f"option {parameter.name} has the default {default!r}; give an int, a float or kvlm.Choice(...)")
        else:
            options[parameter.name] = (type(default).__name__, repr(default).removesuffix(".0"), "")
    return options


def _table(options: dict[str, tuple[str, str, str]]) -> list[_core.PolicyOption]:
    return [_core.PolicyOption(key, kind, default, choices) for key, (kind, default, choices) in options.items()]


def _help(function: Callable[..., Any], otherwise: str) -> str:
    return (inspect.getdoc(function) or otherwise).split("\n")[0]


def _checked(name: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name!r} cannot name a policy; give a word [a-z][a-z0-9_]*")
    return name


def retention(name: str, *, needs: str | tuple[str, ...] = ("keys", "values")) -> Callable[[Function], Function]:
    """Makes a function a retention rule that `kv` may name: as `name`, or as python:NAME, which reports say.

    name   [a-z][a-z0-9_]*, of no built-in policy. Decorating another function with it replaces the rule for later prompts
    needs  of "keys", "values" and "queries", what the function reads

    The function is called once a prompt and layer, layers in order, as function(layer, **options), and returns scores: an
    array (kv_heads, n) of floats in host memory. Of each KV head the best `keep` stay; sinks, last, head_shared, evict and
    distance are options of every such rule. Keyword-only parameters with a default are options of the rule's own. What the
    function raises ends that request and comes out of generate(). It must not ask the model that is waiting for it.
    """
    if callable(name):
        raise TypeError('a rule needs a name; write @kvlm.retention("name")')
    needs = (needs,) if isinstance(needs, str) else tuple(needs)
    wrong = [need for need in needs if need not in _NEEDS]
    if wrong:
        raise ValueError(f"a rule needs {wrong[0]!r}; expected {', '.join(map(repr, _NEEDS))}")

    whole = f"python:{_checked(name)}"

    def decorate(function: Function) -> Function:
        rule = _Rule(function, _options_of(function), tuple(sorted(needs)))
        known = _rules.get(whole)
        if known is None:
            _core.add_retention(whole, _help(function, "the rows that the function scores best"), _table(rule.options), *(need in needs for need in _NEEDS))
        elif not isinstance(known, _Rule) or (known.options, known.needs) != (rule.options, rule.needs):
            raise ValueError(f"the rule {name} had other options or needs when it was first made; give this one another name")
        _rules[whole] = rule
        return function

    return decorate


def quantizer(name: str, *, bits: float | Callable[..., float]) -> Callable[[Function], Function]:
    """Makes a function a simulated quantizer that `kv` may name: what would the answers be if rows were stored so?

    name  as of retention(); reports say python:simulated:NAME
    bits  per element that it claims, scales included: a number, or a function of options of the quantizer

    The function is called twice a layer and prompt, as function(rows, side=, layer=, **options), and returns an array of the same
    shape: what codes would give back.

      rows   (kv_heads, n, head_dim) float32: the kept tokens of the prompt, oldest first, but for the newest `hold`; keys after RoPE
      side   "keys" or "values"

    It composes with any retention rule, and with no other quantizer. Rows are stored unpacked, so that it saves no memory:
    CacheReport.simulated says so, stored_bits is what is stored, claimed_bits what `bits` claims. Generated tokens stay as they
    are, which flatters it in long answers. What the function raises ends that request and comes out of generate().
    """
    if callable(name):
        raise TypeError('a quantizer needs a name; write @kvlm.quantizer("name", bits=4)')

    if not callable(bits) and not 0 < bits <= 64:
        raise ValueError(f"bits={bits} of the quantizer {name} are none that an element can have; give a number above 0, at most 64")
    whole = f"python:simulated:{_checked(name)}"

    def decorate(function: Function) -> Function:
        made = _Quantizer(function, _options_of(function, ("side", "layer")), bits)
        known = _rules.get(whole)
        if known is None:
            _core.add_quantizer(whole, _help(function, "every token as the function gives it back"), _table(made.options))
        elif not isinstance(known, _Quantizer) or known.options != made.options:
            raise ValueError(f"the quantizer {name} had other options when it was first made; give this one another name")
        _rules[whole] = made
        return function

    return decorate


_in_use: dict[tuple[int, str], _Rule | _Quantizer] = {}  # by the thread of a model: what its prompt began with


def _call(name: str, found: dict[str, Any], options: dict[str, str]) -> Any:
    """A prompt ends with the function that it began with, also if the name gets another one meanwhile."""
    if found.get("index", found.get("layer")) == 0 and found.get("side") != "values":
        _in_use[threading.get_ident(), name] = _rules[name]
    return _in_use[threading.get_ident(), name].call(found, options)


_core.set_caller(_call)
