"""How weights reach the servers: settings that go together, a folder that can be written, room."""

import os
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from hybridflow import owned
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.model import is_known
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.schema_roles import SyncSection
from megatron_bridge.convert.sizes import show_bytes
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.translation import resolve

_SECTION = "roles.rollout.sync"
_DIRECTORY = f"{_SECTION}.directory"
SMALLEST_BUCKET = 4096


def folder_faults(context: Context) -> Iterator[Fault]:
    """A folder for weights that cannot be written; of several nodes this one may have none."""
    rollout = context.recipe.roles.rollout
    if rollout is None or context.recipe.cluster.nodes > 1:
        return
    directory = Path(rollout.sync.directory)
    if why := _refusal(directory):
        what = f"{directory} is no folder that can be written ({why}): weights cannot be published"
        yield context.fault(_DIRECTORY, what, "make it, or choose another")


def _refusal(directory: Path) -> str:
    """Why no file can be made there; file systems refuse more than permissions tell."""
    if not directory.is_dir():
        return "there is no such folder"
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def room_faults(context: Context) -> Iterator[Fault]:
    """Too little memory for standby's two versions, where all servers are on this host."""
    recipe, config = context.recipe, context.hf_config
    rollout = recipe.roles.rollout
    if rollout is None or recipe.cluster.nodes > 1 or "rollout" not in context.plan.roles:
        return
    directory = Path(rollout.sync.directory)
    if not rollout.sync.stands_by or config is None or not is_known(config) or _refusal(directory):
        return
    elements = sum(map(prod, huggingface_shapes(resolve(config)).values()))
    version = elements * (4 if recipe.model.dtype == "float32" else 2)
    servers = rollout.parallel.dp
    need = 2 * version * servers  # and some padding, and what ranks of a server hold alike
    if need > _free(directory):
        owned.remove_abandoned(directory, owned.SYNC_FOLDERS)  # as the run would
    if need > (free := _free(directory)):
        what = (
            f"standby keeps two versions ({show_bytes(version)} each) beside each of {servers} "
            f"server(s): {show_bytes(need)} in {directory}, where {show_bytes(free)} are free"
        )
        fix = "free some, give the folder more, set another directory, or `mode: bucketed`"
        yield context.fault(_DIRECTORY, what, fix)


def _free(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def transport_faults(context: Context) -> Iterator[Fault]:
    """Ways of publishing that do not go together, and settings that do nothing."""
    rollout = context.recipe.roles.rollout
    if rollout is None:
        return
    sync = rollout.sync
    if sync.transport == "broadcast" and rollout.engine != "sglang":
        what = "broadcast is SGLang's own way of taking weights; the local engine has none"
        yield context.fault(f"{_SECTION}.transport", what, "use `direct` or `disk`")
    yield from _idle_faults(context, sync)
    memory = Path(sync.directory).resolve().is_relative_to("/dev/shm")
    if sync.transport == "disk" and memory and context.recipe.cluster.nodes > 1:
        what = f"{sync.directory} is the memory of one machine; the other nodes would not see it"
        fix = "name a folder of a file system that all nodes share, or use transport: direct"
        yield context.fault(_DIRECTORY, what, fix)
    if sync.pause == "in_place" and sync.transport != "direct":
        what = f"pause: in_place keeps caches, which servers drop that load over `{sync.transport}`"
        fix = "use retract, or transport: direct"
        yield context.fault(f"{_SECTION}.pause", what, fix)
    elif sync.pause == "in_place" and rollout.max_staleness == 0:
        what = (
            "pause: in_place goes on with a cache of older weights, which max_staleness 0 excludes"
        )
        fix = "use retract, or allow roles.rollout.max_staleness of 1 or more"
        yield context.fault(f"{_SECTION}.pause", what, fix)


def _idle_faults(context: Context, sync: SyncSection) -> Iterator[Fault]:
    if sync.mode is not None and sync.transport != "direct":
        what = f"mode: {sync.mode} is a way of `direct`; `{sync.transport}` has no modes"
        yield context.fault(f"{_SECTION}.mode", what, "remove it, or use transport: direct")
    if sync.transport == "disk" and sync.bucket != SyncSection.model_fields["bucket"].default:
        what = "bucket bounds what is on its way in `direct` and `broadcast`; `disk` has no buckets"
        yield context.fault(f"{_SECTION}.bucket", what, "remove it, or use transport: direct")
    elif sync.bucket_bytes < SMALLEST_BUCKET:
        what = f"bucket: {sync.bucket} would cut every row of the weights to pieces"
        yield context.fault(f"{_SECTION}.bucket", what, "write 4KiB or more, such as 512MiB")
    if sync.full_every is not None and sync.transport != "disk":
        what = f"full_every counts versions on disk; `{sync.transport}` writes none"
        fix = "remove it, or use transport: disk"
        yield context.fault(f"{_SECTION}.full_every", what, fix)


CHECKS = (
    Check(("roles.rollout",), transport_faults),
    Check((_SECTION, "cluster"), folder_faults),
    Check(
        ("roles.rollout", "cluster", "model", "dataflow", "warm_start.dataflow"),
        room_faults,
    ),
)
