"""The subcommands of `hybridflow`: one file each, with `add(subparsers)` and a run function."""
