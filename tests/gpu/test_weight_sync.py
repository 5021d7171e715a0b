"""Weights from trainer ranks on a GPU into a server's live parameters on the same GPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hybridflow.weight_sync.bucketed import BucketedReceiver
from hybridflow.weight_sync.cuda_memory import SharedDeviceMemory
from hybridflow.weight_sync.layout import server_parameters
from hybridflow.weight_sync.receiver import Receiver
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.slots import SlotLayout
from hybridflow.weight_sync.standby import StandbyReceiver
from megatron_bridge import reshard
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Routes, Seat
from megatron_bridge.runtime import device
from tests.gpu.loader_process import LoaderProcess
from tests.tiny_models import make_model
from tests.weight_sync.shards import read_config, trainer_tensors

pytestmark = pytest.mark.gpu

LAYOUT = ParallelLayout(tp=2)
HERE = Seat("here", 0)
DTYPE = torch.float32


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert device.on_gpu(), "no CUDA device is usable"
    torch.cuda.set_device(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpu") / "model")


@pytest.fixture(scope="module")
def routes(model: Path) -> Routes:
    """Both trainer ranks and the engine's one rank on the one device."""
    config = read_config(model)
    targets = [server_parameters(config, tp=1, rank=0, device="cuda")]
    plan = reshard.plan(config, LAYOUT, targets, dtype="float32")
    return reshard.route(plan, [HERE, HERE], [[HERE]])


@pytest.fixture
def client(routes: Routes, tmp_path: Path) -> Iterator[LoaderProcess]:
    layout = SlotLayout(routes.plan.targets[0], DTYPE)
    with LoaderProcess(tmp_path, layout.entries()) as process:
        yield process


@pytest.fixture
def senders(routes: Routes, model: Path) -> list[Sender]:
    held = [
        {index: tensor.cuda() for index, tensor in tensors.items()}
        for tensors in trainer_tensors(model, LAYOUT)
    ]
    return [Sender(routes, rank, lambda t=t: t) for rank, t in enumerate(held)]


def _published(
    receiver: Receiver, senders: list[Sender], client: LoaderProcess, version: int
) -> str:
    """Publish in either mode; the digest of the live parameters."""
    endpoint = receiver.open(version)
    with ThreadPoolExecutor(len(senders) + 1) as pool:
        if receiver.mode == "bucketed":
            loading = pool.submit(receiver.load, client, version)  # type: ignore[attr-defined]
        sending = [pool.submit(sender.send, {0: endpoint}, version) for sender in senders]
        proofs = [each.result() for each in sending]
        if receiver.mode == "bucketed":
            loading.result()
    assert not [sent.fault for proof in proofs for sent in proof.values() if sent.fault]
    receiver.prove(version, proofs)  # type: ignore[attr-defined]
    if receiver.mode == "standby":
        receiver.load(client, version)  # type: ignore[attr-defined]
    return receiver.check(client, version, proofs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bucket", [20_000, 64 << 20])
def test_buckets_on_the_device_and_slots_in_memory_make_the_same_server(
    routes, senders, client, tmp_path, bucket
):
    bucketed = BucketedReceiver(routes, 0, tmp_path, bucket=bucket, device="cuda", seconds=60.0)
    first = _published(bucketed, senders, client, 1)
    assert _published(bucketed, senders, client, 2) == first
    bucketed.close()
    standby = StandbyReceiver(routes, 0, tmp_path, device="cuda", seconds=60.0)
    assert _published(standby, senders, client, 3) == first
    standby.close()


def test_a_server_that_takes_nothing_costs_the_sender_no_memory(routes, senders, tmp_path):
    receiver = BucketedReceiver(routes, 0, tmp_path, bucket=20_000, device="cuda", seconds=60.0)
    endpoint = receiver.open(1)
    receiver.give_up(1, "it is not there")
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        sent = senders[0].send({0: endpoint}, 1)[0, 0]
        assert "the server's loader stopped" in sent.fault and not sent.digest
    assert torch.cuda.mem_get_info()[0] >= free - (1 << 20)
    receiver.close()


def test_memory_is_shared_in_whole_granules():
    memory = SharedDeviceMemory(5, torch.device("cuda", 0))
    assert memory.bytes == 2 << 20 and len(memory.handle) == 64
    memory.tensor.fill_(7)
    assert int(memory.tensor.sum()) == 7 * memory.bytes
    memory.free()


def test_memory_that_the_gpu_does_not_have_is_one_clear_error():
    with pytest.raises(RuntimeError, match=r"no room; choose a smaller .*bucket"):
        SharedDeviceMemory(1 << 50, torch.device("cuda", 0))
