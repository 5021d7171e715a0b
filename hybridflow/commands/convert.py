"""`hybridflow convert`, `inspect`, `diff`, `verify`: the bridge's own commands."""

from typing import Any

from megatron_bridge import cli


def add(subparsers: Any) -> None:
    """Register them; their arguments and errors are the bridge's."""
    cli.add(subparsers)
