"""Reading a /generate body: every fault at once, before a row exists."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hybridflow.recipe.names import hint
from hybridflow.rollout.local.model import Decoder
from hybridflow.rollout.local.rows import Request, Row
from hybridflow.rollout.protocol import Sampling

_BODY = {"input_ids", "sampling_params", "return_logprob", "rid"}
_PARAMETERS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "sampling_seed": "seed",
    "stop_token_ids": "stop_token_ids",
}
assert set(_PARAMETERS.values()) == {field.name for field in fields(Sampling)}


def read_generate(body: Mapping[str, Any], model: Decoder) -> Request:
    """The request that `body` asks for. ValueError for anything that the engine cannot do."""
    unknown = sorted(set(body) - _BODY)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; {hint(unknown[0], _BODY)}")
    prompts = body.get("input_ids")
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("input_ids must be a list of token ids, or a list of such lists.")
    if isinstance(prompts[0], int):
        prompts = [prompts]
    samplings = _samplings(body.get("sampling_params") or {}, len(prompts))
    request = Request(str(body.get("rid") or secrets.token_hex(8)))
    request.rows = [
        _row(request, number, prompt, sampling, model)
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    return request


def _samplings(parameters: Any, rows: int) -> list[Sampling]:
    if isinstance(parameters, Mapping):
        return [_sampling(parameters)] * rows
    if not isinstance(parameters, list) or len(parameters) != rows:
        raise ValueError("sampling_params must be one object, or a list with one per prompt.")
    return [_sampling(entry) for entry in parameters]


def _sampling(parameters: Any) -> Sampling:
    if not isinstance(parameters, Mapping):
        raise ValueError("sampling_params must hold objects.")
    unknown = sorted(set(parameters) - set(_PARAMETERS))
    if unknown:
        known = hint(unknown[0], _PARAMETERS)
        raise ValueError(f"unknown sampling parameter {unknown[0]!r}; {known}")
    values = {_PARAMETERS[key]: value for key, value in parameters.items()}
    for name, kinds in (
        ("max_tokens", int),
        ("temperature", (int, float)),
        ("top_p", (int, float)),
        ("top_k", int),
        ("seed", (int, type(None))),
    ):
        if name in values and (
            not isinstance(values[name], kinds) or isinstance(values[name], bool)
        ):
            raise ValueError(f"sampling parameter {name} is {values[name]!r}, not a number.")
    if not _are_ids(values.get("stop_token_ids", []), 1 << 62):
        raise ValueError("stop_token_ids must be a list of token ids.")
    values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
    return Sampling(**{"max_tokens": 128, **values})


def _row(request: Request, number: int, prompt: Any, sampling: Sampling, model: Decoder) -> Row:
    vocab = model.geometry.vocab
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"prompt {number} is empty or no list of token ids.")
    if not _are_ids(prompt, vocab):
        raise ValueError(f"prompt {number} holds an id outside the vocabulary [0, {vocab}).")
    total = len(prompt) + sampling.max_tokens
    if total > model.context_length:
        raise ValueError(
            f"prompt {number} has {len(prompt)} tokens; with max_new_tokens "
            f"{sampling.max_tokens} that is over the model's {model.context_length}."
        )
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return Row(
        request=request,
        prompt=prompt,
        max_tokens=sampling.max_tokens,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=sampling.top_k,
        seed=seed,
        stop_ids=model.eos_ids | frozenset(sampling.stop_token_ids),
    )


def _are_ids(values: Any, limit: int) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < limit for value in values
    )


def answer(request: Request, version: str) -> list[dict[str, Any]]:
    """The request's rows in SGLang's words."""
    return [_answer_row(request, index, row, version) for index, row in enumerate(request.rows)]


def _answer_row(request: Request, index: int, row: Row, version: str) -> dict[str, Any]:
    spans = [{"version": name, "start": start, "end": end} for name, start, end in row.spans]
    logprobs = [[value, token, None] for value, token in zip(row.logprobs, row.tokens, strict=True)]
    return {
        "output_ids": row.tokens,
        "meta_info": {
            "id": f"{request.rid}-{index}",
            "finish_reason": row.finish,
            "prompt_tokens": len(row.prompt),
            "completion_tokens": len(row.tokens),
            "weight_version": spans[-1]["version"] if spans else version,
            "weight_versions": spans,
            "output_token_logprobs": logprobs,
        },
    }
