"""Measures versions of the weights on held-out tasks."""

from triune.evaluation.bench import Answerer, bench, bench_endpoint
from triune.evaluation.config import EvalSettings
from triune.evaluation.evaluation import Evaluation
from triune.evaluation.results import SetResult, TaskResult

__all__ = ["Answerer", "EvalSettings", "Evaluation", "SetResult", "TaskResult", "bench", "bench_endpoint"]
