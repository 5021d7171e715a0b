"""The way back: the trainer's tensors from one engine's parameters."""

from collections.abc import Iterator

from megatron_bridge import regions
from megatron_bridge.regions import Box
from megatron_bridge.reshard.copies import Copy
from megatron_bridge.reshard.plan import ReshardPlan
from megatron_bridge.reshard.planner import Match, Planner, match_all
from megatron_bridge.reshard.targets import Fill


def inverse(plan: ReshardPlan) -> tuple[Copy, ...]:
    """Copies to be read backwards: each element of one replica of the trainer's tensors once.

    What a copy's ``target`` holds goes to ``source`` of every rank in ``holders``. Of elements
    that several engine ranks keep the first one's count. Padding is in no copy.

    Raises:
        ValueError: the engine does not keep all of the model; names what it lacks.
    """
    planner = plan.planner
    taken: dict[tuple[int, int, int], list[Box]] = {}
    found = [
        copy
        for rank, parameters in enumerate(plan.targets)
        for index, parameter in enumerate(parameters)
        for fill in parameter.fills
        for copy in _new(planner, fill, rank, index, taken)
    ]
    _check(planner, taken)
    return tuple(found)


def _new(
    planner: Planner,
    fill: Fill,
    rank: int,
    index: int,
    taken: dict[tuple[int, int, int], list[Box]],
) -> Iterator[Copy]:
    """Copies of a fill's elements that none before it had."""
    for number, match in planner.matches(fill) if regions.volume(fill.source_box) else ():
        weight, held = planner.weights[number], match.held
        before = taken.setdefault((number, held.place, held.part), [])
        left = [match.box]
        for box in before:
            left = [piece for one in left for piece in regions.subtract(one, box)]
        before += left
        matches: list[Match] = [match]
        if left != [match.box]:
            matches = [m for box in left for m in match_all(weight.shape_of, held, box, fill)]
        for one in matches:
            holders = planner.holders(weight, held.place)
            yield Copy(number, one.view, rank, index, one.target, holders)


def _check(planner: Planner, taken: dict[tuple[int, int, int], list[Box]]) -> None:
    lacking: dict[str, None] = {}
    for number, weight in enumerate(planner.weights):
        wanted: dict[tuple[int, int, int], int] = {}
        for held in planner.held(weight):
            key = (number, held.place, held.part)
            wanted[key] = wanted.get(key, 0) + regions.volume(held.piece.huggingface)
        for key, count in wanted.items():
            if sum(map(regions.volume, taken.get(key, []))) != count:
                lacking[weight.name_of(weight.shape_of.parts[key[2]].name)] = None
    if lacking:
        names = list(lacking)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"the engine does not keep all of {', '.join(names[:5])}{more}; a trainer's tensors "
            "can be made only from an engine that keeps the whole model"
        )
