"""Generation on the trainer's own devices: HybridFlow's 3D-HybridEngine.

Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", EuroSys 2025, section 5. The
trainer has tensor parallel size t, pipeline size p and d replicas; generation has t_g (and p_g).
A generation rank's shard is t*p / (t_g*p_g) training shards. The ranks of one *micro data-parallel
group* hold these: each of them needs the others' and keeps its own where it is.
"""

from fractions import Fraction
from typing import NamedTuple

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard.routes import Routes

Engines = tuple[tuple[int, ...], ...]


def assignment(layout: ParallelLayout, generation_tp: int) -> Engines:
    """Which trainer rank's device each engine rank runs on, so that training shards are reused.

    The generation shard of a device holds the training shard of that device: generation rank g
    runs where the training tensor parallel rank is within ``[g*t/t_g, (g+1)*t/t_g)``. Engines with
    t_g = t are the tensor parallel groups as they are.

    Example:
        t = 4, p = d = 1, t_g = 2: engines (0, 2) and (1, 3); micro groups (0, 1) and (2, 3).

    Returns:
        ``engines[engine][rank]``, in the order of their first rank.

    Raises:
        ValueError: generation_tp does not divide the trainer's tp.
    """
    stride = _stride(layout, generation_tp)
    return tuple(
        tuple(base + first + stride * rank for rank in range(generation_tp))
        for base in range(0, layout.world, layout.tp)
        for first in range(stride)
    )


def vanilla(layout: ParallelLayout, generation_tp: int) -> Engines:
    """As ``assignment``, with consecutive ranks as one engine.

    Few devices then need the training shard that they hold: with t = 4 and t_g = 2 ranks 1 and 2
    hold nothing of their generation shards.

    Raises:
        ValueError: generation_tp does not divide the trainer's tp.
    """
    _stride(layout, generation_tp)
    return tuple(
        tuple(range(first, first + generation_tp))
        for first in range(0, layout.world, generation_tp)
    )


def micro_groups(layout: ParallelLayout, generation_tp: int) -> Engines:
    """Trainer ranks whose shards are one generation shard, of which each needs the others'.

    Consecutive tensor parallel ranks, of all pipeline stages, of one replica: t*p/t_g ranks. There
    is one group for each replica and generation rank.

    Raises:
        ValueError: generation_tp does not divide the trainer's tp.
    """
    stride = _stride(layout, generation_tp)
    return tuple(
        tuple(
            layout.rank(tp=tp, dp=dp, pp=pp)
            for pp in range(layout.pp)
            for tp in range(stride * rank, stride * (rank + 1))
        )
        for dp in range(layout.dp)
        for rank in range(generation_tp)
    )


def _stride(layout: ParallelLayout, generation_tp: int) -> int:
    if generation_tp < 1 or layout.tp % generation_tp:
        fitting = [n for n in range(1, layout.tp + 1) if layout.tp % n == 0]
        raise ValueError(
            f"a rollout tp of {generation_tp} does not divide the trainer's tp={layout.tp}, so "
            f"that training shards cannot be reused; choose from {fitting}"
        )
    return layout.tp // generation_tp


class Transition(NamedTuple):
    """What going from training to generation costs one device, in bytes.

    Attributes:
        volume: received from other devices.
        peak: most memory that parameters of generation take.
        redundancy: memory of training weights that generation does not use, or of a second copy.
    """

    volume: Fraction
    peak: Fraction
    redundancy: Fraction


def deepspeed_chat(model: int, layout: ParallelLayout) -> Transition:
    """DeepSpeed-Chat's (the paper's table 2): ZeRO over all devices, gathered on all of them.

    volume (tpd - 1)/(tpd) M, peak M, redundancy M/(tpd), of a model of M = ``model`` bytes.
    """
    ranks = layout.world
    return Transition(Fraction(model * (ranks - 1), ranks), Fraction(model), Fraction(model, ranks))


def hybridflow_vanilla(model: int, layout: ParallelLayout) -> Transition:
    """HybridFlow-V's (the paper's table 2): gathered within a replica, groups as in ``vanilla``.

    volume (tp - 1)/(tp) M, peak M, redundancy M/(tp).
    """
    ranks = layout.tp * layout.pp
    return Transition(Fraction(model * (ranks - 1), ranks), Fraction(model), Fraction(model, ranks))


def hybridflow(
    model: int, layout: ParallelLayout, generation_tp: int, generation_pp: int = 1
) -> Transition:
    """HybridFlow's (the paper's table 2): gathered within micro groups, as in ``assignment``.

    volume (tp - t_g p_g)/(t_g p_g t p) M, peak M/(t_g p_g), redundancy 0.
    """
    train, generate = layout.tp * layout.pp, generation_tp * generation_pp
    return Transition(
        Fraction(model * (train - generate), train * generate),
        Fraction(model, generate),
        Fraction(0),
    )


def openrlhf(model: int, generation_tp: int) -> Transition:
    """OpenRLHF-like: generation on devices of its own; of one of these.

    The trainer gathers whole tensors, one at a time (each of its devices receives
    (tpd - 1)/(tpd) M), and broadcasts them to every generation device, which cuts out its share.

    volume M, peak M/t_g besides one whole tensor, redundancy M/t_g: a second copy of the weights.
    """
    share = Fraction(model, generation_tp)
    return Transition(Fraction(model), share, share)


def planned(routes: Routes) -> Transition:
    """What a plan moves whose engines run on the trainer's devices: the mean of a device.

    The counterpart of ``hybridflow``, of the parameters as they are: not all of them are cut, and
    stages differ. Redundancy is what a trainer rank holds and the engine rank on its device does
    not take from there.
    """
    traffic, devices = routes.traffic(), len(routes.trainer)
    unused = sum(routes.plan.held_bytes) - traffic.total.device
    return Transition(
        Fraction(traffic.moved, devices),
        Fraction(traffic.needed, devices),
        Fraction(unused, devices),
    )
