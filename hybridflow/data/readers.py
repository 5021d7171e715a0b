"""Reading rows from JSONL, CSV, Parquet and HuggingFace datasets on disk. Imports no torch."""

import codecs
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.recipe.json_rows import json_row

_SHOWN_FAULTS = 5


@dataclass(frozen=True)
class Table:
    """Rows of a data file, each a dict from column to value, and where they came from.

    ``lines[i]`` is the 1-based line of row i in a text file; empty for binary formats.
    """

    path: Path
    rows: Sequence[dict[str, Any]]
    columns: tuple[str, ...]
    lines: Sequence[int] = ()

    def where(self, index: int) -> str:
        """``file:line`` of a row, or ``file, row N`` (from 0) in a format without lines."""
        if self.lines:
            return f"{self.path}:{self.lines[index]}"
        return f"{self.path}, row {index}"


def read_table(path: str | Path) -> Table:
    """The rows of ``path``; its ending says the format, a folder is a HuggingFace dataset.

    Raises:
        ValueError: no such file, a format that is not read, or faults in it, with their lines.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    if path.is_dir():
        table = _read_dataset(path)
    elif path.suffix.lower() in _READERS:
        table = _READERS[path.suffix.lower()](path)
    else:
        raise ValueError(
            f"{path}: data is read from {', '.join(_READERS)} files and from folders that "
            f"datasets.save_to_disk wrote, not from '{path.suffix or path.name}'"
        )
    if len(table.rows) == 0:
        raise ValueError(f"{path}: the file is empty, it holds no row")
    return table


def raise_faults(path: Path, faults: list[str]) -> None:
    """Raise one ValueError that lists the first faults and counts all; none, no error."""
    if not faults:
        return
    shown = faults[:_SHOWN_FAULTS]
    rest = len(faults) - len(shown)
    more = [f"... and {rest} more in {path}"] if rest else []
    raise ValueError("\n".join([*shown, *more]))


def _read_jsonl(path: Path) -> Table:
    """One JSON object a line; blank lines are skipped."""
    rows, lines, faults = [], [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                rows.append(json_row(line))
                lines.append(number)
            except ValueError as error:
                faults.append(f"{path}:{number}: {error}")
    raise_faults(path, faults)
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    return Table(path, rows, columns, lines)


def _read_csv(path: Path) -> Table:
    """The first line names the columns; every value is a string."""
    csv.field_size_limit(sys.maxsize)  # a long answer is no fault of the file
    reader = csv.reader(_text_lines(path), strict=True)
    rows, lines, faults = [], [], []
    try:
        columns = tuple(next(reader, ()))
        if len(set(columns)) < len(columns):
            raise ValueError(f"{path}:1: a column name stands twice: {', '.join(columns)}")
        start = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(columns):
                faults.append(f"{path}:{start}: {len(values)} values for {len(columns)} columns")
            elif values:
                rows.append(dict(zip(columns, values, strict=True)))
                lines.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: no CSV: {error}") from error
    raise_faults(path, faults)
    return Table(path, rows, columns, lines)


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: no Parquet file: {error}") from error
    return Table(path, table.to_pylist(), tuple(table.column_names))


def _read_dataset(path: Path) -> Table:
    """A folder of ``Dataset.save_to_disk``; its rows stay on disk until they are asked for."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if (p / "dataset_info.json").exists())
        raise ValueError(
            f"{path}: a dictionary of splits ({', '.join(splits)}); name one, such as "
            f"{path / splits[0] if splits else path / 'train'}"
        )
    if not (path / "dataset_info.json").exists():
        raise ValueError(
            f"{path}: a folder, but no HuggingFace dataset written by save_to_disk "
            "(it has no dataset_info.json)"
        )
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # its files come from elsewhere, and it checks none of them
        raise ValueError(
            f"{path}: the dataset is not whole: {type(error).__name__}: {error}; write it anew "
            "with save_to_disk, or copy all its files"
        ) from error
    assert isinstance(dataset, datasets.Dataset), "dataset_info.json marks a single dataset"
    return Table(path, dataset, tuple(dataset.column_names))  # type: ignore[arg-type]


def _text_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file with their line breaks; a byte order mark is dropped."""
    lines = []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            lines.append(raw.decode("utf-8") + "\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not UTF-8 at byte {error.start} of the line "
                f"(0x{raw[error.start]:02x}); save the file as UTF-8"
            ) from error
    return lines


_READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
