"""A reward model of transformers from a folder, against the model called directly."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from hybridflow.recipe.rules import END, SCORED_AT
from hybridflow.rewards import Failure, RewardItem, Scorer
from hybridflow.rewards.reward_model import RewardModel

WORDS = ["<pad>", "<eos>", *"0123456789+="]


def make(folder, labels: int = 1, pad: str | None = "<pad>") -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(WORDS)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        pad_token_id=0,
    )
    config.num_labels = labels
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make(tmp_path_factory.mktemp("model"))


def items(*responses: str) -> list[RewardItem]:
    return [RewardItem("2+2=", response, "4", {"question": "2+2="}) for response in responses]


def direct(folder: str, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(torch.tensor([[WORDS.index(c) for c in text]])).logits[0, 0].item()


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_rewards_are_the_models_logits_however_samples_are_batched(folder, batch):
    responses = ["4", "44444", "12", ""]
    scorer = RewardModel(path=folder, batch=batch)
    found = [r for n in range(0, 4, batch) for r in scorer.score(items(*responses)[n : n + batch])]
    expected = [direct(folder, "2+2=" + response) for response in responses]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(set(found)) == 4


def test_without_a_pad_token_of_its_own_nothing_is_padded(tmp_path):
    plain = make(tmp_path, pad=None)
    found = RewardModel(path=plain).score(items("4", "44444"))
    assert found == pytest.approx([direct(plain, "2+2=4"), direct(plain, "2+2=44444")], abs=1e-6)


def test_a_suffix_follows_the_response(folder):
    (found,) = RewardModel(path=folder, suffix="=").score(items("4"))
    assert found == pytest.approx(direct(folder, "2+2=4="), abs=1e-6)


def test_a_model_that_was_trained_here_reads_the_end(tmp_path):
    """As its Megatron form does; another's end is not known, and a suffix that is told counts."""
    folder = make(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {SCORED_AT: END}))
    config = AutoModelForSequenceClassification.from_pretrained(folder).config
    assert getattr(config, SCORED_AT) == END
    ends = RewardModel(path=folder).score(items("4"))
    assert ends == RewardModel(path=folder, suffix="<eos>").score(items("4"))
    assert RewardModel(path=folder, suffix="").score(items("4")) != ends


@pytest.mark.slow
def test_a_sample_that_is_too_long_fails_alone(folder):
    with Scorer("reward_model", {"path": folder}) as scorer:
        first, second, last = scorer.score(items("4", "4" * 20, "12"), 120)
    assert first == pytest.approx(direct(folder, "2+2=4"), abs=1e-6)
    assert last == pytest.approx(direct(folder, "2+2=12"), abs=1e-6)
    assert isinstance(second, Failure) and "24 tokens, more than the model's 12" in second.text
    empty = [RewardItem("", "", "", {}), *items("4" * 20)]
    assert all(isinstance(found, ValueError) for found in RewardModel(path=folder).score(empty))


def test_a_models_own_chat_template(folder, tmp_path):
    model = make(tmp_path)
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (found,) = RewardModel(path=model, chat_column="question").score(items("4"))
    assert found == pytest.approx(direct(model, "2+2==4="), abs=1e-6)
    with pytest.raises(ValueError, match="no chat template"):
        RewardModel(path=folder, chat_column="question")


def test_folders_that_hold_no_reward_model_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="is no model folder; nothing is downloaded"):
        RewardModel(path="someone/some-model")
    two = make(tmp_path / "two", labels=2)
    with pytest.raises(ValueError, match="has 2 logits; say which"):
        RewardModel(path=two)
    assert len(RewardModel(path=two, label=1).score(items("4"))) == 1
    from transformers import LlamaForCausalLM

    base = make(tmp_path / "base")
    LlamaForCausalLM.from_pretrained(base, dtype="float32").save_pretrained(base)
    with pytest.raises(ValueError, match=r"lacks score.weight: it is no reward model"):
        RewardModel(path=base)


def test_a_model_of_token_scores_is_refused(tmp_path):
    """transformers would load it as one of whole responses without a word."""
    folder = Path(make(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForTokenClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"scores tokens.*`pooling: mean`"):
        RewardModel(path=str(folder))


def test_pickles_are_not_read(tmp_path):
    model = make(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save({}, tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match="safetensors"):
        RewardModel(path=model)
