"""The groups of flags that several verbs share, and checks for contradictions within a group.

A verb that has more flags of a group extends it, in the verb's own file.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lpes_jax.choices import Dtype, FirstLine, Overlength, Placing, PromptForm, TaskName, WeightFormat
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.settings.tree import Settings, rare, when

PROMPT_FORMS: tuple[str, ...] = get_args(PromptForm)
Length = int | str  # a number, or a range: "5:20"


@dataclass(frozen=True)
class TaskSettings(Settings):
    """The task.

    Each task refuses the flags that it does not have; None is the task's own default.
    """

    task: TaskName | tuple[TaskName, ...] = "kv"
    """kv, mdqa, needle, niah, vt, cwe, fwe, many_shot, zero_scrolls, l_eval, mmlu, ceval or perplexity.
    kv: key-value retrieval; mdqa: multi-document QA; niah, vt (variable tracking), cwe and fwe (common and frequent words) are
    RULER's; many_shot: classification. A search takes several tasks and uses all of them together, each with those of the flags
    that it has."""
    mixture: Path | None = rare(None)
    """search: a TOML file with several tasks, in place of all other flags of tasks.
    It has a block [[task]] for each: task = its name, its flags by their names, and optionally its own limit, test_limit and
    weight."""
    data_folder: Path | None = rare(None)
    """The folder that paths in --mixture or --other-tasks start from.
    Default: the file's own."""
    data: Path | None = when(
        None, task=("kv", "mdqa", "niah", "cwe", "many_shot", "zero_scrolls", "l_eval", "mmlu", "ceval", "perplexity")
    )
    """The benchmark's file or folder.
    kv, needle and RULER's tasks are generated without one. niah: a text for the essay; cwe: a file of words; many_shot: a CSV
    of text and label."""

    num_pairs: Length | tuple[Length, ...] | None = when(None, task="kv")
    """Key-value pairs (default 50); a search: several, or a range 5:20.
    A search takes several lengths and uses all of them, or a range, 5:20, and draws the length of each prompt log-uniformly
    from it."""
    key_length: int | None = when(None, task="kv")
    """Hexadecimal characters of a key and of a value (default: UUIDs)."""
    answer_opener: str | None = when(None, task=("kv", "vt"))
    """Text at the end of the prompt, before the answer.
    kv: by default a space and a quote; '' admits a bare and a quoted value. vt: a space (RULER's) or ''."""
    queries_per_haystack: int | None = when(None, task=("kv", "mdqa", "niah"))
    """Questions that share a haystack at each position (default 1).
    With 1 the pair, document or line moves. Above 1 the haystack stays fixed and its prefix is shared; the questions ask for
    the items nearest to the position, whose score is the mean over them. mdqa: needs --distractors random; niah: multikey_2 and
    multikey_3."""
    query_aware: bool = when(False, task=("kv", "mdqa"))
    """Repeat the question before the data."""
    num_documents: Length | tuple[Length, ...] | None = when(None, task="mdqa")
    """Documents (default 10); a search: several, or a range 5:20."""
    distractors: Literal["file", "random"] | None = when(None, task="mdqa")
    """The other documents: the file's own, or random ones.
    random: other questions' gold documents (from nq-open-oracle.jsonl.gz)."""
    mode: Literal["documents", "oracle", "closed_book"] | None = when(None, task="mdqa")
    """Give all documents, the gold one (oracle), or none (closed_book)."""
    random_order: bool = when(False, task="mdqa")
    """Shuffle the distractors, and say so in the instruction."""
    first_line: FirstLine | None = when(None, task="mdqa")
    """Which line of the output is scored: stripped, original or all."""
    empty_golds_match: bool = when(False, task="mdqa")
    """Count an answer that normalises to nothing as found (the original)."""
    unicode_normalise: bool = when(False, task="mdqa")
    """Score without accents."""
    num_sentences: Length | tuple[Length, ...] | None = when(None, task="needle")
    """Sentences (default 100); a search: several, or a range 5:20."""
    num_lines: Length | tuple[Length, ...] | None = when(None, task=("niah", "vt"))
    """Lines of the haystack (default 100); a search: several, or a range."""
    num_words: Length | tuple[Length, ...] | None = when(None, task=("cwe", "fwe"))
    """Words of the text (cwe: of the list); a search: several, or a range.
    fwe: all words of the text (default 500); cwe: different words of the list (default 50)."""
    num_keys: int | None = when(None, task=("needle", "niah"))
    """Needles in a prompt."""
    num_queries: int | None = when(None, task="needle")
    """Needles asked for."""
    num_chains: int | None = when(None, task="vt")
    """Chains of assignments in a prompt (default 1)."""
    num_hops: int | None = when(None, task="vt")
    """Assignments of a chain after its first (default 4)."""
    alpha: float | None = when(None, task="fwe")
    """How fast frequencies fall with the rank (default 2)."""
    placing: Placing | None = when(None, task=("vt", "cwe", "fwe"))
    """Where the facts are: spread (RULER's), or together at the position.
    spread has no positions; together: the chain, or the words asked for, are at the position."""
    short_lists: bool = when(False, task="cwe")
    """Take RULER's numbers for prompts below 4,096 tokens."""
    labels: Literal["numbers", "names"] | None = when(None, task="many_shot")
    """Labels: random numbers (the default), or names (the file's own)."""
    subset: str | None = when(None, task=("niah", "zero_scrolls", "l_eval"))
    """The data set; niah: the variant (default single_1).
    niah has single_1, ..., RULER's variants, and near_keys."""
    max_prompt_tokens: int | None = when(None, task=("zero_scrolls", "l_eval"))
    """Tokens of a prompt (default 3584); longer ones are cut.
    They are cut as the benchmark does."""
    subjects: tuple[str, ...] = when((), task=("mmlu", "ceval"))
    """Subjects (default: all in the folder)."""
    num_shots: int | None = when(None, task=("mmlu", "ceval", "many_shot"))
    """Solved examples before the question.
    mmlu, ceval: by default 5; many_shot: by default 50."""
    window: int | None = when(None, task="perplexity")
    """Tokens of a window (default 2048)."""
    stride: int | None = when(None, task="perplexity")
    """Tokens from one window to the next (default: the window)."""

    @property
    def is_mixture(self) -> bool:
        """Whether several tasks are searched on together."""
        return self.mixture is not None or (isinstance(self.task, tuple) and len(self.task) > 1)


@dataclass(frozen=True)
class QuestionSettings(Settings):
    """The questions, and how answers are measured."""

    limit: int = 500
    """Questions, each asked at every position.
    search: to search on, per task and length; compare: to tune on."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of the fact when measured, in percent."""
    metrics: tuple[str, ...] = ()
    """prefix, or metrics of the task's own.
    prefix: the greedy output begins with the answer; nothing is generated. Default: prefix for kv, else the task's own:
    evaluate reports all of them (and substring for kv), search and compare the first."""
    max_new_tokens: int | None = rare(None)
    """Tokens to generate, for metrics of generated text.
    Default: the task's."""
    overlength: Overlength = rare("error")
    """error or skip: what to do with questions too long for the model.
    skip: they are left out at every position, and counted."""
    drop_leaky: bool = rare(False)
    """Leave out questions that give their answer away.
    Their gold answer is empty to the metric, or is also found outside the fact. They are counted."""


@dataclass(frozen=True)
class HeldOutQuestionSettings(QuestionSettings):
    """The questions, and how answers are measured."""

    test_limit: int = 500
    """Held-out questions, on which the result is measured.
    Per task and length."""


@dataclass(frozen=True)
class PromptSettings(Settings):
    """The chat that a question is asked in."""

    apply_chat_template: bool = False
    """Ask in a chat, by the tokenizer's own template.
    The opener follows it."""
    prompt_form: PromptForm | None = rare(None)
    """Ask in a chat by a known form: vicuna, stablebeluga or llama2.
    For models that were trained with it and whose files lack it."""
    system_prompt: str | None = rare(None)
    """The chat's system prompt, in place of the template's or form's own."""


def check_chat(*, apply_chat_template: bool, prompt_form: str | None, system_prompt: str | None) -> None:
    """Raise UserError for flags that contradict each other; needs no model."""
    if apply_chat_template and prompt_form is not None:
        raise UserError("--apply-chat-template and --prompt-form are two ways to wrap a prompt; give one of them")
    if system_prompt is not None and not (apply_chat_template or prompt_form is not None):
        raise UserError("--system-prompt needs --apply-chat-template or --prompt-form")
    if prompt_form is not None and prompt_form not in PROMPT_FORMS:
        raise UserError(f"--prompt-form {prompt_form!r} is not known; the forms are: {', '.join(PROMPT_FORMS)}")


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The model."""

    model: str = "tiny-retriever"
    """Zoo name, folder, .gguf file or Hugging Face hub id.
    The names are in models/zoo; a folder is in Hugging Face layout."""


@dataclass(frozen=True)
class RunSettings(ModelSettings):
    """The model, and the folder of the results."""

    output_path: Path = Path("runs/run")
    """Folder of the results.
    Without this flag, if the default folder exists: the same with -2, -3, ..."""
    overwrite: bool = False
    """Replace the finished run of this kind in --output-path."""


@dataclass(frozen=True)
class SeededRunSettings(RunSettings):
    """The model, the folder of the results, and the seed."""

    seed: int = 0
    """Seed of everything that is drawn.
    Examples, generated text, and the search."""


@dataclass(frozen=True)
class ResumableRunSettings(SeededRunSettings):
    """The model, the folder of the run, and the seed."""

    resume: bool = False
    """Continue the interrupted run in --output-path.
    All other flags must be as before."""


@dataclass(frozen=True)
class OtherModelSettings(Settings):
    """Factors of another run."""

    other_model: bool = rare(False)
    """Accept factors that were found for another model.
    A model of other sizes, RoPE or tokenizer, if the shapes fit."""


@dataclass(frozen=True)
class FactorsSettings(OtherModelSettings):
    """The factors."""

    factors: Path | None = None
    """factors.json of a search, or the zoo's by name."""


@dataclass(frozen=True)
class TextFileSettings(Settings):
    """Plain text."""

    text: Path | None = None
    """Plain text (default, if text is needed: the model writes it).
    search: it must not become less likely; compare: moice's router is trained on it, best instructions with answers."""


@dataclass(frozen=True)
class WeightSettings(Settings):
    """The form of the weights in memory."""

    weight_format: WeightFormat = rare("full")
    """full, packed or int8: how the layers' weights are stored.
    full: in --dtype; packed: as in a quantised .gguf file, and unpacked while a layer runs; int8: like packed, and what the
    file does not quantise is rounded to 8 bits."""


@dataclass(frozen=True)
class DeviceSettings(WeightSettings):
    """Devices and memory."""

    dtype: Dtype = "auto"
    """float32, bfloat16, or auto: bfloat16 on a GPU, else float32."""
    batch_size: int | None = rare(None)
    """Prompts per forward pass and device (default: by memory)."""


@dataclass(frozen=True)
class MeshSettings(DeviceSettings):
    """Devices and memory."""

    model_axis: int = rare(1)
    """Devices that share one copy of the model, for large models.
    The other devices have copies of their own."""
    deterministic: bool = rare(False)
    """On a GPU: only kernels that give the same bits in every run.
    Some of these are slower."""


@dataclass(frozen=True)
class HostSettings(Settings):
    """Several processes, on one host or many.

    Start each with the same flags, except --process-id.
    """

    coordinator_address: str | None = rare(None)
    """HOST:PORT by which all reach process 0; any free port of its host."""
    num_processes: int | None = rare(None)
    """How many processes there are."""
    process_id: int | None = rare(None)
    """Which of them this is, from 0; process 0 writes the files and prints."""
    distributed: bool = rare(False)
    """Instead of these three: the values in a cluster's environment (SLURM, Open MPI, ...)."""
    start_timeout: int = rare(300)
    """Seconds to wait at the start until all have connected."""


def check_hosts(flags: HostSettings) -> bool:
    """Whether the flags name other processes. Raises UserError if they contradict each other."""
    check_bounds(flags)
    three = {name: getattr(flags, name) for name in ("coordinator_address", "num_processes", "process_id")}
    missing = ["--" + name.replace("_", "-") for name, value in three.items() if value is None]
    count, address = flags.num_processes or 0, flags.coordinator_address or ""
    if flags.distributed and len(missing) < 3:
        raise UserError("--distributed detects the processes itself; remove --coordinator-address and its companions")
    if 0 < len(missing) < 3:
        raise UserError(f"--coordinator-address, --num-processes and --process-id go together; add {' and '.join(missing)}")
    if not missing:
        if (flags.process_id or 0) >= count:
            raise UserError(f"--process-id {flags.process_id}: {count} processes have ids from 0 to {count - 1}")
        match = re.fullmatch(r"[^:\s]+:(\d{1,5})", address)
        if match is None or not 0 < int(match[1]) < 65536:
            raise UserError(f"--coordinator-address {address!r} is not HOST:PORT (a name or an IPv4 address), as in node1:8476")
    return flags.distributed or not missing
