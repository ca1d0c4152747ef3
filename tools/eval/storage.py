"""Files: those given are checked and decoded, those of an output folder written whole or not at all, by one run at a time.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Iterator, TextIO

from errors import EvaluationError, printable

LARGEST_JSON = 4 << 30  # bytes
# How files begin that people give instead of JSON and TSV, what they are, and what to do.
OTHERS = (
    (b"\x1f\x8b", "is gzip-compressed; unpack it with gunzip"), (b"BZh", "is bzip2-compressed; unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "is xz-compressed; unpack it with unxz"), (b"\x28\xb5\x2f\xfd", "is Zstandard-compressed; unpack it with unzstd"),
    (b"PK\x03\x04", "is a zip archive; unpack it with unzip"), (b"PAR1", "is a Parquet file; give it a name that ends in .parquet"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the file; fetch it with git lfs pull"),
    (b"<", "is a web page; download the file that it links to"),
)  # fmt: skip


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


def require_file(path: Path, most: int | None = None) -> None:
    """EvaluationError unless `path` is a regular file, of at most so many bytes: others may never end."""
    try:
        found = path.stat()
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}; check the path") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "pipe" if stat.S_ISFIFO(found.st_mode) else "device or socket"
        raise EvaluationError(f"{path} is a {kind}; expected a regular file: write the contents to one, and give that")
    if most is not None and found.st_size > most:
        raise EvaluationError(f"{path} has {found.st_size} bytes; expected at most {most >> 30} GiB: give a part of it")


@contextlib.contextmanager
def open_text(path: Path, most: int | None = None) -> Iterator[TextIO]:
    """A file of at most so many bytes in UTF-8, or in UTF-16 or UTF-32 by its byte-order mark or zero bytes, as JSON's are.

    EvaluationError names a file that cannot be read, is no regular one, is another kind of OTHERS or has other bytes.
    """
    require_file(path, most)
    try:
        with path.open("rb") as file:
            start = file.read(64)
            file.seek(0)
            if other := next((what for magic, what in OTHERS if start.startswith(magic)), None):
                raise EvaluationError(f"{path} {other}")
            if not start:
                raise EvaluationError(f"{path} is empty; download it again")
            with io.TextIOWrapper(file, encoding=json.detect_encoding(start[:4]), newline="") as text:
                yield text
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    except UnicodeDecodeError as error:
        name = error.encoding.upper()
        if name.startswith("UTF-8"):
            fault = f"is not UTF-8: it has the byte 0x{error.object[error.start]:02x}, as Latin-1 and Windows-1252 write letters; " \
                    "convert it, for example with iconv -f WINDOWS-1252 -t UTF-8"  # fmt: skip
        else:
            fault = f"is damaged {name[:6]} text ({error.reason}); save it again as UTF-8"
        raise EvaluationError(f"{path} {fault}") from None


def read_json(path: Path) -> object:
    """What a file holds, in an encoding of open_text(); EvaluationError names a file that is missing or no JSON."""
    with open_text(path, LARGEST_JSON) as file:
        text = file.read()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_json_lines(text):
            raise EvaluationError(
                f"{path} is JSON Lines; expected one JSON value, as the set was published; jq -s . makes the lines one list"
            ) from None
        raise EvaluationError(f"{path} is no JSON file: {printable(error)}; download it again, or delete it if a run wrote it") from None


def _is_json_lines(text: str) -> bool:
    """Whether the first two lines that are not blank are an object or a list each."""
    lines = [line for line in text[: 1 << 20].split("\n") if line.strip()][:2]
    try:
        return len(lines) == 2 and all(isinstance(json.loads(line), (dict, list)) for line in lines)
    except (ValueError, RecursionError):
        return False


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
