"""Groups with true log-probs, a monitor that remembers, and a whole small training run: for tests of trainers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Stop, Task


class RecordingMonitor:
    """Keeps rows, stage names and waits."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, dict[str, float]]] = []
        self.stages: list[str] = []
        self.waits: list[str] = []

    def log(self, metrics: Mapping[str, float], *, role: str, step: int) -> None:
        """Append a row."""
        self.rows.append((step, role, dict(metrics)))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Remember the name."""
        self.stages.append(stage)
        yield

    @contextmanager
    def waiting(self, role: str, for_what: str) -> Iterator[None]:
        """Remember the sentence."""
        self.waits.append(f"{role} waits for {for_what}")
        yield

    def steps(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [metrics[name] for _, _, metrics in self.rows if name in metrics]


def sampled_group(
    key: str,
    *,
    size: int = 4,
    vocab: int = 64,
    lengths: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    version: int = 0,
    run: str = "run",
    model: Any = None,
) -> Group:
    """A group of random answers to one prompt, with advantages.

    Args:
        key: Key of the task.
        size: Rollouts.
        vocab: Ids are drawn from [2, vocab).
        lengths: (prompt, answer) tokens of each rollout, prompts of up to 64; one prompt and random answers when None.
        seed: Of everything random.
        temperature: Stored with the experience.
        version: Of every answer token.
        run: First part of the ids.
        model: Gives true behaviour log-probs; without one they are random.
    """
    rng = np.random.default_rng([seed, *key.encode()])
    size = size if lengths is None else len(lengths)
    rewards = rng.integers(0, 2, size).astype(float)
    credit = rewards - rewards.mean()
    shapes = lengths or [(int(rng.integers(3, 7)), int(rng.integers(1, 9)))] * size
    shapes = [(prompt, int(rng.integers(1, 9)) if lengths is None else answer) for prompt, answer in shapes]
    question = rng.integers(2, vocab, 64)
    group_id = GroupId(run, "train", key, 0)
    rows = []
    for member, (prompt, answer) in enumerate(shapes):
        tokens = np.concatenate([question[:prompt], rng.integers(2, vocab, answer)]).astype(np.int32)
        mask = np.arange(prompt + answer) >= prompt
        found = _true_logprobs(model, tokens, temperature) if model is not None else -rng.random(len(tokens)) * 4
        rows.append(
            Experience(
                id=ExperienceId(RolloutId(group_id, member)),
                tokens=tokens,
                action_mask=mask,
                logprobs=np.where(mask, found, np.nan).astype(np.float32),
                versions=np.where(mask, version, -1).astype(np.int32),
                temperature=temperature,
                streams={"advantages": np.where(mask, credit[member], 0).astype(np.float32)},
                reward=float(rewards[member]),
                stop=Stop.DONE,
            )
        )
    return Group(id=group_id, task=Task(key=key), records=tuple(rows))


def _true_logprobs(model: Any, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """float64[T] by the plain Hugging Face forward in float32; entry 0 is 0."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            scores = (model(input_ids=ids).logits[0, :-1].double() / temperature).log_softmax(-1)
        chosen = scores.gather(1, ids[0, 1:, None]).squeeze(1)
    finally:
        torch.set_float32_matmul_precision(before)
    return np.concatenate([[0.0], chosen.numpy()])


async def filled_buffer(
    folder: Path, groups: Sequence[Group], *, run: str = "run", path: str | None = None, deterministic: bool = True
) -> Any:
    """An open buffer that holds `groups` as ready entries and has ended; in memory unless `path` names a file."""
    from triune.buffer import BufferSettings, open_buffer
    from triune.ports import AdmissionRule

    store = {"use": "memory"} if path is None else {"use": "sqlite", "path": path}
    buffer = open_buffer(BufferSettings.model_validate({"store": store}), folder, deterministic=deterministic)
    await buffer.open_run(run, config_hash="", data_hash="")
    rule = AdmissionRule(max_staleness=10**6, fresh=10**6)
    for group in groups:
        found = await buffer.admit(group.task, rule)
        assert found == group.id, f"{found} is not {group.id}"
        await buffer.put(group, group)
    await buffer.end("all groups are there")
    return buffer
