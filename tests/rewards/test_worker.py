"""A reward role's worker on a real tokenizer: weights, policies, token rewards, swapping."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.dataflow.reward_roles import is_constant, score_metrics
from hybridflow.recipe.axes import Axis
from hybridflow.rewards import FunctionSettings, Level, OnError, RewardError
from hybridflow.workers.reward import RewardWorker

SOURCE = """
def right(prompt, response, answer, row):
    if response == "bad":
        raise KeyError("units")
    return float(response == answer)

def scaled(prompt, response, answer, row, *, by=1.0):
    return by / 1 * (response == answer)

def huge(prompt, response, answer, row):
    return 3e38

def high(prompt, response, answer, row):
    return [3e38] * len(response)

def digits(prompt, response, answer, row, *, of="123"):
    return [float(token in of) for token in response]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a tokenizer of single characters and its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", *"0123456789abcdefghijklmnopqrstuvwxyz+= "]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocabulary)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    fast.save_pretrained(folder := tmp_path_factory.mktemp("model"))
    return str(folder)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def make(model):
    """Makes workers; they are closed at the end."""
    made = []

    def worker(*functions: FunctionSettings, level: Level = "sequence") -> RewardWorker:
        made.append(
            RewardWorker(
                0,
                1,
                ("127.0.0.1", 0),
                model_path=model,
                functions=functions,
                level=level,
                seconds_per_step=60,
                seconds_per_call=60,
                start_seconds=60,
                memory_gib=8.0,
            )
        )
        return made[-1]

    yield worker
    for worker in made:
        worker.close()


EOS = 1


def ids(text: str) -> list[int]:
    return [2 + "0123456789abcdefghijklmnopqrstuvwxyz+= ".index(c) for c in text]


def batch_of(*responses: list[int], samples: int = 2, answer: str = "12") -> Batch:
    prompts = len(responses) // samples
    rows = [{"prompt_text": "5+7=", "answer": answer} for _ in range(prompts)]
    return Batch(
        {"answers": rows, "responses": Ragged.from_rows(responses, torch.int64)},
        {"answers": Axis.PROMPTS, "responses": Axis.TOKENS},
        prompts,
        samples,
    )


def prepare(worker: RewardWorker, name: str, on_error: OnError = "fail", **parameters):
    functions = [FunctionSettings("reward", name, parameters, on_error=on_error)]
    return worker.prepare(functions, failed_share=0.5)


def test_several_functions_are_one_weighted_sum_with_a_metric_each(make, file):
    worker = make(
        FunctionSettings("right", f"{file}:right", weight=2.0),
        FunctionSettings("brief", "length", {"budget": 2, "slack": 2}, weight=-0.5),
    )
    batch = batch_of([*ids("12"), EOS], ids("123"), ids("7"), [*ids("12345")])
    found = worker.score(batch)
    assert found["rewards"].dtype == torch.float32
    assert found["rewards"].tolist() == [1.5, -0.25, -0.5, 0.0]
    metrics = score_metrics("reward", found)
    assert metrics["reward/reward/right/mean"] == 0.25
    assert metrics["reward/reward/brief/mean"] == 2.5 / 4
    assert not [name for name in metrics if "errors" in name], "they end the run instead"


@pytest.mark.parametrize(
    ("policy", "rewards"),
    [
        (0.0, [1.0, 0.0, 0.0, 0.0]),
        (-1.0, [1.0, -1.0, -1.0, -1.0]),
        ("group_mean", [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_samples_without_a_score_get_what_the_policy_says_and_are_counted(
    make, file, policy, rewards
):
    worker = make(FunctionSettings("reward", f"{file}:right", on_error=policy))
    found = worker.score(batch_of(ids("12"), ids("bad"), ids("bad"), ids("bad")))
    assert found["rewards"].tolist() == rewards
    metrics = score_metrics("reward", found)
    assert metrics == {"reward/reward/errors": 3.0, "reward/reward/timeouts": 0.0}


def test_the_policy_fail_names_function_sample_and_a_way_out(make, file):
    worker = make(FunctionSettings("reward", f"{file}:right"))
    message = r"mine.py:right', sample 1 .*'bad'.*KeyError: 'units' .*2 of 4.*`on_error`"
    with pytest.raises(RewardError, match=message):
        worker.score(batch_of(ids("12"), ids("bad"), ids("bad"), ids("1")))


def test_a_sum_beyond_float32_is_an_error(make, file):
    worker = make(FunctionSettings("reward", f"{file}:huge", weight=2.0))
    with pytest.raises(RewardError, match="2 .* reward', sample 0 .*beyond what float32 holds"):
        worker.score(batch_of(ids("1"), ids("2")))


def test_token_rewards_are_zero_at_special_tokens_wherever_they_stand(make, file):
    worker = make(FunctionSettings("reward", f"{file}:digits"), level="token")
    batch = batch_of([*ids("91a2"), EOS], [EOS], [0, *ids("3"), 0], ids("99"))
    found = worker.score(batch)
    assert found.axes["token_rewards"] is Axis.TOKENS
    rows = [row.tolist() for row in found["token_rewards"].rows()]
    assert rows == [[0, 1, 0, 1, 0], [0], [0, 1, 0], [0, 0]]
    assert found["token_rewards"].dtype == torch.float32
    assert found["rewards"].tolist() == [2.0, 0.0, 1.0, 0.0]


def test_token_rewards_whose_sum_is_too_large_name_function_and_sample(make, file):
    worker = make(FunctionSettings("reward", f"{file}:high"), level="token")
    with pytest.raises(RewardError, match=r"mine.py:high', sample 1 .*'12'.*beyond what float32"):
        worker.score(batch_of(ids("1"), ids("12")))


def test_token_rewards_of_several_functions(make, file):
    worker = make(
        FunctionSettings("low", f"{file}:digits", weight=2.0),
        FunctionSettings("high", f"{file}:digits", {"of": "789"}, weight=-1.0),
        FunctionSettings("odd", f"{file}:digits", {"of": "13579"}),
        level="token",
    )
    found = worker.score(batch_of([*ids("128"), EOS], ids("9"), samples=1))
    assert [row.tolist() for row in found["token_rewards"].rows()] == [[3, 2, -1, 0], [0]]
    assert found["component:high"].tolist() == [1.0, 1.0]


def test_a_worker_swaps_its_function_between_batches(make, file):
    worker = make(FunctionSettings("reward", "length", {"budget": 2}))
    batch = batch_of(ids("123"), ids("1"))
    assert worker.score(batch)["rewards"].tolist() == [0.0, 1.0]
    assert prepare(worker, "length", budget=3) is None
    assert worker.score(batch)["rewards"].tolist() == [0.0, 1.0], "not before the swap"
    worker.swap(True)
    assert worker.score(batch)["rewards"].tolist() == [1.0, 1.0]
    fault = prepare(worker, "length", budgett=3)
    assert fault is not None and "did you mean 'budget'" in fault
    worker.swap(False)
    assert worker.score(batch)["rewards"].tolist() == [1.0, 1.0], "the old one stays"


@pytest.mark.parametrize("policy", ["fail", 0.0])
def test_what_would_end_the_next_step_is_not_swapped_in(make, file, policy):
    worker = make(FunctionSettings("reward", f"{file}:scaled", on_error=policy))
    batch = batch_of(ids("12"), ids("1"))
    assert worker.score(batch)["rewards"].tolist() == [1.0, 0.0]
    fault = prepare(worker, f"{file}:scaled", policy, by="abc")
    assert fault is not None and "scaled', sample 0" in fault and "TypeError" in fault
    assert policy == "fail" or "2 of 2 samples of the last step" in fault
    worker.swap(False)
    assert worker.score(batch)["rewards"].tolist() == [1.0, 0.0]


def test_a_sum_that_would_end_the_next_step_is_not_swapped_in(make, file):
    worker = make(FunctionSettings("reward", f"{file}:scaled", weight=10.0))
    worker.score(batch_of(ids("12"), ids("1")))
    new = FunctionSettings("reward", f"{file}:scaled", {"by": 1e38}, weight=10.0)
    fault = worker.prepare([new], failed_share=0.5)
    assert fault is not None and "10 * reward', sample 0" in fault and "beyond" in fault
    worker.swap(False)


def test_a_swap_reads_code_anew(make, file):
    worker = make(FunctionSettings("reward", f"{file}:right"))
    batch = batch_of(ids("12"), ids("1"))
    assert worker.score(batch)["rewards"].tolist() == [1.0, 0.0]
    file.write_text("def right(prompt, response, answer, row):\n    return 7.0\n")
    assert prepare(worker, f"{file}:right") is None
    worker.swap(True)
    assert worker.score(batch)["rewards"].tolist() == [7.0, 7.0]


def test_a_worker_whose_function_cannot_be_used_says_so_and_leaves_no_process(make, file):
    with pytest.raises(ValueError, match="has no 'rigth'; did you mean 'right'"):
        make(FunctionSettings("reward", f"{file}:rigth"))


def test_a_reward_that_never_differs_is_a_metric():
    assert is_constant(torch.tensor([0.5, 0.5])) == is_constant(torch.tensor([0.5])) == 1.0
    assert is_constant(torch.tensor([0.5, 0.25])) == 0.0
    assert is_constant(torch.tensor([torch.nan, torch.nan])) == 0.0
