"""The verb evaluate: `run_evaluation`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpes_jax import evaluation, hosts
from lpes_jax.evaluate.checks import check
from lpes_jax.evaluate.perplexity import measure_perplexity
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Outcome
from lpes_jax.factors import LayerFactors
from lpes_jax.mesh import make_mesh
from lpes_jax.models.llama import Loaded, load
from lpes_jax.models.llama.chat import Chat, make_chat
from lpes_jax.report.html import write_page
from lpes_jax.report.plots import depth_by_length, u_curve
from lpes_jax.report.progress import SearchProgress
from lpes_jax.report.tables import ScreenTable, differences, markdown, position_table, show
from lpes_jax.results import figures_of, results_record, rows, run_record, write_samples
from lpes_jax.same_model import check_loaded
from lpes_jax.settings.evaluate import EvaluateSettings
from lpes_jax.store import output
from lpes_jax.store.content import content_sha256
from lpes_jax.store.files import write_json, write_text
from lpes_jax.store.provenance import check_deterministic, check_processes, environment
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.flags import task_of, title_of
from lpes_jax.tasks.metrics import effective_length


def run_evaluation(settings: EvaluateSettings) -> list[Outcome]:
    """Measure, write the folder, print the table; return the outcomes (none for `perplexity`: its results are in the folder).

    With several processes (lpes_jax.hosts) the first one writes and prints. Raises UserError if the settings, the model or the
    data are unusable.
    """
    started = time.time()
    check(settings)
    check_deterministic(settings.devices.deterministic)
    hosts.from_first(lambda: output.check(settings.run.output_path, "evaluate", overwrite=settings.run.overwrite))
    questions, path = settings.questions, settings.factors.factors
    task = task_of(settings.task, max_new_tokens=questions.max_new_tokens)
    factors = None if path is None else LayerFactors.load(path)
    examples = []
    if settings.task.task != "perplexity" and not questions.lengths:  # before loading the model: report a bad file at once
        examples = task.examples(questions.split, questions.limit, settings.run.seed)
    loaded = load(
        settings.run.model,
        settings.devices.dtype,
        make_mesh(settings.devices.model_axis),
        weight_format=settings.devices.weight_format,
    )
    candidates = [] if settings.factors.only_factors else [Candidate(PLAIN, plain=True), Candidate(BASELINE)]
    factors_model = None
    if factors is not None:
        factors_model = check_loaded(factors, loaded, str(path), settings.factors.other_model)
        candidates.append(Candidate("factors", factors))
    _check_processes(settings, loaded, factors)
    if settings.task.task == "perplexity":
        unforced = [candidate for candidate in candidates if not candidate.plain]
        results, lines = measure_perplexity(
            task, loaded, unforced, questions.split, questions.limit, settings.devices.batch_size
        )
        if not hosts.is_first():
            return []
        results |= run_record(_record(settings, loaded, None, factors_model), started)
        with output.staged(settings.run.output_path) as folder:
            write_json(folder / "results.json", results)
        show(*lines, f"results: {settings.run.output_path}")
        return []
    chat = make_chat(loaded.tokenizer, **settings.prompt.flat())
    if questions.lengths:
        return _by_length(settings, task, loaded, chat, candidates, started, factors_model)
    slots, outcomes = _measure(settings, task, examples, loaded, chat, candidates)
    if hosts.is_first():
        config = _record(settings, loaded, chat, factors_model)
        results = results_record(task, outcomes, slots, config, started)
        _write(settings, task, outcomes, slots, results, loaded.identity["name"])
    return outcomes


def _check_processes(settings: EvaluateSettings, loaded: Loaded, factors: LayerFactors | None) -> None:
    """Raise UserError if the processes do not measure the same."""
    here = ("model", "data", "factors", "output_path")
    sha256 = {"factors": None if factors is None else factors.sha256}
    sha256 |= {"data": content_sha256(Path(settings.task.data))} if settings.task.data else {}
    named = {name: value for name, value in settings.flat().items() if name not in here}
    check_processes(
        {"model": {"sha256": loaded.identity["sha256"]}, "settings": named, "sha256": sha256, "environment": environment()}
    )


def _measure(
    settings: EvaluateSettings,
    task: Any,
    examples: Sequence[Any],
    loaded: Loaded,
    chat: Chat | None,
    candidates: Sequence[Candidate],
) -> tuple[list[tuple[int, int]], list[Outcome]]:
    """The slots of the fact, and an outcome for each candidate that the task has prompts for."""
    if chat is not None:
        task = ChatTask(task, chat.render)
    questions = settings.questions
    slots = evaluation.slots_of(task, questions.positions if task.num_items > 1 else (0,), questions.slots)
    measured = [candidate for candidate in candidates if not candidate.plain or task.plain is not None]
    with SearchProgress(len(measured) * len(examples) * len(slots)) as progress:
        progress.note(f"measuring {loaded.identity['name']}")
        outcomes = evaluation.evaluate(
            loaded.model,
            loaded.tokenizer,
            task,
            examples,
            slots,
            measured,
            evaluation.Conditions.of(
                questions,
                questions.metrics or evaluation.default_metrics(task),
                loaded.stop_ids,
                settings.devices.batch_size,
                questions.stop,
            ),
            on_prompts=progress.prompts,
        )
    return slots, outcomes


def _by_length(
    settings: EvaluateSettings,
    task: Any,
    loaded: Loaded,
    chat: Chat | None,
    candidates: Sequence[Candidate],
    started: float,
    factors_model: dict[str, Any] | None,
) -> list[Outcome]:
    """The task at each length: a heat map of depth and length for each candidate, and its effective length."""
    by_length: dict[int, list[Outcome]] = {}
    slots: list[tuple[int, int]] = []
    for length in sorted(settings.questions.lengths):
        version = task.with_length(length, loaded.tokenizer)
        examples = version.examples(settings.questions.split, settings.questions.limit, settings.run.seed)
        slots, by_length[length] = _measure(settings, version, examples, loaded, chat, candidates)
    last = by_length[max(by_length)]
    everything = [outcome for outcomes in by_length.values() for outcome in outcomes]
    if not hosts.is_first():
        return everything
    config = _record(settings, loaded, chat, factors_model)
    record = results_record(task, last, slots, config, started)
    record["by_length"] = {length: figures_of(outcomes, slots) for length, outcomes in by_length.items()}
    record["effective_length"] = {}
    positions = [position for _, position in slots]
    with output.staged(settings.run.output_path) as folder:
        lines = _write_by_length(settings, folder, task, loaded, by_length, positions, record)
        write_samples(folder / "samples.jsonl", everything)
    show(*lines, f"results: {settings.run.output_path}")
    return everything


def _write_by_length(
    settings: EvaluateSettings,
    folder: Path,
    task: Any,
    loaded: Loaded,
    by_length: dict[int, list[Outcome]],
    positions: list[int],
    record: dict[str, Any],
) -> list[str]:
    """Write the plots, the page and results.json; return the text to print."""
    lengths, last, lines, pictures = list(by_length), by_length[max(by_length)], [], {}
    for number, outcome in enumerate(last):
        name = outcome.candidate.name
        accuracy = [outcomes[number].main.mean(axis=0).tolist() for outcomes in by_length.values()]
        means = [sum(row) / len(row) for row in accuracy]
        record["effective_length"][name] = effective_length(lengths, means)
        stem = folder / f"depth_by_length_{name.replace(' ', '_')}"
        title = f"{loaded.identity['name']}, {name}: {outcome.metric}"
        pictures[f"Depth by length: {name}"] = depth_by_length(stem, positions, lengths, accuracy, title)[1]
        shown = ", ".join(f"{length}: {100 * mean:.1f}" for length, mean in zip(lengths, means, strict=True))
        lines.append(f"{name}, {outcome.metric} in % by length: {shown}; effective length: {record['effective_length'][name]}")
    head = f"Evaluate: {loaded.identity['name']}, {task.name} by length"
    write_page(folder, "evaluate", head, settings, record, "\n\n".join(lines), pictures)
    write_json(folder / "results.json", record)
    return lines


def _record(
    settings: EvaluateSettings, loaded: Loaded, chat: Chat | None, factors_model: dict[str, Any] | None
) -> dict[str, Any]:
    record = {name: str(value) if isinstance(value, Path) else value for name, value in settings.flat().items()}
    return record | {"model_identity": loaded.identity, "factors_model": factors_model, "chat": chat and chat.record}


def _write(
    settings: EvaluateSettings,
    task: Any,
    outcomes: list[Outcome],
    slots: list[tuple[int, int]],
    results: dict[str, Any],
    model: str,
) -> None:
    positions = [position for _, position in slots]
    title = f"{model}, {title_of(settings.task, task)}, {len(outcomes[0].main)} questions"
    curves = {outcome.candidate.name: (outcome.main.mean(axis=0).tolist(), len(outcome.main)) for outcome in outcomes}
    screen_tables: list[ScreenTable] = []
    tables: list[str] = []
    for metric in outcomes[0].scores:
        table_rows = rows(outcomes, metric)
        screen_tables.append(position_table(table_rows, positions, f"{title}: {metric}"))
        tables.append(f"{metric}\n\n{markdown(table_rows, positions)}\n")
    if compared := differences(results["methods"]):
        tables.append(f"{outcomes[0].metric}\n\n{compared}\n")
    text = "\n".join(tables)
    with output.staged(settings.run.output_path) as folder:
        write_samples(folder / "samples.jsonl", outcomes)
        picture = u_curve(folder / "positions", positions, curves, title)[1]
        write_text(folder / "results.md", text)
        write_page(folder, "evaluate", f"Evaluate: {title}", settings, results, text, {"Accuracy by position": picture})
        write_json(folder / "results.json", results)
    lines = []
    for name, figures in results["methods"].items():
        if "substring_but_not_prefix" in figures:
            lines.append(f"{name}: {figures['substring_but_not_prefix']} answers that substring accepts and prefix does not")
        unusual = {key: figures[key] for key in evaluation.COUNTS if figures.get(key)}
        if unusual:
            lines.append(f"{name}: " + ", ".join(f"{key.replace('_', ' ')}: {count}" for key, count in unusual.items()))
    show(*screen_tables, *lines, f"{outcomes[-1].compilations} compiled shapes; results: {settings.run.output_path}")
