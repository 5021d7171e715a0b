"""Value types of the recipe whose rule does not fit a plain bound. One fault per value."""

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from hybridflow.recipe.registry import Registry
from hybridflow.recipe.rules import LARGEST as LARGEST
from megatron_bridge.convert.sizes import parse_bytes


class Wrong(ValueError):
    """A value that breaks its rule, with the way to mend it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _clip(value: Any) -> Any:
    bounds = value if isinstance(value, list) else [value]
    pair = len(bounds) == (2 if isinstance(value, list) else 1)
    numbers = all(_is_number(b) and 0 < b < math.inf for b in bounds)
    if not pair or not numbers:
        what = f"must be a number above 0 or two of them, [low, high], not {value!r}"
        raise Wrong(what, "write `clip: 0.2` or `clip: [0.2, 0.28]`")
    return [float(b) for b in bounds] if isinstance(value, list) else float(value)


def _betas(value: Any) -> Any:
    pair = isinstance(value, list) and len(value) == 2
    if not pair or not all(_is_number(b) and 0 <= b < 1 for b in value):
        raise Wrong(f"must be two numbers in [0, 1), not {value!r}", "write `betas: [0.9, 0.999]`")
    return [float(b) for b in value]


_NAME = re.compile(r"[\w-][\w.-]*")


def _run_name(value: Any) -> Any:
    if not isinstance(value, str):
        raise Wrong(f"must be a text, not {value!r}", "write letters, or quote it: `name: '3'`")
    if not _NAME.fullmatch(value) or ".." in value:
        what = f"must be a name without slashes or '..', not {value!r}"
        raise Wrong(what, "use letters, digits, '-', '_' and '.'")
    return value


_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_IN_FILE = re.compile(r".+\.py:[^\W\d]\w*")


def _function_path(value: Any) -> Any:
    if not isinstance(value, str) or not (_DOTTED.fullmatch(value) or _IN_FILE.fullmatch(value)):
        what = f"must name a function, not {value!r}"
        raise Wrong(what, "write a reward's name, 'pkg.mod.fn' or 'file.py:fn'")
    return value


def _module(value: Any) -> Any:
    if not isinstance(value, str) or not (_DOTTED.fullmatch(value) or value.endswith(".py")):
        what = f"must name a module, not {value!r}"
        raise Wrong(what, "write 'pkg.mod' or 'file.py'")
    return value


def _dataflow(value: Any) -> Any:
    if not isinstance(value, (str, dict)) or not value:
        what = f"must be a dataflow's name, a path or a mapping, not {value!r}"
        raise Wrong(what, "write `dataflow: grpo`")
    return value


def is_graph_file(dataflow: Any) -> bool:
    """Whether it is the path of a graph, rather than a shipped one's name or the graph itself."""
    return isinstance(dataflow, str) and dataflow.endswith((".yaml", ".yml"))


def _top_k(value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise Wrong(f"must be at least 1, or -1 for all tokens, not {value!r}", "write `top_k: -1`")
    return value


def _size(value: Any) -> Any:
    try:
        parse_bytes(value)
    except (ValueError, AttributeError):
        what = f"must be a size such as 512MiB or 1GB, not {value!r}"
        raise Wrong(what, "write `512MiB`") from None
    return value


def named(registry: Registry[Any]) -> BeforeValidator:
    """A name of ``registry``, or an alias, which becomes the name that it stands for."""

    def name(value: Any) -> Any:
        if not isinstance(value, str) or value not in registry:
            raise Wrong(f"is no {registry.kind}: {value!r}", registry.advice(str(value)))
        return registry.canonical(value)

    return BeforeValidator(name)


Clip = Annotated[float | list[float], BeforeValidator(_clip)]
Betas = Annotated[list[float], BeforeValidator(_betas)]
RunName = Annotated[str, BeforeValidator(_run_name)]
FunctionPath = Annotated[str, BeforeValidator(_function_path)]
Module = Annotated[str, BeforeValidator(_module)]
Dataflow = Annotated[str | dict[str, Any], BeforeValidator(_dataflow)]
TopK = Annotated[int, BeforeValidator(_top_k)]
Size = Annotated[str, BeforeValidator(_size)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
DualClip = Annotated[float, Field(gt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
Deadline = Annotated[float, Field(ge=1, le=1e7)]
