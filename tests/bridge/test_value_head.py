"""Reward models and critics: a score per token, loaded or fresh, at any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto

from megatron_bridge import live, registry
from megatron_bridge.huggingface import value_heads
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import parallel
from tests.bridge import families_dense, families_moe, parity, tiny
from tests.ranks import run_ranks

LABELS = 3
LAYOUTS = {"tp1": ParallelLayout(), "tp2pp2": ParallelLayout(tp=2, pp=2)}


def _classifier(kind: str) -> Any:
    """``kind`` may end in " token": then the scores have a bias."""
    name, _, token = kind.partition(" ")
    config = tiny.config(name, num_labels=LABELS, classifier_dropout=0.0)
    torch.manual_seed(11)
    if not token:
        return transformers.AutoModelForSequenceClassification.from_config(config)
    made = transformers.AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(made.score.bias)
    return made


def _scores(model: Any, pack: list[torch.Tensor]) -> torch.Tensor:
    """HuggingFace's scores [T, labels] of every token of a pack."""
    rows = [model.score(model.model(ids[None, :-1]).last_hidden_state)[0] for ids in pack]
    return torch.cat(rows)


def _step(iterator: Any, model: Any) -> Any:
    pack = parity._pack(next(iterator))
    del pack["labels"]
    out = model(**pack, labels=None)
    factor = len(parity.PACKS) / parity.TOKENS
    return out, lambda o: ((o**2).sum() * factor, {"out": o.detach()})


def _train(folder: Path, layout: ParallelLayout) -> dict[str, Any]:
    """Scores of each pack and the gradients of their mean square."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    (model,) = parity.build(folder, layout)
    config = live.load_hf_config(folder)
    exported = {name: tensor.clone() for name, tensor in live.export_weights(model, config)}
    settings: Any = model.config
    settings.finalize_model_grads_func = finalize_model_grads
    wrapped = DistributedDataParallel(settings, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    packs = parity.packs(tiny.VOCABULARY)
    results = get_forward_backward_func()(
        forward_step_func=_step,
        data_iterator=iter(packs),
        model=wrapped,
        num_microbatches=len(packs),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    for parameter in model.parameters():
        parameter.data = parameter.main_grad  # type: ignore[attr-defined]
    gradients = {name: tensor.clone() for name, tensor in live.export_weights(model, config)}
    return {
        "scores": [result["out"][0] for result in results],
        "exported": exported,
        "gradients": gradients,
    }


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", "tp1"), ("qwen3", "tp2pp2"), ("qwen3 token", "tp1"), ("llama token", "tp2pp2")],
)
def test_scores_and_gradients_equal_huggingface(kind, layout, tmp_path):
    model = _classifier(kind)
    folder = tiny.save(model, tmp_path)
    wanted = [_scores(model, pack) for pack in parity.packs(tiny.VOCABULARY)]
    losses = [(scores**2).sum() for scores in wanted]
    (torch.stack(losses).sum() / parity.TOKENS).backward()
    results = run_ranks(_train, LAYOUTS[layout].world, folder, LAYOUTS[layout])
    source = parity.read_all(folder)
    assert results[0]["exported"].keys() == source.keys()
    assert all(torch.equal(results[0]["exported"][name], source[name]) for name in source)
    for found, reference in zip(results[-1]["scores"], wanted, strict=True):
        assert found.shape == reference.shape and reference.shape[1] == LABELS
        torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            results[0]["gradients"][name], parameter.grad, rtol=0, atol=1e-5 * scale
        )


def _fresh(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parallel.initialize(ParallelLayout())
    config = live.with_value_head(live.load_hf_config(folder))
    model = live.build_model(config, ParallelLayout(), dtype=torch.float32, seed=4)
    assert isinstance(model.output_layer, torch.nn.Module)
    before = model.output_layer.weight.detach().clone()  # type: ignore[union-attr,operator]
    live.load_weights(model, folder, fresh_head=True)
    return dict(live.export_weights(model, config)), before  # type: ignore[return-value]


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_model_with_a_fresh_head(tied, tmp_path):
    folder = tiny.save(tiny.model("llama", tied=tied), tmp_path)
    ((exported, head),) = run_ranks(_fresh, 1, folder)
    source = parity.read_all(folder)
    assert exported.keys() == (source.keys() - {"lm_head.weight"}) | {"score.weight"}
    assert exported["score.weight"].shape == (1, tiny.SIZES["hidden_size"])
    assert torch.equal(exported["score.weight"], head) and head.std() > 0
    for name in source.keys() - {"lm_head.weight"}:
        assert torch.equal(exported[name], source[name])


def _separate(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    parallel.initialize(ParallelLayout())
    config = live.with_value_head(live.load_hf_config(folder), bias=True)
    model = live.build_model(config, ParallelLayout(), dtype=torch.float32)
    live.load_weights(model, folder)
    scores = parity.run([model], parity.packs(tiny.VOCABULARY)[:1], train=False)[0][0]
    return scores, dict(live.export_weights(model, config))  # type: ignore[return-value]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_beside_a_causal_model_as_trl_saves_it(tied, tmp_path):
    model = tiny.model("qwen3", tied=tied)
    folder = tiny.save(model, tmp_path)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    names = {f"v_head.summary.{name}": p.detach() for name, p in head.named_parameters()}
    save_file(parity.read_all(folder) | names, folder / "model.safetensors", {"format": "pt"})
    ((scores, exported),) = run_ranks(_separate, 1, folder)
    (ids, *_) = parity.packs(tiny.VOCABULARY)[0]
    with torch.no_grad():
        wanted = head(model.model(ids[None, :-1]).last_hidden_state)[0]
    torch.testing.assert_close(scores[: len(wanted)], wanted, rtol=0, atol=1e-5)
    assert torch.equal(exported["score.bias"], names["v_head.summary.bias"])
    assert "lm_head.weight" not in exported


def test_a_head_of_another_form_is_an_error(tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    tensors = parity.read_all(folder) | {"v_head.dense.weight": torch.ones(2, 2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"made of v_head.dense.weight; it is read where"):
        value_heads.is_separate(HuggingFaceFolder(folder))


def _without_saying_so(folder: Path) -> None:
    parallel.initialize(ParallelLayout())
    config = live.with_value_head(live.load_hf_config(folder))
    model = live.build_model(config, ParallelLayout(), dtype=torch.float32)
    live.load_weights(model, folder)


def test_a_base_model_is_no_reward_model_by_itself(tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    with pytest.raises(AssertionError, match=r"'score.weight' is missing"):
        run_ranks(_without_saying_so, 1, folder)


def _scores_and_export(folder: Path, layout: ParallelLayout) -> dict[str, Any]:
    chunks = parity.build(folder, layout)
    exported = {n: t.clone() for n, t in live.export_weights(chunks, live.load_hf_config(folder))}
    packs = parity.packs(tiny.VOCABULARY)
    return {"exported": exported, "scores": parity.run(chunks, packs, train=False)}


OTHERS = {"gemma3": ParallelLayout(pp=2), "gpt_oss": ParallelLayout(tp=2, pp=2)}
OTHERS |= dict.fromkeys(("mixtral", "deepseek_v3"), ParallelLayout(pp=2, tp=2, ep=2, etp=1))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind == "gpt_oss" else kind for kind in OTHERS],
)
def test_heads_on_other_families_with_tied_embeddings(kind, tmp_path):
    """A tied embedding is held on the first stage alone: the last ends in scores."""
    module = families_moe if kind in families_moe.CONFIGS else families_dense
    config = module.model(kind).config
    config.num_labels, config.tie_word_embeddings = LABELS, True
    torch.manual_seed(11)
    model = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    )
    folder = tiny.save(model, tmp_path)
    with torch.no_grad():
        wanted = [_scores(model, pack) for pack in parity.packs(tiny.VOCABULARY)]
    results = run_ranks(_scores_and_export, OTHERS[kind].world, folder, OTHERS[kind])
    source = parity.read_all(folder)
    assert results[0]["exported"].keys() == source.keys()
    assert all(torch.equal(results[0]["exported"][name], source[name]) for name in source)
    for found, reference in zip(results[-1]["scores"], wanted, strict=True):
        torch.testing.assert_close(found[0], reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("table", registry.tables(), ids=lambda table: table.name)
def test_a_fresh_heads_config_names_transformers_own_class(table):
    made = live.with_value_head({"architectures": [table.name], "model_type": table.model_type})
    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    assert made["architectures"] == [names[table.model_type]]
    assert registry.architecture(made) is table and registry.has_value_head(made)
