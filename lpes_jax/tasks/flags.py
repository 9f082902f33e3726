"""The flags that choose a task and its settings, shared by the verbs. None leaves a setting at the task's own default."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task, settings_of
from lpes_jax.tasks.metrics import FirstLine
from lpes_jax.tasks.ranged import Ranged
from lpes_jax.tasks.variable_tracking import Placing

TaskName = Literal[
    "kv", "mdqa", "needle", "niah", "vt", "cwe", "fwe", "many_shot", "zero_scrolls", "l_eval", "mmlu", "ceval", "perplexity"
]
Length = int | str  # a number, or a range: "5:20"
ITEMS = {"kv": "key-value pairs", "mdqa": "documents", "needle": "sentences"}
SIZES = {
    **{"niah": ("num_lines", "lines"), "vt": ("num_lines", "lines"), "many_shot": ("num_shots", "examples")},
    **{"cwe": ("num_words", "words"), "fwe": ("num_words", "words")},
}


@dataclass(frozen=True)
class TaskFlags:
    """Which task, and its settings; each task refuses those that it has not."""

    task: TaskName | tuple[TaskName, ...] = "kv"
    """kv: key-value retrieval; mdqa: multi-document QA; needle; RULER's niah, vt (variable tracking), cwe and fwe (common and
    frequent words); many_shot: classification; zero_scrolls; l_eval; mmlu; ceval; perplexity. Several in a search: it uses all
    of them together, each with those of the flags that it has."""
    mixture: Path | None = None
    """A search: TOML file with a block [[task]] for each task: task = its name, its flags by their names, and where wanted
    limit, test_limit and weight of its own. In place of all flags of tasks."""
    data_folder: Path | None = None
    """The folder that paths in --mixture start from (default: the file's own)."""
    data: Path | None = None
    """The benchmark's file or folder; kv, needle and RULER's tasks are generated without one. niah: a text for the essay; cwe:
    a file of words; many_shot: a CSV of text and label."""

    num_pairs: Length | tuple[Length, ...] | None = None
    """kv: key-value pairs in a prompt (default 50); several in a search: it uses prompts of all these lengths. A range, 5:20: a
    search draws the length of each prompt log-uniformly from it."""
    key_length: int | None = None
    """kv: keys and values of this many hexadecimal characters instead of UUIDs."""
    answer_opener: str | None = None
    """kv: what stands at the end of the prompt, before the answer (default: a space and a quote); '' admits a bare and a quoted
    value. vt: a space (RULER's) or ''."""
    queries_per_haystack: int | None = None
    """kv, mdqa, niah: so many questions a position about the same pairs, documents or lines, which stay, for those nearest to
    it, so that a position is a mean of neighbours (1: the pair, document or line moves); mdqa: with --distractors random; niah:
    multikey_2 and multikey_3."""
    query_aware: bool = False
    """kv, mdqa: the question stands before the data as well."""
    num_documents: Length | tuple[Length, ...] | None = None
    """mdqa: documents in a prompt (default 10), or several lengths or a range in a search likewise."""
    distractors: Literal["file", "random"] | None = None
    """mdqa: the file's own, or other questions' gold documents (from nq-open-oracle.jsonl.gz)."""
    mode: Literal["documents", "oracle", "closed_book"] | None = None
    """mdqa: all documents, the gold one alone, or none."""
    random_order: bool = False
    """mdqa: shuffle the distractors, and say so in the instruction."""
    first_line: FirstLine | None = None
    """mdqa: which line of the output is scored."""
    empty_golds_match: bool = False
    """mdqa: an answer that normalises to nothing counts as found, as in the original."""
    unicode_normalise: bool = False
    """mdqa: score without accents."""
    num_sentences: Length | tuple[Length, ...] | None = None
    """needle: sentences of filler (default 100), or several lengths or a range in a search likewise."""
    num_lines: Length | tuple[Length, ...] | None = None
    """niah, vt: lines of the haystack (default 100), or several lengths or a range in a search likewise."""
    num_words: Length | tuple[Length, ...] | None = None
    """fwe: words of the text (default 500); cwe: different words of the list (default 50); several lengths or a range
    likewise."""
    num_keys: int | None = None
    """needle, niah: needles in a prompt."""
    num_queries: int | None = None
    """needle: how many of them are asked for."""
    num_chains: int | None = None
    """vt: chains of assignments in a prompt (default 1)."""
    num_hops: int | None = None
    """vt: assignments of a chain behind its first (default 4)."""
    alpha: float | None = None
    """fwe: how fast frequencies fall with the rank (default 2)."""
    placing: Placing | None = None
    """vt, cwe, fwe: spread, RULER's, without positions; or together: the chain, or the words asked for, stand at the
    position."""
    short_lists: bool = False
    """cwe: RULER's numbers for prompts below 4,096 tokens."""
    labels: Literal["numbers", "names"] | None = None
    """many_shot: random numbers as labels (the default), or the file's own."""
    subset: str | None = None
    """zero_scrolls, l_eval: the data set. niah: single_1 (the default), ..., RULER's variants, or near_keys."""
    max_prompt_tokens: int | None = None
    """zero_scrolls, l_eval: tokens of a prompt (default 3584); longer ones are cut as the benchmark does."""
    subjects: tuple[str, ...] = ()
    """mmlu, ceval: subjects (default: all in the folder)."""
    num_shots: int | None = None
    """mmlu, ceval: solved questions before the one asked (default 5); many_shot: solved examples (default 50)."""
    window: int | None = None
    """perplexity: tokens of a window (default 2048)."""
    stride: int | None = None
    """perplexity: tokens that each window moves on (default: the window)."""


LENGTHS = ("num_pairs", "num_documents", "num_sentences", "num_lines", "num_words")
SETTINGS = tuple(field.name for field in fields(TaskFlags) if field.name not in ("task", "mixture", "data_folder"))


def task_of(flags: TaskFlags, **more: Any) -> Any:
    """The task that the flags ask for. Raises UserError as `make_task` does, and where they ask for several."""
    if flags.mixture is not None:
        raise UserError("--mixture is for a search; here give one --task with its flags")
    if isinstance(flags.task, tuple) and len(flags.task) > 1:
        raise UserError(f"--task {' '.join(flags.task)}: several tasks are for a search; give one at a time here")
    first, *others = tasks_of(flags, **more)
    if others or isinstance(first, Ranged):
        flag = next(name for name in LENGTHS if isinstance(getattr(flags, name), str | tuple))
        raise UserError(f"--task {name_of(flags)}: one length at a time; give --{flag.replace('_', '-')} one number")
    return first


def name_of(flags: TaskFlags) -> TaskName:
    """The name of the one task. Raises UserError where there are several."""
    names = (flags.task,) if isinstance(flags.task, str) else flags.task
    if len(names) != 1:
        raise UserError(f"--task {' '.join(names) or 'without a name'}: give one task")
    return names[0]


def given(flags: TaskFlags) -> dict[str, Any]:
    """The settings of tasks that the flags name."""
    found = {name: getattr(flags, name) for name in SETTINGS}
    return {name: value for name, value in found.items() if value is not None and value is not False and value != ()}


def tasks_of(flags: TaskFlags, **more: Any) -> list[Any]:
    """The task of each length that the flags name: one, unless `num_pairs` or the like are several."""
    return make_tasks(name_of(flags), given(flags), **more)


def make_tasks(name: TaskName, settings: dict[str, Any], **more: Any) -> list[Any]:
    """The task `name` in each of its lengths. `more`: settings that those tasks get that have them."""
    settings, own = dict(settings), settings_of(name)
    if name == "kv":
        settings.setdefault("num_pairs", 50)
    settings |= {name: value for name, value in more.items() if value is not None and name in own}
    setting = next((name for name in LENGTHS if isinstance(settings.get(name), str | tuple)), None)
    if setting is None:
        return [make_task(name, **settings)]
    lengths = settings.pop(setting)
    lengths = lengths if isinstance(lengths, tuple) else (lengths,)
    if len(set(lengths)) < len(lengths):
        raise UserError(
            f"--{setting.replace('_', '-')} {' '.join(map(str, lengths))}: a length stands there twice; give it once"
        )
    return [_of_length(name, settings, setting, length) for length in lengths]


def _of_length(name: str, settings: dict[str, Any], setting: str, length: Length) -> Any:
    if isinstance(length, int):
        return make_task(name, **settings, **{setting: length})
    match = re.fullmatch(r"(\d+):(\d+)", length)
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        flag = f"--{setting.replace('_', '-')}"
        raise UserError(f"{flag} {length!r} is neither a number nor a range from a lower to a higher one, such as 5:20")
    return Ranged(make_task(name, **settings, **{setting: int(match[2])}), setting, int(match[1]))


def title_of(flags: TaskFlags, task: Any) -> str:
    """What pictures and tables call it: `10 documents`, `5 to 20 documents`, `zero_scrolls qasper`."""
    name = name_of(flags)
    if name in SIZES:
        setting, items = SIZES[name]
        longest: Any = task.longest if isinstance(task, Ranged) else task
        low = f"{task.low} to " if isinstance(task, Ranged) else ""
        return " ".join([name, *([longest.subset] if name == "niah" else []), f"{low}{getattr(longest, setting)} {items}"])
    if name in ITEMS:
        return f"{f'{task.low} to ' if isinstance(task, Ranged) else ''}{task.num_items} {ITEMS[name]}"
    return f"{name} {flags.subset or ''}".strip()
