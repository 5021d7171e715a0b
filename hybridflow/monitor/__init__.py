"""What a run leaves behind and shows: the run folder, the console, the report. Needs no torch."""

from hybridflow.monitor.console import Console
from hybridflow.monitor.folder import read_events, read_metrics, read_rollouts
from hybridflow.monitor.writer import RunWriter

__all__ = ["Console", "RunWriter", "read_events", "read_metrics", "read_rollouts"]
