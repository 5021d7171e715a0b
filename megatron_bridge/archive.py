"""What ``torch.save`` writes: a zip archive that is not compressed."""

import zipfile
from pathlib import Path


def refuse_compressed(path: Path) -> None:
    """Make sure that reading a file takes no more memory than the file has bytes.

    torch writes archives without compression, and unpacks compressed ones all the same: a small
    file could fill the memory.

    Raises:
        ValueError: when a record is compressed. A file that is no archive passes: torch says why.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return
    found = [r.filename for r in records if r.compress_type != zipfile.ZIP_STORED]
    if found:
        raise ValueError(
            f"{path} is refused: its record {found[0]!r} is compressed, which torch.save never "
            "does; get the file from a source that you trust"
        )
