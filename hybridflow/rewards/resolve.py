"""From the name in a recipe to a function with its parameters bound and checked."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hybridflow.recipe.names import hint
from hybridflow.rewards.registry import REWARDS, RewardFunction

ARGUMENTS = ("prompt", "response", "answer", "row")
"""What every reward receives, in this order; all else is a parameter."""


def resolve(
    name: str, parameters: Mapping[str, Any] | None = None, *, base: Path | None = None
) -> RewardFunction:
    """The reward called ``name``: a registered one, ``pkg.mod.fn`` or ``file.py:fn``.

    Args:
        name: what the recipe calls the function.
        parameters: values of its keyword parameters.
        base: folder that a relative ``file.py`` is looked up in; the working folder when None.

    Returns:
        ``fn(prompt, response, answer, row) -> float``; its ``__name__`` is ``name``.

    Raises:
        ValueError: no such function, or parameters that do not fit it (every one is named).
    """
    function = _find(name, base or Path.cwd())
    parameters = dict(parameters or {})
    problems = _parameter_problems(function, parameters)
    if problems:
        raise ValueError(f"reward '{name}': " + "; ".join(problems))

    @functools.wraps(function)
    def bound(prompt: str, response: str, answer: object, row: dict) -> float:
        return function(prompt, response, answer, row, **parameters)

    bound.__name__ = bound.__qualname__ = name
    return bound


def _find(name: str, base: Path) -> Callable[..., float]:
    if name in REWARDS:
        return REWARDS[name]
    file, colon, attribute = name.rpartition(":")
    if colon:
        module = _load_file(name, file, base)
    else:
        path, dot, attribute = name.rpartition(".")
        if not dot:
            raise ValueError(
                f"{REWARDS.unknown(name)}. "
                "A function of your own is 'package.module.function' or 'file.py:function'."
            )
        module = _import(name, path)
    return _function(name, module, attribute)


def _load_file(name: str, file: str, base: Path) -> ModuleType:
    """Run a Python file as a module of its own, known under a name made from its path."""
    path = (base / Path(file).expanduser()).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"reward '{name}': there is no Python file {path}")
    module_name = "hybridflow_reward_" + "".join(c if c.isalnum() else "_" for c in str(path))
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"reward '{name}': {path} fails when run: {error!r}") from error
    return module


def _import(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"reward '{name}': module '{module}' cannot be imported: {error!r}; it must be "
            "installed, or be given as a file: 'file.py:function'"
        ) from error


def _function(name: str, module: ModuleType, attribute: str) -> Callable[..., float]:
    function = getattr(module, attribute, None)
    if function is None:
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"reward '{name}': {module.__file__} has no '{attribute}'; {hint(attribute, functions)}"
        )
    if not callable(function):
        raise ValueError(f"reward '{name}': '{attribute}' is no function, but {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward '{name}' is async; a reward is a plain function")
    return cast("Callable[..., float]", function)


def _parameter_problems(function: Callable[..., float], parameters: dict[str, Any]) -> list[str]:
    """What keeps ``function(*ARGUMENTS, **parameters)`` from being called, in words."""
    signature = inspect.signature(function)
    kinds = inspect.Parameter
    declared = list(signature.parameters.values())
    positional = [
        p for p in declared if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in declared)
    enough = len(positional) >= len(ARGUMENTS)
    if not enough and not any(p.kind is kinds.VAR_POSITIONAL for p in declared):
        return [
            f"it takes {len(positional)} arguments, {signature}; "
            f"a reward takes ({', '.join(ARGUMENTS)}), then its parameters"
        ]
    settable = {
        p.name: p
        for p in [*positional[len(ARGUMENTS) :], *declared]
        if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        and p not in positional[: len(ARGUMENTS)]
    }
    problems = [
        f"unknown parameter '{key}'; {hint(key, settable)}"
        for key in parameters
        if key not in settable and not takes_any
    ]
    missing = [k for k, p in settable.items() if p.default is kinds.empty and k not in parameters]
    return problems + [f"parameter '{key}' has no value and no default" for key in missing]
