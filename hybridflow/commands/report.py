"""`hybridflow report RUN_FOLDER`: rebuild a run's report from what it wrote."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="rebuild report.html from a run folder",
        description="Rebuild report.html from a run folder; a run that still goes on will do.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="the run's `output`")
    parser.add_argument(
        "--curve",
        type=Path,
        metavar="PNG",
        help="also draw the reward curve into this file (needs matplotlib)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the report; 0, or 2 when the folder holds no run or the curve cannot be drawn."""
    from hybridflow.monitor.curve import write_curve
    from hybridflow.monitor.report import write_report

    try:
        paths = [write_report(args.folder)]
        if args.curve is not None:
            paths.append(write_curve(args.folder, args.curve))
    except (ValueError, ImportError) as error:
        print(f"hybridflow report: {error}", file=sys.stderr)  # noqa: T201
        return 2
    for path in paths:
        print(f"wrote {path}")  # noqa: T201
    return 0
