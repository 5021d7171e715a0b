"""A tokenizer that does not load is an error that names its folder."""

from pathlib import Path

import pytest

from hybridflow.data import load_tokenizer


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "none"}}'])
def test_a_broken_tokenizer_names_the_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ValueError, match=rf"model.path: {tmp_path} has no tokenizer that loads: "):
        load_tokenizer(tmp_path)
