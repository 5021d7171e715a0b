"""Numbers and durations as people read them."""

import math


def number(value: float) -> str:
    """At most four significant digits: 0.5123, 12.3, 1,234, 3.2e-06."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e7):
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    text = f"{value:.4f}" if size < 1 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """4.2 ms, 0.42 s, 12.3 s, 2:05, 3:07:09."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
