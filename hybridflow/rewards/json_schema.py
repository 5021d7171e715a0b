"""Reward 1 when the response is JSON of a given schema."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hybridflow.rewards.tags import within


class JsonSchema:
    """1.0 when the whole response is a JSON text that the schema allows, else 0.0.

    The dialect is what the schema's ``$schema`` says, else 2020-12. References point within the
    schema; nothing is fetched.

    Args:
        schema: the JSON schema; None: each row's answer is one, as text.
        tag: look only into the last ``<tag>...</tag>`` (nothing there scores 0); None: the whole.

    Raises:
        ValueError: the schema is none.
    """

    def __init__(self, *, schema: Mapping[str, Any] | None = None, tag: str | None = None) -> None:
        self._tag = tag
        self._validator = None if schema is None else _validator(json.dumps(schema))

    def __call__(self, prompt: str, response: str, answer: object, row: dict) -> float:
        validator = self._validator or _validator(str(answer))
        text = response if self._tag is None else within(response, self._tag)
        if text is None:
            return 0.0
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return 1.0 if validator.is_valid(value) else 0.0
        except RecursionError:
            return 0.0  # nested beyond what can be checked


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema {text[:200]!r} is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a schema is an object, not {text[:200]!r}")
    kind: Any = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is not valid: {error.message}") from error
    return kind(schema, registry=Registry())  # a registry of its own: no reference is fetched
