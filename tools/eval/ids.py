"""The ids of a file's records, each of which may come once. Standard library only."""

from __future__ import annotations

from pathlib import Path

from errors import EvaluationError, printable


class Ids:
    """Those of one file that were seen; `what` a record of it is called (image, question)."""

    def __init__(self, what: str, path: Path):
        self.what, self.path = what, path
        self._seen: set[str] = set()  # 7 and "7" are one id to the files that are written

    def number(self, record: object, name: str) -> int:
        """The whole number `name` of a record; EvaluationError if there is none, or if it came before."""
        key = record.get(name) if isinstance(record, dict) else None
        if not isinstance(key, int) or isinstance(key, bool):
            raise EvaluationError(f"{self.path}: {self.what} {printable(record, 60)} has no whole number {name!r}")
        return self._once(key)

    def of(self, record: object, name: str) -> int | str:
        """The id `name` of a record, a number or a text; EvaluationError if there is none, or if it came before."""
        key = record.get(name) if isinstance(record, dict) else None
        if not isinstance(key, (int, str)) or isinstance(key, bool) or key == "":
            raise EvaluationError(f"{self.path}: {self.what} {printable(record, 60)} has no id {name!r}, a number or a text")
        return self._once(key)

    def any(self, key: object) -> int | str:
        """A number or a text; EvaluationError if it is neither, or if it came before."""
        if not isinstance(key, (int, str)) or isinstance(key, bool) or key == "":
            raise EvaluationError(
                f"{self.path}: {self.what} {len(self._seen)} has no id; give the file as it was published"
            )
        return self._once(key)

    def _once(self, key):
        if str(key) in self._seen:
            raise EvaluationError(
                f"{self.what} {printable(key)} comes twice in {self.path}; give a file in which every one is once"
            )
        self._seen.add(str(key))
        return key
