"""Modules of the user's own, which a recipe's ``imports`` names: they register functions, losses
and rewards. Running them is all that is done with them; no shell, no other process."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hybridflow.recipe.faults import Fault
from hybridflow.recipe.source import Source

_PREFIX = "hybridflow_own_"


@dataclass(frozen=True)
class OwnModule:
    """A module to import in each process of a model, as it was where the run was started.

    Attributes:
        name: dotted, or the absolute path of a Python file.
        source: what the file held.
    """

    name: str
    source: bytes | None = None

    @staticmethod
    def of(name: str) -> "OwnModule":
        """Of one of a recipe's ``imports``; ValueError where the file cannot be read."""
        if not name.endswith(".py"):
            return OwnModule(name)
        path = Path(name).expanduser().resolve()
        try:
            return OwnModule(str(path), path.read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error

    def load(self) -> ModuleType:
        """Import it, once in a process.

        Raises:
            ValueError: there is none, or it fails.
        """
        if self.name.endswith(".py"):
            return load_file(Path(self.name), self.source)
        try:
            return importlib.import_module(self.name)
        except Exception as error:
            raise ValueError(f"the module '{self.name}' cannot be imported: {error!r}") from error


def load_file(path: Path, source: bytes | None = None) -> ModuleType:
    """Run a Python file, or what it held, as a module of its own, known under a name made from its
    path; it may import what lies beside it.

    Raises:
        ValueError: there is no such file, or it fails.
    """
    if path.suffix != ".py" or (source is None and not path.is_file()):
        raise ValueError(f"there is no Python file {path}")
    name = _PREFIX + "".join(c if c.isalnum() else "_" for c in str(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (beside := str(path.parent)) not in sys.path:
        sys.path.append(beside)  # last, so that nothing of it takes the place of another module
    try:
        text = path.read_bytes() if source is None else source
        exec(compile(text, str(path), "exec"), vars(module))  # noqa: S102 - the recipe names it
    except Exception as error:
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f":{lines[-1]}" if lines else ""
        raise ValueError(f"{path}{line} fails when run: {error!r}") from error
    return module


def place_of(entry: object) -> str:
    """``pkg.mod.fn`` or ``/path/file.py:fn``: how another process finds a function or class."""
    module, name = entry.__module__, entry.__qualname__  # type: ignore[attr-defined]
    if module.startswith(_PREFIX):
        return f"{sys.modules[module].__file__}:{name}"
    return f"{module}.{name}"


def import_own(names: Iterable[str], source: Source) -> list[Fault]:
    """Import what a recipe's ``imports`` names; a fault for each that cannot be."""
    faults = []
    for index, name in enumerate(names):
        try:
            OwnModule.of(name).load()
        except ValueError as error:
            fix = "mend it; a module is installed, or given by its file's path"
            faults.append(Fault(source.origin(("imports", index)), str(error), fix))
    return faults
