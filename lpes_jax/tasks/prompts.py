"""What a task is, what it gives (prompts), and how prompts become token ids. Tasks know text, not models.

    task = KeyValue(num_pairs=50)
    examples = task.examples("test", count=500, seed=0)
    prompts = [task.prompt(example, slot(p, task.num_items), p) for example in examples for p in (0, 25, 50, 75, 100)]
    fitted = fit(prompts, tokenizer, window=8192, max_prompt_tokens=task.max_prompt_tokens, new_tokens=task.max_new_tokens)
    encoded = encode(fitted.prompts, tokenizer, window=8192)
    scores = [task.score(output, prompt) for output, prompt in zip(outputs, fitted.prompts)]

A prompt holds n items (key-value pairs, documents); the fact asked for is the item at one slot, 0 ... n-1. Positions are
percent: 0 begin, 50 middle, 100 end.

A task is decided by `generation` (an output is generated text) or by `options` (an output is the likeliest of a prompt's
options, whose log-likelihoods come from the prompts that `option_prompts` gives).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int

from lpes_jax.choices import Overlength, Split
from lpes_jax.errors import UserError

Tokenizer = Callable[[list[str]], Mapping[str, Any]]  # as transformers' are: texts -> {"input_ids": a list of ids for each}
Example = TypeVar("Example")  # whatever a task makes of one question; only the task itself looks inside


@dataclass(frozen=True)
class Cut:
    """How the benchmark itself shortens a prompt that is too long: the end of text[start:end] goes, `separator` stands there.

    places: the only ends that may be left (of whole few-shot examples, say); empty for any character.
    """

    start: int
    end: int
    separator: str = ""
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One question with its fact at one slot.

    text: all that the model reads, a forced opener included.
    answers: the admitted continuations, opener + gold for each admitted opener; just the gold where the opener is forced.
        Empty where only the generated text counts (summaries), and where the gold is blank: any output begins with that.
    gold: the bare answer, for metrics on text.
    example: a stable id (hash of the example's content), the same at every slot, so that results can be paired.
    position, slot, num_items: where the fact stands: in percent, 0-based, and of how many.
    golds: all bare answers, where there are several; `references` gives them in any case.
    options: the continuations to choose among, for tasks decided by options.
    cut, was_cut: how the benchmark shortens this prompt, and whether `fit` did.
    details: what a record should say of this prompt (the subject, which distractors).
    faults: why its score says nothing, of `lpes_jax.tasks.leaks.FAULTS`.
    """

    text: str
    answers: tuple[str, ...]
    gold: str
    example: str
    position: int
    slot: int
    num_items: int
    golds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    cut: Cut | None = None
    was_cut: bool = False
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    faults: tuple[str, ...] = ()

    @property
    def references(self) -> tuple[str, ...]:
        return self.golds or (self.gold,)


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt's text, and of each answer that greedy generation from there could produce."""

    ids: list[int]
    answers: list[list[int]]


@runtime_checkable
class Task(Protocol[Example]):
    """Questions with a fact that can be moved. A task without positions has num_items 1 and slot 0 alone.

    decided_by: what `score` takes: generated text, or the option that the model holds likeliest.
    metrics: what `score` gives, each in [0, 1]; the first is the task's own.
    max_new_tokens: tokens to generate, unless the user says otherwise.
    max_prompt_tokens: the benchmark's own limit of a prompt, kept by `fit`; None where the window is the only one.
    stop: texts that end an output, besides the model's own end.
    """

    name: ClassVar[str]

    @property
    def num_items(self) -> int: ...

    @property
    def decided_by(self) -> Literal["generation", "options"]: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def max_prompt_tokens(self) -> int | None: ...

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def plain(self) -> "Task[Any] | None":
        """The same task without a forced opener behind its prompts; None where nothing is forced."""
        ...

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples; `search` and `test` never share one, whatever the seeds and counts.

        None: all there are, of a task that reads a file. Raises UserError where there are fewer than `count`.
        """
        ...

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its fact at `slot`; `position` is the percentage asked for (None: the slot's own, rounded)."""
        ...

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """A figure in [0, 1] for each of `metrics`, of what the model said to one prompt."""
        ...


class Unmoved:
    """What the tasks without positions have in common: one item, and nothing forced behind their prompts."""

    @property
    def num_items(self) -> int:
        return 1

    @property
    def plain(self) -> None:
        return None


class Generated:
    """What the tasks that are decided by generated text have in common."""

    @property
    def decided_by(self) -> Literal["generation"]:
        return "generation"

    @property
    def stop(self) -> tuple[str, ...]:
        return ()


class Generation(Generated):
    """What those with short answers have in common besides."""

    @property
    def max_new_tokens(self) -> int:
        return 100

    @property
    def max_prompt_tokens(self) -> int | None:
        return None


class Fitted(NamedTuple):
    """What `fit` gives: the prompts that stay, the ids of the examples left out, and how many prompts were shortened."""

    prompts: list[Prompt]
    skipped: list[str]
    num_cut: int


def check_positions(positions: Sequence[int], flag: str = "--positions") -> None:
    """Raise UserError for positions in percent that cannot be measured: none, one beyond 0 to 100, one named twice."""
    if not positions:
        raise UserError(f"{flag}: give at least one position, in percent")
    if outside := [position for position in positions if not 0 <= position <= 100]:
        raise UserError(f"{flag}: {outside[0]} is not a percentage; positions go from 0 (begin) to 100 (end)")
    check_once(positions, flag)


def check_once(values: Sequence[Any], flag: str) -> None:
    """Raise UserError for a value that stands in a flag's list twice: results go by these values."""
    for at, value in enumerate(values):
        if value in values[:at]:
            raise UserError(f"{flag} {' '.join(map(str, values))}: {value} stands there twice; give it once")


def slot(position: int, num_items: int) -> int:
    """The 0-based slot of a position in percent: floor(position / 100 * (num_items - 1)), in integers."""
    check_positions([position])
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
    if not prompts:
        return []
    joint_texts = [prompt.text + answer for prompt in prompts for answer in prompt.answers]
    text_ids = token_ids(tokenizer, [prompt.text for prompt in prompts])
    joint_ids = iter(token_ids(tokenizer, joint_texts) if joint_texts else [])
    encoded = []
    for prompt, ids in zip(prompts, text_ids, strict=True):
        joints = [next(joint_ids) for _ in prompt.answers]
        answers = [joint[len(ids) :] for joint in joints if len(joint) > len(ids) and joint[: len(ids)] == ids]
        if prompt.answers and not answers:
            raise UserError(
                f"the end of the prompt, {prompt.text[-8:]!r}, merges with the answer {prompt.answers[0]!r} in this tokenizer, "
                "so no generation could begin with it; choose another --answer-opener"
            )
        encoded.append(EncodedPrompt(ids, answers))
    longest = max(len(prompt.ids) + max(map(len, prompt.answers), default=0) for prompt in encoded)
    if longest > window:
        raise UserError(
            f"the longest prompt with its answer is {longest} tokens and the model's window is {window}; "
            "use fewer items a prompt (--num-pairs)"
        )
    return encoded


def fit(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    window: int,
    *,
    max_prompt_tokens: int | None = None,
    new_tokens: int = 0,
    overlength: Overlength = "error",
) -> Fitted:
    """Prompts that fit: text in `max_prompt_tokens`, and text with `new_tokens` or its longest answer in the window.

    Where the benchmark defines a cut, a prompt that is too long is cut to the most that fits. Any other is an error, or with
    `skip` its example is left out at every position, so that all positions keep the same questions.
    """
    budget = min(window - new_tokens, window if max_prompt_tokens is None else max_prompt_tokens)
    fitted, lengths = [], []
    for prompt, tokens in zip(prompts, _num_tokens(tokenizer, [prompt.text for prompt in prompts]), strict=True):
        if tokens > budget and prompt.cut is not None:
            prompt, tokens = _cut(prompt, prompt.cut, tokens, tokenizer, budget)
        fitted.append(prompt)
        lengths.append(tokens)
    with_answer = iter(_num_tokens(tokenizer, [prompt.text + answer for prompt in fitted for answer in prompt.answers]))
    skipped, longest = dict[str, None](), 0
    for prompt, tokens in zip(fitted, lengths, strict=True):
        answered = max((next(with_answer) for _ in prompt.answers), default=0)
        if tokens > budget or answered > window:
            longest = max(longest, tokens, answered)
            skipped[prompt.example] = None
    if skipped and overlength == "error":
        limit = f"the model's window of {window}" + (f" less {new_tokens} to generate" if new_tokens else "")
        if max_prompt_tokens is not None:
            limit = f"the smaller of {limit} and the task's own {max_prompt_tokens}"
        raise UserError(
            f"{len(skipped)} questions are too long: up to {longest} tokens, more than {limit}; use fewer items a "
            "prompt (--num-pairs, --num-documents, --num-sentences, --num-lines), or leave these questions out with "
            "--overlength skip"
        )
    fitted = [prompt for prompt in fitted if prompt.example not in skipped]
    return Fitted(fitted, list(skipped), sum(prompt.was_cut for prompt in fitted))


def _cut(prompt: Prompt, cut: Cut, tokens: int, tokenizer: Tokenizer, budget: int) -> tuple[Prompt, int]:
    # Interpolates between an end that fits and one that does not: tokens grow almost evenly with the text.
    def text(at: int) -> str:
        return prompt.text[: ends[at]] + cut.separator + prompt.text[cut.end :]

    ends = cut.places or range(cut.start, cut.end + 1)
    low, high, high_tokens = 0, len(ends) - 1, tokens
    [low_tokens] = _num_tokens(tokenizer, [text(low)])
    while high - low > 1 and low_tokens < budget:
        step = (high - low) * (budget - low_tokens) // (high_tokens - low_tokens) if high_tokens > low_tokens else 0
        middle = low + min(max(step, 1), high - low - 1)
        [middle_tokens] = _num_tokens(tokenizer, [text(middle)])
        if middle_tokens <= budget:
            low, low_tokens = middle, middle_tokens
        else:
            high, high_tokens = middle, middle_tokens
    return replace(prompt, text=text(low), was_cut=True), low_tokens


def _num_tokens(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [len(ids) for ids in token_ids(tokenizer, texts)] if texts else []


def option_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Each prompt once for each of its options, with that option as its only answer: what a scorer reads of such a task."""
    return [replace(prompt, answers=(option,)) for prompt in prompts for option in prompt.options]


def short_answers(prompts: Sequence[Prompt]) -> bool:
    """Whether the prompts have answers that an output can begin with. Raises UserError where some have and some have not."""
    lacking = {prompt.example for prompt in prompts if not prompt.answers}
    if lacking and any(prompt.answers for prompt in prompts):
        raise UserError(
            f"{len(lacking)} questions have a blank gold answer, which any output begins with; leave them out with --drop-leaky"
        )
    return not lacking


def continuation(text: str, answer: str) -> str:
    """The answer as it stands behind the text: a space between them where the text does not end in white space."""
    return answer if text[-1:].isspace() else f" {answer}"


def before_stop(output: str, stop: Sequence[str]) -> str:
    """The output up to the first of the stop texts in it."""
    return output[: min((at for text in stop if (at := output.find(text)) >= 0), default=None)]


def checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop texts as a user gave them. Raises UserError for an empty one, and for backslash-n that should be a line end."""
    for text in stop:
        if not text or "\\n" in text:
            raise UserError(
                f"--stop {text!r} "
                + ("is empty" if not text else "has a backslash and an n, no line end; in a shell a line end is $'\\n'")
            )
    return tuple(stop)


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Of all that is asked, and of the answers, whether they come from a file or are generated."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answers, prompt.references, prompt.options]).encode())
    return digest.hexdigest()


def token_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text as the tokenizer gives them. Where it puts a BOS before one that a chat template wrote, one goes.

    A text is asked of a tokenizer once: prompts are measured, checked and encoded, and long ones take their time. What was
    asked for is kept, up to `_KEPT` tokens of a tokenizer.
    """
    try:
        kept = _kept.setdefault(tokenizer, _Kept())
    except TypeError:  # what cannot be a key is asked each time
        kept = _Kept()
    new = [text for text in dict.fromkeys(texts) if text not in kept.ids]
    if new:
        bos = getattr(tokenizer, "bos_token_id", None)
        for text, ids in zip(new, tokenizer(new)["input_ids"], strict=True):
            kept.ids[text] = np.array(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids, np.int64)
            kept.tokens += len(ids)
    found = [kept.ids[text].tolist() for text in texts]
    if kept.tokens > _KEPT:
        kept.ids, kept.tokens = {}, 0
    return found


_KEPT = 2**24  # tokens: 128 MiB


@dataclass
class _Kept:
    ids: dict[str, Int[np.ndarray, "T"]] = field(default_factory=dict)
    tokens: int = 0


_kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
