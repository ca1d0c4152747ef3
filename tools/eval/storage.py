"""Files of an output folder: written whole or not at all, by one run at a time. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path

from errors import EvaluationError, printable


def write_text(path: Path, text: str) -> None:
    """As UTF-8; half a surrogate pair, which JSON may hold, as JSON's escape of it."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file that is seen complete or not at all, whatever ends this program meanwhile.

    It is written next to `path` and renamed, so what stood there before lives until the new text is on the disk.
    EvaluationError names the path.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's files are for their owner only
        os.replace(temporary, path)
    except OSError as error:
        raise EvaluationError(
            f"{path} cannot be written: {error.strerror}; what was finished is kept, start the same command again "
            "with a writable folder and free space"
        ) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_lines(path: Path, records: list[dict]) -> None:
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def read_json(path: Path) -> object:
    """With or without a byte-order mark; EvaluationError names a file that is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{path} is no JSON file: {printable(error)}") from None


def digest(text: str | bytes) -> str:
    """First half of a SHA-256, in hexadecimal: tells files apart, guards nothing."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text).hexdigest()[:32]


def sweep(folder: Path) -> None:
    """Removes the unfinished files of write_text that a kill left behind; call it while nobody else writes."""
    for path in folder.rglob(".*.part"):
        path.unlink(missing_ok=True)


class Lock:
    """A file that one run holds, or that runs share, until they end; `with Lock(...)`.

    It is an flock, so the system frees it however a run ends, and network file systems carry it. `fileno` is handed to
    the programs that a run starts, so that it lives as long as they write; those of a run that was killed end within
    moments, so a taken lock is tried for `wait_s` seconds.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait_s: float = 2):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise EvaluationError(f"{path.parent} cannot be written: {error.strerror}; give a folder as --out") from None
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.02)
                    continue
                holder = printable(os.pread(self._fd, 200, 0).decode("utf-8", "replace").strip())
                os.close(self._fd)
                raise EvaluationError(
                    f"{path.parent} is being written by another run{f' ({holder})' if holder else ''}; wait for it, or "
                    "give another --out"
                ) from None
        if not shared:
            with contextlib.suppress(OSError):  # a full disk; the lock holds without a name
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def fileno(self) -> int:
        return self._fd

    def take_alone(self) -> bool:
        """Whether a lock that was shared is now this run's only; if not, it is lost.

        In one call: of runs that share it and try, exactly one gets it, unless another holds on to it.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Lets others hold a lock that was this run's only."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()
