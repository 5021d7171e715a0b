"""Value heads beside a whole causal model, as TRL's ``AutoModelForCausalLMWithValueHead`` saves."""

from collections.abc import Mapping

from torch import Tensor

from megatron_bridge.source import Ranges, Source, TensorInfo

NAMES = {"v_head.summary.weight": "score.weight", "v_head.summary.bias": "score.bias"}
_PREFIX = "v_head."


def is_separate(source: Source) -> bool:
    """Whether the model has such a head.

    Raises:
        ValueError: it has one of another form, such as of several layers.
    """
    found = {name for name in source.tensors() if name.startswith(_PREFIX)}
    if found and found != NAMES.keys():
        raise ValueError(
            f"the value head is made of {', '.join(sorted(found))}; it is read where it is one "
            f"layer, {' and '.join(NAMES)}"
        )
    return bool(found)


class Named:
    """A source in which such a head has the names of a ``*ForTokenClassification``."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._names = {NAMES.get(name, name): name for name in source.tensors()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, in the source's order."""
        infos = self._source.tensors()
        return {name: infos[theirs] for name, theirs in self._names.items()}

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The rectangle ``ranges`` of one tensor."""
        return self._source.read(self._names[name], ranges)
