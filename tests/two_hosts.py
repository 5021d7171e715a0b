"""Two hosts on this machine: network namespaces joined by a pair of virtual interfaces.

Each has its own addresses, its own loopback and its own /dev/shm; what crosses between them is
counted by the kernel. Root alone may make them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_PREFIX = "hftest"
_ADDRESSES = ("198.18.0.1", "198.18.0.2")  # a range for measurements between networks
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SECONDS = 60.0


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        namespace: its network namespace.
        address: at which the other reaches it.
        holder: the process that keeps its /dev/shm.
    """

    namespace: str
    address: str
    holder: subprocess.Popen[bytes]

    def command(self, *words: str) -> list[str]:
        """``words`` as a command on this host, in this process's working folder."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--net", "--mount"]
        return [*enter, "env", f"--chdir={Path.cwd()}", *words]

    def sent(self) -> int:
        """Bytes that its kernel has sent to the other host, headers included."""
        shown = _ip("-n", self.namespace, "-json", "-stats", "link", "show", "dev", "wire")
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it."""
        found = []
        for pid in _ip("netns", "pids", self.namespace).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found


class TwoHosts:
    """The hosts, as ``first`` and ``second``; on leaving, whatever runs on them ends."""

    def __enter__(self) -> TwoHosts:
        remove_abandoned()
        self._names = [f"{_PREFIX}{os.getpid()}{letter}" for letter in "ab"]
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            self._join()
            self.first, self.second = self._hosts()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _join(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        first, second = self._names
        ends = ["wire", "netns", first, "type", "veth", "peer", "wire", "netns", second]
        _ip("link", "add", *ends)
        for name, address, gateway in zip(
            self._names, _ADDRESSES, reversed(_ADDRESSES), strict=True
        ):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            # No router is looked for: what is counted is what processes send.
            _ip("-n", name, "link", "set", "wire", "mtu", "9000", "addrgenmode", "none")
            for interface in ("lo", "wire"):
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "route", "add", "default", "via", gateway)

    def _hosts(self) -> list[Host]:
        own_memory = "mount -t tmpfs -o size=2g tmpfs /dev/shm && echo ready && exec sleep infinity"
        for name in self._names:
            enter = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", own_memory]
            self._holders.append(subprocess.Popen(enter, stdout=subprocess.PIPE))
        for holder in self._holders:
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        return [Host(*parts) for parts in zip(self._names, _ADDRESSES, self._holders, strict=True)]

    def _remove(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        for name in self._names:
            _remove(name)


def remove_abandoned() -> None:
    """Remove the hosts of test runs that were killed."""
    for path in _NAMESPACES.glob(f"{_PREFIX}*"):
        owner = re.fullmatch(rf"{_PREFIX}(\d+)[ab]", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            _remove(path.name)


def _remove(namespace: str) -> None:
    """Kill what runs in a namespace of ours, then remove it, and its interface with it."""
    if not (_NAMESPACES / namespace).exists():
        return
    deadline = time.monotonic() + _SECONDS
    while pids := _ip("netns", "pids", namespace).split():
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()
        assert time.monotonic() < deadline, f"{pids} run in {namespace} {_SECONDS:g} s after a kill"
        time.sleep(0.05)
    _ip("netns", "delete", namespace)


@cache
def refusal() -> str | None:
    """Why this machine lets us make no hosts; None: it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}{os.getpid()}a"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except (OSError, RuntimeError) as error:
        return f"network namespaces are refused here: {error}"
    return None


def enter_network(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, onto a host's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _ip(*words: str) -> str:
    """The output of ``ip``; RuntimeError with what it says when it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
