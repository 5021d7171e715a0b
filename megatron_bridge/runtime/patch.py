"""One replacement in megatron-core, and whether it fits the installed version."""

import ast
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# As a needle: somewhere in the module a call passes it, however it is written.
CUDA_LITERAL = 'device="cuda"'


@dataclass(frozen=True)
class Patch:
    """One replacement: ``apply(module)`` is right only while ``needles`` are in the source."""

    name: str
    module: str
    target: str | None  # an attribute of the module; None: the module as a whole
    needles: tuple[str, ...]
    apply: Callable[[ModuleType], None]
    why: str

    def problem(self) -> str | None:
        """Why the patch does not fit the installed megatron-core, or None."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            return f"{self.module} cannot be imported: {error}"
        if self.needles == (CUDA_LITERAL,):
            return None if _cuda_literals(module) else f"no {CUDA_LITERAL} is left"
        target = _originals.get(self.name) or self._find(module)
        if target is None:
            return f"{self.module}.{self.target} does not exist"
        source = inspect.getsource(target)
        missing = [needle for needle in self.needles if needle not in source]
        return f"the source no longer has {missing}" if missing else None

    def _find(self, module: ModuleType) -> Any:
        return getattr(module, self.target, None) if self.target else module

    def install(self) -> None:
        """Apply it; what it replaces is kept, so that ``problem`` goes on to look at that."""
        module = importlib.import_module(self.module)
        _originals[self.name] = self._find(module)
        self.apply(module)


_originals: dict[str, Any] = {}


def _cuda_literals(module: ModuleType) -> list[int]:
    """Lines of the calls in ``module`` that pass ``device="cuda"``."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            keyword.arg == "device"
            and isinstance(keyword.value, ast.Constant)
            and str(keyword.value.value).startswith("cuda")
            for keyword in node.keywords
        )
    ]
