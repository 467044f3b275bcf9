"""GRPO on one page: sample, judge, credit, train, repeat, with Triune's bricks and nothing hidden.

    python examples/one_file_grpo.py                                  # two-digit sums, about a minute on two cores
    python examples/one_file_grpo.py --algorithm dr_grpo --steps 40
    python examples/one_file_grpo.py --set kl='{use: k3, coefficient: 0.01}'

`triune run` does the same with a durable buffer, versions of the weights, checkpoints, continuous batching, metrics and
many ways to fail well. Here is only the method, to be read from top to bottom and changed.

Axes: P tasks of a step, G rollouts of a task, B = P x G sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from triune import registry
from triune.algorithms import Algorithm, Divider, MicroBatch, Progress
from triune.models import ChatTokenizer, resolve_model, set_float32_matmul
from triune.pipelines import Pipeline
from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Stop, Task

# ------------------------------------------------------------------------------------------------- 1. settings

parser = argparse.ArgumentParser(description="GRPO on one page.")
parser.add_argument("--model", default="triune/nano", help="the shipped model, a folder, or owner/name on the hub")
parser.add_argument("--algorithm", default="grpo", help="one of " + ", ".join(registry.names("algorithm")))
parser.add_argument("--set", action="append", default=[], metavar="KEY=YAML", help="a field of the algorithm")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--tasks-per-step", type=int, default=32)
parser.add_argument("--max-tokens", type=int, default=6, help="longest answer")
parser.add_argument("--learning-rate", type=float, default=3e-4)
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--tokens-per-micro-batch", type=int, default=8192)
parser.add_argument("--seed", type=int, default=0)


# ------------------------------------------------------------------------------------------------- 2. sampling


class Policy:
    """A causal language model that is sampled from and trained, both at one temperature."""

    def __init__(self, path: str, temperature: float) -> None:
        source = resolve_model(path)
        self.chat = ChatTokenizer.load(source.location)
        self.model = AutoModelForCausalLM.from_pretrained(
            source.location, dtype=torch.float32, **source.arguments()
        ).eval()  # eval: with dropout, two passes over the same tokens would disagree and no ratio would be 1
        self.temperature = temperature

    @torch.no_grad()
    def sample(self, prompts: Sequence[np.ndarray], group_size: int, max_tokens: int) -> tuple[Tensor, Tensor]:
        """Sample `group_size` answers to each prompt.

        Each prompt is computed once and its keys and values are shared by its group. Prompts are padded on the *left*,
        so that all answers begin at the same column; positions count from the first real token.

        Returns:
            Sampled ids [B, n] and their log-probs [B, n], in groups. What stands behind the first stop token is noise.
        """
        width = max(len(prompt) for prompt in prompts)
        ids = torch.stack([F.pad(torch.tensor(prompt).long(), (width - len(prompt), 0)) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        visible = torch.arange(width) >= width - lengths[:, None]
        positions = (visible.long().cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        logits = self.model(ids, visible, positions, cache).logits[:, -1]

        cache.batch_repeat_interleave(group_size)
        logits, visible = logits.repeat_interleave(group_size, 0), visible.repeat_interleave(group_size, 0)
        positions = lengths.repeat_interleave(group_size)[:, None]
        stops, done = torch.tensor(self.chat.stop_ids), torch.zeros(len(logits), dtype=torch.bool)
        tokens, logprobs = [], []
        for _ in range(max_tokens):
            logprobs_BV = (logits / self.temperature).log_softmax(-1)
            token_B = torch.multinomial(logprobs_BV.exp(), 1)
            tokens.append(token_B)
            logprobs.append(logprobs_BV.gather(1, token_B))
            done |= torch.isin(token_B[:, 0], stops)
            if done.all():
                break
            visible = F.pad(visible, (0, 1), value=True)
            logits = self.model(token_B, visible, positions, cache).logits[:, -1]
            positions = positions + 1
        return torch.cat(tokens, 1), torch.cat(logprobs, 1)

    def logprobs(self, tokens_BT: Tensor) -> Tensor:
        """log p(token t | tokens before t) under the current weights: [B, T] with gradient, 0 for the first token.

        Padding on the right needs no mask: causal attention never looks there from a real token.
        """
        logits = self.model(tokens_BT[:, :-1], use_cache=False).logits / self.temperature
        chosen = -F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="none")
        return F.pad(chosen.view(len(tokens_BT), -1), (1, 0))


# ------------------------------------------------------------------------------------------------- 3. rollouts


def explore(policy: Policy, tasks: Sequence[Task], reward, group_size: int, max_tokens: int, step: int) -> list[Group]:
    """Let the policy answer every task `group_size` times and record each token it sampled."""
    prompts = [policy.chat.prompt([{"role": "user", "content": task.data["question"]}]).ids for task in tasks]
    tokens_Bn, logprobs_Bn = (x.numpy() for x in policy.sample(prompts, group_size, max_tokens))
    groups = []
    for p, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
        identity = GroupId("one_file", task.taskset, task.key, 0)
        rows = []
        for member in range(group_size):
            b = p * group_size + member
            ends = np.flatnonzero(np.isin(tokens_Bn[b], policy.chat.stop_ids))
            length = int(ends[0]) + 1 if len(ends) else tokens_Bn.shape[1]
            sampled = tokens_Bn[b, :length].astype(np.int32)
            before = np.full(len(prompt), np.nan, np.float32)  # the prompt was not sampled: NaN, never 0
            rows.append(
                Experience(
                    id=ExperienceId(RolloutId(identity, member)),
                    tokens=np.concatenate([prompt, sampled]),  # exactly the sampled ids; nothing is tokenised again
                    action_mask=np.arange(len(prompt) + length) >= len(prompt),
                    logprobs=np.concatenate([before, logprobs_Bn[b, :length]]),
                    versions=np.repeat(np.array([-1, step], np.int32), [len(prompt), length]),
                    reward=float(reward(task, policy.chat.answer(sampled))),
                    stop=Stop.DONE if len(ends) else Stop.LENGTH,
                )
            )
        groups.append(Group(id=identity, task=task, records=tuple(rows)))
    return groups


# ------------------------------------------------------------------------------------------------- 4. training


def collate(rows: Sequence[Experience]) -> MicroBatch:
    """Pad sequences on the right. What the padding holds is never looked at, so zeros will do for every stream."""
    width = max(len(row) for row in rows)

    def padded(arrays: Sequence[np.ndarray]) -> Tensor:
        out = np.zeros((len(arrays), width), arrays[0].dtype)
        for line, array in zip(out, arrays, strict=True):
            line[: len(array)] = array
        return torch.from_numpy(out)

    names = {name for row in rows for name in row.streams}  # `advantages`, which the pipeline added
    return MicroBatch(
        tokens=padded([row.tokens for row in rows]).long(),
        action_mask=padded([row.action_mask for row in rows]),
        streams={
            "behaviour_logprobs": padded([row.behaviour_logprobs for row in rows]),
            **{name: padded([row.streams[name] for row in rows]) for name in names},
        },
        rewards=torch.tensor([row.reward for row in rows]),
    )


def train(
    policy: Policy, reference: Policy | None, algorithm: Algorithm, optimizer, groups: Sequence[Group], budget: int,
    state: dict, progress: Progress,
) -> tuple[dict, dict[str, float]]:  # fmt: skip
    """One optimiser update on all groups.

    Returns:
        The bricks' state after the update, and its metrics.
    """
    rows = sorted((row for group in groups for row in group.experiences), key=len)
    size = max(budget // max(len(row) for row in rows), 1)
    batches = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    if reference is not None:  # prepare: streams that do not change during the step
        with torch.no_grad():
            batches = [batch.with_streams(ref_logprobs=reference.logprobs(batch.tokens)) for batch in batches]
    # Every unit is counted over the whole update before the first backward pass, so that the size of a micro-batch
    # changes neither loss nor gradient.
    divider = Divider(algorithm, batches, state=state, progress=progress)
    for batch in batches:
        divider.loss(batch.with_logprobs(policy.logprobs(batch.tokens))).backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    metrics = divider.metrics()
    return algorithm.update(state, metrics), metrics


# ------------------------------------------------------------------------------------------------- 5. the loop


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, print a line per step, and return the mean reward of every step."""
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    set_float32_matmul("medium")
    fields = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in args.set)}
    algorithm = registry.build("algorithm", {"use": args.algorithm, **fields}, "algorithm")
    algorithm.check()  # refuses what cannot work, and says what to write instead
    if algorithm.group_size == 1 or "entropy" in algorithm.needs:
        parser.error("this page is for methods that compare a group and need no full distribution")

    taskset = registry.build("taskset", "arithmetic", "tasks")
    source = taskset.open(args.seed, "tasks")
    policy = Policy(args.model, args.temperature)
    reference = copy.deepcopy(policy) if "ref_logprobs" in algorithm.needs else None
    optimizer = torch.optim.AdamW(policy.model.parameters(), args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    pipeline = Pipeline([registry.build("operator", "drop_flat_groups", "pipeline"), algorithm.advantage])

    state, rewards, start = algorithm.state0(), [], time.perf_counter()
    for step in range(args.steps):
        numbers = range(step * args.tasks_per_step, (step + 1) * args.tasks_per_step)
        tasks = [Task(key=str(n), data=row) for n, row in zip(numbers, source.read(numbers), strict=True)]
        raw = explore(policy, tasks, taskset.reward, algorithm.group_size, args.max_tokens, step)
        rewards.append(float(np.mean([group.rewards.mean() for group in raw])))  # before any operator touched it
        shaped = [pipeline.apply(group) for group in raw]
        groups = [one.group for one in shaped if one.group is not None]
        line = f"step {step:3d}  reward {rewards[-1]:.3f}  flat groups {sum(one.group is None for one in shaped):2d}"
        if groups:
            progress = Progress(step, args.steps)
            state, metrics = train(
                policy, reference, algorithm, optimizer, groups, args.tokens_per_micro_batch, state, progress
            )
            shown = ("policy_loss", "clip_ratio", "logprob_gap", "kl", "entropy")
            line += "".join(f"  {name} {metrics[name]:.4f}" for name in shown if name in metrics)
        print(f"{line}  {time.perf_counter() - start:5.1f} s", flush=True)
    print(f"mean reward of the first and the last 5 steps: {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}")
    return rewards


if __name__ == "__main__":
    main()
