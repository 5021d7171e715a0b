"""Making a folder once: whole or not at all, and nothing to do the second time."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "asset.json"

EXTRA_HINT = "pip install 'hybridflow[assets]' (from a checkout: pip install -e '.[assets]')"


def make(folder: Path, options: dict[str, Any], build: Callable[[Path], None]) -> bool:
    """Have ``build`` fill ``folder``, unless it already holds what ``options`` ask for.

    The files are written into a folder beside it, which is renamed when all of them are there,
    so a reader never sees half an asset. ``asset.json`` notes the options and the files' sizes.

    Returns:
        Whether anything had to be made.

    Raises:
        ValueError: the folder holds something else, which is left alone.
    """
    if _is_whole(folder, options):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        built = aside / "new"
        built.mkdir()
        build(built)
        _write_json(built / MANIFEST, {"options": options, "files": _sizes(built)})
        if folder.exists():
            folder.rename(aside / "old")
        built.rename(folder)
    finally:
        shutil.rmtree(aside)
    return True


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line, UTF-8."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _is_whole(folder: Path, options: dict[str, Any]) -> bool:
    """Whether ``folder`` is complete; ValueError when it holds what this did not make."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(
            f"{folder} exists, and no `hybridflow make` wrote it (it has no {MANIFEST}): "
            "name another folder, or remove this one"
        )
    made = json.loads(manifest.read_text(encoding="utf-8"))
    present = _sizes(folder)
    strange = sorted(n for n, size in present.items() if made["files"].get(n) != size)
    if strange:
        raise ValueError(
            f"{folder} has changed since it was made ({', '.join(strange)}): "
            "name another folder, or remove this one"
        )
    return made["options"] == options and present == made["files"]


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file under ``folder``, the manifest aside, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in files}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
