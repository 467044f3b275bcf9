"""A bandit with five arms, on which expected gradients are sums and not estimates.

Every sampling distribution here is a multiple of 1/20, so a batch that holds each arm as often as it says *is* the
distribution: means over it are expectations, without noise and without weights. Beside it stand the true gradients by
the logits of a softmax policy, as closed forms in NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triune.algorithms import SOURCES, Divider, MicroBatch, Progress
from triune.records import Source
from triune.testing.proofs import Case

NUM_ROWS = 20


@dataclass(frozen=True)
class Bandit:
    """Five arms.

    Attributes:
        policy: Probability of each arm, multiples of 1/20.
        other: Another such distribution: who sampled, in off-policy proofs and in demonstrations.
        reference: Probability of each arm under the reference, any numbers.
        rewards: Of each arm.
    """

    policy: np.ndarray
    other: np.ndarray
    reference: np.ndarray
    rewards: np.ndarray

    @classmethod
    def random(cls, seed: int) -> Bandit:
        """A bandit on which no two arms are alike."""
        chance = np.random.default_rng(seed)
        draw = lambda: (1 + chance.multinomial(NUM_ROWS - 5, np.full(5, 0.2))) / NUM_ROWS  # noqa: E731
        reference = np.exp(chance.normal(0, 0.7, 5))
        return cls(draw(), draw(), reference / reference.sum(), chance.normal(0, 1, 5))

    # ------------------------------------------------------------------ true gradients by the logits

    def policy_gradient(self) -> np.ndarray:
        """Of the expected reward: p (r - E r)."""
        return self.policy * (self.rewards - self.policy @ self.rewards)

    def imitation(self) -> np.ndarray:
        """Of the mean log-prob of samples of `other`: other - p."""
        return self.other - self.policy

    def reverse_kl(self) -> np.ndarray:
        """Of KL(policy || reference): p (log(p / ref) - KL)."""
        return self._of_mean(np.log(self.policy / self.reference))

    def forward_kl(self) -> np.ndarray:
        """Of KL(reference || policy): p - ref."""
        return self.policy - self.reference

    def total_variation(self) -> np.ndarray:
        """Of the sum of |p - ref|: p (s - E s) with s the sign of p - ref."""
        return self._of_mean(np.sign(self.policy - self.reference))

    def entropy(self) -> np.ndarray:
        """Of the policy's entropy: -p (log p - E log p)."""
        return -self._of_mean(np.log(self.policy))

    def zero(self) -> np.ndarray:
        """Of nothing."""
        return np.zeros(5)

    def _of_mean(self, value: np.ndarray) -> np.ndarray:
        return self.policy * (value - self.policy @ value)

    # ------------------------------------------------------------------------------ batches and their gradients

    def gradient(
        self,
        case: Case,
        *,
        sampler: np.ndarray | None = None,
        policy: np.ndarray | None = None,
        old: np.ndarray | None = None,
        source: Source = Source.POLICY,
        labels: bool = False,
    ) -> np.ndarray:
        """Expected gradient of the brick's loss by the logits, over samples of `sampler` (default: the policy).

        Args:
            case: The brick, called on one batch whose arms are distributed as the sampler says.
            sampler: Multiples of 1/20; its log-probs are the behaviour's, which is unknown for experts.
            policy: Whose logits; default: the bandit's.
            old: The policy that began the step, when it is neither.
            source: Who is said to have made the samples.
            labels: Whether rewards are given as 1 and -1 instead of as they are.
        """
        sampler = self.policy if sampler is None else sampler
        policy = self.policy if policy is None else policy
        arms = np.repeat(np.arange(5), np.rint(sampler * NUM_ROWS).astype(int))
        rewards = np.sign(self.rewards) if labels else self.rewards
        streams = {"advantages": (self.rewards - policy @ self.rewards)[arms]}
        behaviour = np.log(sampler[arms]) if source == Source.POLICY else np.full(len(arms), np.nan)
        streams |= {"behaviour_logprobs": behaviour, "ref_logprobs": np.log(self.reference)[arms]}
        if old is not None or "old_logprobs" in case.streams:
            streams["old_logprobs"] = np.log((sampler if old is None else old)[arms])
        batch = _batch(arms, streams, rewards[arms], source)
        return gradient(case, batch, policy, arms)

    def value_gradient(self, case: Case, value: float) -> float:
        """Expected gradient of a critic's loss by its one value, over samples of the policy."""
        arms = np.repeat(np.arange(5), np.rint(self.policy * NUM_ROWS).astype(int))
        streams = {name: np.full(NUM_ROWS, value) for name in case.streams} | {"returns": self.rewards[arms]}
        batch = _batch(arms, streams, self.rewards[arms], Source.POLICY)
        leaf = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        divider = Divider(case.algorithm, [batch], state=case.algorithm.state0(), progress=Progress())
        divider.loss(batch.with_values(leaf.expand(batch.tokens.shape))).backward()
        assert leaf.grad is not None
        return leaf.grad.item()

    def pair_gradient(self, case: Case, policy: np.ndarray, strengths: np.ndarray) -> np.ndarray:
        """The same for a brick over pairs: all pairs of arms, labelled as Bradley and Terry's model does.

        Arm a is chosen over b in the share s_a / (s_a + s_b) of their comparisons, so the reward is log s. Strengths of
        1, 2 and 4 make all shares multiples of 1/30, and 30 rows per pair the exact distribution.
        """
        wins = []
        for one in range(5):
            for other in range(one + 1, 5):
                times = int(np.rint(30 * strengths[one] / (strengths[one] + strengths[other])))
                wins += [(one, other)] * times + [(other, one)] * (30 - times)
        arms = np.array(wins).reshape(-1)
        streams = {"ref_logprobs": np.log(self.reference)[arms], "behaviour_logprobs": np.log(policy)[arms]}
        streams["advantages"] = np.zeros(len(arms))
        batch = _batch(arms, streams, np.log(strengths)[arms], Source.POLICY, is_paired=True)
        return gradient(case, batch, policy, arms)


def _batch(
    arms: np.ndarray, streams: dict[str, np.ndarray], rewards: np.ndarray, source: Source, *, is_paired: bool = False
) -> MicroBatch:
    """One token per row: the arm."""
    num = len(arms)
    number = torch.arange(num)
    return MicroBatch(
        tokens=torch.tensor(arms).unsqueeze(1),
        action_mask=torch.ones(num, 1, dtype=torch.bool),
        streams={name: torch.tensor(value).unsqueeze(1) for name, value in streams.items()},
        rollouts=number,
        rewards=torch.tensor(rewards),
        sources=torch.full((num,), SOURCES.index(source)),
        pairs=number // 2 if is_paired else torch.full((num,), -1),
        chosen=number % 2 == 0,
    )


@dataclass(frozen=True)
class TwoSteps:
    """Answers of two tokens: five first ones, and after each of them five others, all told by one softmax policy.

    Attributes:
        first: Probability of each first token, multiples of 1/20.
        second: [5, 5]: of each second token, given the first.
        rewards: [5, 5]: of each answer.
    """

    first: np.ndarray
    second: np.ndarray
    rewards: np.ndarray

    @classmethod
    def random(cls, seed: int) -> TwoSteps:
        """Answers of which no two are alike."""
        chance = np.random.default_rng(seed)
        draw = lambda: (1 + chance.multinomial(NUM_ROWS - 5, np.full(5, 0.2))) / NUM_ROWS  # noqa: E731
        return cls(draw(), np.stack([draw() for _ in range(5)]), chance.normal(0, 1, (5, 5)))

    def policy_gradient(self) -> np.ndarray:
        """Of the expected reward by the 5 + 25 logits: p(a) (Q(a) - J), and p(a) p(b | a) (r(a, b) - Q(a))."""
        worth = (self.second * self.rewards).sum(1)
        of_first = self.first * (worth - self.first @ worth)
        of_second = self.first[:, None] * self.second * (self.rewards - worth[:, None])
        return np.concatenate([of_first, of_second.reshape(-1)])

    def gradient(self, case: Case) -> np.ndarray:
        """Expected gradient of a loss by the logits, over fresh samples; an answer's advantage is r - J."""
        counts = np.rint(np.outer(self.first, np.ones(5)) * self.second * NUM_ROWS**2).astype(int).reshape(-1)
        one, other = np.divmod(np.repeat(np.arange(25), counts), 5)
        rewards = self.rewards[one, other]
        first = torch.tensor(np.log(self.first), requires_grad=True)
        second = torch.tensor(np.log(self.second), requires_grad=True)
        logprobs = torch.stack([first.log_softmax(0)[one], second.log_softmax(1)[one, other]], dim=1)
        given = {"behaviour_logprobs": logprobs.detach(), "ref_logprobs": logprobs.detach()}
        given["advantages"] = torch.tensor(rewards - rewards.mean()).unsqueeze(1).expand(-1, 2)
        if "old_logprobs" in case.streams:
            given["old_logprobs"] = logprobs.detach()
        batch = MicroBatch(
            tokens=torch.tensor(np.stack([one, other], axis=1)),
            action_mask=torch.ones(len(one), 2, dtype=torch.bool),
            streams=given,
            rollouts=torch.arange(len(one)),
            rewards=torch.tensor(rewards),
            sources=torch.full((len(one),), SOURCES.index(Source.POLICY)),
        )
        divider = Divider(case.algorithm, [batch], state=case.algorithm.state0(), progress=Progress())
        divider.loss(batch.with_logprobs(logprobs, entropy=-logprobs.detach())).backward()
        assert first.grad is not None
        assert second.grad is not None
        return np.concatenate([first.grad.numpy(), second.grad.numpy().reshape(-1)])


def gradient(case: Case, batch: MicroBatch, policy: np.ndarray, arms: np.ndarray) -> np.ndarray:
    """Gradient of a case's loss on one batch by the logits of the policy."""
    logits = torch.tensor(np.log(policy), requires_grad=True)
    logprobs = logits.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum().expand(batch.tokens.shape)
    chosen: Tensor = logprobs[torch.tensor(arms)].unsqueeze(1)
    divider = Divider(case.algorithm, [batch], state=case.algorithm.state0(), progress=Progress())
    loss = divider.loss(batch.with_logprobs(chosen, entropy=entropy))
    if not loss.requires_grad:
        return np.zeros(5)
    loss.backward()
    assert logits.grad is not None
    return logits.grad.numpy()


def weight_of(case: Case) -> float:
    """The weight of a brick's only term that has one: what a coefficient, fixed or adaptive, is first; 0 without."""
    terms = case.brick(_tiny(case), case.brick.state0() if hasattr(case.brick, "state0") else {}, Progress())
    weights = {term.weight for term in terms if term.weight}
    assert len(weights) <= 1, f"{case}: terms of several weights"
    return weights.pop() if weights else 0.0


def _tiny(case: Case) -> MicroBatch:
    arms = np.zeros(1, dtype=int)
    streams = {name: np.full(1, -1.0) for name in ("advantages", "behaviour_logprobs", "ref_logprobs", *case.streams)}
    batch = _batch(arms, streams, np.zeros(1), Source.POLICY)
    one = torch.full((1, 1), -1.0, dtype=torch.float64)
    return batch.with_logprobs(one, entropy=-one).with_values(one)
