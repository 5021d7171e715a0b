"""Numbers and durations as people read them."""

import math


def number(value: float) -> str:
    """At most four significant digits: 0.5123, 12.3, 1,234, 3.2e-6."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e7):
        return _scientific(value)
    if size >= 100:
        return f"{value:,.0f}"
    text = f"{value:.4f}" if size < 1 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick(value: float) -> str:
    """A number for an axis, short: 0.25, 12, 1,500, 40k, 4.2M, 5e-4."""
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 1e4) and size < unit * 1e4:
            return f"{value / unit:.4g}{name}"
    return f"{value:,.0f}" if 1e3 <= size < 1e4 else number(value)


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


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
