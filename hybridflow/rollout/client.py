"""The one client of SGLang's HTTP protocol, for the real server and for the local engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests

from hybridflow.rollout import loading
from hybridflow.rollout.errors import LoadFailed, RolloutError, RolloutTimeout, root_cause
from hybridflow.rollout.protocol import LoaderStatus, Sample, Sampling, VersionSpan

__all__ = ["LoadFailed", "RolloutClient", "RolloutError", "RolloutTimeout"]

_SEED_LIMIT = 1 << 62


class RolloutClient:
    """Calls one server. Threads may share it; connections are kept alive (TCP_NODELAY).

    `timeout` is the deadline in seconds of each call, of a generation included. `vocab_size`, where
    known, lets a wrong token id fail here: one ends a whole SGLang server.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 600.0,
        vocab_size: int | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.vocab_size = vocab_size
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy must not see a loopback server's traffic
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        """Close the kept connections."""
        self._session.close()

    def health(self, timeout: float = 5.0) -> bool:
        """Whether the server answers 200 within `timeout` seconds."""
        try:
            answer = self._session.get(self.url + "/health", timeout=timeout)
        except (requests.ConnectionError, requests.Timeout):
            return False
        return answer.status_code == 200

    def model_info(self) -> dict[str, Any]:
        """The server's model path, weight_version and more."""
        return self._call("GET", "/model_info")

    def server_info(self) -> dict[str, Any]:
        """The server's resolved settings, tp_size and dtype among them."""
        return self._call("GET", "/server_info")

    def generate(
        self,
        prompts: list[list[int]],
        samples: int,
        sampling: Sampling,
        *,
        positions: Sequence[int] | None = None,
        request_id: str | None = None,
    ) -> list[list[Sample]]:
        """`samples` responses to each prompt (token ids), in the prompts' order.

        Seeds come from each prompt's place in the whole of which these are a part: `positions`,
        or 0, 1, ... The server's answer must bear `request_id`.
        """
        if not prompts or samples < 1:
            raise ValueError(f"generate: {len(prompts)} prompts x {samples} samples is nothing.")
        self._check_ids(prompts)
        body = {
            "input_ids": [prompt for prompt in prompts for _ in range(samples)],
            "sampling_params": _parameters(sampling, _rows(positions, len(prompts), samples)),
            "return_logprob": True,
        }
        if request_id is not None:
            body["rid"] = request_id
        answers = self._call("POST", "/generate", body)
        if len(answers) != len(body["input_ids"]):
            raise RolloutError(
                f"{self.url}/generate answered {len(answers)} of {len(body['input_ids'])} samples."
            )
        for answer in answers:
            if request_id is not None and not str(answer["meta_info"]["id"]).startswith(request_id):
                raise RolloutError(
                    f"{self.url}/generate answered request {answer['meta_info']['id']} when asked "
                    f"for {request_id}."
                )
        rows = [_sample(answer) for answer in answers]
        return [rows[at : at + samples] for at in range(0, len(rows), samples)]

    def _check_ids(self, prompts: list[list[int]]) -> None:
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"generate: prompt {number} is empty.")
            if self.vocab_size and not (min(prompt) >= 0 and max(prompt) < self.vocab_size):
                raise ValueError(
                    f"generate: prompt {number} holds an id outside the model's vocabulary "
                    f"[0, {self.vocab_size})."
                )

    def pause(self, mode: str = "retract") -> None:
        """Stop generating. `retract` requeues what runs, `abort` ends it, `in_place` freezes it."""
        self._call("POST", "/pause_generation", {"mode": mode})

    def continue_(self) -> None:
        """Go on after `pause`."""
        self._call("POST", "/continue_generation", {})

    def abort(self) -> None:
        """End every running and waiting request; each answers with what it has."""
        self._call("POST", "/abort_request", {"abort_all": True})

    def flush_cache(self) -> None:
        """Drop cached prefixes; refused while requests run."""
        self._call("POST", "/flush_cache?timeout=10")

    def update_from_disk(self, folder: str | Path, version: int | None = None) -> None:
        """Load the HuggingFace folder's weights in place and drop cached prefixes.

        Without `version` the server keeps its version's name (see `set_version`).
        """
        body: dict[str, Any] = {"model_path": str(folder), "flush_cache": True}
        if version is not None:
            body["weight_version"] = str(version)
        self._call("POST", "/update_weights_from_disk", body)

    def begin_weight_update(self) -> None:
        """Open a session for weights; one that a dead caller left open is closed first."""
        try:
            self._call("POST", "/begin_weight_update", {})
        except RolloutError as error:
            if error.status != 400 or "already open" not in str(error):
                raise
            self.end_weight_update()
            self._call("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the session."""
        self._call("POST", "/end_weight_update", {})

    def load_through(
        self,
        folder: str | Path,
        controls: Sequence[dict[str, Any]],
        *,
        flush_cache: bool = True,
    ) -> list[LoaderStatus]:
        """Have the loader inside the server do `controls`, one per rank in order; their statuses.

        `folder` is the sync folder that the server was started with, on this host. The server
        should be paused (`retract`); its version keeps its name (see `set_version`).

        Raises:
            LoadFailed: when a rank refused, failed, or wrote no status.
        """
        nonce = uuid.uuid4().hex
        named = [
            {"nonce": nonce, **control, "rank": rank, "status": f"status-{nonce}-{rank}.json"}
            for rank, control in enumerate(controls)
        ]
        self.begin_weight_update()
        refusal: RolloutError | None = None
        try:
            self._call("POST", "/update_weights_from_tensor", loading.request(named, flush_cache))
        except RolloutError as error:
            if error.status is None:  # no answer: a session may be open, which the next call closes
                raise
            refusal = error
        self.end_weight_update()
        statuses = [loading.take_status(Path(folder) / control["status"]) for control in named]
        return loading.all_loaded(self.url, named, statuses, refusal)

    def set_version(self, version: int) -> None:
        """Name the weights the server holds; responses carry it from here on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._call("POST", "/update_weight_version", body)

    def checksum(self) -> str:
        """The digest of the server's live parameters (see `weight_sync.checksum`)."""
        return self._call("POST", "/weights_checker", {"action": "checksum"})["per_engine_checksum"]

    def wait_until_healthy(self, timeout: float) -> None:
        """Wait for /health; RolloutTimeout after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.health():
            if time.monotonic() > deadline:
                raise RolloutTimeout(f"{self.url} was not healthy within {timeout:.0f} s.")
            time.sleep(0.1)

    def join_weight_group(self, invitation: dict[str, Any], timeout: float) -> None:
        """Have the server's ranks join a trainer's group; rank 0 must be there already.

        RolloutTimeout after `timeout` seconds: the server then waits on, and needs a restart.
        """
        self._call("POST", "/init_weights_update_group", invitation, timeout)

    def update_from_group(self, group: str, bucket: dict[str, Any], timeout: float) -> None:
        """Load one bucket that rank 0 broadcasts: whole tensors by `names`, `dtypes`, `shapes`."""
        body = {key: bucket[key] for key in ("names", "dtypes", "shapes")}
        body |= {"group_name": group, "load_format": "flattened_bucket", "flush_cache": True}
        self._call("POST", "/update_weights_from_distributed", body, timeout)

    def leave_weight_group(self, group: str, timeout: float) -> None:
        """Undo `join_weight_group`."""
        self._call("POST", "/destroy_weights_update_group", {"group_name": group}, timeout)

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """One call; returns the parsed JSON, or the text where the answer is not JSON."""
        timeout = timeout or self.timeout
        try:
            answer = self._session.request(method, self.url + path, json=body, timeout=timeout)
        except requests.Timeout as error:
            raise RolloutTimeout(
                f"{self.url}{path} did not answer within {timeout:.0f} s."
            ) from error
        except requests.RequestException as error:
            raise RolloutError(f"{self.url}{path}: connection lost: {root_cause(error)}") from error
        if answer.status_code != 200:
            raise RolloutError(
                f"{self.url}{path} answered {answer.status_code}: {answer.text[:2000]}",
                answer.status_code,
            )
        if "json" not in answer.headers.get("Content-Type", ""):
            return answer.text
        result = answer.json()
        if isinstance(result, dict) and result.get("success") is False:
            raise RolloutError(f"{self.url}{path} failed: {result.get('message')}")
        return result


def _rows(positions: Sequence[int] | None, prompts: int, samples: int) -> list[int]:
    """Number of each sample in the whole, of which the prompts at `positions` are asked for."""
    places = range(prompts) if positions is None else positions
    return [place * samples + sample for place in places for sample in range(samples)]


def _parameters(sampling: Sampling, rows: list[int]) -> dict[str, Any] | list[dict[str, Any]]:
    """`sampling_params` in SGLang's words; one entry per row when seeded, each its own seed."""
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is None:
        return parameters
    return [
        {**parameters, "sampling_seed": (sampling.seed * 1_000_003 + row) % _SEED_LIMIT}
        for row in rows
    ]


def _sample(answer: dict[str, Any]) -> Sample:
    meta = answer["meta_info"]
    tokens, logprobs = list(answer["output_ids"]), meta["output_token_logprobs"]
    assert len(tokens) == len(logprobs), "a server gave tokens without log-probabilities"
    version = str(meta["weight_version"])
    spans = meta.get("weight_versions") or [{"version": version, "start": 0, "end": len(tokens)}]
    return Sample(
        tokens=tokens,
        logprobs=[entry[0] for entry in logprobs],
        finish_reason=(meta["finish_reason"] or {"type": "abort"})["type"],
        weight_version=version,
        spans=tuple(VersionSpan(str(s["version"]), s["start"], s["end"]) for s in spans),
    )
