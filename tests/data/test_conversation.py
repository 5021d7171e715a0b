"""Conversations: which tokens the assistant wrote, by templates of several kinds."""

import json
from contextlib import nullcontext

import pytest

from hybridflow.data import load_dataset
from hybridflow.data.conversation import encode_turns
from hybridflow.data.rendering import Renderer
from tests.data.settings import Settings

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
FORGETFUL = (  # a turn that is not the last loses its signs, as thoughts are dropped elsewhere
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}\n"
    "{{ m['content'] if loop.last else m['content'] | replace('=', '') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "=2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "=4"},
]


@pytest.fixture
def chatml(tokenizer):
    """A template in the manner of ChatML, whose marks are tokens."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def trained_texts(tokenizer, turns) -> list[str]:
    """What is trained on, run by run."""
    runs, last = [], False
    for token, trained in zip(turns.ids, turns.trained, strict=True):
        if trained and not last:
            runs.append([])
        if trained:
            runs[-1].append(token)
        last = trained
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_turn_of_the_assistant_is_trained_on_up_to_its_end(chatml, template):
    chatml.chat_template = template
    turns = encode_turns(Renderer(chatml, Settings()), TALK, "all")
    assert trained_texts(chatml, turns) == ["=2<|im_end|>", "=4<|im_end|>"]
    whole = chatml.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert turns.ids == whole[: len(turns.ids)], "the ids are the template's"
    assert turns.trained[-1], "nothing behind the last word"


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL])
def test_the_last_turn_alone(chatml, template):
    chatml.chat_template = template
    turns = encode_turns(Renderer(chatml, Settings()), TALK, "last")
    assert trained_texts(chatml, turns) == ["=4<|im_end|>"]


def test_the_recipes_system_message_is_no_turn(chatml):
    turns = encode_turns(Renderer(chatml, Settings(system="+")), TALK, "all")
    assert chatml.decode(turns.ids[:4]) == "<|im_start|><unk><unk>+"
    assert trained_texts(chatml, turns) == ["=2<|im_end|>", "=4<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (FORGETFUL, TALK, "renders answer 1 or what stands before it otherwise"),
        (CHATML.replace("<|im_end|>", ""), TALK, "writes no special token after"),
        (MARKED, [*TALK, TALK[-1], *TALK], "no JSON object"),
        (CHATML, TALK[:1], "no message of the assistant"),
        (CHATML, [], "must be text or a list of messages"),
    ],
)
def test_masks_that_cannot_be_told_are_errors(chatml, template, talk, message):
    chatml.chat_template = template
    if template == MARKED:  # marks around one of the roles alone are no marks of the assistant's
        chatml.chat_template = MARKED.replace("== 'assistant'", "== 'system'")
        message = "give 0 spans of tokens for 5 messages"
    with pytest.raises(ValueError, match=message):
        encode_turns(Renderer(chatml, Settings()), talk, "all")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_conversations(chatml, tmp_path):
    path = write(tmp_path / "talks.jsonl", {"talk": TALK}, {"talk": TALK[:2]})
    settings = Settings(messages_column="talk")
    dataset = load_dataset(settings, chatml, path, ("prompts", "targets", "target_mask"))
    first, second = dataset.row(0), dataset.row(1)
    assert first.prompt_text == "<|im_start|><unk><unk>1+1<|im_end|><unk><|im_start|><unk><unk>"
    assert first.prompt_ids == second.prompt_ids and first.answer is None
    assert chatml.decode(second.answer_ids) == "=2<|im_end|>" and all(second.answer_mask)
    assert sum(first.answer_mask) == 6 and len(first.answer_mask) == len(first.answer_ids)


def test_faults_of_conversations_name_their_lines(chatml, tmp_path):
    path = write(tmp_path / "talks.jsonl", {"talk": TALK}, {"talk": TALK[:1]}, {"tolk": 1})
    settings = Settings(messages_column="talk")
    with pytest.raises(
        ValueError, match=r"jsonl:2: column 'talk': the conversation.*\n.*jsonl:3: .*'tolk'"
    ):
        load_dataset(settings, chatml, path, ("prompts", "targets"))
    with pytest.raises(ValueError, match="need a chat template"):
        load_dataset(Settings(messages_column="talk", chat=False), chatml, path, ("targets",))
    with pytest.raises(ValueError, match=r"no column 'talks' \(data.messages_column\).*'talk'"):
        load_dataset(Settings(messages_column="talks"), chatml, path, ("targets",))


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
CALL = {"role": "assistant", "tool_calls": [{"name": "1+2"}], "content": ""}


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_what_a_turn_says_beside_its_content_is_read_or_refused(chatml, key):
    said = {"role": "assistant", "content": "=2", key: [{"name": "1"}]}
    with pytest.raises(ValueError, match=f"message 1 has `{key}`, which the chat template"):
        encode_turns(Renderer(chatml, Settings()), [TALK[0], said], "all")
    quiet = [TALK[0], said | {key: None, "name": "x"}]  # as Parquet fills up a message
    renderer = Renderer(chatml, Settings())
    assert trained_texts(chatml, encode_turns(renderer, quiet, "all")) == ["=2<|im_end|>"]
    assert renderer.unread == {"name"}, "told, since it may matter"


def test_calls_of_tools_are_trained_on(chatml, tmp_path):
    chatml.chat_template = CALLING
    renderer = Renderer(chatml, Settings())
    turns = encode_turns(renderer, [TALK[0], CALL, *TALK[2:]], "all")
    assert trained_texts(chatml, turns) == ["1+2<|im_end|>", "=4<|im_end|>"]
    null = [TALK[0], CALL | {"content": None}]
    assert trained_texts(chatml, encode_turns(renderer, null, "all")) == ["1+2<|im_end|>"]
    path = write(tmp_path / "p.jsonl", {"prompt": "1", "chosen": [CALL], "rejected": "2"})
    row = load_dataset(Settings(), chatml, path, PAIR).row(0)
    assert chatml.decode(row.chosen_ids) == "1+2<|im_end|>"
    with pytest.raises(ValueError, match="column 'chosen': it has `tool_calls`, which needs a"):
        load_dataset(Settings(chat=False), chatml, path, PAIR)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_turn_of_weight_0_is_not_trained_on(chatml, template):
    chatml.chat_template = template
    renderer = Renderer(chatml, Settings(system="+"))
    for key, value in (("weight", 0), ("train", False)):
        talk = [TALK[0], TALK[1] | {key: value}, TALK[2], TALK[3] | {"weight": 1}]
        assert trained_texts(chatml, encode_turns(renderer, talk, "all")) == ["=4<|im_end|>"]
    for talk, turns, message in (
        ([TALK[0], TALK[1] | {"weight": 0.5}], "all", "`weight` of message 1 is 0 or 1, not 0.5"),
        ([TALK[0] | {"train": True}, TALK[1]], "all", "message 0, of the user, is marked"),
        ([TALK[0], TALK[1] | {"weight": 0}], "all", "no message of the assistant to train on"),
        ([*TALK[:3], TALK[3] | {"weight": 0}], "last", "the last message of the assistant has"),
        ([TALK[0], TALK[1] | {"content": " "}], "all", "message 1, of the assistant, is empty"),
    ):
        assert turns in ("all", "last")
        with pytest.raises(ValueError, match=message):
            encode_turns(renderer, talk, turns)


def test_content_in_parts_is_one_text(chatml):
    parts = [{"type": "text", "text": "="}, {"type": "text", "text": "2"}]
    turns = encode_turns(
        Renderer(chatml, Settings()), [TALK[0], {"role": "assistant", "content": parts}], "all"
    )
    assert trained_texts(chatml, turns) == ["=2<|im_end|>"]
    picture = {"role": "user", "content": [{"type": "image", "url": "x"}]}
    with pytest.raises(ValueError, match="message 0 has content that is no text"):
        encode_turns(Renderer(chatml, Settings()), [picture, TALK[1]], "all")


def test_marks_without_the_end_of_a_turn(chatml):
    chatml.chat_template = MARKED.replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    with pytest.raises(ValueError, match="leave out the token that ends a turn"):
        encode_turns(Renderer(chatml, Settings()), TALK, "all")
    chatml.eos_token = "<|im_end|>"
    turns = encode_turns(Renderer(chatml, Settings()), TALK, "all")
    assert trained_texts(chatml, turns) == ["=2<|im_end|>", "=4<|im_end|>"]


def test_the_end_of_a_thought_ends_no_turn(chatml):
    chatml.chat_template = CHATML.replace("<|im_end|>", "")
    talk = [TALK[0], {"role": "assistant", "content": "1<|im_end|>2"}]
    with pytest.raises(ValueError, match="writes no special token after"):
        encode_turns(Renderer(chatml, Settings()), talk, "all")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_conversation_may_begin_with_the_assistant(chatml, template):
    chatml.chat_template = template
    turns = encode_turns(Renderer(chatml, Settings()), TALK[1:], "all")
    assert trained_texts(chatml, turns) == ["=2<|im_end|>", "=4<|im_end|>"]
    chatml.chat_template = CHATML.partition("{% if")[0]  # nothing stands before an answer
    with pytest.raises(ValueError, match="begins with the assistant, and the chat template does"):
        encode_turns(Renderer(chatml, Settings()), TALK[1:], "all")


def test_a_template_that_refuses_or_is_broken(chatml, tmp_path):
    chatml.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "talks.jsonl", {"talk": TALK})
    settings = Settings(messages_column="talk")
    with pytest.raises(ValueError, match=r"talks.jsonl:1: column 'talk': .*roles must alternate"):
        load_dataset(settings, chatml, path, ("targets",))
    chatml.chat_template = "{% for m in %}"
    with pytest.raises(ValueError, match=r"template is not valid, line 1: Expected an expression"):
        load_dataset(settings, chatml, path, ("targets",))


PAIR = ("prompts", "pairs")


def test_pairs_of_texts(tokenizer, tmp_path):
    path = write(tmp_path / "pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    row = load_dataset(Settings(), tokenizer, path, PAIR).row(0)
    assert tokenizer.decode(row.prompt_ids) == "1+1="
    assert [tokenizer.decode(ids) for ids in (row.chosen_ids, row.rejected_ids)] == [
        "2<eos>",
        "3<eos>",
    ]


def test_pairs_of_messages_end_as_the_template_ends_them(chatml, tmp_path):
    rows = [
        {
            "prompt": "1+1",
            "chosen": "2",
            "rejected": [TALK[0], {"role": "assistant", "content": "3"}],
        },
        {"prompt": TALK[:3], "chosen": TALK, "rejected": [{"role": "assistant", "content": "5"}]},
    ]
    dataset = load_dataset(Settings(), chatml, write(tmp_path / "pairs.jsonl", *rows), PAIR)
    ends = [
        [chatml.decode(ids) for ids in (row.chosen_ids, row.rejected_ids)]
        for row in (dataset.row(0), dataset.row(1))
    ]
    assert ends == [["2<|im_end|>", "3<|im_end|>"], ["=4<|im_end|>", "5<|im_end|>"]]
    broken = write(tmp_path / "more.jsonl", {"prompt": "1", "chosen": TALK, "rejected": "2"})
    with pytest.raises(
        ValueError, match=r"more.jsonl:1: column 'chosen': it must be text, or messages"
    ):
        load_dataset(Settings(), chatml, broken, PAIR)


def test_what_is_hardly_meant_is_told(chatml, tmp_path):
    same = {"prompt": [TALK[0] | {"id": 7}], "chosen": "2", "rejected": "2"}
    path = write(tmp_path / "pairs.jsonl", same, same | {"rejected": "\u00e9"})
    odd = load_dataset(Settings(), chatml, path, PAIR).oddities
    assert [text.removeprefix(f"{path}: ")[:58] for text in odd] == [
        "the chosen and the rejected response of 1 of 2 rows are th",
        "1 of 4 responses hold text that the tokenizer does not kno",
        "the chat template does not read these keys of messages: id",
    ]
    path = write(tmp_path / "pairs.jsonl", same, same)
    with pytest.raises(ValueError, match=r"response of every row are the same; set data.chosen"):
        load_dataset(Settings(), chatml, path, PAIR)


def test_the_longer_response_of_a_pair_decides_whether_it_fits(tokenizer, tmp_path):
    pair = {"prompt": "1", "chosen": "2", "rejected": "12345"}
    path = write(tmp_path / "pairs.jsonl", pair, pair | {"chosen": "12345", "rejected": "2"})
    for most, kept in ((7, 2), (6, 0)):
        told = Settings(max_tokens=most)
        with nullcontext() if kept else pytest.raises(ValueError, match="all 2 rows have more"):
            assert len(load_dataset(told, tokenizer, path, PAIR)) == kept


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, [1]])
def test_values_that_are_no_answer(tokenizer, tmp_path, value):
    path = write(tmp_path / "rows.jsonl", {"prompt": "1", "answer": value, "margin": -1})
    with pytest.raises(ValueError, match="column 'answer': it must be text or a number"):
        load_dataset(Settings(), tokenizer, path, ("prompts", "targets"))
    with pytest.raises(ValueError, match="column 'margin': it must be a number of 0 or more"):
        load_dataset(Settings(), tokenizer, path, ("prompts", "margins"))


def test_labels_margins_and_lengths(tokenizer, tmp_path):
    rows = [
        {"prompt": "1", "answer": "2", "good": label, "margin": number}
        for label, number in ((True, 1), ("false", "0.5"), (1, 2))
    ]
    path = write(tmp_path / "rows.jsonl", *rows, {"prompt": "1", "answer": "12345", "good": 0})
    settings = Settings(label_column="good", max_tokens=4)
    dataset = load_dataset(settings, tokenizer, path, ("prompts", "targets", "labels"))
    assert [dataset.row(i).label for i in range(3)] == [True, False, True]
    assert (len(dataset), dataset.dropped) == (3, 1), "prompt and answer are too long together"
    assert dataset.oddities == []
    (odd,) = load_dataset(
        settings, tokenizer, write(tmp_path / "good.jsonl", rows[0]), ("prompts", "labels")
    ).oddities
    assert "every row is labelled desirable, so nothing tells good" in odd
    with pytest.raises(ValueError, match=r"rows.jsonl:4: the row has no 'margin'"):
        load_dataset(settings, tokenizer, path, ("prompts", "margins"))
    with pytest.raises(ValueError, match=r"all 4 rows have more than data.max_tokens=2"):
        load_dataset(Settings(max_tokens=2), tokenizer, path, ("prompts", "targets"))
    path = write(tmp_path / "labels.jsonl", {"prompt": "1", "answer": "2", "label": "yes"})
    with pytest.raises(
        ValueError, match=r"labels.jsonl:1: column 'label': it must be true or false"
    ):
        load_dataset(Settings(), tokenizer, path, ("prompts", "targets", "labels"))
