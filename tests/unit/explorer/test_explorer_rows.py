"""Rows that hold answers become records: pairs, labels, texts."""

from itertools import pairwise

import numpy as np
import pytest

from triune.errors import TaskError
from triune.explorer.row_reader import RowReader
from triune.models import ChatTokenizer
from triune.records import GroupId, Task
from triune.testing.chats import byte_tokenizer

GROUP = GroupId("r", "train", "t", 0)
TOKENIZER = ChatTokenizer(byte_tokenizer())
USER = {"role": "user", "content": "2+2?"}


def said(text):
    return {"role": "assistant", "content": text}


def read(reads, data, **options):
    asked = lambda task: [{"role": "user", "content": task.data["question"]}]  # noqa: E731
    reader = RowReader(tokenizer=TOKENIZER, prompt_of=asked, reads=reads, **options)
    return reader(GROUP, Task(key="t", data=data))


def trained(row):
    return TOKENIZER.decode(row.tokens[row.action_mask])


def context(row):
    return TOKENIZER.decode(row.tokens[~row.action_mask])


PROMPT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5!"},
        {"question": "2+2?", "chosen": "4", "rejected": "5!"},
        {"prompt": [USER], "chosen": [said("4")], "rejected": [said("5!")]},
        {"chosen": [USER, said("4")], "rejected": [USER, said("5!")]},
        {"prompt": "ignored beside whole conversations", "chosen": [USER, said("4")], "rejected": [USER, said("5!")]},
    ],
    ids=["text", "the workflow's question", "messages", "conversations", "conversations and prompt"],
)
def test_a_pair_may_be_text_messages_or_whole_conversations(row):
    (pair,) = read("pairs", row)
    assert (trained(pair.chosen), trained(pair.rejected)) == ("4<|im_end|>", "5!<|im_end|>")
    assert context(pair.chosen) == context(pair.rejected) == PROMPT
    assert (pair.weight, pair.margin, pair.chosen.reward, pair.rejected.reward) == (1.0, 0.0, 1.0, 0.0)
    assert pair.chosen.id != pair.rejected.id
    assert np.isnan(pair.chosen.logprobs).all()
    for half in (pair.chosen, pair.rejected):
        half.check()


def test_weight_and_margin_of_a_row_go_into_its_pair():
    (pair,) = read("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2, "margin": 0.5})
    assert (pair.weight, pair.margin) == (2.0, 0.5)


def test_only_the_last_message_of_a_longer_conversation_is_trained():
    before = [USER, said("4"), {"role": "user", "content": "sure?"}]
    (pair,) = read("pairs", {"chosen": [*before, said("yes")], "rejected": [*before, said("no")]})
    assert (trained(pair.chosen), trained(pair.rejected)) == ("yes<|im_end|>", "no<|im_end|>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            r"the row has no 'rejected' \(it has prompt, chosen\).*fields: \{rejected: …\}",
        ),
        ({"prompt": "a", "rejected": "b"}, "the row has no 'chosen'"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen is 3; expected an answer: text, or chat messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": -1}, "weight is -1; expected 0 or more"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "margin is 'big'; expected a number"),
        (
            {"chosen": [USER, said("4")], "rejected": [{"role": "user", "content": "?"}, said("5")]},
            "`chosen` and `rejected` differ before their last message; expected two answers to one prompt",
        ),
        ({"chosen": [USER], "rejected": [USER]}, "`chosen` do not end with the assistant's"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_what_to_write(row, message):
    with pytest.raises(TaskError, match=message):
        read("pairs", row)


@pytest.mark.parametrize(("label", "reward"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0)])
def test_a_labelled_answer_carries_its_label_as_reward(label, reward):
    for row in ({"prompt": "2+2?"}, {"question": "2+2?"}):
        (one,) = read("labels", {**row, "answer": "4", "label": label})
        assert (trained(one), context(one), one.reward) == ("4<|im_end|>", PROMPT, reward)
    (one,) = read("labels", {"messages": [USER, said("4")], "label": label})
    assert (trained(one), context(one), one.reward) == ("4<|im_end|>", PROMPT, reward)


@pytest.mark.parametrize("label", ["yes", 0.5, 2])
def test_a_label_is_true_or_false(label):
    with pytest.raises(TaskError, match=r"label is .*; expected true or false"):
        read("labels", {"prompt": "a", "answer": "b", "label": label})


def test_a_text_ends_with_the_end_token_and_has_no_chat_template():
    (text,) = read("texts", {"text": "Once"})
    assert TOKENIZER.decode(text.tokens) == "Once<|im_end|>"
    assert text.tokens.dtype == np.int32


def test_a_long_text_is_cut_into_pieces_that_train_every_token_but_the_first_exactly_once():
    for size in range(2, 12):
        pieces = read("texts", {"text": "0123456789"}, max_tokens=size)
        assert all(2 <= len(piece.tokens) <= size for piece in pieces)
        assert len({piece.id for piece in pieces}) == len(pieces)
        joined = np.concatenate([piece.tokens[1:] for piece in pieces])
        assert TOKENIZER.decode(joined) == "123456789<|im_end|>"
        for one, other in pairwise(pieces):
            assert one.tokens[-1] == other.tokens[0]


def test_an_answer_that_is_too_long_is_refused_and_never_cut():
    with pytest.raises(TaskError, match=r"tokens; expected at most 20"):
        read("pairs", {"prompt": "a" * 30, "chosen": "b", "rejected": "c"}, max_tokens=20)
