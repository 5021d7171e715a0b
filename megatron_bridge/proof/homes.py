"""A weight's homes: sets of ranks that are replicas of each other. Imports no torch.

Data parallel ranks hold the same; so do tensor parallel ranks where a weight is not cut. Together
they are one home, and gradients are summed over them, so that all must hold the very same rows.
"""

from dataclasses import dataclass

from megatron_bridge import sharding
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.proof import boxes
from megatron_bridge.proof.holders import Place
from megatron_bridge.proof.problems import Problems, show
from megatron_bridge.sharding import Holding, Placement

# Coordinates that replicas share: (pp, tp) or, for experts, (pp, ep, etp); without the last one
# where the weight is not cut.
Key = tuple[int, ...]


@dataclass(frozen=True)
class Home:
    """Replicas of one part of a weight.

    Attributes:
        ranks: all that hold it.
        holdings: what each of them holds.
    """

    ranks: frozenset[int]
    holdings: list[Holding]


class Replicas:
    """Which ranks of a layout must hold the same."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._keys: dict[tuple[bool, bool], list[Key]] = {}
        self._sets: dict[tuple[bool, bool], dict[Key, frozenset[int]]] = {}
        ranks = range(layout.world)
        plain = [layout.coordinates(rank) for rank in ranks]
        expert = [layout.expert_coordinates(rank) for rank in ranks]
        for cut in (True, False):
            self._group((False, cut), [(c.pp, c.tp)[: 1 + cut] for c in plain])
            self._group((True, cut), [(c.pp, c.ep, c.etp)[: 2 + cut] for c in expert])

    def _group(self, kind: tuple[bool, bool], keys: list[Key]) -> None:
        sets: dict[Key, list[int]] = {}
        for rank, key in enumerate(keys):
            sets.setdefault(key, []).append(rank)
        self._keys[kind] = keys
        self._sets[kind] = {key: frozenset(ranks) for key, ranks in sets.items()}

    def keys(self, weight: Weight) -> list[Key]:
        """For each rank what it shares with its replicas of the weight."""
        return self._keys[weight.row.per_expert, weight.row.cut is not None]

    def ranks(self, weight: Weight, key: Key) -> frozenset[int]:
        """All that share the key."""
        return self._sets[weight.row.per_expert, weight.row.cut is not None][key]


def homes(
    weight: Weight,
    holders: dict[int, Place],
    parts: int,
    replicas: Replicas,
    problems: Problems,
) -> list[Home]:
    """The homes of a weight; notes stages and replicas that disagree.

    Args:
        holders: rank -> model chunk and tensor parallel place.
        parts: into how many the weight is cut.
    """
    keys = replicas.keys(weight)
    places: dict[Key, dict[int, list[int]]] = {}
    for rank, (_, place) in holders.items():
        places.setdefault(keys[rank], {}).setdefault(place, []).append(rank)
    cache: dict[int, list[Holding]] = {}
    found = []
    for key, here in places.items():
        for place in here:
            if place not in cache:
                cache[place] = sharding.holdings(weight, parts, place)
        ranks = frozenset(rank for group in here.values() for rank in group)
        first = next(iter(here))
        for place, group in here.items():
            if cache[place] != cache[first]:
                _differ(weight, cache[first], cache[place], here[first], group, problems)
        missing = replicas.ranks(weight, key) - ranks
        if missing:
            what = f"is on {show(ranks)}, and not on {show(missing)}, which must hold the same"
            problems.add(*first_element(weight, cache[first]), ranks | missing, what)
        found.append(Home(ranks, cache[first]))
    return found


def _differ(
    weight: Weight,
    one: list[Holding],
    other: list[Holding],
    one_ranks: list[int],
    other_ranks: list[int],
    problems: Problems,
) -> None:
    """Replicas that hold different boxes, or the same ones in different rows."""
    changed = [holding for holding in [*one, *other] if (holding in one) != (holding in other)]
    what = (
        f"is not held alike on {show(one_ranks)} and on {show(other_ranks)}, which are replicas of "
        "each other"
    )
    problems.add(*first_element(weight, changed or one), [*one_ranks, *other_ranks], what)


def one_stage(weight: Weight, holders: dict[int, Place], layout: ParallelLayout) -> set[Place]:
    """Pipeline ranks and model chunks that hold a weight; more than one is a fault."""
    return {(layout.coordinates(rank).pp, chunk) for rank, (chunk, _) in holders.items()}


def first_element(weight: Weight, holdings: list[Holding]) -> tuple[str, tuple[int, ...] | None]:
    """The HuggingFace tensor and element that these holdings begin with."""
    for holding in holdings:
        for piece in weight.pieces(holding.box):
            part = weight.parts[piece.part]
            position = boxes.start(piece.huggingface)
            return part.name, boxes.element(part.sizes, position, part.rows[0])
    return weight.row.megatron.format(layer=weight.layer, expert=weight.expert), None


def check_owners(
    weight: Weight,
    holders: dict[int, Place],
    found: list[Home],
    placement: Placement,
    problems: Problems,
) -> None:
    """An export takes each home's part from one rank, at the place that this rank has."""
    owners, parts = placement.owners(weight), placement.tensor_parallel(weight)
    for owner in owners:
        held = holders.get(owner.rank)
        if held is None or held[1] != owner.place:
            there = "does not hold it" if held is None else f"holds part {held[1]}"
            problems.add(
                *first_element(weight, sharding.holdings(weight, parts, owner.place)),
                [owner.rank],
                f"is exported as part {owner.place} from rank {owner.rank}, which {there}",
            )
    for home in found:
        senders = [owner.rank for owner in owners if owner.rank in home.ranks]
        if len(senders) != 1:
            who = show(senders) if senders else "no rank"
            what = f"of {show(home.ranks)} is exported from {who}; it must be from one of them"
            problems.add(*first_element(weight, home.holdings), home.ranks, what)
