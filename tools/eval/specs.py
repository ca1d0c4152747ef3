"""What a spec says in words. Standard library only."""

from __future__ import annotations


def residual(spec: str, policies: dict) -> int | None:
    """Newest rows that a canonical spec keeps in full precision; None if it has no such window.

    policies  what `vlm-kv list --json` prints: it has the defaults
    """
    defaults = {
        policy["name"]: int(option["default"])
        for policy in policies["policies"]
        for option in policy["options"]
        if option["key"] == "residual"
    }
    found = []
    for part in spec.split("+"):
        name, *options = (word.strip() for word in part.split(","))
        said = dict(option.split("=", 1) for option in options if "=" in option)
        if name in defaults:
            found.append(int(said.get("residual", defaults[name])))
    return max(found, default=None)


def prefixkv_keep(spec: str) -> str | None:
    """The share of rows that a spec asks PrefixKV to keep by offline budgets; None if it does not, or says no share."""
    for part in spec.split("+"):
        name, *options = (word.strip() for word in part.split(","))
        said = dict(option.split("=", 1) for option in options if "=" in option)
        if name == "prefixkv" and said.get("mode") != "online":
            return said.get("keep")
    return None
