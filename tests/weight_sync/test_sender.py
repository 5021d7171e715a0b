"""A trainer rank's side without a server: what it holds on to, and what it refuses."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from hybridflow.weight_sync.bucketed import BucketedReceiver
from hybridflow.weight_sync.finite import NonFiniteWeights, require_finite, watch_finite
from hybridflow.weight_sync.inbox import SendFailed
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.standby import StandbyReceiver
from megatron_bridge.layout import ParallelLayout
from tests.tiny_models import make_model
from tests.weight_sync.shards import planned, routed, trainer_tensors

LAYOUT = ParallelLayout(tp=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sender") / "model")


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def test_one_send_serves_every_engine_and_a_lost_one_costs_the_others_nothing(model, tmp_path):
    plan = planned(model, LAYOUT, 2)
    routes = routed(plan, engines=2)
    held = trainer_tensors(model, LAYOUT)
    senders = [Sender(routes, rank, lambda t=t: t) for rank, t in enumerate(held)]
    receivers = [StandbyReceiver(routes, n, _folder(tmp_path, f"{n}")) for n in range(2)]
    endpoints = {n: receiver.open(1) for n, receiver in enumerate(receivers)}
    Path(endpoints[0].slots[1]).unlink()
    proofs = [sender.send(endpoints, 1) for sender in senders]
    receivers[1].prove(1, proofs)
    assert receivers[1].bytes == sum(plan.bytes_of(copy) for copy in plan.copies)
    with pytest.raises(SendFailed, match=r"engine 0 rank 1: .*cannot be opened: [\w ]+\.$"):
        receivers[0].prove(1, proofs)
    for receiver in receivers:
        receiver.close()
    assert not list(tmp_path.glob("*/*"))


def test_the_model_and_removed_slots_are_let_go(model, tmp_path):
    routes = routed(planned(model, LAYOUT, 1))
    held = trainer_tensors(model, LAYOUT)[0]
    sender = Sender(routes, 0, lambda: {n: t.detach() for n, t in held.items()})
    receiver = StandbyReceiver(routes, 0, tmp_path)
    sender.send({0: receiver.open(1)}, 1)
    storage = weakref.ref(next(iter(held.values())))
    held.clear()
    gc.collect()
    assert storage() is None
    maps = Path("/proc/self/maps")
    assert "engine0-rank0-a.slot" in maps.read_text()
    receiver.close()
    held.update(trainer_tensors(model, LAYOUT)[0])
    sender.send({}, 2)
    gc.collect()
    assert "engine0-rank0-a.slot" not in maps.read_text()


def test_slots_take_turns_and_keep_what_is_served(model, tmp_path):
    routes = routed(planned(model, ParallelLayout(), 1))
    receiver = StandbyReceiver(routes, 0, tmp_path)
    first = receiver.open(1).slots
    assert receiver.open(2).slots == first  # nothing is served yet
    receiver._served = 2
    second = receiver.open(3).slots
    assert second != first
    assert receiver.open(4).slots == second  # 3 never came to be served
    receiver.close()


def test_a_rank_of_another_host_needs_a_way(model, tmp_path):
    routes = routed(planned(model, LAYOUT, 1), elsewhere=(1,))
    with pytest.raises(ValueError, match="has no listener"):
        StandbyReceiver(routes, 0, tmp_path)


def test_tensors_that_do_not_fit_are_all_named(model):
    routes = routed(planned(model, LAYOUT, 1, dtype="bfloat16"))
    held = trainer_tensors(model, LAYOUT)[0]
    assert all(tensor.dtype == torch.float32 for tensor in held.values())
    with pytest.raises(ValueError, match="rank 0 cannot publish: .*keeps it in torch.bfloat16"):
        Sender(routes, 0, lambda: held).send({}, 1)
    with pytest.raises(ValueError, match="is not among its tensors"):
        Sender(routes, 0, dict).send({}, 1)


@pytest.mark.parametrize("kind", [StandbyReceiver, BucketedReceiver])
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_not_published(model, tmp_path, kind, number):
    """The tensor, its rank and the version are named, wherever in the tensor it is."""
    routes = routed(planned(model, LAYOUT, 1))
    held = [dict(tensors) for tensors in trainer_tensors(model, LAYOUT)]
    keys = {n: routes.plan.weights[n].key for n in held[1]}
    index = next(n for n, key in keys.items() if "linear_fc2" in key)  # without padding
    held[1][index] = held[1][index].clone()
    held[1][index][-1, -1] = number
    senders = [Sender(routes, rank, lambda t=t: t) for rank, t in enumerate(held)]
    receiver = kind(routes, 0, tmp_path)  # of buckets that hold all: nobody takes them here
    endpoints = {0: receiver.open(7)}
    senders[0].send(endpoints, 7)
    name = keys[index]
    with pytest.raises(NonFiniteWeights, match=f"version 7 .*: {name} of trainer rank 1 holds NaN"):
        senders[1].send(endpoints, 7)
    receiver.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_numbers_are_numbers(dtype):
    """Their sum is none."""
    most = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    require_finite(most, "weight", 1)
    most[3] = float("inf")
    with pytest.raises(NonFiniteWeights, match="1 of the 1000"):
        require_finite(most, "weight", 1)


def test_whole_tensors_are_all_exported_before_the_first_that_is_no_number_is_told():
    """Other ranks have their part in each."""
    held = {name: torch.ones(2) / (name != "b" and name != "c") for name in "abcd"}
    weights = watch_finite(iter(held.items()), 3)
    assert [next(weights)[0] for _ in held] == list(held)
    with pytest.raises(NonFiniteWeights, match="version 3 is not published: b holds"):
        next(weights)
