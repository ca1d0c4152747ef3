"""In what two cache policies differ, found from their text and from what `vlm-kv list --json` says of every option.

Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass, field

AUTO_OF_KEY = re.compile(r"\bauto: (\w+)$")
AUTO_BESIDE = re.compile(r"\bauto: (\S+) with (?:a quantizer|a retention rule), else (\S+)$")
# Has another value at another width, or after `vlm-kv profile`, unless it is written.
FITTED, LEFT_OPEN = "--kv-profile supplies", "left open"
# Another number gives other random rows: a draw, not a factor.
DRAW = "seed"
# What is chosen so that two rules store the same.
BUDGET = "keep"


@dataclass(frozen=True)
class Part:
    name: str
    options: tuple[tuple[str, str], ...]  # as written, by key

    def written(self, key: str) -> str | None:
        return dict(self.options).get(key)

    def __str__(self) -> str:
        head = f"share={self.written('what')}" if self.name == "share" else self.name
        return ",".join([head, *(f"{key}={value}" for key, value in self.options if key != "what")])


@dataclass(frozen=True)
class Factor:
    """One thing in which two specs differ: a part, or an option of a part that both have."""

    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.name}: {self.a} or {self.b}"


@functools.lru_cache(maxsize=None)
def parse(spec: str) -> tuple[Part, ...]:
    """The parts of a spec, options sorted; ValueError where the text is no spec by itself (@FILE)."""
    text = re.sub(r"\b(visual|text)=([^\s+]+)", r"\2,scope=\1 +", spec).strip().rstrip("+")
    found = []
    for part in filter(None, (piece.strip() for piece in text.split("+"))):
        head, *pairs = part.split(",")
        name, _, what = head.partition("=")
        options = {"what": what} if what else {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key or key in options:
                raise ValueError(f"{spec!r} is not a spec: {pair!r} is no KEY=VALUE of its own (see docs/policies.md)")
            options[key] = value
        if not re.fullmatch(r"(\w+:)*\w+", name):
            raise ValueError(
                f"{spec!r} is not a spec: {head!r} is no policy's name; a spec file has to be named by the "
                "text that vlm-run prints for it"
            )
        found.append(Part(name, tuple(sorted(options.items()))))
    if not found:
        raise ValueError("a spec is empty; expected at least f16 (see docs/policies.md)")
    return tuple(found)


def normal(spec: str) -> str:
    """One spelling of a spec: options in order, no shorthand."""
    return " + ".join(map(str, parse(spec)))


def same(a: str, b: str) -> bool:
    """The same parts and written options, in whatever order. What is no spec (a result file of another program, @FILE) is
    the same as its own text only."""
    try:
        return sorted(parse(a), key=str) == sorted(parse(b), key=str)
    except ValueError:
        return a == b


@dataclass
class Catalogue:
    """Kinds and options of all policies, as `vlm-kv list --json` prints them."""

    kinds: dict[str, str] = field(default_factory=dict)  # name -> quantizer, retention or sharing
    plain: set[str] = field(default_factory=set)
    options: dict[str, dict[str, dict]] = field(default_factory=dict)  # name -> key -> its row

    @classmethod
    def from_json(cls, listed: dict) -> Catalogue:
        made = cls()
        for policy in listed["policies"]:
            made.kinds[policy["name"]] = policy["kind"].removeprefix("simulated ")
            made.options[policy["name"]] = {option["key"]: option for option in policy["options"]}
            if policy["plain"]:
                made.plain.add(policy["name"])
        return made

    def written(self, spec: str) -> str:
        """The spec with whole names: python:mine for mine. What is no spec stays."""
        try:
            parts = parse(spec)
        except ValueError:
            return spec
        whole = {name.rpartition(":")[2]: name for name in self.kinds if ":" in name}
        if whole.keys().isdisjoint(part.name for part in parts):
            return spec
        return " + ".join(str(Part(whole.get(part.name, part.name), part.options)) for part in parts)

    def differences(self, a: str, b: str) -> list[Factor]:
        """Every factor in which two specs differ, effective values compared: an option that is written as its default is
        no difference. `seed` never is one. ValueError names a policy or option that the catalogue lacks."""
        left, right = self._placed(a), self._placed(b)
        found = []
        for x, y in self._pairs(left, right):
            if x is None or y is None:
                found.append(Factor(self.kinds[(x or y).name], str(x) if x else "none", str(y) if y else "none"))
            elif x.name == y.name:
                found += self._options_apart(x, y, left, right)
            else:
                found += self._parts_apart(x, y, left, right)
        return found

    def family(self, spec: str) -> str:
        """The spec without its width and budget: what one curve over stored bits is of."""
        kept = [
            Part(part.name, tuple((key, value) for key, value in part.options if key not in ("bits", BUDGET)))
            for part in parse(spec)
        ]
        return " + ".join(map(str, kept))

    def unknown(self, specs: list[str]) -> list[str]:
        """The policies that these specs name and the build lacks; what is no spec names none."""
        names = set()
        for spec in specs:
            with contextlib.suppress(ValueError):
                names |= {part.name for part in parse(spec)}
        return sorted(names - self.kinds.keys())

    def kind(self, spec: str) -> str:
        """quantizer, retention or both, of what a spec does; f16 alone is a quantizer."""
        kinds = {self._kind(part, spec) for part in parse(spec)} - {"sharing"}
        return "both" if len(kinds) > 1 else kinds.pop() if kinds else "quantizer"

    def _kind(self, part: Part, spec: str) -> str:
        if part.name not in self.kinds:
            raise ValueError(f"{spec!r} names {part.name!r}, which `vlm-kv list` does not have")
        return self.kinds[part.name]

    def _placed(self, spec: str) -> list[Part]:
        """Its parts, all known; plain f16 rows of everything are what there is without a quantizer."""
        parts = []
        for part in parse(spec):
            self._kind(part, spec)
            for key, _ in part.options:
                if key not in self.options[part.name]:
                    raise ValueError(f"{spec!r}: {part.name} has no option {key!r} in `vlm-kv list`")
            if part.name != "f16" or part.options:
                parts.append(part)
        return parts

    def _place(self, part: Part) -> tuple:
        return (self.kinds[part.name], self._value(part, "scope"), self._value(part, "layers"))

    def _pairs(self, left: list[Part], right: list[Part]) -> list[tuple[Part | None, Part | None]]:
        """Parts that do the same work: of one kind, scope and layers; then those of one kind that are left over."""
        pairs, rest = [], list(right)
        unmatched = []
        for part in left:
            other = next((y for y in rest if self._place(y) == self._place(part)), None)
            if other is None:
                unmatched.append(part)
            else:
                rest.remove(other)
                pairs.append((part, other))
        for part in unmatched:
            other = next((y for y in rest if self.kinds[y.name] == self.kinds[part.name]), None)
            if other is not None:
                rest.remove(other)
            pairs.append((part, other))
        return pairs + [(None, part) for part in rest]

    def _value(self, part: Part, key: str) -> str:
        """As written, else by the profile that it names."""
        row = self.options[part.name].get(key)
        if row is None:
            return ""
        written = part.written(key)
        if written is not None:
            return written
        profile = part.written("profile")
        return LEFT_OPEN if FITTED in row["help"] and not profile else row[profile or "default"]

    def _effective(self, part: Part, key: str, spec: list[Part]) -> str:
        """The value that an `auto` stands for, where its help says so."""
        value = self._value(part, key)
        if value != "auto":
            return value
        words = self.options[part.name][key]["help"]
        if (of_key := AUTO_OF_KEY.search(words)) and of_key[1] in self.options[part.name]:
            return self._value(part, of_key[1])
        if beside := AUTO_BESIDE.search(words):
            other = "quantizer" if self.kinds[part.name] == "retention" else "retention"
            return beside[1] if any(self.kinds[x.name] == other for x in spec) else beside[2]
        return value

    def _options_apart(self, x: Part, y: Part, left: list[Part], right: list[Part]) -> list[Factor]:
        found = []
        for key in self.options[x.name]:
            if key in (DRAW, "profile"):
                continue
            if self._value(x, key) == self._value(y, key) == "auto" and not AUTO_BESIDE.search(
                self.options[x.name][key]["help"]
            ):
                continue
            found += _apart(key, self._effective(x, key, left), self._effective(y, key, right))
        return found + self._fitted_apart(x, y) if found else []

    def _fitted_apart(self, x: Part, y: Part) -> list[Factor]:
        """What both leave open: parts that differ otherwise may have been fitted to other values."""
        open_keys = (key for key in self.options[x.name] if self._value(x, key) == self._value(y, key) == LEFT_OPEN)
        return [Factor(key, LEFT_OPEN, LEFT_OPEN) for key in open_keys]

    def _parts_apart(self, x: Part, y: Part, left: list[Part], right: list[Part]) -> list[Factor]:
        """Two policies: their names, what both can be told and is not the same, and what is told to one alone."""
        found = [Factor(self.kinds[x.name], x.name, y.name)]
        common = self.options[x.name].keys() & self.options[y.name].keys() - {"profile", DRAW}
        for key in self.options[x.name]:
            if key in common:
                found += _apart(key, self._effective(x, key, left), self._effective(y, key, right))
        for part, is_left in ((x, True), (y, False)):
            stood_for = {
                match[1] for key in common if (match := AUTO_OF_KEY.search(self.options[part.name][key]["help"]))
            }
            for key, value in part.options:
                default = self.options[part.name][key]["default"]
                if key in common or key in stood_for or key in ("profile", DRAW) or value == default:
                    continue
                found.append(Factor(f"{key} of {part.name}", *((value, "-") if is_left else ("-", value))))
        return found


def _apart(key: str, a: str, b: str) -> list[Factor]:
    def number(text):
        try:
            return float(text)
        except ValueError:
            return text

    return [] if number(a) == number(b) else [Factor(key, a, b)]
