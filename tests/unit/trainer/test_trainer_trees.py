"""A group laid out as a tree gives the log-probs and gradients of its rows."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from triune.ports import Lease
from triune.testing.tiny_models import tiny_llama
from triune.testing.training import sampled_group
from triune.trainer import Policy
from triune.trainer.layout import grow_trees, lay_out, pad_rows, plan_trees, tree_width
from triune.trainer.rows import build_rows


def rows_of(*groups):
    return build_rows([Lease(entry=str(group.id), revision=1, use_no=0, group=group) for group in groups])


def group_of(key: str, prompt: int, answers: list[int], **options):
    return sampled_group(key, lengths=[(prompt, answer) for answer in answers], **options)


def test_a_tree_holds_the_prompt_once_and_every_answer_but_its_last_token():
    rows = rows_of(group_of("a", 4, [3, 1, 2]))
    micro = grow_trees(rows, [np.arange(3)])
    prompt = rows.tokens[:4].tolist()
    answers = [row.tokens[4:].tolist() for row in rows.experiences]
    assert micro.inputs.tolist() == [prompt + answers[0][:2] + answers[2][:1]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 5, 4]]
    assert tree_width(rows, np.arange(3)) == 7
    assert micro.num_tokens == 6 + 4 + 5
    sees = [[column for column in range(7) if micro.allowed[0, row, column]] for row in range(7)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6]]
    # the first token of every answer is predicted by the prompt's last one
    assert micro.before.tolist() == [3, 4, 5, 3, 3, 6]


def test_rows_share_only_what_is_the_same_token_for_token():
    one, two = group_of("a", 4, [3, 3]), group_of("b", 4, [3, 3])
    rows = rows_of(one, two)
    assert [tree.tolist() for tree in plan_trees(rows, np.arange(4), 512)] == [[0, 1], [2, 3]]
    alone = rows_of(*(group_of(key, 4, [3]) for key in "abc"))
    assert plan_trees(alone, np.arange(3), 512) is None


def test_a_tree_that_grows_too_wide_is_split_and_a_row_too_long_switches_trees_off():
    rows = rows_of(group_of("a", 10, [4] * 6))
    trees = plan_trees(rows, np.arange(6), 20)
    assert [tree.tolist() for tree in trees] == [[0, 1, 2], [3, 4, 5]]
    assert max(tree_width(rows, tree) for tree in trees) <= 20
    assert plan_trees(rows, np.arange(6), 12) is None
    micros = lay_out(rows, np.arange(6), 10**6, widest=0)
    assert micros[0].allowed is None


MODELS = {
    "llama": lambda: tiny_llama(),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [25, 10**6])
def test_log_probs_and_gradients_of_trees_equal_those_of_padded_rows(name: str, budget: int):
    torch.manual_seed(0)
    policy = Policy(MODELS[name](), float32_matmul="highest")
    groups = [group_of("a", 6, [3, 1, 5, 2]), group_of("b", 9, [4, 4, 1]), group_of("c", 2, [7])]
    rows = rows_of(*(group.map(lambda row: row.replace(temperature=0.7)) for group in groups))
    numbers = np.arange(len(rows))
    up = torch.randn(len(rows), 32, generator=torch.Generator().manual_seed(1))

    def gradients(micros, parts):
        values = {}
        for micro, part in zip(micros, parts, strict=True):
            logprobs, entropy = policy.logprobs(micro, entropy=True)
            width = logprobs.shape[1]
            ((logprobs + 0.3 * entropy) * up[part, :width]).sum().backward()
            for place, number in enumerate(part):
                values[number] = logprobs[place][micro.batch.action_mask[place]].detach()
        found = {key: value.grad.clone() for key, value in policy.trainable.items()}
        policy.model.zero_grad()
        return values, found

    padded = gradients([pad_rows(rows, numbers)], [numbers])
    trees = lay_out(rows, numbers, budget)
    assert all(micro.allowed is not None for micro in trees)
    parts = [np.array([_find(rows, micro, place) for place in range(len(micro.batch.tokens))]) for micro in trees]
    shared = gradients(trees, parts)
    assert padded[0].keys() == shared[0].keys()
    for number, want in padded[0].items():
        torch.testing.assert_close(shared[0][number], want, atol=1e-5, rtol=1e-5)
    for key, want in padded[1].items():
        torch.testing.assert_close(shared[1][key], want, atol=1e-4, rtol=1e-4)


def _find(rows, micro, place: int) -> int:
    """Number of the row that stands at a place of the algorithm's view."""
    tokens = micro.batch.tokens[place].tolist()
    return next(
        number
        for number in range(len(rows))
        if rows.rollouts[number] == micro.batch.rollouts[place]
        and tokens[: rows.ends[number]] == rows.experiences[number].tokens[: rows.ends[number]].tolist()
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("widest", [0, 512])
def test_leaving_padding_out_changes_neither_log_probs_nor_gradients(name: str, widest: int):
    torch.manual_seed(0)
    policy = Policy(MODELS[name](), float32_matmul="highest")
    rows = rows_of(group_of("a", 6, [3, 1, 5, 2]), group_of("b", 9, [4, 4, 1]), group_of("c", 2, [7]))
    (micro,) = lay_out(rows, np.arange(len(rows)), 10**6, widest=widest)
    assert not micro.inside.all()
    found = []
    for packs in (True, False):
        policy._packs = packs
        logprobs, _ = policy.logprobs(micro)
        (logprobs.sin() * micro.batch.tokens).sum().backward()
        found.append((logprobs.detach(), {key: value.grad.clone() for key, value in policy.trainable.items()}))
        policy.model.zero_grad()
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    for key, want in found[1][1].items():
        torch.testing.assert_close(found[0][1][key], want, atol=2e-3, rtol=1e-4)


def test_a_model_that_does_not_hand_the_layout_on_is_fed_padded_rows():
    policy = Policy(tiny_llama(), float32_matmul="highest")
    rows = rows_of(group_of("a", 6, [3, 1, 5, 2]))
    micro = pad_rows(rows, np.arange(4))
    want, _ = policy.logprobs(micro)
    assert policy._packs
    body = policy._body
    policy._body = lambda packed_rows=None, **arguments: body(**arguments)
    got, _ = policy.logprobs(micro)
    assert not policy._packs
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
