"""What Triune is measured against, each as one function: written by hand for speed, with nothing around the model.

`bare_grpo` knows nothing of buffers, versions, metrics or chat templates: ids in, one optimiser step out. The prompt is
prefilled once per task and shared by its group, the samples are decoded as one batch, and the same rows are trained on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class BareLlama:
    """Forward pass of a Llama written out, over the parameters of a Hugging Face model (both train the same tensors).

    Sequences are padded on the right; `positions` are the places of `ids` in their rows.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        angles = torch.outer(torch.arange(self.config.max_position_embeddings, dtype=torch.float32), frequencies)
        self.cos, self.sin = torch.cat([angles, angles], 1).cos(), torch.cat([angles, angles], 1).sin()
        self.fuse()

    def fuse(self) -> None:
        """Join projections that read the same input, for decoding (again after every optimiser step)."""
        self.fused = [
            (
                torch.cat(
                    [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
                ),
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            )
            for layer in self.model.model.layers
        ]

    def hidden(self, ids: Tensor, positions: Tensor, cache: list[Tensor] | None, rows: Tensor | None) -> Tensor:
        """[B, T, D] after the last norm; writes keys and values into `cache` when there is one."""
        batch, length = ids.shape
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        keys_to = length if cache is None else cache[0].shape[3]
        allowed = torch.arange(keys_to) <= positions[:, :, None]
        bias = (
            torch.zeros(allowed.shape).masked_fill_(~allowed, -1e30).repeat(1, self.heads // self.kv_heads, 1)[:, None]
        )
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        for number, (layer, (qkv, gate_up)) in enumerate(zip(self.model.model.layers, self.fused, strict=True)):
            normed = F.rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, self.config.rms_norm_eps)
            q, k, v = F.linear(normed, qkv).split(
                [w * self.head_dim for w in (self.heads, self.kv_heads, self.kv_heads)], -1
            )
            q, k, v = (y.view(batch, length, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))
            q, k = (
                y * cos + torch.cat([-y[..., self.head_dim // 2 :], y[..., : self.head_dim // 2]], -1) * sin
                for y in (q, k)
            )
            if cache is not None:
                if rows is None:
                    cache[number][0, :, :, :length], cache[number][1, :, :, :length] = k, v
                else:
                    cache[number][0, rows, :, positions[:, 0]] = k[:, :, 0]
                    cache[number][1, rows, :, positions[:, 0]] = v[:, :, 0]
                k, v = cache[number]
            folded = q.reshape(batch, self.kv_heads, -1, self.head_dim)  # the heads of a group share one matmul
            scores = torch.softmax(folded @ k.transpose(2, 3) * self.head_dim**-0.5 + bias, -1)
            mixed = (scores @ v).view(batch, self.heads, length, self.head_dim).transpose(1, 2).flatten(2)
            x = x + F.linear(mixed, layer.self_attn.o_proj.weight)
            normed = F.rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, self.config.rms_norm_eps)
            gate, up = F.linear(normed, gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
        return F.rms_norm(x, x.shape[-1:], self.model.model.norm.weight, self.config.rms_norm_eps)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], group_size: int, max_new: int, eos: int, pad: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample `group_size` answers to each prompt.

        Returns:
            ids [B, T] padded on the right, prompt lengths [B], answer lengths [B], log-probs [B, max_new].
        """
        self.fuse()
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        widest = int(lengths.max())
        ids = torch.tensor([[*prompt, *([pad] * (widest - len(prompt)))] for prompt in prompts])
        shape = (2, len(prompts), self.kv_heads, widest + max_new, self.head_dim)
        cache = [torch.zeros(shape) for _ in self.fused]
        positions = torch.arange(widest).expand(len(prompts), -1)
        last = self.hidden(ids, positions, cache, None)[torch.arange(len(prompts)), lengths - 1]
        member_of = torch.arange(len(prompts)).repeat_interleave(group_size)
        cache, last, lengths = [layer[:, member_of] for layer in cache], last[member_of], lengths[member_of]
        rows, batch = torch.arange(len(member_of)), len(member_of)
        out = torch.full((batch, widest + max_new), pad)
        out[:, :widest] = ids[member_of]
        logprobs, done = torch.zeros(batch, max_new), torch.zeros(batch, dtype=torch.bool)
        counts = torch.zeros(batch, dtype=torch.long)
        for step in range(max_new):
            logits = F.linear(last, self.model.lm_head.weight) / temperature
            probs = torch.softmax(logits, -1)
            token = torch.searchsorted(probs.cumsum(-1), torch.rand(batch, 1)).clamp_(max=probs.shape[1] - 1)[:, 0]
            logprobs[:, step] = torch.log(probs[rows, token])
            out[rows, lengths + step] = torch.where(done, out[rows, lengths + step], token)
            counts += ~done
            done |= token == eos
            if step + 1 == max_new or bool(done.all()):
                break
            last = self.hidden(token[:, None], (lengths + step)[:, None], cache, rows)[:, 0]
        return out, lengths, counts, logprobs


@dataclass
class BareRun:
    """What a bare loop measured: one entry per step in each list."""

    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)
    samples_per_step: int = 0

    @property
    def samples_per_s(self) -> float:
        """Over all steps but the first two, which warm up."""
        kept = self.seconds[2:] or self.seconds
        return self.samples_per_step * len(kept) / sum(kept)


def bare_grpo(
    model: Any,
    tasks: Iterator[tuple[Sequence[int], Sequence[int]]],
    *,
    steps: int,
    tasks_per_step: int = 32,
    group_size: int = 8,
    max_new: int = 5,
    learning_rate: float = 3e-4,
    clip: tuple[float, float] = (0.2, 0.28),
    temperature: float = 1.0,
    eos: int = 258,
    pad: int = 257,
    random_rewards: bool = False,
    stop_at_reward: float = 2.0,
) -> BareRun:
    """Train by GRPO, on-policy, one update per step, and time every step.

    Args:
        model: A Hugging Face Llama in float32; trained in place.
        tasks: Prompt ids and the answer's ids (with eos), without end.
        random_rewards: Rewards are coin flips, so that with learning rate 0 every step trains the same number of rows.
        stop_at_reward: Stop when the mean of the last ten steps' rewards reaches it.
    """
    torch.set_float32_matmul_precision("medium" if torch.cpu._is_avx512_bf16_supported() else "highest")
    bare, run = BareLlama(model), BareRun(samples_per_step=tasks_per_step * group_size)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(steps):
        start = time.perf_counter()
        batch = [next(tasks) for _ in range(tasks_per_step)]
        ids, prompt, answer, behaviour = bare.sample(
            [prompt for prompt, _ in batch], group_size, max_new, eos, pad, temperature
        )
        run.generating.append(time.perf_counter() - start)
        rewards = _rewards(ids, prompt, answer, [wanted for _, wanted in batch], group_size, random_rewards)
        grouped = rewards.view(-1, group_size)
        spread = grouped.std(1, keepdim=True, unbiased=False)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (spread + 1e-6)).flatten()
        ids = ids[:, : int((prompt + answer).max())]
        bare.fuse()
        positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
        places = positions - (prompt - 1)[:, None]
        mask = (places >= 0) & (places < answer[:, None])
        hidden = bare.hidden(ids[:, :-1], positions, None, None)[mask]
        logits = F.linear(hidden, model.lm_head.weight) / temperature
        new = -F.cross_entropy(logits, ids[:, 1:][mask], reduction="none")
        owner = mask.nonzero()[:, 0]
        ratio = torch.exp(new - behaviour[owner, places[mask]])
        gain = torch.minimum(ratio * advantages[owner], ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages[owner])
        (-gain.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.rewards.append(float(rewards.mean()))
        run.seconds.append(time.perf_counter() - start)
        if sum(run.rewards[-10:]) / 10 >= stop_at_reward:
            break
    return run


def _rewards(
    ids: Tensor, prompt: Tensor, answer: Tensor, wanted: list[Sequence[int]], group_size: int, random_rewards: bool
) -> Tensor:
    if random_rewards:
        return torch.randint(0, 2, (len(ids),)).float()
    rows, starts, counts = ids.tolist(), prompt.tolist(), answer.tolist()
    return torch.tensor(
        [
            float(row[start : start + count] == list(wanted[number // group_size]))
            for number, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True))
        ]
    )


def load_bare(folder: Path | str) -> Any:
    """A Hugging Face model in float32 whose own forward, where used, is the fastest for short rows on a CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def nano_sums(
    seed: int, operands: int = 2, largest: int = 99, suffix: str = "="
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts `<|bos|><|user|>12+34=<|end|><|assistant|>` of the nano model, and `46<|end|>`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        numbers = torch.randint(0, largest + 1, (operands,), generator=generator).tolist()
        question = "+".join(map(str, numbers)) + suffix
        yield [256, 260, *question.encode(), 258, 261], [*str(sum(numbers)).encode(), 258]


class HfGenerate:
    """`transformers.generate` over token ids: left-padded batches, sampling at temperature 1, nothing recorded.

    Args:
        name: In tables.
        model: A Hugging Face causal LM.
    """

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model.eval()

    def run(self, prompts: Sequence[Any], lengths: Sequence[int], at_a_time: int) -> float:
        """Wanted tokens per second.

        Prompts are taken in the order of their answers' lengths, so that a batch, which runs as long as its longest
        answer, wastes as little as it can.
        """
        order = sorted(range(len(prompts)), key=lambda number: lengths[number])
        start = time.perf_counter()
        for first in range(0, len(order), at_a_time):
            chosen = order[first : first + at_a_time]
            self._batch([prompts[number] for number in chosen], max(lengths[number] for number in chosen))
        return sum(lengths) / (time.perf_counter() - start)

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Any], new_tokens: int) -> None:
        widest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), widest, dtype=torch.long)
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, widest - len(prompt) :] = torch.as_tensor(prompt)
            seen[row, widest - len(prompt) :] = 1
        self.model.generate(
            ids,
            attention_mask=seen,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )


class HfPaddedLoop:
    """What a supervised loop over Transformers looks like: padded micro-batches, autocast over float32 masters.

    Args:
        model: A Hugging Face causal LM.
        autocast: Products in bfloat16.
        micro_batch: Sequences of a forward pass, in the order given, padded to the longest of them.
    """

    def __init__(self, model: Any, *, autocast: bool, micro_batch: int, learning_rate: float = 1e-5) -> None:
        self.model, self.autocast, self.micro_batch = model, autocast, micro_batch
        trained = [value for value in model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.trained = trained

    def step(self, sequences: Sequence[tuple[Sequence[int], int]]) -> float:
        """One optimiser update on (ids, number of prompt ids); returns the mean loss of the answers' tokens."""
        counted = sum(len(ids) - prompt for ids, prompt in sequences)
        total = 0.0
        for start in range(0, len(sequences), self.micro_batch):
            part = sequences[start : start + self.micro_batch]
            widest = max(len(ids) for ids, _ in part)
            ids = torch.tensor([[*row, *([0] * (widest - len(row)))] for row, _ in part])
            attention = torch.tensor([[1] * len(row) + [0] * (widest - len(row)) for row, _ in part])
            labels = ids.masked_fill(attention == 0, -100)
            for place, (_, prompt) in enumerate(part):
                labels[place, :prompt] = -100
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / counted).backward()
            total += float(loss.detach()) / counted
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
