"""From the name in a recipe to a reward with its parameters bound and checked."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.recipe import catalogue
from hybridflow.recipe.names import hint
from hybridflow.recipe.own_code import load_file
from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.registry import REWARDS, prepare

ARGUMENTS = ("prompt", "response", "answer", "row")
"""What a reward of single samples receives, in this order; all else is a parameter."""

_BATCH = 32
_CALLS_AT_ONCE = 32


@dataclass(frozen=True)
class Reward:
    """A reward with its parameters bound.

    Attributes:
        name: what the recipe calls it.
        call: of one sample ``(prompt, response, answer, row)``, or of a list of items.
        takes_batch: whether ``call`` takes a list of items and gives as many results.
        is_async: whether ``call`` gives a coroutine.
        batch: most samples of one call.
        calls_at_once: most calls under way, where they are coroutines.
    """

    name: str
    call: Callable[..., Any]
    takes_batch: bool = False
    is_async: bool = False
    batch: int = 1
    calls_at_once: int = 1

    def arguments(self, items: list[RewardItem]) -> tuple[Any, ...]:
        """What ``call`` gets for ``items``, one of them unless it takes a batch."""
        if self.takes_batch:
            return (items,)
        (item,) = items
        response = item.response if item.tokens is None else list(item.tokens)
        return item.prompt, response, item.answer, item.row


def resolve(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    base: Path | None = None,
    source: bytes | None = None,
) -> Reward:
    """The reward called ``name``: a registered one, ``pkg.mod.fn`` or ``file.py:fn``.

    A function may be plain or ``async``. A class is made with the parameters, once; its objects
    are called like a function, or have a method ``score`` of a list of items.

    Args:
        name: what the recipe calls the function.
        parameters: values of its keyword parameters.
        base: folder that a relative ``file.py`` is looked up in; the working folder when None.
        source: what ``source_of`` gave, to run in the place of what the file holds by now.

    Raises:
        ValueError: no such function, or parameters that do not fit it (every one is named).
    """
    found = _find(name, base or Path.cwd(), source)
    parameters = dict(parameters or {})
    prepare(name)
    given = () if inspect.isclass(found) else ARGUMENTS
    problems = _parameter_problems(found, parameters, given)
    problems += _value_problems(name, parameters)
    if problems:
        raise ValueError(f"reward '{name}': " + "; ".join(problems))
    if inspect.isclass(found):
        return _of_object(name, found(**parameters))
    call = functools.partial(found, **parameters)
    is_async = inspect.iscoroutinefunction(found)
    return Reward(name, call, is_async=is_async, calls_at_once=_CALLS_AT_ONCE)


def _of_object(name: str, made: Any) -> Reward:
    """A reward that is an object: ``score`` takes a batch, else it is called per sample."""
    at_once = _count(name, made, "calls_at_once", _CALLS_AT_ONCE)
    score = getattr(made, "score", None)
    if score is not None:
        is_async = inspect.iscoroutinefunction(score)
        return Reward(name, score, True, is_async, _count(name, made, "batch", _BATCH), at_once)
    if not callable(made):
        raise ValueError(
            f"reward '{name}': objects of the class have neither `score(items)` nor "
            f"`__call__({', '.join(ARGUMENTS)})`; add one of them"
        )
    is_async = inspect.iscoroutinefunction(type(made).__call__)
    return Reward(name, made, is_async=is_async, calls_at_once=at_once)


def _count(name: str, made: Any, attribute: str, default: int) -> int:
    count = getattr(made, attribute, default)
    if type(count) is not int or count < 1:
        raise ValueError(f"reward '{name}': {attribute} must be 1 or more, not {count!r}")
    return count


def source_of(name: str, base: Path) -> bytes | None:
    """What stands in the file of ``file.py:function``; None for other names, and without a file."""
    file, colon, _ = name.rpartition(":")
    path = _path_of(file, base)
    if not colon or name in REWARDS or not path.is_file():
        return None
    return path.read_bytes()


def _path_of(file: str, base: Path) -> Path:
    return (base / Path(file).expanduser()).resolve()


def _find(name: str, base: Path, source: bytes | None) -> Callable[..., Any]:
    if name in REWARDS:
        return REWARDS[name]
    file, colon, attribute = name.rpartition(":")
    if colon:
        module = _load_file(name, _path_of(file, base), source)
    else:
        path, dot, attribute = name.rpartition(".")
        if not dot:
            raise ValueError(
                f"{REWARDS.unknown(name)}. "
                "A function of your own is 'package.module.function' or 'file.py:function'."
            )
        module = _import(name, path)
    return _function(name, module, attribute)


def _load_file(name: str, path: Path, source: bytes | None) -> ModuleType:
    try:
        return load_file(path, source)
    except ValueError as error:
        raise ValueError(f"reward '{name}': {error}") from error


def _import(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"reward '{name}': module '{module}' cannot be imported: {error!r}; it must be "
            "installed, or be given as a file: 'file.py:function'"
        ) from error


def _function(name: str, module: ModuleType, attribute: str) -> Callable[..., Any]:
    function = getattr(module, attribute, None)
    if function is None:
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"reward '{name}': {module.__file__} has no '{attribute}'; {hint(attribute, functions)}"
        )
    if not callable(function):
        raise ValueError(f"reward '{name}': '{attribute}' is no function, but {function!r}")
    return function


def _value_problems(name: str, parameters: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values that a reward of the package is told."""
    if name not in catalogue.REWARDS:
        return []
    options = catalogue.REWARDS[name].parameters
    told = {key: value for key, value in parameters.items() if key in options}
    problems = {key: options[key].problem(value) for key, value in told.items()}
    return [f"`{key}` {problem}" for key, problem in problems.items() if problem]


def _parameter_problems(
    function: Callable[..., Any], parameters: dict[str, Any], given: tuple[str, ...]
) -> list[str]:
    """What keeps ``function(*given, **parameters)`` from being called, in words."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ["it shows no signature to check; wrap it in a function of your own"]
    kinds = inspect.Parameter
    declared = list(signature.parameters.values())
    positional = [
        p for p in declared if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in declared)
    enough = len(positional) >= len(given)
    if not enough and not any(p.kind is kinds.VAR_POSITIONAL for p in declared):
        return [
            f"it takes {len(positional)} arguments, {signature}; "
            f"a reward takes ({', '.join(given)}), then its parameters"
        ]
    settable = {
        p.name: p
        for p in [*positional[len(given) :], *declared]
        if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        and p not in positional[: len(given)]
    }
    problems = [
        f"unknown parameter '{key}'; {hint(key, settable)}"
        for key in parameters
        if key not in settable and not takes_any
    ]
    missing = [k for k, p in settable.items() if p.default is kinds.empty and k not in parameters]
    return problems + [f"parameter '{key}' has no value and no default" for key in missing]
