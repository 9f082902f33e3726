"""A task whose questions are asked in a chat: `ChatTask(task, chat.render)`. The model's package defines the chat's format."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lpes_jax.tasks.prompts import Cut, Prompt, Split, Task


@dataclass(frozen=True)
class ChatTask:
    """`task` with each prompt rendered as a user's message, up to where the answer begins.

    A forced opener is the beginning of the answer, so it comes after everything that the chat format adds. If nothing is forced
    and the chat ends with a line end, each admitted answer is also admitted without its leading space, and options lose it.
    """

    task: Task[Any]
    render: Callable[[str], str]

    name: ClassVar[str]

    def __post_init__(self):
        object.__setattr__(self, "name", self.task.name)  # records use the name of the inner task

    @property
    def num_items(self) -> int:
        return self.task.num_items

    @property
    def plain(self) -> "ChatTask | None":
        return None if self.task.plain is None else ChatTask(self.task.plain, self.render)

    @property
    def decided_by(self) -> Literal["generation", "options"]:
        return self.task.decided_by

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.task.metrics

    @property
    def max_new_tokens(self) -> int:
        return self.task.max_new_tokens

    @property
    def max_prompt_tokens(self) -> int | None:
        return self.task.max_prompt_tokens

    @property
    def stop(self) -> tuple[str, ...]:
        return self.task.stop

    def examples(self, split: Split, count: int | None, seed: int) -> list[Any]:
        return self.task.examples(split, count, seed)

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        return self.task.score(output, prompt)

    def prompt(self, example: Any, slot: int, position: int | None = None) -> Prompt:
        """The prompt of `task`, rendered as a chat."""
        prompt = self.task.prompt(example, slot, position)
        question = prompt.text if self.task.plain is None else self.task.plain.prompt(example, slot, position).text
        assert prompt.text.startswith(question), "a task's prompt is its plain prompt followed by the opener"
        opener = prompt.text[len(question) :]
        text, answers, options = self.render(question), prompt.answers, prompt.options
        if not opener and text[-1:].isspace():
            answers = tuple(dict.fromkeys([*answers, *(answer.lstrip(" ") for answer in answers)]))
            options = tuple(option.lstrip(" ") for option in options)
        cut = prompt.cut and _moved(prompt.cut, question, text)
        return replace(prompt, text=text + opener, answers=answers, options=options, cut=cut)


def _moved(cut: Cut, question: str, chat: str) -> Cut | None:
    # Templates may strip the question. None if the template changed it: then nothing can be cut, and too long is an error.
    start = chat.find(question.strip())
    if start < 0:
        return None
    by = start - (len(question) - len(question.lstrip()))
    return replace(cut, start=cut.start + by, end=cut.end + by, ends=tuple(end + by for end in cut.ends))
