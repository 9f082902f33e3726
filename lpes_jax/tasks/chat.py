"""A task whose questions are asked in a chat: `ChatTask(task, chat.render)`. How a chat looks is the model's business."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lpes_jax.tasks.prompts import Prompt, Split, Task


@dataclass(frozen=True)
class ChatTask:
    """`task` with each prompt rendered as a user's message, up to where the answer begins.

    A forced opener is the beginning of the answer, so it stands behind all that the chat writes. Where nothing is forced and
    the chat ends with a line end, each admitted answer is admitted without its leading space as well.
    """

    task: Task[Any]
    render: Callable[[str], str]

    name: ClassVar[str]

    def __post_init__(self):
        object.__setattr__(self, "name", self.task.name)  # records know it as the task that it is

    @property
    def num_items(self) -> int:
        return self.task.num_items

    @property
    def plain(self) -> "ChatTask | None":
        return None if self.task.plain is None else ChatTask(self.task.plain, self.render)

    def examples(self, split: Split, count: int, seed: int) -> list[Any]:
        return self.task.examples(split, count, seed)

    def prompt(self, example: Any, slot: int, position: int | None = None) -> Prompt:
        prompt = self.task.prompt(example, slot, position)
        question = prompt.text if self.task.plain is None else self.task.plain.prompt(example, slot, position).text
        assert prompt.text.startswith(question), "a task's prompt is its plain prompt with the opener behind it"
        opener = prompt.text[len(question) :]
        text, answers = self.render(question), prompt.answers
        if not opener and text[-1:].isspace():
            answers = tuple(dict.fromkeys([*answers, *(answer.lstrip(" ") for answer in answers)]))
        return replace(prompt, text=text + opener, answers=answers)
