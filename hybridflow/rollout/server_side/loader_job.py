"""One request to one rank of a server: what it asks of which parameters, and its status."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.sync_files import LoadFault, file_name, refuse
else:  # inside SGLang, this folder is on the path and the project is not
    from sync_files import LoadFault, file_name, refuse


class Job:
    """One request to one rank."""

    def __init__(
        self, parameters: Mapping[str, Tensor], rank: int, control: dict[str, Any], folder: Path
    ) -> None:
        self.parameters = {name: tensor.detach() for name, tensor in parameters.items()}
        self.rank, self.control, self.folder = rank, control, folder
        self._status_path = folder / file_name(control["status"])
        self.status: dict[str, Any] = {
            "nonce": str(control["nonce"]),
            "rank": rank,
            "pid": os.getpid(),
            "ok": False,
            "touched": False,
            "bytes": 0,
            "seconds": {},
        }

    def run(self, operations: Mapping[str, Callable[[Job], None]]) -> None:
        """Run the operation; LoadFault says what is wrong with the request."""
        operation = str(self.control.get("operation"))
        if operation not in operations:
            raise LoadFault(f"unknown operation {operation!r}; known: {', '.join(operations)}.")
        if self.control.get("rank") != self.rank:
            raise LoadFault(
                f"this is rank {self.rank}, and the request is for rank {self.control.get('rank')}."
            )
        operations[operation](self)
        self.status["ok"] = True

    def timed(self, phase: str, action: Callable[[], Any]) -> Any:
        """What `action` gives; its seconds go into the status."""
        start = time.perf_counter()
        try:
            return action()
        finally:
            self.status["seconds"][phase] = time.perf_counter() - start

    def touch(self) -> None:
        """Parameters may differ from here on."""
        self.status["touched"] = True

    def targets(self) -> list[Tensor]:
        """The parameters that the request lists, in its order; LoadFault lists every difference."""
        listed = self.control["parameters"]
        faults = []
        for name, dtype, shape, *_ in listed:
            held = self.parameters.get(name)
            if held is None:
                faults.append(f"{name} is no parameter of the server")
                continue
            have = (str(held.dtype).removeprefix("torch."), list(held.shape))
            if have != (dtype, shape):
                faults.append(f"{name} is {dtype} {shape}, the server's is {have[0]} {have[1]}")
            elif not held.is_contiguous():
                faults.append(f"{name} is not contiguous in the server")
        names = [entry[0] for entry in listed]
        faults += [f"{name} is missing" for name in self.parameters if name not in set(names)]
        if len(set(names)) != len(names):
            faults.append("a name is listed twice")
        refuse("the request does not fit the server's parameters", faults)
        return [self.parameters[name] for name in names]

    def write_status(self) -> None:
        """Write the status aside, then rename it: a reader sees it whole or not at all."""
        self.status["rss"] = _resident_bytes()
        aside = self._status_path.with_suffix(".part")
        with aside.open("w") as file:
            json.dump(self.status, file)
        aside.replace(self._status_path)


def _resident_bytes() -> dict[str, int]:
    """Resident memory of this process now and at its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))
        if key in fields
    }
