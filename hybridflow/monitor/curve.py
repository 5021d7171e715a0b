"""The reward curve of a run as a picture, for a README or a slide. Needs matplotlib."""

from pathlib import Path

from hybridflow.monitor import folder as files
from hybridflow.monitor.series import Series, by_stage, series_of, smooth

_SMOOTH_WINDOW = 5  # steps


def write_curve(folder: str | Path, path: str | Path | None = None) -> Path:
    """Draw reward and evaluation over the steps into a PNG (``reward_curve.png`` by default).

    Raises ValueError when the folder holds no run or no reward was recorded, ImportError with
    the remedy when matplotlib is missing.
    """
    folder = Path(folder)
    files.require_run_folder(folder)
    target = Path(path) if path is not None else folder / files.CURVE
    if target.suffix.lower() != ".png":
        raise ValueError(f"the curve is a PNG, and {target} is named otherwise; write NAME.png")
    stage, reward, evaluation = _curves(folder)
    aside = target.with_name(target.name + ".partial")
    _draw(aside, f"{files.run_name(folder)}: {stage}", reward, evaluation)
    aside.replace(target)
    return target


def _curves(folder: Path) -> tuple[str, Series, Series]:
    """The last stage that recorded a reward: its name, reward and evaluation."""
    for stage, rows in reversed(by_stage(files.read_metrics(folder)).items()):
        reward = series_of(rows, "reward/mean")
        if reward.finite:
            return stage, reward, series_of(rows, "eval/reward")
    raise ValueError(f"{folder}: no step recorded reward/mean, so there is no curve to draw.")


def _draw(path: Path, title: str, reward: Series, evaluation: Series) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "the reward curve needs matplotlib, which is not installed: "
            "run `pip install 'hybridflow[docs]'`."
        ) from error
    figure = Figure(figsize=(7.2, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(reward.steps, reward.values, color="#2563eb", alpha=0.3, linewidth=1)
    smoothed = smooth(reward.values, _SMOOTH_WINDOW)
    label = f"training reward, mean of {_SMOOTH_WINDOW} steps"
    axes.plot(reward.steps, smoothed, color="#2563eb", linewidth=2, label=label)
    if evaluation.steps:
        options = {"color": "#ea580c", "marker": "o", "markersize": 5, "linewidth": 1.2}
        axes.plot(evaluation.steps, evaluation.values, label="evaluation", **options)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, format="png")
