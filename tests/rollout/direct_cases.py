"""A trainer's shards to a server and back to the tests' hands: what both engines must do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.rollout.errors import LoadFailed
from hybridflow.weight_sync.bucketed import BucketedReceiver
from hybridflow.weight_sync.direct import connect_to
from hybridflow.weight_sync.endpoint import Endpoint, Link, Sent
from hybridflow.weight_sync.inbox import SendFailed, WeightMismatch
from hybridflow.weight_sync.pairs import Listener
from hybridflow.weight_sync.receiver import Receiver
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.standby import StandbyReceiver
from megatron_bridge.layout import ParallelLayout
from tests.rollout.loader_cases import Shards
from tests.weight_sync.shards import planned, routed, trainer_tensors

RECEIVERS = {"standby": StandbyReceiver, "bucketed": BucketedReceiver}
LAYOUTS = (ParallelLayout(tp=2, pp=3), ParallelLayout(pp=3, dp=2))


class Publishing:
    """A trainer of one checkpoint at a layout, and the receiver of a server's engine."""

    def __init__(
        self,
        shards: Shards,
        source: Path,
        layout: ParallelLayout,
        mode: str,
        *,
        elsewhere: tuple[int, ...] = (),
        **settings: Any,
    ) -> None:
        """``elsewhere``: trainer ranks that reach the engine through a process group alone."""
        routes = routed(planned(source, layout, len(shards.slots)), elsewhere=elsewhere)
        self.client = shards.client
        self.tensors = trainer_tensors(source, layout)
        self.senders = [
            Sender(routes, rank, lambda held=held: held, connect_to)
            for rank, held in enumerate(self.tensors)
        ]
        named = {"bucket": 10_000, "seconds": 60.0, **settings}
        if elsewhere:
            named["listener"] = Listener()
        self.receiver: Receiver = RECEIVERS[mode](routes, 0, shards.folder, **named)
        self.standby = mode == "standby"

    def send(self, endpoint: Endpoint, version: int) -> list[dict[Link, Sent]]:
        """Every trainer rank at once, as in a run."""
        with ThreadPoolExecutor(len(self.senders)) as pool:
            return list(pool.map(lambda s: s.send({0: endpoint}, version), self.senders))

    def deliver(self, version: int) -> list[dict[Link, Sent]]:
        """Up to a server that is paused and loaded; what the senders say."""
        receiver: Any = self.receiver
        endpoint = receiver.open(version)
        if self.standby:
            with ThreadPoolExecutor(1) as pool:
                receiving = pool.submit(receiver.receive, version)
                proofs = self.send(endpoint, version)
                receiving.result()
            receiver.prove(version, proofs)
            self.client.pause("retract")
            receiver.load(self.client, version)
            return proofs
        self.client.pause("retract")
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(receiver.load, self.client, version)
            proofs = self.send(endpoint, version)
            loading.result()
        return proofs

    def publish(self, version: int) -> str:
        """Both phases; the digest of the server's live parameters."""
        receiver: Any = self.receiver
        proofs = self.deliver(version)
        digest = receiver.check(self.client, version, proofs)
        self.client.continue_()
        return digest

    def close(self) -> None:
        """Give files and maps back."""
        for sender in self.senders:
            sender.close()
        self.receiver.close()


def check_publications(
    shards: Shards, layout: ParallelLayout, mode: str, elsewhere: tuple[int, ...] = ()
) -> None:
    """Published is bit for bit loaded from disk; so is a second one; the third changes nothing."""
    client = shards.client
    client.update_from_disk(shards.other)
    want, digest = shards.answers(), client.checksum()
    client.update_from_disk(shards.model)
    first = client.checksum()
    trainer = Publishing(shards, shards.other, layout, mode, elsewhere=elsewhere)
    back = trainer_tensors(shards.model, layout)
    try:
        assert trainer.publish(1) == digest == client.checksum()
        got = shards.answers()
        assert [g[0].tokens for g in got] == [g[0].tokens for g in want]
        assert [g[0].logprobs for g in got] == [g[0].logprobs for g in want]
        for held, old in zip(trainer.tensors, back, strict=True):
            for index, tensor in held.items():
                tensor.copy_(old[index])  # in place, as an optimizer's step does
        assert trainer.publish(2) == first == client.checksum()
        assert trainer.publish(3) == first
    finally:
        trainer.close()
    assert not list(shards.folder.glob("engine0-*"))


def check_a_wrong_byte_in_a_slot(shards: Shards) -> None:
    """It is found before the server is touched, and names who sent it."""
    trainer = Publishing(shards, shards.other, LAYOUTS[0], "standby")
    receiver = trainer.receiver
    assert isinstance(receiver, StandbyReceiver)
    before = shards.client.checksum()
    try:
        endpoint = receiver.open(1)
        proofs = trainer.send(endpoint, 1)
        with open(endpoint.slots[-1], "r+b") as file:
            file.seek(77)
            byte = file.read(1)[0]
            file.seek(77)
            file.write(bytes([byte ^ 1]))
        last = len(endpoint.slots) - 1
        with pytest.raises(WeightMismatch, match=rf"trainer \d+ to engine 0 rank {last}: "):
            receiver.prove(1, proofs)
        assert shards.client.checksum() == before
        lacking = [dict(sent) for sent in proofs]
        lacking[1].pop((0, last), None)
        lacking[0][0, 0] = Sent("", 0, 0.0, "OSError: it went away")
        with pytest.raises((WeightMismatch, SendFailed), match="it went away"):
            receiver.prove(1, lacking)
    finally:
        trainer.close()


def check_a_server_that_holds_something_else(shards: Shards) -> None:
    """What differs in the server is named, and the slot brings it back."""
    trainer = Publishing(shards, shards.other, LAYOUTS[0], "standby")
    receiver = trainer.receiver
    assert isinstance(receiver, StandbyReceiver)
    try:
        proofs = trainer.deliver(1)
        shards.client.update_from_disk(shards.model)
        with pytest.raises(WeightMismatch, match="rank 0's model.embed_tokens.weight"):
            receiver.check(shards.client, 1, proofs)
        receiver.restore(shards.client, 1)
        shards.client.continue_()
        assert shards.client.checksum() == shards.digest()
        with pytest.raises(ValueError, match="no proven version 2"):
            receiver.restore(shards.client, 2)
    finally:
        trainer.close()


def check_a_late_sender(shards: Shards, seconds: float) -> None:
    """The loader waits for it."""
    trainer = Publishing(shards, shards.other, LAYOUTS[1], "bucketed")
    late = trainer.senders[-1]
    send = late.send

    def later(endpoints: Any, version: int) -> Any:
        time.sleep(seconds)
        return send(endpoints, version)

    late.send = later  # type: ignore[method-assign]
    try:
        assert trainer.publish(1) == shards.digest()
    finally:
        trainer.close()


def check_a_sender_that_never_comes(shards: Shards) -> None:
    """The loader stops at its deadline and names the stream; the server lives, half changed."""
    trainer = Publishing(shards, shards.other, LAYOUTS[0], "bucketed", seconds=2.0)
    trainer.senders = trainer.senders[:-1]
    try:
        with pytest.raises(LoadFailed, match=r"trainer 5 to engine 0 .* did not come") as caught:
            trainer.deliver(1)
        assert caught.value.touched
    finally:
        trainer.close()
        shards.client.continue_()
    assert shards.client.health(timeout=60)
    shards.client.update_from_disk(shards.other)
    assert shards.client.checksum() == shards.digest()


def check_a_wrong_byte_in_a_bucket(shards: Shards) -> None:
    """The loader refuses the bucket by its number."""
    trainer = Publishing(shards, shards.other, LAYOUTS[0], "bucketed", seconds=20.0, bucket=4000)
    receiver = trainer.receiver
    try:
        endpoint = receiver.open(1)
        path, area = next(iter(endpoint.areas.values()))
        stop = threading.Event()

        def spoil() -> None:
            with open(path, "r+b", buffering=0) as file:
                while not stop.is_set():
                    file.seek(4096 + area)
                    byte = file.read(1)
                    file.seek(4096 + area)
                    file.write(bytes([byte[0] ^ 1]))

        spoiler = threading.Thread(target=spoil)
        spoiler.start()
        shards.client.pause("retract")
        try:
            with (
                ThreadPoolExecutor(1) as pool,
                pytest.raises(LoadFailed, match="is not what its sender hashed"),
            ):
                loading = pool.submit(receiver.load, shards.client, 1)  # type: ignore[attr-defined]
                trainer.send(endpoint, 1)
                loading.result()
        finally:
            stop.set()
            spoiler.join()
    finally:
        trainer.close()
        shards.client.continue_()
    assert shards.client.health(timeout=60)


def check_tensors_that_do_not_fit(shards: Shards) -> None:
    """A missing tensor and another dtype are found before anything is sent."""
    layout = LAYOUTS[0]
    plan = planned(shards.other, layout, len(shards.slots))
    routes, tensors = routed(plan), trainer_tensors(shards.other, layout)[0]
    sent = {plan.copies[n].weight for copies in routes.sends(0).values() for n in copies}
    first, second, *_ = sorted(sent)
    wrong = {**tensors, second: tensors[second].to(torch.bfloat16)}
    wrong.pop(first)
    with pytest.raises(ValueError, match=r"not among its tensors; .* is torch.bfloat16"):
        Sender(routes, 0, lambda: wrong).send({}, 1)
