"""One Ray for all of the cluster's tests; after it no process of it may be left."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import Pool, RaySession, processes
from hybridflow.recipe.axes import Axis


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySession]:
    torch.set_num_threads(1)
    others = set(psutil.Process().children(recursive=True))  # of other rooms' tests
    logs: Path = tmp_path_factory.mktemp("logs")
    # As under torchrun: with these in force, ranks would wait for a store that nobody serves.
    foreign = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "3", "WORLD_SIZE": "7"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in foreign.items():
            patch.setenv(name, value)
        session = RaySession(1, 5, log_dir=logs)
    children = psutil.Process().children(recursive=True)
    try:
        yield session
        children += psutil.Process().children(recursive=True)
    finally:
        session.close()
    session.close()
    assert processes.marked(session.mark) == []
    _, left = psutil.wait_procs(set(children) - others, timeout=60)
    assert left == []


@pytest.fixture(scope="session")
def pool(session: RaySession) -> Pool:
    return session.pool("devices", 3)


@pytest.fixture
def batch() -> Batch:
    """Four prompts of two samples with rows of 0 to 7 tokens."""
    rows = [torch.arange(length) + 10 * length for length in range(8)]
    responses = Ragged.from_rows(rows, torch.int64)
    return Batch(
        {
            "responses": responses,
            "logprobs": responses.with_values(-responses.values.to(torch.bfloat16)),
            "rewards": torch.arange(8.0),
            "answers": [{"answer": str(prompt)} for prompt in range(4)],
        },
        {
            "responses": Axis.TOKENS,
            "logprobs": Axis.TOKENS,
            "rewards": Axis.SAMPLES,
            "answers": Axis.PROMPTS,
        },
        prompts=4,
        samples_per_prompt=2,
    )
