"""The report of a run: one HTML file that opens anywhere, without a network."""

from datetime import UTC, datetime
from pathlib import Path

from hybridflow.monitor import folder as files
from hybridflow.monitor.jsonl import Row
from hybridflow.monitor.page import escape, page
from hybridflow.monitor.sections import charts, headline, node_times
from hybridflow.monitor.series import by_stage
from hybridflow.monitor.transcripts import transcripts

_MAX_EVENTS = 200
_STATES = {"finish": ("finished", "good"), "error": ("failed", "bad"), "stop": ("stopped", "bad")}


def write_report(folder: str | Path) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    Raises ValueError when the folder holds no run.
    """
    folder = Path(folder)
    files.require_run_folder(folder)
    target = folder / files.REPORT
    aside = target.with_name(target.name + ".partial")
    aside.write_text(build_report(folder), encoding="utf-8")
    aside.replace(target)
    return target


def build_report(folder: Path) -> str:
    """The report as HTML text."""
    stages = by_stage(files.read_metrics(folder))
    events = files.read_events(folder)
    title = files.run_name(folder)
    # The last stage is what the run is about: it comes first and open.
    order = list(reversed(stages.items()))
    body = [_heading(title, folder, events)]
    if not order:
        body.append('<p class="card">No step has finished yet.</p>')
    for index, (name, rows) in enumerate(order):
        body.append(_stage(name, rows, opened=index == 0))
    body += [transcripts(folder), _events(events), _recipe(folder)]
    return page(f"{title} - HybridFlow", "".join(body))


def _stage(name: str, rows: list[Row], opened: bool) -> str:
    content = headline(rows) + charts(rows) + node_times(rows)
    if opened:
        return f"<h2>Stage {escape(name)}</h2>{content}"
    heading = f"Stage {escape(name)}: {len(rows):,} steps"
    return f"<details><summary>{heading}</summary>{content}</details>"


def _heading(title: str, folder: Path, events: list[Row]) -> str:
    state, tone = _STATES.get(str(events[-1]["kind"]) if events else "", ("", ""))
    badge = f' <span class="badge {tone}">{state}</span>' if state else ""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    reason = f'<p class="bad">{escape(events[-1]["text"])}</p>' if state == "failed" else ""
    where = f'<p class="muted">{escape(folder.resolve())} &middot; written {written}</p>'
    return f"<h1>{escape(title)}{badge}</h1>{where}{reason}"


def _events(events: list[Row]) -> str:
    events = [event for event in events if not event.get("rule")]  # one a step: a curve
    if not events:
        return ""
    rows = []
    for event in events[-_MAX_EVENTS:]:
        when = datetime.fromtimestamp(float(event["time"]), UTC).strftime("%m-%d %H:%M:%S")
        tone = ' class="bad"' if event["kind"] == "error" else ""
        cells = (when, escape(event["kind"]), escape(event["text"]))
        rows.append(f"<tr{tone}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    hidden = len(events) - len(rows)
    note = f'<p class="muted">{hidden:,} earlier events are in events.jsonl.</p>' if hidden else ""
    table = f'<table class="texts"><tr><th>UTC<th>Kind<th>Text</tr>{"".join(rows)}</table>'
    return f'<h2>Events</h2><div class="card scroll">{table}</div>{note}'


def _recipe(folder: Path) -> str:
    text = files.recipe_text(folder)
    if text is None:
        return ""
    return f'<h2>Recipe, resolved</h2><div class="card"><pre>{escape(text)}</pre></div>'
