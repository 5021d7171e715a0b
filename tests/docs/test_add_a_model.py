"""The table that docs/add_a_model.md shows is the one that the bridge has."""

import re

from megatron_bridge.models import qwen3
from tests.docs.pages import ROOT

_FIELDS = ("name", "model_type", "rows", "required", "defaults", "harmless", "ignored", "models")


def test_the_example_is_qwen3s_table():
    page = (ROOT / "docs/add_a_model.md").read_text(encoding="utf-8")
    block = re.search(r'```python\n(""".*?)```', page, re.DOTALL)
    assert block is not None
    names: dict = {}
    exec(compile(block[1], "add_a_model.md", "exec"), names)  # noqa: S102 (our own page)
    (shown,), (ours,) = names["ARCHITECTURES"], qwen3.ARCHITECTURES
    assert [getattr(shown, field) for field in _FIELDS] == [
        getattr(ours, field) for field in _FIELDS
    ]
    assert (shown.features, shown.refusals) == (ours.features, ours.refusals)
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 4)
    config = {**ours.defaults, **sizes, "intermediate_size": 8}
    assert shown.transformer(config) == ours.transformer(config)
