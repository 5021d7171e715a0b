"""Tokenizers for tests of the data."""

import pytest

from hybridflow.assets.quickstart import character_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One token a digit, + - and =; id 1 ends a sequence; no chat template."""
    return character_tokenizer()


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer
