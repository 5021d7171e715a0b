"""Where ``hybridflow make`` puts what the shipped recipes read."""

from pathlib import Path

FOLDERS = {
    "quickstart": Path("assets/quickstart"),
    "smollm2": Path("assets/smollm2-135m"),
    "reasoning-gym": Path("assets/reasoning_gym"),
}


def how_to_make(path: str, otherwise: str) -> str:
    """The command that makes a missing ``path``, else what to do ``otherwise``."""
    places = {folder: name for name, folder in FOLDERS.items()}
    name = next((places[p] for p in (Path(path), *Path(path).parents) if p in places), None)
    return f"run `hybridflow make {name}`" if name else otherwise
