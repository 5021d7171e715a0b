"""What a value of the right type must hold beside: bounds and forms of options. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LARGEST = 2**31 - 1  # what every library behind the recipe can count to
MODEL_CONFIG = "config.json"
SCORED_AT, END = "hybridflow_scored_at", "end"
"""Key of the config of a reward model that was trained here, and its value: the score is the one
after the response's end token."""
_HEADLESS = ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification")


@dataclass(frozen=True)
class Rule:
    """A rule and its words.

    Attributes:
        text: what a value must be, for messages and the reference.
        broken: why a value breaks it (an empty text: ``text`` says it all), or None.
    """

    text: str
    broken: Callable[[Any], str | None]

    def __call__(self, value: Any) -> str | None:
        """What is wrong with ``value`` in words, or None."""
        why = self.broken(value)
        if why is None:
            return None
        return f"must be {self.text}, not {value!r}" + (f": {why}" if why else "")


def _holds(text: str, holds: Callable[[Any], bool]) -> Rule:
    return Rule(text, lambda value: None if holds(value) else "")


def at_least(least: float, most: float = math.inf) -> Rule:
    """A number from ``least`` to ``most``, both among them."""
    if most == math.inf:
        return _holds(f"{least:g} or more", lambda value: value >= least)
    return _holds(f"between {least:g} and {most:g}", lambda value: least <= value <= most)


def _whole(least: int) -> Rule:
    """A whole number of things, ``least`` or more of them."""
    most = _holds(f"at most {LARGEST}", lambda value: value <= LARGEST)
    return Rule(f"{least} or more", lambda value: "" if value < least else most(value))


def above(least: float, most: float = math.inf) -> Rule:
    """A number over ``least``, at most ``most``."""
    text = f"more than {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
    return _holds(text, lambda value: least < value <= most)


def _regex(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


def _url(url: str) -> str | None:
    try:
        place = urlsplit(url)
        port = place.port  # which only reading it parses
    except ValueError as error:
        return str(error)
    if place.scheme not in ("http", "https") or not place.hostname or port == 0:
        return ""
    return "name the variable of a token by `token_env`" if place.username else None


def _schema(schema: Mapping[str, Any]) -> str | None:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        json.dumps(schema)
        kind: Any = validator_for(schema)
        kind.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path} {error.message}"
    except (TypeError, ValueError) as error:
        return str(error)
    inner = list(_mappings(schema))
    named = {str(one["$id"]).partition("#")[0] for one in inner if "$id" in one}
    for reference in (one["$ref"] for one in inner if isinstance(one.get("$ref"), str)):
        if "://" in reference and reference.partition("#")[0] not in named:
            return f"nothing is fetched, so {reference} cannot be followed"
    return None


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping within a value of JSON."""
    if isinstance(value, Mapping):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value:
        if isinstance(inner, (Mapping, list)):
            yield from _mappings(inner)


def _model_folder(path: str) -> str | None:
    folder = Path(path)
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / MODEL_CONFIG).is_file():
        return f"it holds no {MODEL_CONFIG}"
    return None


def _scoring_folder(path: str) -> str | None:
    if why := _model_folder(path):
        return why
    try:
        names = json.loads((Path(path) / MODEL_CONFIG).read_text(encoding="utf-8"))["architectures"]
        headless = [name for name in names if name.endswith(_HEADLESS)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers judges it
    return f"{headless[0]} has no trained head for whole responses" if headless else None


def _headers(told: Mapping[Any, Any]) -> bool:
    texts = all(isinstance(name, str) and isinstance(text, str) for name, text in told.items())
    return texts and all(re.fullmatch(r"[!-9;-~]+", name) for name in told)


REGEX = Rule("a Python regular expression", _regex)
URL = Rule("http://HOST[:PORT]/PATH or https://... without a password", _url)
SCHEMA = Rule("a JSON schema", _schema)
SCORING_FOLDER = Rule("the folder of a *ForSequenceClassification", _scoring_folder)
HEADERS = _holds("a mapping of names to texts", _headers)
VARIABLE = _holds("a variable's name", lambda name: bool(re.fullmatch(r"[A-Za-z_]\w*", name)))
NOT_EMPTY = _holds("a text with a letter or more", lambda text: bool(text.strip()))
COUNT = _whole(1)
INDEX = _whole(0)
DISCOUNT = above(0, 1)
SOME_WEIGHT = _holds("weights that are not all 0", any)
