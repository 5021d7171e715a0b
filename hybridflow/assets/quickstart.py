"""The quickstart's input: a tiny Qwen3, a character tokenizer, two-digit additions.

Everything is a function of the seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.assets.build import make, write_jsonl

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, *"0123456789", "+", "-", "=")
"""16 tokens, so that a tensor-parallel group of 2, 4 or 8 splits them evenly."""

REVISION = 3
"""Raised when the same seed gives another asset, so that an older one is made anew."""

EVALUATION_ROWS = 500
PAIRS = 2000
INITIAL_STD = 0.08
ROPE_THETA = 1000.0
CIRCLE_FREQUENCIES = (1, 2, 5)


def make_quickstart(folder: str | Path, *, seed: int = 0) -> bool:
    """Make model, tokenizer, ``train.jsonl`` (9,500 rows) and ``eval.jsonl`` (500) in ``folder``.

    A row is ``{"prompt": "07+85=", "answer": "092"}``; no sum is in both files. ``pairs.jsonl``
    (2,000 of the first) and ``pairs_eval.jsonl`` have ``chosen`` and ``rejected`` answers, and an
    ``answer`` with the ``label`` whether it is right.

    Returns:
        Whether anything had to be made.
    """

    def build(target: Path) -> None:
        _write_sums(target, seed)
        _write_tokenizer(target)
        _write_model(target, seed)

    options = {"asset": "quickstart", "revision": REVISION, "seed": seed}
    return make(Path(folder), options, build)


def _write_sums(folder: Path, seed: int) -> None:
    sums = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in _pairs()]
    random.Random(seed).shuffle(sums)
    write_jsonl(folder / "eval.jsonl", sums[:EVALUATION_ROWS])
    write_jsonl(folder / "train.jsonl", sums[EVALUATION_ROWS:])
    for name, rows in (("pairs", sums[-PAIRS:]), ("pairs_eval", sums[:EVALUATION_ROWS])):
        write_jsonl(folder / f"{name}.jsonl", _pairs_of(rows, random.Random(f"{seed}/{name}")))


def _pairs_of(sums: list[dict[str, str]], chance: random.Random) -> list[dict[str, Any]]:
    """Each sum with its right answer, a wrong one, and one of the two with its label."""
    rows = []
    for row in sums:
        right = row["answer"]
        wrong = f"{(int(right) + chance.randrange(1, 199)) % 200:03d}"
        good = chance.random() < 0.5
        rows.append(
            {
                "prompt": row["prompt"],
                "chosen": right,
                "rejected": wrong,
                "answer": right if good else wrong,
                "label": good,
            }
        )
    return rows


def _pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in range(100) for b in range(100)]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of ``VOCABULARY``, ``<unk>`` for any other; no chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def _write_tokenizer(folder: Path) -> None:
    character_tokenizer().save_pretrained(folder)


def _write_model(folder: Path, seed: int) -> None:
    """A Qwen3 of 986,496 parameters with tied embeddings.

    Three things make it learn to add in about 135 steps of 128 sums rather than in several
    hundred: an initial spread four times the usual, a low rotary base, and digits on circles.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    eos, pad = VOCABULARY.index(EOS), VOCABULARY.index(PAD)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=INITIAL_STD,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        _put_digits_on_circles(model.model.embed_tokens.weight)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=True)
    model.save_pretrained(folder)


def _put_digits_on_circles(embedding_VH: torch.Tensor) -> None:
    """Add to each digit's embedding its place on a circle, for each of some frequencies.

    Digit d stands at the angle 2 pi k d / 10 in a random plane, so that adding digits modulo
    ten is a rotation; the tokens themselves stay as different as they were.
    """
    import torch

    digits = torch.arange(10)
    first = VOCABULARY.index("0")
    spread = 2 * INITIAL_STD
    for frequency in CIRCLE_FREQUENCIES:
        angles = 2 * torch.pi * frequency * digits / 10
        points = torch.stack([angles.cos(), angles.sin()], dim=1)
        plane = torch.randn(2, embedding_VH.shape[1]) * spread
        embedding_VH.data[first : first + 10] += points @ plane
