"""One question, one answer, one reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.errors import WorkflowError
from triune.explorer.model import Model
from triune.ports import Reward, RewardFn
from triune.records import Task
from triune.registry import brick


@brick("workflow")
@dataclass(frozen=True, kw_only=True)
class SingleTurn:
    """Ask the task's question once and score the answer with the task set's reward.

    Attributes:
        prompt_key: Field of the task's data with the question: text, or a list of chat messages.
        system: System message before it.
        template: Text around the question; `{question}` stands for it.
    """

    prompt_key: str = "question"
    system: str | None = None
    template: str | None = None

    async def __call__(self, task: Task, model: Model, reward: RewardFn) -> Reward:
        answer = await model.generate(self.messages(task))
        return await reward(task, answer.text)

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The conversation put to the model.

        Raises:
            WorkflowError: The task has no such field.
        """
        question = task.data.get(self.prompt_key)
        if question is None:
            where = f"task {task.taskset}/{task.key}"
            raise WorkflowError(
                where,
                f"no field {self.prompt_key!r}",
                ", ".join(task.data),
                "map it with tasks.fields, or set prompt_key",
            )
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        if isinstance(question, list):
            return [*head, *question]
        if self.template is not None:
            question = self.template.replace("{question}", str(question))
        return [*head, {"role": "user", "content": str(question)}]
