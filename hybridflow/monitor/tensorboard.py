"""Scalars for TensorBoard, written with TensorBoard's own record writer; needs no torch."""

import time
from collections.abc import Mapping
from pathlib import Path

# The generated protocol modules define their classes at run time.
from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class ScalarWriter:
    """Event files of a run: one TensorBoard run (sub-folder) per stage.

    Stages count their steps apart, so each is a curve of its own under the same tag.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stage: str | None = None
        self._writer: EventFileWriter | None = None

    def write(self, stage: str, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step and flush them to the file."""
        writer = self._open(stage, step)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    def _open(self, stage: str, step: int) -> EventFileWriter:
        if self._writer is not None and stage == self._stage:
            return self._writer
        self.close()
        self._writer = EventFileWriter(str(self._folder / stage_folder(stage)))
        self._stage = stage
        # A session start makes TensorBoard drop what an earlier process wrote from here on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def stage_folder(stage: str) -> str:
    """The stage's name as one folder name: it cannot leave the TensorBoard folder."""
    kept = "".join(char if char.isalnum() or char in "-_." else "_" for char in stage)
    return kept.strip(".") or "stage"
