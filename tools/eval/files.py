"""Files of an evaluation, written whole or not at all. Standard library only."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a file that is seen complete or not at all, whatever ends this program meanwhile.

    It is written beside `path` and renamed, so what stood there before lives until the new text is on the disk. OSError
    names the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}; what stood there is kept") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
