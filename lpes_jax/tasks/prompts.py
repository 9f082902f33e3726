"""The interface of a task, its prompts, and how prompts become token ids. Tasks know text, not models.

    task = KeyValue(num_pairs=50)
    examples = task.examples("test", count=500, seed=0)
    prompts = [task.prompt(example, slot(p, task.num_items), p) for example in examples for p in (0, 25, 50, 75, 100)]
    fitted = fit(prompts, tokenizer, window=8192, max_prompt_tokens=task.max_prompt_tokens, new_tokens=task.max_new_tokens)
    encoded = encode(fitted.prompts, tokenizer, window=8192)
    scores = [task.score(output, prompt) for output, prompt in zip(outputs, fitted.prompts)]

A prompt contains n items (key-value pairs, documents). The fact asked for is the item at one slot, 0 ... n-1. Positions are in
percent: 0 is the beginning, 50 the middle, 100 the end.

A task is decided either by `generation` (the output is generated text) or by `options` (the output is the likeliest of a
prompt's options, whose log-likelihoods come from the prompts of `option_prompts`).
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

Tokenizer = Callable[[list[str]], Mapping[str, Any]]  # like transformers': texts -> {"input_ids": one list of ids per text}
Example = TypeVar("Example")  # a task's own type of one question; only the task reads its contents


@dataclass(frozen=True)
class Cut:
    """How the benchmark shortens a prompt that is too long: it replaces the end of text[start:end] by `separator`.

    `ends` are the only indices at which the kept part may end (such as after whole few-shot examples); empty allows any.
    """

    start: int
    end: int
    separator: str = ""
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One question with its fact at one slot.

    Attributes:
        text: Everything that the model reads, including a forced opener.
        answers: The admitted continuations: opener + gold for each admitted opener, or only the gold if the opener is forced.
            Empty if only the generated text counts (summaries), and if the gold is blank, because every output begins with it.
        gold: The bare answer, for metrics on text.
        example: A stable id (hash of the example's content), equal at every slot, so that results can be paired.
        position: Where the fact is, in percent.
        slot: The 0-based index of the fact among the items.
        num_items: The number of items.
        golds: All bare answers, if there are several; `references` gives them in every case.
        options: The continuations to choose from, for tasks decided by options.
        cut: How the benchmark shortens this prompt.
        was_cut: Whether `fit` shortened it.
        details: What a record should contain about this prompt (the subject, the distractors).
        faults: Why its score is meaningless, from `lpes_jax.tasks.leaks.FAULTS`.
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
    """Token ids of a prompt's text, and of each answer that greedy generation could produce after it."""

    ids: list[int]
    answers: list[list[int]]


@runtime_checkable
class Task(Protocol[Example]):
    """Questions with a movable fact. A task without positions has num_items 1 and only slot 0.

    Attributes:
        decided_by: What `score` receives: generated text, or the option that the model finds likeliest.
        metrics: The keys of `score`'s result, each in [0, 1]; the first is the task's own.
        max_new_tokens: Tokens to generate, unless the user gives another number.
        max_prompt_tokens: The benchmark's own limit of a prompt, which `fit` applies; None if only the window limits it.
        stop: Texts that end an output, in addition to the model's end-of-text token.
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
        """The same task without a forced opener at the end of its prompts; None if nothing is forced."""
        ...

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples; None: all examples of a task that reads a file.

        `search` and `test` never share an example, for any seeds and counts. Raises UserError if there are fewer than `count`.
        """
        ...

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its fact at `slot`; `position` is the percentage asked for (None: that of the slot, rounded)."""
        ...

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """The value in [0, 1] of each of `metrics`, for the model's output on one prompt."""
        ...


class Unmoved:
    """Base of the tasks without positions: one item and no forced opener."""

    @property
    def num_items(self) -> int:
        return 1

    @property
    def plain(self) -> None:
        return None


class Generated:
    """Base of the tasks that are decided by generated text."""

    @property
    def decided_by(self) -> Literal["generation"]:
        return "generation"

    @property
    def stop(self) -> tuple[str, ...]:
        return ()


class Generation(Generated):
    """Base of those among them that have short answers."""

    @property
    def max_new_tokens(self) -> int:
        return 100

    @property
    def max_prompt_tokens(self) -> int | None:
        return None


class Fitted(NamedTuple):
    """The result of `fit`: the prompts that are kept, the ids of the skipped examples, and how many prompts were shortened."""

    prompts: list[Prompt]
    skipped: list[str]
    num_cut: int


def check_positions(positions: Sequence[int], flag: str = "--positions") -> None:
    """Raise UserError for invalid positions in percent: none, one outside 0 to 100, or a repeated one."""
    if not positions:
        raise UserError(f"{flag}: give at least one position, in percent")
    if outside := [position for position in positions if not 0 <= position <= 100]:
        raise UserError(f"{flag}: {outside[0]} is not a percentage; positions go from 0 (begin) to 100 (end)")
    check_once(positions, flag)


def check_once(values: Sequence[Any], flag: str) -> None:
    """Raise UserError for a repeated value in a flag's list, because results are indexed by these values."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise UserError(f"{flag} {' '.join(map(str, values))}: {value} is repeated; give it once")


def slot(position: int, num_items: int) -> int:
    """The 0-based slot of a position in percent: floor(position / 100 * (num_items - 1)), in integers."""
    check_positions([position])
    return position * (num_items - 1) // 100


def position(slot: int, num_items: int) -> int:
    """The percentage nearest to a slot, for slots that the user gave directly."""
    if not 0 <= slot < num_items:
        raise UserError(f"--slots: there is no slot {slot} among {num_items} items; slots go from 0 to {num_items - 1}")
    return round(100 * slot / max(num_items - 1, 1))


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer, window: int) -> list[EncodedPrompt]:
    """Tokenise prompts, with text and answer as one string, under the tokenizer's own BOS policy but never with a second BOS.

    If the joint ids do not begin with the ids of the text, the answer merges with the end of the text ("value: " + "7f" becomes
    "value:", " 7f"). Greedy generation from the text cannot produce those ids, so that answer is dropped. Nothing is ever cut.

    Args:
        prompts: The prompts.
        tokenizer: A transformers tokenizer, or any callable `list of strings -> {"input_ids": list of id lists}`.
        window: The model's limit of tokens, for prompt and answer together.

    Raises:
        UserError: No answer of a prompt is left, or a prompt with its answer exceeds the window.
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
            "use fewer items per prompt (--num-pairs)"
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
    """Select or shorten prompts: text must fit `max_prompt_tokens`, and with `new_tokens` or its longest answer the window.

    A prompt that is too long is cut to the longest part that fits if the benchmark defines a cut. Otherwise it is an error, or,
    with `overlength="skip"`, its example is skipped at every position, so that all positions have the same questions.

    Raises:
        UserError: With `overlength="error"`, a prompt is too long and cannot be cut.
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
            f"{len(skipped)} questions are too long: up to {longest} tokens, more than {limit}; use fewer items per "
            "prompt (--num-pairs, --num-documents, --num-sentences, --num-lines), or skip these questions with "
            "--overlength skip"
        )
    fitted = [prompt for prompt in fitted if prompt.example not in skipped]
    return Fitted(fitted, list(skipped), sum(prompt.was_cut for prompt in fitted))


def _cut(prompt: Prompt, cut: Cut, tokens: int, tokenizer: Tokenizer, budget: int) -> tuple[Prompt, int]:
    # Interpolates between an end that fits and one that does not, because tokens grow almost linearly with the text.
    def text(index: int) -> str:
        return prompt.text[: ends[index]] + cut.separator + prompt.text[cut.end :]

    ends = cut.ends or range(cut.start, cut.end + 1)
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
    """Each prompt once per option, with that option as its only answer, as a scorer needs them for a task of options."""
    return [replace(prompt, answers=(option,)) for prompt in prompts for option in prompt.options]


def short_answers(prompts: Sequence[Prompt]) -> bool:
    """Whether the prompts have answers that an output can begin with. Raises UserError if only some have."""
    lacking = {prompt.example for prompt in prompts if not prompt.answers}
    if lacking and any(prompt.answers for prompt in prompts):
        raise UserError(
            f"{len(lacking)} questions have a blank gold answer, with which every output begins; skip them with --drop-leaky"
        )
    return not lacking


def continuation(text: str, answer: str) -> str:
    """The answer as it follows the text: after a space, unless the text ends in white space."""
    return answer if text[-1:].isspace() else f" {answer}"


def before_stop(output: str, stop: Sequence[str]) -> str:
    """The output up to the first stop text in it."""
    return output[: min((index for text in stop if (index := output.find(text)) >= 0), default=None)]


def checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Check the user's stop texts. Raises UserError for an empty one, and for backslash-n in place of a line end."""
    for text in stop:
        if not text or "\\n" in text:
            raise UserError(
                f"--stop {text!r} "
                + ("is empty" if not text else "has a backslash and an n, not a line end; in a shell a line end is $'\\n'")
            )
    return tuple(stop)


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """A hash of all texts, answers and options, whether they come from a file or are generated."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answers, prompt.references, prompt.options]).encode())
    return digest.hexdigest()


def token_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text from the tokenizer. If the tokenizer adds a BOS to one from a chat template, one BOS is removed.

    Long prompts take time to tokenise and are needed several times: measured, checked and encoded. Ids are therefore cached, up
    to `_KEPT` tokens per tokenizer.
    """
    try:
        kept = _kept.setdefault(tokenizer, _Kept())
    except TypeError:  # not hashable: no cache
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
