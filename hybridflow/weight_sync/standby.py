"""Standby: a whole version waits beside the server, which copies it in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridflow.weight_sync.checksum import engine_digest, rank_digest
from hybridflow.weight_sync.inbox import WeightMismatch
from hybridflow.weight_sync.receiver import LoaderClient, Proofs, Receiver, some
from hybridflow.weight_sync.slots import Slot, create_slot, slot_digests
from hybridflow.weight_sync.streams import copies_digest
from megatron_bridge.reshard import Routes


class StandbyReceiver(Receiver):
    """Every engine rank has two slots of a whole shard each, in shared memory.

    One takes the next version while the server generates, is proven, and is then copied into the
    paused server. The other still holds the version before: the way back, and what a server that
    was started anew gets.
    """

    mode = "standby"

    def __init__(self, routes: Routes, *args: Any, **named: Any) -> None:
        super().__init__(routes, *args, **named)
        self._pairs: list[list[Slot]] = [[] for _ in self._layouts]
        self._held: list[int | None] = [None, None]
        self._digests: list[list[dict[str, str]] | None] = [None, None]
        self._served: int | None = None
        engines = sum(seats[0].host == self._host for seats in routes.engines)
        slots = 2 * engines * len(self._layouts)
        whole = 2 * engines * sum(layout.bytes for layout in self._layouts)
        self._among = f" (one of {slots} on this host, {whole / 1e6:.1f} MB in all)"

    def _places(self, version: int) -> dict[str, Any]:
        """The slots that do not hold the served version."""
        self._make_missing()
        serving = self._held.index(self._served) if self._served in self._held else 1
        number = 1 - serving
        self._held[number], self._digests[number] = version, None
        return {"slots": tuple(str(pair[number].path) for pair in self._pairs)}

    def _make_missing(self) -> None:
        """Both slots of each rank: when first needed, and where a cleaner removed them."""
        for rank, (pair, layout) in enumerate(zip(self._pairs, self._layouts, strict=True)):
            for number, letter in enumerate("ab"):
                if number < len(pair) and pair[number].is_there():
                    continue
                self._held[number], self._digests[number] = None, None
                name = f"engine{self._engine}-rank{rank}-{letter}.slot"
                made = create_slot(self._folder / name, layout, self._among)
                for lost in pair[number : number + 1]:
                    lost.close()
                pair[number : number + 1] = [made]

    def receive(self, version: int) -> None:
        """Write what other hosts send into the slots.

        Raises:
            Exception: of a stream that broke; names it.
        """
        if self._remote:
            with self._incoming(version) as incoming:
                incoming.into_slots(self._plan, self._slots(version))

    def prove(self, version: int, proofs: Proofs) -> None:
        """Compare the slots with what each trainer rank hashed as it sent.

        Raises:
            WeightMismatch: names each pair of ranks that differ.
            SendFailed: names the sender that failed, and why.
        """
        slots = self._slots(version)
        with ThreadPoolExecutor(len(slots), "prove") as pool:  # hashing lets other threads run
            found = list(pool.map(self._received, slots, self._receives))
            self._compare(found, proofs, "the slot")
            self._digests[self._number(version)] = list(pool.map(slot_digests, slots))
        self.bytes = self._plan.bytes_before[-1]

    def _received(self, slot: Slot, sources: Mapping[int, Sequence[int]]) -> dict[int, str]:
        """The digest of what each trainer rank sent, as it lies in a slot."""
        tensors = [slot.tensor(index) for index in range(len(slot.layout.places))]
        return {
            source: copies_digest(self._plan, copies, tensors) for source, copies in sources.items()
        }

    def load(self, client: LoaderClient, version: int) -> None:
        """Have the loader inside the paused server copy the slots, which were proven."""
        assert self._digests[self._number(version)] is not None, "prove comes first"
        controls = [
            {
                "operation": "standby",
                "slot": slot.path.name,
                "bytes": slot.layout.bytes,
                "parameters": slot.layout.entries(),
            }
            for slot in self._slots(version)
        ]
        client.load_through(self._folder, controls, flush_cache=not self._keep_cache)

    def give_up(self, version: int, why: str) -> None:
        """Nobody waits: what was sent is in the slot."""

    def check(self, client: LoaderClient, version: int, proofs: Proofs = ()) -> str:
        """The digest of the server's live parameters, after comparing it with the slots'.

        Raises:
            WeightMismatch: names the parameters that differ.
        """
        want = self._digests[self._number(version)]
        assert want is not None, "prove comes first"
        expected = engine_digest(map(rank_digest, want))
        if self._device != "cpu" or client.checksum() != expected:
            self._name_differences(client, version, want)
        self._served = version
        return expected

    def _name_differences(
        self, client: LoaderClient, version: int, want: list[dict[str, str]]
    ) -> None:
        live = self._ask_all(client, {"operation": "digest"})
        wrong = [
            f"rank {rank}'s {name}"
            for rank, (have, told) in enumerate(zip(live, want, strict=True))
            for name in told
            if have.get(name) != told[name]
        ]
        if self._device == "cpu" and not wrong:
            wrong = ["its own checksum, though its parameters are as they should be"]
        if wrong:
            raise WeightMismatch(
                f"{client.url} holds other weights than version {version} in its slots: "
                f"{some(wrong)}."
            )

    def restore(self, client: LoaderClient, version: int) -> str:
        """Copy ``version`` from its slots again, into a server in doubt or started anew; the digest
        of its live parameters.

        Raises:
            ValueError: they do not hold it, are gone, or it was never proven there.
        """
        if version not in self._held or self._digests[self._number(version)] is None:
            raise ValueError(
                f"engine {self._engine} holds no proven version {version} beside its server."
            )
        if gone := [str(slot.path) for slot in self._slots(version) if not slot.is_there()]:
            raise ValueError(f"something has removed slots of version {version}: {some(gone)}.")
        self.load(client, version)
        return self.check(client, version)

    def close(self) -> None:
        """Remove this engine's files."""
        for pair in self._pairs:
            for slot in pair:
                slot.close()
        super().close()

    def _number(self, version: int) -> int:
        assert version in self._held, f"version {version} was not opened"
        return self._held.index(version)

    def _slots(self, version: int) -> list[Slot]:
        return [pair[self._number(version)] for pair in self._pairs]
