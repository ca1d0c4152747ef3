"""Tables that people publish data sets as: parquet with the images inside, and VLMEvalKit's TSV with images in base64.

Records are read without their images, since a set's take gigabytes; those of the records that are asked about are written
as files, once, named by their contents. Parquet needs pyarrow; else the standard library suffices.
"""

from __future__ import annotations

import ast
import base64
import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, TextIO

from errors import EvaluationError, guarded, note, printable
from regions import Box, with_box
from storage import digest, open_text, require_file, write_bytes

PARQUET, TSV = "parquet file", "TSV"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})((?:-[0-9a-f]+)?\.parquet)")  # as the datasets library names parts of a split
LONGEST_LINE = 1 << 30  # characters of a TSV, and of a cell that spans lines
SHORTEST_IMAGE = 64  # of a TSV: what is shorter names another row's index
ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}


@dataclass(frozen=True)
class Table:
    """A published table without its images; `column` holds them where they are inside."""

    kind: str
    paths: tuple[Path, ...]  # of one split, in order
    rows: list[dict] = field(repr=False, compare=False)
    column: str | None = None

    def images(self, wanted: set[int]) -> Iterator[tuple[int, bytes]]:
        """The encoded images of these rows, a few at a time in memory."""
        source = _parquet_images(self.paths, self.column) if self.kind == PARQUET else _tsv_images(self.paths[0])
        last = max(wanted, default=-1)
        for row, content in source:
            if row in wanted:
                if not content:
                    raise EvaluationError(f"row {row} of {self.paths[0]} has no image; give the file as it was published")
                yield row, content
            if row >= last:
                return


def read_table(path: Path) -> Table:
    """The rows of a .parquet with the other parts of its split, or of a .tsv. EvaluationError for anything else."""
    return _read_parquet(path) if path.suffix == ".parquet" else _read_tsv(path)


def store(content: bytes, folder: Path, box: Box | None = None) -> Path:
    """An image, with a region's box if there is one, as a file of the folder, which is written if it is not there."""
    ending = next((e for magic, e in ENDINGS.items() if content.startswith(magic)), "")
    path = folder / (digest(content + repr(box).encode()) + ".png" if box else digest(content) + ending)
    if not path.exists():
        write_bytes(path, with_box(content, box) if box else content)
    return path


def parts_of(path: Path) -> list[Path]:
    """All parts of the split that `path` is a part of, which are there; a note names how many are not."""
    found = PART.fullmatch(path.name)
    if not found or not path.is_file():
        return [path]
    count = int(found[3])
    parts = sorted(file for file in path.parent.iterdir()
                   if (other := PART.fullmatch(file.name)) and (other[1], other[3]) == (found[1], found[3]))  # fmt: skip
    if len(parts) != count:
        note(f"{len(parts)} of the {count} parts of {path.name} are in {path.parent}, so the other records are left out")
    return parts


@guarded
def _read_parquet(path: Path) -> Table:
    paths = parts_of(path)
    for file in paths:
        require_file(file)
    arrow, parquet = _pyarrow(path)
    rows: list[dict] = []
    column = None
    try:
        for file in paths:
            opened = parquet.ParquetFile(file)
            names = [field.name for field in opened.schema_arrow]
            column = next((field.name for field in opened.schema_arrow if _is_image(arrow, field.type)), None)
            rows += opened.read(columns=[name for name in names if name != column]).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise EvaluationError(f"{path} is no parquet file: {printable(error)}") from None
    if not rows:
        raise EvaluationError(f"{path} has no rows")
    return Table(PARQUET, tuple(paths), rows, column)


def _is_image(arrow, kind) -> bool:
    """{"bytes", "path"}, as the datasets library stores an image; or bytes alone."""
    if arrow.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind)


def _parquet_images(paths: tuple[Path, ...], column: str) -> Iterator[tuple[int, bytes]]:
    arrow, parquet = _pyarrow(paths[0])
    row = 0
    for path in paths:
        try:
            for batch in parquet.ParquetFile(path).iter_batches(batch_size=16, columns=[column]):
                for image in batch.column(0).to_pylist():
                    yield row, image.get("bytes") if isinstance(image, dict) else image
                    row += 1
        except (OSError, arrow.ArrowException) as error:
            raise EvaluationError(f"{path} is damaged: {printable(error)}; download it again") from None


def _pyarrow(path: Path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise EvaluationError(
            f"{path} cannot be read: this Python has no pyarrow; run tools/eval/setup.sh and start with "
            "build/eval-venv/bin/python3, or give the set's .tsv or .json"
        ) from None
    return pyarrow, pyarrow.parquet


@guarded
def _read_tsv(path: Path) -> Table:
    rows, column = [], None
    for row in _tsv_rows(path):
        if None in row:
            raise EvaluationError(f"row {len(rows)} of {path} has more cells than its first line names columns")
        column = "image" if row.get("image") is not None else column
        if (row.get("image") or "") and len(row["image"]) > SHORTEST_IMAGE:
            row["image"] = ""
        rows.append(row)
    if not rows:
        raise EvaluationError(f"{path} has no rows")
    return Table(TSV, (path,), rows, column)


def _tsv_rows(path: Path) -> Iterator[dict]:
    csv.field_size_limit(LONGEST_LINE)
    with open_text(path) as file:
        try:
            yield from csv.DictReader(_lines(file, path), delimiter="\t")
        except csv.Error as error:
            raise EvaluationError(f"{path} is no TSV: {printable(error)}; download it again") from None


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise EvaluationError(f"{path} has a line of more than {LONGEST_LINE} characters; give the file as it was published")
        yield line


def _tsv_images(path: Path) -> Iterator[tuple[int, bytes]]:
    """A cell that is too short for an image is the index of the row whose image it shares."""
    places, shared = {}, {}
    for row, cells in enumerate(_tsv_rows(path)):
        places.setdefault(str(cells.get("index")), row)
        if 0 < len(cells.get("image") or "") <= SHORTEST_IMAGE:
            shared[row] = cells["image"]
    owners = {row: places.get(index) for row, index in shared.items()}
    kept = {row: _decoded(cells, row, path) for row, cells in enumerate(_tsv_rows(path)) if row in owners.values()} if owners else {}
    for row, cells in enumerate(_tsv_rows(path)):
        yield row, kept.get(owners[row], b"") if row in owners else _decoded(cells, row, path)


def _decoded(cells: dict, row: int, path: Path) -> bytes:
    try:
        return base64.b64decode(cells.get("image") or "", validate=True)
    except ValueError:
        raise EvaluationError(f"row {row} of {path} has an image that is no base64; give the file as it was published") from None


def listed(cell: object) -> object:
    """A cell of a TSV that is a list as Python writes it; any other as it is."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return cell
    try:
        found = ast.literal_eval(cell.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return cell
    return found if isinstance(found, list) else cell
