"""``hybridflow plan-sync``: what publishing a recipe's weights moves, from config files alone."""

from __future__ import annotations

import argparse
import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from hybridflow.recipe.schema import Recipe
    from hybridflow.weight_sync.wiring import Wiring
    from megatron_bridge.reshard import Traffic

_ROWS = 16


def add(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "plan-sync", help="print which bytes a recipe's weight sync moves; reads no weights"
    )
    parser.add_argument("recipe", help="path of the recipe's YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="dotted overrides"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="kind of the servers' devices; the two differ in padding (default: cpu for the local "
        "engine, which runs there alone, cuda for SGLang)",
    )
    parser.add_argument(
        "--ranks", action="store_true", help=f"print every rank, not the first {_ROWS}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan's traffic; of the model, config.json alone need exist."""
    from rich.console import Console

    from hybridflow.recipe.compile import compile_recipe
    from hybridflow.recipe.load import load_recipe
    from hybridflow.weight_sync.wiring import planned

    plan = compile_recipe(load_recipe(args.recipe, args.overrides))
    if "rollout" not in plan.roles or "actor" not in plan.layouts:
        raise ValueError(f"{args.recipe} publishes nothing: no node of its graph uses a rollout")
    wiring = planned(plan, _device(plan.recipe, args.device))
    traffic = wiring.routes.traffic()
    if args.json:
        print(json.dumps(_content(wiring, traffic), indent=2))  # noqa: T201
    elif wiring.sync.transport == "direct":
        _show(Console(), wiring, traffic, None if args.ranks else _ROWS)
    else:
        _show_whole(Console(), wiring, traffic)
    return 0


def _device(recipe: Recipe, asked: str | None) -> str:
    """Of the servers, after a look for what the plan reads.

    Raises:
        ValueError: there is no config.json, or the engine does not run there.
    """
    from hybridflow.recipe.assets import how_to_make

    path = recipe.model.path
    if not (Path(path) / "config.json").is_file():
        fix = how_to_make(path, "put the model's config.json there")
        raise ValueError(
            f"model.path: there is no {Path(path) / 'config.json'}; {fix}, or mend the path"
        )
    local = recipe.roles.servers.engine == "local"
    if local and asked == "cuda":
        raise ValueError("--device cuda: the local engine runs on the CPU; set engine: sglang")
    return asked or ("cpu" if local else "cuda")


def _whole(wiring: Wiring, traffic: Traffic) -> dict[str, int]:
    """What a transport of whole tensors moves, by step."""
    ranks = len(wiring.engines) * wiring.tp
    gathered = {"to trainer rank 0": traffic.gathered - traffic.model * ranks}
    if wiring.sync.transport == "broadcast":
        return gathered | {"to server ranks": traffic.model * ranks}
    return gathered | {"written": traffic.model, "read, at most": traffic.model * ranks}


def _content(wiring: Wiring, traffic: Traffic) -> dict[str, Any]:
    total, sync = traffic.total, wiring.sync
    told: dict[str, Any] = {"transport": sync.transport, "device": wiring.device}
    if sync.transport != "direct":
        return told | {
            "trainer": str(wiring.layout),
            "engines": {"count": len(wiring.engines), "tp": wiring.tp, "ep": wiring.ep},
            "bytes": {"model": traffic.model, "direct": traffic.moved, **_whole(wiring, traffic)},
        }
    return told | {
        "mode": sync.mode,
        "memory": _beside(wiring),
        "trainer": str(wiring.layout),
        "engines": {"count": len(wiring.engines), "tp": wiring.tp, "ep": wiring.ep},
        "bytes": {
            "model": traffic.model,
            "needed": traffic.needed,
            "lower_bound": traffic.lower_bound,
            "moved": traffic.moved,
            "gathered": traffic.gathered,
            **total._asdict(),
        },
        "sent": [sent._asdict() for sent in traffic.sent],
        "received": [[rank._asdict() for rank in engine] for engine in traffic.received],
    }


def _show(console: Console, wiring: Wiring, traffic: Traffic, rows: int | None) -> None:
    from megatron_bridge.convert.sizes import show_bytes

    console.print(_headline(wiring), soft_wrap=True)
    console.print(_memory(wiring), soft_wrap=True)
    console.print(_totals(traffic))
    console.print(_ranks("trainer rank", "sends", wiring.trainer, traffic.sent, rows))
    seats = [seat for engine in wiring.engines for seat in engine]
    received = [rank for engine in traffic.received for rank in engine]
    console.print(_ranks("engine rank", "receives", seats, received, rows))
    assert traffic.moved == traffic.lower_bound, "a plan moves what is needed and no more"
    console.print(
        f"[bold]{show_bytes(traffic.moved)}[/] leave a device, the lower bound; gathering would "
        f"move {show_bytes(traffic.gathered)}.",
        soft_wrap=True,
    )


def _show_whole(console: Console, wiring: Wiring, traffic: Traffic) -> None:
    """A transport of whole tensors: the plan of boxes is not what it moves."""
    from rich.table import Table

    from megatron_bridge.convert.sizes import show_bytes

    console.print(_headline(wiring), soft_wrap=True)
    table = Table("What", "Bytes", "Of the model")
    for name, count in {"the model, once": traffic.model, **_whole(wiring, traffic)}.items():
        table.add_row(name, show_bytes(count), f"{count / traffic.model:.3f}")
    console.print(table)
    every = wiring.sync.full_every
    if every:
        rest = f"{every - 1} of {every} versions are what changed alone, which no config file tells"
        console.print(f"The table is of a whole version; {rest}.", soft_wrap=True)
    console.print(
        f"transport: {wiring.sync.transport} moves whole tensors; direct would move "
        f"{show_bytes(traffic.moved)}.",
        soft_wrap=True,
    )


def _beside(wiring: Wiring) -> int:
    """Bytes of host memory that a server rank's weights take on their way, the fullest rank's."""
    if wiring.sync.mode != "standby":
        return 2 * wiring.sync.bucket
    size = {"float32": 4}
    return 2 * max(
        sum(prod(p.shape) * size.get(p.dtype or wiring.dtype, 2) for p in target)
        for target in wiring.plan.targets
    )


def _memory(wiring: Wiring) -> str:
    from megatron_bridge.convert.sizes import show_bytes

    size = show_bytes(_beside(wiring))
    if wiring.sync.mode == "standby":
        return f"mode standby: {size} of shared memory for the two slots of each engine rank"
    return f"mode bucketed: at most {size} for the two buckets of each stream; servers stand still"


def _headline(wiring: Wiring) -> str:
    hosts = {seat.host for seat in wiring.trainer} | {s.host for e in wiring.engines for s in e}
    shared = set(wiring.trainer) & {seat for engine in wiring.engines for seat in engine}
    experts = f" ep {wiring.ep}" if wiring.ep > 1 else ""
    return (
        f"{wiring.layout.world} trainer ranks ({wiring.layout}) -> {len(wiring.engines)} engine(s) "
        f"of tp {wiring.tp}{experts} ({wiring.device}), on {len(hosts)} host(s), {len(shared)} "
        "device(s) shared"
    )


def _totals(traffic: Traffic) -> Any:
    from rich.table import Table

    from megatron_bridge.convert.sizes import show_bytes

    table = Table("What", "Bytes", "Of the model")
    for name, count in (
        ("the model, once", traffic.model),
        ("kept by all engines", traffic.needed),
        ("lower bound: kept, and not on the same device", traffic.lower_bound),
        ("moved within a device", traffic.total.device),
        ("moved within a host", traffic.total.host),
        ("moved over the network", traffic.total.network),
        ("a sync that gathers whole tensors", traffic.gathered),
    ):
        table.add_row(name, show_bytes(count), f"{count / traffic.model:.3f}")
    return table


def _ranks(what: str, verb: str, seats: Any, counts: Any, rows: int | None) -> Any:
    from rich.table import Table

    from megatron_bridge.convert.sizes import show_bytes

    table = Table(what, "host", "device", f"{verb}: device", "host", "network", title=f"{what}s")
    moved = [count.moved for count in counts]
    shown = len(counts) if rows is None else min(rows, len(counts))
    for rank in range(shown):
        seat, count = seats[rank], counts[rank]
        table.add_row(str(rank), seat.host, str(seat.device), *map(show_bytes, count))
    if shown < len(counts):
        table.add_row("...", "", "", "", "", "")
    mean = show_bytes(sum(moved) / len(moved))
    table.caption = (
        f"off a device: least {show_bytes(min(moved))}, mean {mean}, most {show_bytes(max(moved))}"
    )
    return table
