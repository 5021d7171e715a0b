"""The table of the 3D-HybridEngine is what its program writes."""

from benchmarks import hybrid_engine


def test_the_table_is_current():
    written = hybrid_engine.PAGE.read_text(encoding="utf-8")
    assert written == hybrid_engine.page(), "run: python -m benchmarks.hybrid_engine"
