"""What a task is, what it gives (prompts), and how prompts become token ids. Tasks know text, not models.

    task = KeyValue(num_pairs=50)
    examples = task.examples("test", count=500, seed=0)
    prompts = [task.prompt(example, slot(p, task.num_items), p) for example in examples for p in (0, 25, 50, 75, 100)]
    encoded = encode(prompts, tokenizer, window=8192)

A prompt holds n items (key-value pairs, documents); the fact asked for is the item at one slot, 0 ... n-1. Positions are
percent: 0 begin, 50 middle, 100 end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from lpes_jax.errors import UserError

Split = Literal["search", "test", "all"]
Tokenizer = Callable[[list[str]], Mapping[str, Any]]  # as transformers' are: texts -> {"input_ids": a list of ids for each}
Example = TypeVar("Example")  # whatever a task makes of one question; only the task itself looks inside


@dataclass(frozen=True)
class Prompt:
    """One question with its fact at one slot.

    text: all that the model reads, a forced opener included.
    answers: the admitted continuations, opener + gold for each admitted opener; just the gold where the opener is forced.
    gold: the bare answer, for metrics on text.
    example: a stable id (hash of the example's content), the same at every slot, so that results can be paired.
    position, slot, num_items: where the fact stands: in percent, 0-based, and of how many.
    """

    text: str
    answers: tuple[str, ...]
    gold: str
    example: str
    position: int
    slot: int
    num_items: int


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt's text, and of each answer that greedy generation from there could produce."""

    ids: list[int]
    answers: list[list[int]]


@runtime_checkable
class Task(Protocol[Example]):
    """Questions with a fact that can be moved. A task without positions has num_items 1 and slot 0 alone."""

    name: ClassVar[str]

    @property
    def num_items(self) -> int: ...

    @property
    def plain(self) -> "Task[Any] | None":
        """The same task without a forced opener behind its prompts; None where nothing is forced."""
        ...

    def examples(self, split: Split, count: int, seed: int) -> list[Example]:
        """The first `count` examples; `search` and `test` never share one, whatever the seeds and counts.

        Raises UserError where there are fewer than `count`.
        """
        ...

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its fact at `slot`; `position` is the percentage asked for (None: the slot's own, rounded)."""
        ...


def slot(position: int, num_items: int) -> int:
    """The 0-based slot of a position in percent: floor(position / 100 * (num_items - 1)), in integers."""
    if not 0 <= position <= 100:
        raise UserError(f"--positions: {position} is not a percentage; positions go from 0 (begin) to 100 (end)")
    return position * (num_items - 1) // 100


def position(slot: int, num_items: int) -> int:
    """The percentage nearest to a slot, for slots that were named themselves."""
    if not 0 <= slot < num_items:
        raise UserError(f"--slots: there is no slot {slot} among {num_items} items; slots go from 0 to {num_items - 1}")
    return round(100 * slot / max(num_items - 1, 1))


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer, window: int) -> list[EncodedPrompt]:
    """Token ids under the tokenizer's own BOS policy, never with a second BOS. Text and answer are tokenised as one string.

    tokenizer: a transformers tokenizer, or any callable `list of strings -> {"input_ids": list of id lists}`.
    window: the most tokens the model takes, prompt and answer together.

    Where the joint ids do not begin with the ids of the text alone, the answer merges with the end of the text ("value: "
    + "7f" becomes "value:", " 7f"): greedy generation from the text cannot reach those ids, so that answer is dropped.
    Raises UserError where none is left, and where a prompt with its answer is longer than the window; never cuts.
    """
    joint_texts = [prompt.text + answer for prompt in prompts for answer in prompt.answers]
    if not joint_texts:
        return []
    text_ids = token_ids(tokenizer, [prompt.text for prompt in prompts])
    joint_ids = iter(token_ids(tokenizer, joint_texts))
    encoded = []
    for prompt, ids in zip(prompts, text_ids, strict=True):
        joints = [next(joint_ids) for _ in prompt.answers]
        answers = [joint[len(ids) :] for joint in joints if len(joint) > len(ids) and joint[: len(ids)] == ids]
        if not answers:
            raise UserError(
                f"the end of the prompt, {prompt.text[-8:]!r}, merges with the answer {prompt.answers[0]!r} in this tokenizer, "
                "so no generation could begin with it; choose another --answer-opener"
            )
        encoded.append(EncodedPrompt(ids, answers))
    longest = max(len(prompt.ids) + max(map(len, prompt.answers)) for prompt in encoded)
    if longest > window:
        raise UserError(
            f"the longest prompt with its answer is {longest} tokens and the model's window is {window}; "
            "use fewer items a prompt (--num-pairs)"
        )
    return encoded


def token_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text as the tokenizer gives them. Where it puts a BOS before one that a chat template wrote, one goes."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in tokenizer(texts)["input_ids"]]
