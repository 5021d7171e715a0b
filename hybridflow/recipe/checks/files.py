"""A look into data files: columns, rows and broken lines, without reading more than needed."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.recipe.json_rows import json_row

PARSED_BYTES = 32 * 1024 * 1024  # lines after these are counted, not parsed: a check stays quick
SHOWN_PROBLEMS = 5
SUFFIXES = (".jsonl", ".csv", ".parquet")


@dataclass
class Found:
    """What a data file holds.

    Attributes:
        rows: number of rows.
        columns: names of the columns; None when they could not be read.
        problems: (line or None, what is wrong); the first few.
    """

    rows: int = 0
    columns: set[str] | None = None
    problems: list[tuple[int | None, str]] = field(default_factory=list)


def look(path: Path, wanted: Iterable[str]) -> Found:
    """Look into an existing file or folder; rows of JSONL must hold the ``wanted`` columns."""
    if path.is_dir():
        return _folder(path)
    readers = {".csv": _csv, ".parquet": _parquet}
    if path.suffix.lower() == ".jsonl":
        return _jsonl(path, tuple(wanted))
    if path.suffix.lower() in readers:
        return readers[path.suffix.lower()](path)
    what = f"'{path.name}' is none of {', '.join(SUFFIXES)}, nor a dataset's folder"
    return Found(problems=[(None, what)])


def _jsonl(path: Path, wanted: tuple[str, ...]) -> Found:
    found, broken, lacking = Found(columns=set()), [], []
    assert found.columns is not None
    for number, line in _parsed_lines(path, found):
        try:
            row = json_row(line)
        except ValueError as error:
            broken.append((number, str(error)))
            continue
        found.rows += 1
        found.columns |= row.keys()
        if lacks := [column for column in wanted if column not in row]:
            lacking.append((number, f"the row lacks {', '.join(map(repr, lacks))}"))
    if found.columns.issuperset(wanted):
        broken += lacking  # a column that no row has is one fault of the file instead
    found.problems = sorted(broken)[:SHOWN_PROBLEMS]
    if len(broken) > SHOWN_PROBLEMS:
        found.problems.append((None, f"{len(broken) - SHOWN_PROBLEMS} more lines are wrong"))
    return found


def _parsed_lines(path: Path, found: Found) -> Iterator[tuple[int, bytes]]:
    """Lines to parse; those past the limit are only counted into ``found.rows``."""
    read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            read += len(line)
            if read <= PARSED_BYTES:
                yield number, line
            else:
                found.rows += 1


def _csv(path: Path) -> Found:
    try:
        csv.field_size_limit(sys.maxsize)  # a long answer is no fault of the file
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            found = Found(columns=set(header))
            if len(header) > len(set(header)):
                found.problems.append((1, "a column name stands twice"))
            for row in filter(None, reader):
                found.rows += 1
                if len(row) != len(header) and len(found.problems) < SHOWN_PROBLEMS:
                    what = f"{len(row)} values for {len(header)} columns"
                    found.problems.append((reader.line_num, what))
            return found
    except UnicodeDecodeError:
        return Found(problems=[(None, "the file is not UTF-8")])
    except csv.Error as error:
        return Found(problems=[(None, f"not valid CSV: {error}")])


def _parquet(path: Path) -> Found:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        return Found(problems=[(None, f"not valid Parquet: {error}")])
    return Found(file.metadata.num_rows, set(file.schema_arrow.names))


def _folder(path: Path) -> Found:
    """A dataset written by ``save_to_disk``: Arrow streams that state.json lists."""
    import pyarrow

    if (path / "dataset_dict.json").is_file():
        what = "the folder holds several splits; name the folder of one"
        return Found(problems=[(None, what)])
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        what = "the folder is no HuggingFace dataset (written by save_to_disk)"
        return Found(problems=[(None, what)])
    found = Found(columns=set())
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as source:
                reader = pyarrow.ipc.open_stream(source)
                found.columns = set(reader.schema.names)
                found.rows += sum(batch.num_rows for batch in reader)
        except (pyarrow.ArrowException, OSError) as error:
            found.problems.append((None, f"{file.name} cannot be read: {error}"))
    return found
