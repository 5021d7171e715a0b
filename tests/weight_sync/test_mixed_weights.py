"""No token comes from other weights than its version names, while versions replace each other.

An engine is asked by several threads without a pause; meanwhile its weights change twenty times and
more. transformers then says, for every token of every response, what the named version's weights
give for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hybridflow.rollout import Sample, Sampling
from hybridflow.rollout.client import RolloutClient
from tests.tiny_models import VOCAB, make_model, reference
from tests.weight_sync.publications import Publications, engines

ASKING = 4
VERSIONS = 24
BETWEEN = 16  # responses from one publication to the next
TOLERANCE = 1e-4
PAUSES = ("retract", "abort", "in_place")
Response = tuple[list[int], Sample]


class Load:
    """Threads that ask without a pause; what they were answered."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.responses: list[Response] = []
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(ASKING)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not self._errors, self._errors

    def _ask(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not self._stop.is_set():
                prompts = [
                    [chance.randrange(2, VOCAB) for _ in range(chance.randrange(2, 9))]
                    for _ in range(3)
                ]
                sampling = Sampling(chance.randrange(8, 33))
                groups = self._client.generate(prompts, 2, sampling)
                for prompt, samples in zip(prompts, groups, strict=True):
                    self.responses += [(prompt, sample) for sample in samples]
        except Exception as error:  # noqa: BLE001 - raised by the test's own thread
            self._errors.append(error)

    def wait_for(self, count: int) -> None:
        """Until there are so many responses."""
        deadline = time.monotonic() + 120
        while len(self.responses) < count:
            assert not self._errors, self._errors
            assert time.monotonic() < deadline, f"{len(self.responses)} responses of {count}"
            time.sleep(0.005)


@contextmanager
def served(kind: str, folder: Path, **server) -> Iterator[tuple[Publications, list[Path]]]:
    """One engine, and three sets of weights for it."""
    weights = [make_model(folder / f"{seed}", seed=seed) for seed in range(3)]
    (folder / "sync").mkdir()
    with engines(weights[0], weights, folder / "sync", 1, kind, **server) as fleet:
        yield fleet, weights


def under_load(fleet: Publications, pause: str) -> tuple[list[Response], dict[str, int]]:
    """Responses while `VERSIONS` versions were published, and each version's set of weights."""
    trainer = fleet.connect("standby", pause=pause)
    held = {}

    def publish(weights: int) -> None:
        fleet.holds(trainer, weights)
        report = fleet.publish(trainer.send)
        assert not (report.failed or report.behind or report.mended), report
        held[str(fleet.version)] = weights

    publish(0)
    with Load(fleet.engines[0].client) as load:
        for turn in range(1, VERSIONS + 1):
            load.wait_for(turn * BETWEEN)
            publish(turn % 3)
        load.wait_for((VERSIONS + 1) * BETWEEN)
    trainer.close()
    return load.responses, held


@torch.inference_mode()
def logprobs(weights: Path, responses: list[Response]) -> list[list[float]]:
    """What one set of weights gives each response's tokens."""
    model, found = reference(weights), []
    for at in range(0, len(responses), 100):
        part = responses[at : at + 100]
        rows = [torch.tensor([*prompt, *sample.tokens]) for prompt, sample in part]
        # Rows end in padding, which nothing before it sees.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logs = torch.log_softmax(model(ids).logits, -1)[:, :-1]
        chosen = logs.gather(2, ids[:, 1:, None]).squeeze(2)
        for row, (prompt, sample) in zip(chosen, part, strict=True):
            start = len(prompt) - 1
            found.append(row[start : start + len(sample.tokens)].tolist())
    return found


def violations(
    responses: list[Response], held: dict[str, int], weights: list[Path], *, first_span: bool
) -> list[str]:
    """Tokens without a version, or with a log-probability that is not its version's."""
    told = [logprobs(folder, responses) for folder in weights]
    faults = []
    for number, (_, sample) in enumerate(responses):
        ends = [0, *(span.end for span in sample.spans)]
        starts = [span.start for span in sample.spans]
        if starts != ends[:-1] or ends[-1] != len(sample.tokens):
            faults.append(f"{number}: spans {sample.spans} of {len(sample.tokens)} tokens")
            continue
        for span in sample.spans[:1] if first_span else sample.spans:
            want = told[held[span.version]][number]
            faults += [
                f"{number}: token {place} of version {span.version}"
                for place in range(span.start, span.end)
                if abs(want[place] - sample.logprobs[place]) > TOLERANCE
            ]
    return faults


def check(fleet: Publications, weights: list[Path], pause: str) -> int:
    """No violation, and versions did change under running samples; how many responses."""
    responses, held = under_load(fleet, pause)
    if pause == "in_place":
        # A sample goes on with keys and values of the weights before: what follows is named by its
        # version, and is not what these weights alone would give. So would mixed weights look.
        assert violations(responses, held, weights, first_span=True) == []
        assert violations(responses, held, weights, first_span=False)
    else:
        assert violations(responses, held, weights, first_span=False) == []
    across = sum(len(sample.spans) > 1 for _, sample in responses)
    aborted = sum(sample.finish_reason == "abort" for _, sample in responses)
    if pause == "abort":
        assert aborted > VERSIONS and across == 0
    else:
        assert across > VERSIONS and aborted == 0
    return len(responses)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Publications, list[Path]]]:
    with served("local", tmp_path_factory.mktemp("local")) as found:
        yield found


@pytest.mark.parametrize(
    "pause", [pytest.param(p, marks=pytest.mark.slow if p == "abort" else ()) for p in PAUSES]
)
def test_every_token_is_of_the_version_that_it_names(local, pause: str) -> None:
    fleet, weights = local
    assert check(fleet, weights, pause) >= VERSIONS * BETWEEN


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_every_token_of_sglang(tmp_path: Path) -> None:
    with served("sglang", tmp_path, prefix_cache=False) as (fleet, weights):
        counts = [check(fleet, weights, pause) for pause in PAUSES]
        assert sum(counts) > 1000, counts


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_every_token_of_sglang_with_its_prefix_cache(tmp_path: Path, pause: str) -> None:
    """What was cached under older weights is never gone on with."""
    with served("sglang", tmp_path) as (fleet, weights):
        assert check(fleet, weights, pause) >= VERSIONS * BETWEEN
