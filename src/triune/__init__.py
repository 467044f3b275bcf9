"""Reinforcement fine-tuning of LLM agents that keep learning from experience."""

__version__ = "0.1.0"
