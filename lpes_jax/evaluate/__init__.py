"""Measure a model by the position of the fact: `run_evaluation(EvaluateSettings(...))`, or `python -m lpes_jax.evaluate`."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lpes_jax import evaluation
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Outcome
from lpes_jax.factors import LayerFactors, write_json
from lpes_jax.models.llama import load
from lpes_jax.models.llama.chat import PromptForm, check_chat, make_chat
from lpes_jax.report.plots import u_curve
from lpes_jax.report.progress import SearchProgress
from lpes_jax.report.tables import console, markdown, position_table
from lpes_jax.tasks import make_task
from lpes_jax.tasks.chat import ChatTask


@dataclass(frozen=True)
class EvaluateSettings:
    """What to measure."""

    model: str = "tiny-retriever"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    output_path: Path = Path("runs/evaluate")
    """Folder of the results."""
    factors: Path | None = None
    """factors.json of a search; measured beside the model as it is."""
    only_factors: bool = False
    """Leave out the model as it is and the plain prompts."""

    task: str = "kv"
    """kv: key-value retrieval."""
    num_pairs: int = 50
    """Key-value pairs in a prompt."""
    key_length: int | None = None
    """Keys and values of this many hexadecimal characters instead of UUIDs."""
    data: Path | None = None
    """A lost-in-the-middle .jsonl(.gz) file; without it examples are generated."""
    split: Literal["test", "search", "all"] = "test"
    """test: never overlaps what a search uses; all: every row of a file."""
    answer_opener: str = ' "'
    """What stands at the end of the prompt, before the answer; '' admits a bare and a quoted value."""
    apply_chat_template: bool = False
    """Ask in a chat, by the tokenizer's own chat template; the opener stands behind it."""
    prompt_form: PromptForm | None = None
    """Ask in a chat, by a form that the model was trained with and its files lack."""
    system_prompt: str | None = None
    """The chat's system prompt, instead of the template's or form's own."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of the fact, in percent."""
    slots: tuple[int, ...] = ()
    """Slots (0-based) instead of positions."""
    limit: int = 500
    """Examples; each stands at every position."""
    seed: int = 0
    """Seed of the examples."""

    metrics: tuple[Literal["prefix", "substring"], ...] = ("prefix", "substring")
    """prefix: the greedy output begins with the answer (nothing is generated); substring: it stands in the generated text."""
    max_new_tokens: int = 100
    """Tokens to generate for substring."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts a forward pass (default: chosen from the memory)."""


def run_evaluation(settings: EvaluateSettings) -> list[Outcome]:
    """Measure, write the folder, print the table. Raises UserError where the settings, the model or the data cannot be used."""
    started = time.time()
    if settings.limit < 1:
        raise UserError(f"--limit must be at least 1, got {settings.limit}")
    if settings.batch_size is not None and settings.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {settings.batch_size}")
    if not (settings.slots or settings.positions):
        raise UserError("--positions: give at least one position, in percent")
    if settings.only_factors and settings.factors is None:
        raise UserError("--only-factors needs --factors")
    check_chat(
        apply_chat_template=settings.apply_chat_template,
        prompt_form=settings.prompt_form,
        system_prompt=settings.system_prompt,
    )
    task = make_task(
        settings.task,
        num_pairs=settings.num_pairs,
        key_length=settings.key_length,
        data=settings.data,
        answer_opener=settings.answer_opener,
    )
    places = evaluation.slots_of(task, settings.positions, settings.slots)
    examples = task.examples(settings.split, settings.limit, settings.seed)
    factors = None if settings.factors is None else LayerFactors.load(settings.factors)
    loaded = load(settings.model, settings.dtype)
    chat = make_chat(
        loaded.tokenizer,
        apply_chat_template=settings.apply_chat_template,
        prompt_form=settings.prompt_form,
        system_prompt=settings.system_prompt,
    )
    if chat is not None:
        task = ChatTask(task, chat.render)
    config = loaded.model.config
    candidates = [] if settings.only_factors else [Candidate(PLAIN, plain=True), Candidate(BASELINE)]
    if factors is not None:
        factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, str(settings.factors))
        candidates.append(Candidate("factors", factors))
    measured = [candidate for candidate in candidates if not candidate.plain or task.plain is not None]
    with SearchProgress(len(measured) * len(examples) * len(places)) as progress:
        progress.note(f"measuring {loaded.identity['name']}")
        outcomes = evaluation.evaluate(
            loaded.model,
            loaded.tokenizer,
            task,
            examples,
            places,
            measured,
            metrics=settings.metrics,
            max_new_tokens=settings.max_new_tokens,
            stop_ids=loaded.stop_ids,
            batch_size=settings.batch_size,
            on_prompts=progress.prompts,
        )
    record = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    record |= {"model_identity": loaded.identity, "chat": chat and chat.record}
    results = evaluation.results_record(task, outcomes, places, record, started)
    _write(settings, outcomes, places, results, loaded.identity["name"])
    return outcomes


def _write(
    settings: EvaluateSettings, outcomes: list[Outcome], places: list[tuple[int, int]], results: dict, model: str
) -> None:
    folder = settings.output_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-path {folder}: cannot be written ({error.strerror})") from error
    evaluation.write_samples(folder / "samples.jsonl", outcomes)
    write_json(folder / "results.json", results)
    positions = [position for _, position in places]
    title = f"{model}, {settings.num_pairs} key-value pairs, {len(outcomes[0].correct)} questions"
    curves = {outcome.candidate.name: (outcome.correct.mean(axis=0).tolist(), len(outcome.correct)) for outcome in outcomes}
    u_curve(folder / "positions", positions, curves, title)
    out, tables = console(), []
    for metric in settings.metrics:
        table_rows = evaluation.rows(outcomes, metric)
        out.print(position_table(table_rows, positions, f"{title}: {metric}"))
        tables.append(f"{metric}\n\n{markdown(table_rows, positions)}\n")
    (folder / "results.md").write_text("\n".join(tables), encoding="utf-8")
    for name, figures in results["methods"].items():
        if "substring_but_not_prefix" in figures:
            out.print(f"{name}: {figures['substring_but_not_prefix']} answers that substring accepts and prefix does not")
    out.print(f"{outcomes[-1].compilations} compiled shapes; results: {folder}", highlight=False, soft_wrap=True)
