"""From a plan to a finished run: data, session, team, trainer, and an orderly end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridflow.cluster import Session
from hybridflow.data import (
    PromptDataset,
    PromptRow,
    PromptStream,
    load_dataset,
    load_tokenizer,
)
from hybridflow.dataflow.control import Routes, announced, listening
from hybridflow.dataflow.data_record import check_data_record, data_record, keep_data_record
from hybridflow.dataflow.feed import Feed
from hybridflow.dataflow.live_values import live_values
from hybridflow.dataflow.row_sizes import check_sizes
from hybridflow.dataflow.run_folder import Checkpoint, RunFolder
from hybridflow.dataflow.runner import ConcurrentRunner, Runner
from hybridflow.dataflow.signals import orderly_end
from hybridflow.dataflow.state import SharedState
from hybridflow.dataflow.team import Team
from hybridflow.dataflow.trainer import Records, Trainer
from hybridflow.megatron.checkpoint import MEND
from hybridflow.monitor import Console, RunWriter
from hybridflow.monitor.report import write_report
from hybridflow.recipe.load import resolved_yaml
from hybridflow.recipe.plan import Plan, Stage


@dataclass(frozen=True)
class LaunchOptions:
    """How to run, beside what the recipe says.

    Attributes:
        resume: go on from the last checkpoint; ``if any``: where there is one, else start.
        live: whether the console draws a panel; None: on a terminal.
    """

    resume: bool | Literal["if any"] = False
    live: bool | None = None


def train(
    plan: Plan,
    open_session: Callable[[Path], Session],
    options: LaunchOptions,
    runner: Runner | None = None,
) -> Path:
    """Run the plan; returns the run's folder.

    ``open_session`` gets the folder for the workers' logs. The session is closed here, whatever
    happens; the report is written even when the run fails.
    """
    with ExitStack() as stack:
        begin_end = stack.enter_context(orderly_end())
        tokenizer = load_tokenizer(plan.recipe.model.path)
        port = stack.enter_context(listening(plan.recipe.control))
        feeds = make_feeds(plan, tokenizer)
        folder, resume = _open_folder(stack, plan, options)
        stack.enter_context(announced(port, folder.path))
        doubts = _compare_data(plan, feeds, folder, resume)
        records = stack.enter_context(_records(plan, folder, resume, options))
        records.event("start", f"{plan.recipe.name} in {folder.path}")
        if port is not None:
            text = f"{port.url} tells the run's health, and more once the workers have started"
            records.event("control", text)
        for text in dict.fromkeys(text for feed in feeds.values() for text in feed.told):
            records.event("data", text)
        for text in doubts:
            records.event("warning", text)
        with _ending(folder, records, begin_end):
            session = stack.enter_context(open_session(folder.path / "logs"))
            state = SharedState(live_values(plan), records.state_change)
            told = (records.fleet_event, folder.note_version)
            team = Team(plan, session, plan.stages[0], *told, state)
            stack.callback(team.close)
            if port is not None:
                port.routes = Routes(plan, team, records.pulse).table()
            runner = runner or _concurrent(stack)

            def decode(rows: list[list[int]]) -> list[str]:
                return tokenizer.batch_decode(rows, skip_special_tokens=True)

            Trainer(plan, team, feeds, folder, records, runner, decode).run(resume)
        return folder.path


def _concurrent(stack: ExitStack) -> ConcurrentRunner:
    runner = ConcurrentRunner()
    stack.callback(runner.close)
    return runner


def make_feeds(plan: Plan, tokenizer: Any) -> dict[str, Feed]:
    """A feed for each stage; a file that two stages read alike is tokenised once."""
    loaded: dict[tuple[str, frozenset[str]], PromptDataset] = {}

    def dataset(path: str, inputs: frozenset[str]) -> PromptDataset:
        key = path, inputs
        if key not in loaded:
            loaded[key] = load_dataset(plan.recipe.data, tokenizer, path, inputs)
        return loaded[key]

    return {stage.name: _feed(plan, stage, dataset) for stage in plan.stages}


def _feed(
    plan: Plan, stage: Stage, dataset: Callable[[str, frozenset[str]], PromptDataset]
) -> Feed:
    recipe = plan.recipe
    training = dataset(stage.data, stage.rows_of("train"))
    check_sizes(plan, stage, training)
    stream = PromptStream(training, recipe.seed, recipe.data.shuffle)
    rows: list[PromptRow] = []
    told = [training.left_out, *training.oddities]
    inputs = stage.rows_of("eval")
    if recipe.evaluation is not None and recipe.data.eval is not None and inputs:
        held_out = dataset(recipe.data.eval, inputs)
        check_sizes(plan, stage, held_out)
        count = min(recipe.evaluation.prompts or len(held_out), len(held_out))
        rows = [held_out.row(i) for i in range(count)]
        told += [held_out.left_out, *held_out.oddities]
    return Feed(stream, stage.prompts_per_step, rows, [text for text in told if text])


def _open_folder(
    stack: ExitStack, plan: Plan, options: LaunchOptions
) -> tuple[RunFolder, Checkpoint | None]:
    """The run's folder, held until the stack ends, and the checkpoint to go on from."""
    folder = RunFolder(Path(plan.recipe.folder))
    found = folder.checkpoints() if options.resume else []
    if not options.resume or (options.resume == "if any" and not found):
        folder.set_aside()
        stack.enter_context(folder.held())
        folder.write_recipe(resolved_yaml(plan.recipe))
        return folder, None
    if not found:
        raise ValueError(
            f"--resume: {folder.checkpoints_path} holds no whole checkpoint; start without "
            "--resume, or name the run's folder with output=DIR"
        )
    stack.enter_context(folder.held())
    recipe = resolved_yaml(plan.recipe)
    folder.check_same_recipe(recipe)
    _require_steps_left(plan, found[-1])
    folder.write_recipe(recipe)
    folder.remove_partial()
    return folder, found[-1]


def _require_steps_left(plan: Plan, checkpoint: Checkpoint) -> None:
    """ValueError when the recipe asks for fewer steps than the run has made, or lacks its stage."""
    if checkpoint.progress.stage_index >= len(plan.stages):
        raise ValueError(
            f"{checkpoint.folder} is damaged: it is of stage {checkpoint.progress.stage_index} "
            f"and the recipe has {len(plan.stages)}, counted from 0; {MEND}"
        )
    done, stage = checkpoint.progress.step, plan.stages[checkpoint.progress.stage_index]
    if done > stage.steps:
        raise ValueError(
            f"--resume: {checkpoint.folder} was written after step {done} of stage '{stage.name}', "
            f"which has {stage.steps} by the recipe; ask for at least {done} steps"
        )


def _compare_data(
    plan: Plan, feeds: dict[str, Feed], folder: RunFolder, resume: Checkpoint | None
) -> list[str]:
    """Keep what a new run's data are; of a resumed one, doubts whether they are the same."""
    record = data_record(plan, feeds)
    if resume is not None:
        return check_data_record(folder, record)
    keep_data_record(folder, record)
    return []


@contextmanager
def _records(
    plan: Plan, folder: RunFolder, resume: Checkpoint | None, options: LaunchOptions
) -> Iterator[Records]:
    stages = {stage.name: stage.steps for stage in plan.stages}
    place: dict[str, Any] = {}
    if resume is not None:
        stage = plan.stages[resume.progress.stage_index].name
        place = {"resume_step": resume.progress.step, "resume_stage": stage}
    with (
        RunWriter(folder.path, **place) as writer,
        Console(plan.recipe.name, stages, live=options.live) as console,
    ):
        yield Records(writer, console)


@contextmanager
def _ending(folder: RunFolder, records: Records, begin_end: Callable[[], None]) -> Iterator[None]:
    """Record how the run ended, and write its report however it did."""
    try:
        yield
    except BaseException as cause:
        begin_end()
        try:
            records.writer.event("error", f"{type(cause).__name__}: {cause}")
            if (folder.path / "metrics.jsonl").stat().st_size:
                write_report(folder.path)
        except Exception as problem:  # noqa: BLE001 - why the run ended is what must be told
            cause.add_note(f"recording the end failed too: {problem}")
        raise
    begin_end()
    records.writer.event("finish", "every stage ended")
    try:
        records.event("report", str(write_report(folder.path)))
    except (OSError, ValueError) as problem:  # the run itself is whole
        records.event("warning", f"there is no report: {problem}")
