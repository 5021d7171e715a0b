"""The loop: stages, steps, what is recorded after each, and the export at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybridflow.dataflow import controllers
from hybridflow.dataflow.control import Pulse, StepRecord, totals_of
from hybridflow.dataflow.feed import Feed
from hybridflow.dataflow.observer import Decode, Observer
from hybridflow.dataflow.operations import Surroundings, operations
from hybridflow.dataflow.run_folder import Checkpoint, Progress, RunFolder
from hybridflow.dataflow.runner import Runner
from hybridflow.dataflow.start_model import begin_as_actor, resume_as_actor
from hybridflow.dataflow.state import Change, changes_after
from hybridflow.dataflow.steps import StepContext, StepOutcome, StepRunner
from hybridflow.dataflow.team import Team
from hybridflow.dataflow.utilisation import Utilisation
from hybridflow.dataflow.warnings import Watch
from hybridflow.monitor import Console, RunWriter
from hybridflow.recipe.plan import Plan, Stage
from hybridflow.rollout.engines import FleetEvent
from hybridflow.workers.model import ModelWorker


@dataclass
class Records:
    """Where a run's steps are recorded and shown."""

    writer: RunWriter
    console: Console
    pulse: Pulse = field(default_factory=Pulse)

    def step(self, record: StepRecord) -> None:
        """Keep and show a step."""
        told = (record.step, record.stage, record.metrics, record.node_seconds, record.seconds)
        self.writer.step(*told)
        self.console.step(*told)
        self.pulse.beat(record, totals_of(record))

    def event(self, kind: str, text: str) -> None:
        """Keep and show one line."""
        self.writer.event(kind, text)
        self.console.event(kind, text)

    def fleet_event(self, event: FleetEvent) -> None:
        """Keep what happened to a rollout engine with the end of its log; show it in one line."""
        self.writer.event(event.kind, event.text, engine=event.engine, log=event.log)
        self.console.event(event.kind, event.text)

    def state_change(self, change: Change) -> None:
        """Keep and show a change of live values."""
        details = {"version": change.version, "by": change.by, "values": dict(change.values)}
        self.writer.event("state", str(change), rule=change.rule, **details)
        if not change.rule:  # a rule may move a value in every step
            self.console.event("state", str(change))


class Trainer:
    """Runs the stages of a plan, from the start or from a checkpoint.

    ``feeds`` gives each stage's rows by the stage's name.
    """

    def __init__(
        self,
        plan: Plan,
        team: Team,
        feeds: Mapping[str, Feed],
        folder: RunFolder,
        records: Records,
        runner: Runner,
        decode: Decode,
    ) -> None:
        self._plan = plan
        self._team = team
        self._state = team.state
        self._feeds = feeds
        self._folder = folder
        self._records = records
        self._runner = runner
        self._decode = decode
        self._unfinished: tuple[Path, Progress] | None = None
        self._sources: dict[str, list[str]] = {}

    def run(self, resume: Checkpoint | None = None) -> None:
        """Every stage that is left, then the export."""
        first = resume.progress.stage_index if resume else 0
        if resume is not None:
            self._resume(resume)
        for index, stage in enumerate(self._plan.stages):
            if index < first:
                continue
            resumed = resume if index == first else None
            if resumed is None and index > 0:
                begin_as_actor(self._plan, index, self._team, self._folder.start_model_path)
                self._team.begin_stage(stage)
                fresh = {r: t for r, t in stage.trained.items() if not t.goes_on}
                rates = {f"{r}_lr": t.optimizer.lr for r, t in fresh.items()}
                self._state.begin(rates, f"the begin of stage {stage.name}")
                if stage.goes_on:
                    before = self._feeds[self._plan.stages[index - 1].name].stream
                    self._feeds[stage.name].stream.seek(before.position)
            self._run_stage(index, stage, resumed.progress if resumed else None)
        if self._plan.recipe.export:
            for folder in self._team.export(self._folder.export_path):
                self._records.event("export", f"{folder}, in HuggingFace format")

    def _resume(self, checkpoint: Checkpoint) -> None:
        """The engine's state, the data's position, and the servers' weights, proven."""
        progress = checkpoint.progress
        start_model = self._folder.start_model_path
        resume_as_actor(self._plan, progress.stage_index, self._team, start_model)
        self._team.begin_stage(self._plan.stages[progress.stage_index], resuming=True)
        self._team.load(checkpoint.folder)
        self._team.version = max(progress.weight_version, self._folder.noted_version())
        self._restore_state(checkpoint)
        self._restore_rewards(checkpoint)
        if self._team.publisher is not None:
            self._team.publish()
        stage = self._plan.stages[progress.stage_index]
        self._feeds[stage.name].stream.seek(progress.stream_position)
        self._records.event("resume", f"from {checkpoint.folder}, after step {progress.step}")

    def _restore_state(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.progress
        try:
            if progress.live:
                self._state.restore(progress.live)
        except ValueError as error:
            raise ValueError(f"{checkpoint.folder} does not fit this run: {error}") from error
        self._state.put(step=progress.global_step, weight_version=self._team.version)
        for text in changes_after(checkpoint.folder, self._folder.path):
            self._records.event("warning", f"undone, since it came after the checkpoint: {text}")

    def _restore_rewards(self, checkpoint: Checkpoint) -> None:
        """The parameters that reward roles had by then, where a reload had changed them."""
        rewards, code = checkpoint.progress.rewards, checkpoint.progress.code
        for name, digest in self._team.rewards.code().items():
            if code.get(name, digest) != digest:
                text = f"the file of the reward '{name}' is another one than at the checkpoint"
                self._records.event("warning", text)
        try:
            self._team.rewards.restore(rewards)
        except ValueError as error:
            raise ValueError(
                f"{checkpoint.folder} was written after a reload, which cannot be repeated: {error}"
            ) from error
        for role, parameters in rewards.items():
            self._records.event("reload", f"'{role}' goes on with {json.dumps(parameters)}")

    def _run_stage(self, index: int, stage: Stage, resumed: Progress | None) -> None:
        feed = self._feeds[stage.name]

        def save(context: StepContext) -> str:
            return self._save(index, stage, context)

        tell = self._records.event
        around = Surroundings(self._plan.recipe, stage, self._team, save, tell)
        kinds = self._team.kinds
        steps = StepRunner(stage.graph, operations(around), self._runner, feed, kinds)
        column = self._plan.recipe.data.source_column
        lead = stage.leads(self._plan.recipe)
        observer = Observer(stage.graph, kinds, self._decode, column, lead, self._sources)
        watch = Watch(stage.steps)
        done = 0
        if resumed is not None:
            done = resumed.step
            self._sources.update(resumed.sources)
            watch.restore(resumed.watch)
        use = self._utilisation(stage)
        before = sum(earlier.steps for earlier in self._plan.stages[:index])
        for step in range(done + 1, stage.steps + 1):
            self._state.apply()
            self._team.between.run("reload", self._records.event)
            start = time.perf_counter()
            outcome = steps.run(StepContext(stage.name, step, stage.steps, before + step))
            self._state.put(step=before + step, weight_version=self._team.version)
            seconds = time.perf_counter() - start
            metrics = self._record(outcome, observer, use, seconds)
            for text in watch.see(step, metrics):
                self._records.event("warning", text)
            controllers.move(self._state, self._plan.recipe, metrics, stage.samples)
            self._finish_checkpoint(watch)

    def _utilisation(self, stage: Stage) -> Utilisation | None:
        lead = stage.leads(self._plan.recipe)
        if lead is None:
            return None
        device = self._team.groups[lead].run(ModelWorker.device_name)[0]
        return Utilisation(self._plan, stage, lead, device)

    def _record(
        self, outcome: StepOutcome, observer: Observer, use: Utilisation | None, seconds: float
    ) -> dict[str, float]:
        """Keep and show the step; its metrics."""
        context = outcome.context
        metrics = observer.metrics(outcome, self._team.last_publish) | self._team.memory
        if "update/tokens" in metrics:
            metrics["throughput/tokens_per_second"] = metrics["update/tokens"] / seconds
        metrics |= {} if use is None else use.metrics(outcome)
        metrics |= {f"state/{name}": value for name, value in self._state.moved().items()}
        rollouts = observer.rollouts(outcome)
        self._records.writer.rollouts(context.step, rollouts, stage=context.stage)
        place = (context.stage, context.step, context.global_step)
        self._records.step(StepRecord(*place, metrics, outcome.timings.seconds, seconds))
        return metrics

    def _save(self, index: int, stage: Stage, context: StepContext) -> str:
        """The run after this step, in a folder that does not count yet; its name when it does."""
        progress = Progress(
            stage_index=index,
            step=context.step,
            global_step=context.global_step,
            stream_position=self._feeds[stage.name].stream.position,
            weight_version=self._team.version,
        )
        partial = self._folder.begin_checkpoint(progress)
        self._team.save(partial)
        self._unfinished = partial, progress
        return str(partial.with_suffix(""))

    def _finish_checkpoint(self, watch: Watch) -> None:
        """A checkpoint counts once its step is recorded: what goes on from it leaves no gap.

        It holds the live values of the step that follows, and reward parameters of this one.
        """
        if self._unfinished is None:
            return
        keep = self._plan.recipe.checkpoint.keep
        partial, progress = self._unfinished
        rewards = {role: dict(told) for role, told in self._team.rewards.parameters.items()}
        code = self._team.rewards.code()
        told = {"rewards": rewards, "code": code, "watch": watch.saved(), "sources": self._sources}
        progress = replace(progress, live=self._state.saved(), **told)
        folder = self._folder.finish_checkpoint(partial, progress, keep)
        self._unfinished = None
        self._records.event("checkpoint", str(folder))
