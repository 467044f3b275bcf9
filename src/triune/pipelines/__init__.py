"""Pipelines: operators that drop, mask, reshape and credit finished experience on its way into the buffer."""

from triune.pipelines.pipeline import Pipeline, Shaped
from triune.pipelines.rewards import RAW_REWARD, raw_rewards, with_reward

__all__ = ["RAW_REWARD", "Pipeline", "Shaped", "raw_rewards", "with_reward"]
