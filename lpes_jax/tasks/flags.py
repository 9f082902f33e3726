"""The flags that choose a task and its settings, shared by the verbs. None leaves a setting at the task's own default."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task, settings_of
from lpes_jax.tasks.metrics import FirstLine

TaskName = Literal["kv", "mdqa", "needle", "zero_scrolls", "l_eval", "mmlu", "ceval", "perplexity"]
ITEMS = {"kv": "key-value pairs", "mdqa": "documents", "needle": "sentences"}


@dataclass(frozen=True)
class TaskFlags:
    """Which task, and its settings; each task refuses those that it has not."""

    task: TaskName = "kv"
    """kv: key-value retrieval; mdqa: multi-document QA; needle; zero_scrolls; l_eval; mmlu; ceval; perplexity."""
    data: Path | None = None
    """The benchmark's file or folder; kv and needle are generated without one."""

    num_pairs: int | tuple[int, ...] | None = None
    """kv: key-value pairs in a prompt (default 50); several in a search: it uses prompts of all these lengths."""
    key_length: int | None = None
    """kv: keys and values of this many hexadecimal characters instead of UUIDs."""
    answer_opener: str | None = None
    """kv: what stands at the end of the prompt, before the answer (default: a space and a quote); '' admits a bare and a quoted
    value."""
    queries_per_haystack: int | None = None
    """kv, mdqa: so many questions a position about the same pairs or documents, which stay, for those nearest to it, so
    that a position is a mean of neighbours (1: the pair or document moves); mdqa: with --distractors random."""
    query_aware: bool = False
    """kv, mdqa: the question stands before the data as well."""
    num_documents: int | tuple[int, ...] | None = None
    """mdqa: documents in a prompt (default 10), or several lengths in a search likewise."""
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
    num_sentences: int | None = None
    """needle: sentences of filler (default 100)."""
    num_keys: int | None = None
    """needle: needles in a prompt."""
    num_queries: int | None = None
    """needle: how many of them are asked for."""
    subset: str | None = None
    """zero_scrolls, l_eval: the data set."""
    max_prompt_tokens: int | None = None
    """zero_scrolls, l_eval: tokens of a prompt (default 3584); longer ones are cut as the benchmark does."""
    subjects: tuple[str, ...] = ()
    """mmlu, ceval: subjects (default: all in the folder)."""
    num_shots: int | None = None
    """mmlu, ceval: solved questions before the one asked (default 5)."""
    window: int | None = None
    """perplexity: tokens of a window (default 2048)."""
    stride: int | None = None
    """perplexity: tokens that each window moves on (default: the window)."""


LENGTHS = ("num_pairs", "num_documents")


def task_of(flags: TaskFlags, **more: Any) -> Any:
    """The task that the flags ask for. Raises UserError as `make_task` does, and where they ask for several."""
    first, *others = tasks_of(flags, **more)
    if others:
        raise UserError(f"--{flags.task}: one length at a time; give --num-pairs or --num-documents one number")
    return first


def tasks_of(flags: TaskFlags, **more: Any) -> list[Any]:
    """The task of each length that the flags name: one, unless `num_pairs` or `num_documents` are several."""
    named = [field.name for field in fields(TaskFlags) if field.name != "task"]
    given = {name: getattr(flags, name) for name in named}
    given = {name: value for name, value in given.items() if value is not None and value is not False and value != ()}
    if flags.task == "kv":
        given.setdefault("num_pairs", 50)
    own = settings_of(flags.task)
    given |= {name: value for name, value in more.items() if value is not None and name in own}
    several = next((name for name in LENGTHS if isinstance(given.get(name), tuple)), None)
    if several is None:
        return [make_task(flags.task, **given)]
    lengths = given.pop(several)
    if len(set(lengths)) < len(lengths):
        raise UserError(
            f"--{several.replace('_', '-')} {' '.join(map(str, lengths))}: a length stands there twice; give it once"
        )
    return [make_task(flags.task, **given, **{several: length}) for length in lengths]


def title_of(flags: TaskFlags, task: Any) -> str:
    """What pictures and tables call it: `10 documents`, `zero_scrolls qasper`."""
    if flags.task in ITEMS:
        return f"{task.num_items} {ITEMS[flags.task]}"
    return f"{flags.task} {flags.subset or ''}".strip()
