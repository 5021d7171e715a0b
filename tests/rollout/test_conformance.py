"""One suite for both engines: what a client may expect of a rollout server."""

import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from hybridflow.rollout import RolloutClient, RolloutError, Sample, Sampling
from hybridflow.rollout.samples import token_versions
from hybridflow.weight_sync import (
    ServerDigest,
    WeightMismatch,
    server_checksum,
    write_version,
)
from tests.servers import TOKEN, Rollout, load_and_prove
from tests.tiny_models import EOS, VOCAB, greedy, logprobs, make_model, reference

PROMPTS = [[5, 17, 33], [40, 8, 9, 10, 11, 12, 13], [99, 2]]
GREEDY = Sampling(max_tokens=12, temperature=0.0)


def _weights(folder: Path):
    return load_file(folder / "model.safetensors")


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def _check_against(folder: Path, groups: list[list[Sample]], temperature: float = 1.0) -> None:
    model = reference(folder)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for sample in group:
            expected = logprobs(model, prompt, sample.tokens, temperature)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)


def _serve_weights(rollout: Rollout, folder: Path, directory: Path) -> int:
    """Publish `folder`'s weights as the next version; returns it."""
    version, config = rollout.next_version(), _config(folder)
    digest = ServerDigest(config)
    written = write_version(directory, digest.watch(_weights(folder).items()), folder, version)
    load_and_prove(rollout.client, written, version, digest.result())
    return version


@pytest.fixture(autouse=True)
def _restore(rollout_server: Rollout, tmp_path: Path):
    """Every test begins with the session's own weights, served."""
    expected = server_checksum(_weights(rollout_server.model), _config(rollout_server.model))
    if rollout_server.client.checksum() != expected:
        _serve_weights(rollout_server, rollout_server.model, tmp_path / "restored")


def test_greedy_tokens_and_logprobs_equal_transformers(rollout_server: Rollout):
    groups = rollout_server.client.generate(PROMPTS, 1, GREEDY)
    model = reference(rollout_server.model)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert group[0].tokens == greedy(model, prompt, GREEDY.max_tokens)
    _check_against(rollout_server.model, groups)


def test_sampled_logprobs_are_of_the_scaled_distribution(rollout_server: Rollout):
    sampling = Sampling(max_tokens=10, temperature=0.7, top_p=0.9, top_k=40)
    groups = rollout_server.client.generate(PROMPTS, 3, sampling)
    _check_against(rollout_server.model, groups, temperature=0.7)
    assert len({tuple(sample.tokens) for group in groups for sample in group}) > 3


def test_groups_come_in_the_prompts_order(rollout_server: Rollout):
    groups = rollout_server.client.generate(PROMPTS, 4, GREEDY)
    single = rollout_server.client.generate(PROMPTS, 1, GREEDY)
    assert [len(group) for group in groups] == [4, 4, 4]
    for group, alone in zip(groups, single, strict=True):
        assert all(sample.tokens == alone[0].tokens for sample in group)


def test_top_k_one_is_greedy(rollout_server: Rollout):
    groups = rollout_server.client.generate(PROMPTS, 1, Sampling(12, top_k=1))
    single = rollout_server.client.generate(PROMPTS, 1, GREEDY)
    assert [group[0].tokens for group in groups] == [group[0].tokens for group in single]


def test_stops_at_eos_and_at_length(rollout_server: Rollout):
    groups = rollout_server.client.generate(PROMPTS, 16, Sampling(max_tokens=48))
    samples = [sample for group in groups for sample in group]
    ended = [sample for sample in samples if EOS in sample.tokens]
    assert ended and len(ended) < len(samples)
    for sample in samples:
        if sample in ended:
            assert sample.tokens.index(EOS) == len(sample.tokens) - 1
            assert sample.finish_reason == "stop"
        else:
            assert (len(sample.tokens), sample.finish_reason) == (48, "length")


def test_stops_at_a_token_of_the_request(rollout_server: Rollout):
    [[free]] = rollout_server.client.generate(PROMPTS[:1], 1, GREEDY)
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    sampling = Sampling(12, temperature=0.0, stop_token_ids=(stop,))
    [[sample]] = rollout_server.client.generate(PROMPTS[:1], 1, sampling)
    assert sample.tokens == free.tokens[: first + 1]
    assert sample.finish_reason == "stop"


def test_published_weights_are_served_and_named(rollout_server: Rollout, tmp_path: Path):
    other = make_model(tmp_path / "other", seed=7)
    version = _serve_weights(rollout_server, other, tmp_path / "versions")
    groups = rollout_server.client.generate(PROMPTS, 2, GREEDY)
    model = reference(other)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for sample in group:
            assert sample.tokens == greedy(model, prompt, GREEDY.max_tokens)
            assert sample.weight_version == str(version)
    _check_against(other, groups)
    assert rollout_server.client.model_info()["weight_version"] == str(version)


def test_a_flipped_byte_is_caught(rollout_server: Rollout, tmp_path: Path):
    client, folder = rollout_server.client, rollout_server.model
    served = client.model_info()["weight_version"]
    digest = ServerDigest(_config(folder))
    pairs = digest.watch(_weights(folder).items())
    written = write_version(tmp_path / "versions", pairs, folder, rollout_server.next_version())
    path = written / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightMismatch, match="shows"):
        load_and_prove(client, written, rollout_server.versions, digest.result())
    assert client.model_info()["weight_version"] == served

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, PROMPTS, 1, GREEDY)
        time.sleep(1.0)
        assert not waiting.done(), "a server that failed its proof must stay paused"
        version = _serve_weights(rollout_server, folder, tmp_path / "mended")
        groups = waiting.result(timeout=120)
    assert groups[0][0].weight_version == str(version)
    _check_against(folder, groups)


def test_a_folder_that_is_not_there_leaves_the_weights(rollout_server: Rollout, tmp_path: Path):
    before = rollout_server.client.checksum()
    with pytest.raises(RolloutError, match="400"):
        rollout_server.client.update_from_disk(tmp_path / "nowhere")
    assert rollout_server.client.checksum() == before


def test_abort_answers_with_what_there_is(rollout_server: Rollout):
    long = Sampling(max_tokens=3000, temperature=0.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rollout_server.client.generate, PROMPTS, 1, long)
        _until(running, rollout_server.client.abort)
    samples = [group[0] for group in running.result()]
    assert "abort" in {sample.finish_reason for sample in samples}
    for sample in samples:
        assert len(sample.tokens) == len(sample.logprobs) < 3000


def test_a_response_names_every_version_that_made_it(rollout_server: Rollout):
    client, prompts = rollout_server.client, PROMPTS[:1]
    long = Sampling(max_tokens=400, temperature=0.0)
    [[whole]] = client.generate(prompts, 1, long)
    for _ in range(10):
        version = rollout_server.next_version()
        with ThreadPoolExecutor(1) as pool:
            running: Future = pool.submit(client.generate, prompts, 1, long)
            time.sleep(0.2)
            client.pause("retract")
            client.set_version(version)
            client.continue_()
        [[sample]] = running.result(timeout=120)
        assert sample.tokens == whole.tokens
        if len(sample.spans) == 2:
            break
    assert len(sample.spans) == 2, "never paused while the request ran"
    first, second = sample.spans
    assert (first.start, second.start, second.end) == (0, first.end, len(sample.tokens))
    assert second.version == str(version) == sample.weight_version
    versions = token_versions(sample)
    assert versions == [int(first.version)] * first.end + [version] * (second.end - second.start)
    with pytest.raises(RolloutError, match="do not cover"):
        token_versions(replace(sample, spans=(second,)))


def test_an_answer_bears_the_id_of_its_request(rollout_server: Rollout):
    client = rollout_server.client
    plain, named = (client.generate(PROMPTS, 2, GREEDY, request_id=i) for i in (None, "step-7"))
    assert [[s.tokens for s in group] for group in named] == [
        [s.tokens for s in group] for group in plain
    ]


def test_a_part_of_a_request_draws_what_the_whole_draws(local_server: Rollout):
    """SGLang heeds seeds in its deterministic mode alone."""
    seeded = Sampling(max_tokens=12, seed=3)
    whole = local_server.client.generate(PROMPTS, 2, seeded)
    part = local_server.client.generate(PROMPTS[1:], 2, seeded, positions=[1, 2])
    assert [[s.tokens for s in group] for group in part] == [
        [s.tokens for s in group] for group in whole[1:]
    ]


def test_wrong_ids_never_reach_a_server(rollout_server: Rollout):
    for prompts, text in (
        ([[5], [VOCAB]], "prompt 1 holds"),
        ([[-1]], "prompt 0"),
        ([[]], "empty"),
    ):
        with pytest.raises(ValueError, match=text):
            rollout_server.client.generate(prompts, 1, GREEDY)


def test_threads_share_a_client(rollout_server: Rollout):
    single = rollout_server.client.generate(PROMPTS, 1, GREEDY)
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(rollout_server.client.generate, [prompt], 1, GREEDY)
            for prompt in PROMPTS * 2
        ]
        results = [job.result(timeout=120) for job in jobs]
    assert [r[0][0].tokens for r in results] == [g[0].tokens for g in single] * 2


def test_a_deadline_names_what_it_waited_for(rollout_server: Rollout):
    client = RolloutClient(rollout_server.server.url, TOKEN, timeout=0.5)
    rollout_server.client.pause("retract")
    try:
        with pytest.raises(RolloutError, match=r"/generate did not answer within"):
            client.generate(PROMPTS, 1, GREEDY)
    finally:
        rollout_server.client.continue_()
        rollout_server.client.abort()


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_token_nothing_is_done(rollout_server: Rollout, token: str | None):
    """Loopback is every user's of the machine."""
    stranger = RolloutClient(rollout_server.server.url, token, timeout=60)
    asked = (
        stranger.model_info,
        stranger.server_info,
        lambda: stranger.generate(PROMPTS, 1, GREEDY),
        stranger.pause,
        stranger.continue_,
        stranger.abort,
        stranger.flush_cache,
        lambda: stranger.update_from_disk(rollout_server.model),
        stranger.begin_weight_update,
        stranger.end_weight_update,
        lambda: stranger.set_version(99),
        stranger.checksum,
        lambda: stranger.join_weight_group({}, 60),
        lambda: stranger.update_from_group("g", {"names": [], "dtypes": [], "shapes": []}, 60),
        lambda: stranger.leave_weight_group("g", 60),
    )
    for ask in asked:
        with pytest.raises(RolloutError, match="answered 401"):
            ask()
    assert stranger.health()


def test_nobody_else_learns_the_token(rollout_server: Rollout):
    server = rollout_server.server
    assert TOKEN not in server.log_path.read_text() and TOKEN not in repr(server.config)
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(True)]:
        assert TOKEN not in "\0".join([*process.cmdline(), *process.environ().values()])


def test_nobody_at_the_url_is_told_in_a_few_words():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RolloutError) as caught:
        RolloutClient(f"http://127.0.0.1:{port}", timeout=60).pause()
    told = "/pause_generation: connection lost: Connection refused"
    assert str(caught.value) == f"http://127.0.0.1:{port}{told}"


def _until(running: Future, action) -> None:
    """Repeat `action` until `running` has ended; the request may not have arrived at first."""
    done = threading.Event()
    running.add_done_callback(lambda _: done.set())
    for _ in range(600):
        if done.wait(0.2):
            return
        action()
    raise AssertionError("the request did not end within 120 s of aborts")
