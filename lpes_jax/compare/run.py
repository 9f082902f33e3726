"""The verb compare: `run_comparison`."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lpes_jax.compare import other_tasks
from lpes_jax.compare.checks import check, tasks_asked
from lpes_jax.compare.learning import learn
from lpes_jax.compare.learnt import Learnt, arrays_of
from lpes_jax.compare.other_tasks import Measured, OtherTask
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, default_metrics, evaluate, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.json_files import is_number
from lpes_jax.methods import (
    Apply,
    Choice,
    Maker,
    Tuning,
    attention_buckets,
    hidden_channel,
    learnt_tables,
    moice,
    ms_poe,
    seal,
    self_extend,
    tables,
    zero_tuning,
)
from lpes_jax.models.llama import Loaded, load
from lpes_jax.models.llama.method import table_method
from lpes_jax.prefixes import pack_rows
from lpes_jax.report.html import write_page
from lpes_jax.report.plots import u_curve
from lpes_jax.report.progress import SearchProgress
from lpes_jax.report.tables import ScreenTable, differences, markdown, position_table, show
from lpes_jax.results import outcome_of, record_of, results_record, rows, write_samples
from lpes_jax.same_model import check_loaded
from lpes_jax.scores import LikelihoodScorer, batch_scores
from lpes_jax.scoring import OptionScorer, Scorer
from lpes_jax.search.plain_text import text_windows
from lpes_jax.settings.compare import CompareSettings
from lpes_jax.store import output
from lpes_jax.store.content import content_sha256
from lpes_jax.store.files import write_json, write_text
from lpes_jax.store.parts import Parts
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.flags import title_of
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.prompts import (
    EncodedPrompt,
    Prompt,
    encode,
    fit,
    option_prompts,
    short_answers,
)

METHODS: dict[str, Callable[[Tuning], list[Choice]]] = {
    BASELINE: lambda tuning: [Choice("", None)],
    "uniform": tables.uniform_choices,
    "pi": tables.pi_choices,
    "dynamic_ntk": tables.dynamic_ntk_choices,
    "ntk_by_base": tables.ntk_by_base_choices,
    "yarn": tables.yarn_choices,
    "attention_buckets": attention_buckets.choices,
    "ms_poe": ms_poe.choices,
    "moice": moice.choices,
    "self_extend": self_extend.choices,
    "hidden_channel": hidden_channel.choices,
    "zero_tuning": zero_tuning.choices,
    "seal": seal.choices,
    "learnt_factors": learnt_tables.factors_choices,
    "learnt_gains": learnt_tables.gains_choices,
    "learnt_both": learnt_tables.both_choices,
    "lpes": tables.lpes_choices,
}
"""The compared methods in the order of the tables, and the settings that are tried for each."""
_LEARNING = (  # work to do before they have settings
    *("moice", "hidden_channel", "zero_tuning", "seal"),
    *("learnt_factors", "learnt_gains", "learnt_both"),
)
_TIMED_PROMPTS = 8


def run_comparison(settings: CompareSettings) -> dict[str, Any]:
    """Tune, measure, time; write the folder and print the table. Returns `results.json`.

    Raises UserError if the settings, the model or the data are unusable, or if a named method is not available.
    """
    started = time.time()
    names = check(settings)
    output.check(settings.run.output_path, "compare", overwrite=settings.run.overwrite, resume=settings.run.resume)
    task, title, others = tasks_asked(settings)
    asked = _Asked(
        task,
        title,
        task.examples("search", settings.questions.limit, settings.run.seed),
        task.examples("test", settings.questions.test_limit, settings.run.seed),
        other_tasks.with_questions(others, settings),
    )
    found = None if settings.factors.factors is None else LayerFactors.load(settings.factors.factors)
    loaded = load(settings.run.model, settings.devices.dtype, weight_format=settings.devices.weight_format)
    factors_model = None
    if found is not None:
        factors_model = check_loaded(found, loaded, str(settings.factors.factors), settings.factors.other_model)
    config, run = _config(settings, loaded, found, asked.others), settings.run
    with Parts(run.output_path, config, PARTS, run.resume, run.overwrite) as kept:
        with kept.interruptible():
            record, shown = _compared(settings, names, asked, loaded, found, factors_model, kept, started)
        kept.drop()
    show(*shown)
    return record


@dataclass(frozen=True)
class _Asked:
    """The tuned task, its title beside other tasks, its questions, and the other tasks."""

    task: Any
    title: str
    searched: Sequence[Any]
    held_out: Sequence[Any]
    others: Sequence[OtherTask]


def _compared(
    settings: CompareSettings,
    names: Sequence[str],
    asked: _Asked,
    loaded: Loaded,
    found: LayerFactors | None,
    factors_model: dict[str, Any] | None,
    kept: Parts,
    started: float,
) -> tuple[dict[str, Any], list[ScreenTable | str]]:
    """The content of `results.json`, after all files are written, and the text to print."""
    task, held_out, others = asked.task, asked.held_out, asked.others
    slots = slots_of(task, settings.questions.positions if task.num_items > 1 else (0,))
    measured = partial(
        evaluate,
        loaded.model,
        loaded.tokenizer,
        task,
        held_out,
        slots,
        conditions=Conditions.of(
            settings.questions,
            settings.questions.metrics or default_metrics(task)[:1],
            loaded.stop_ids,
            settings.devices.batch_size,
        ),
        on_outcome=lambda outcome: kept.keep("measured", outcome.candidate.name, record_of(outcome)),
    )
    prompts = _search_prompts(settings, loaded, task, asked.searched, slots)
    scorer = _scorer(settings, loaded, task, prompts)
    tuning = _tuning(settings, loaded, found, scorer, prompts, Learnt(kept))

    measurements = kept.records["measured"]
    try:
        choices, refused = _available(settings, [name for name in names if name not in _LEARNING], tuning)
        if BASELINE not in measurements:  # before any tuning, so that errors in questions or metrics appear at once
            measured([Candidate(BASELINE)])
        for other in others:
            other_tasks.measure(other, [Candidate(BASELINE)], settings, loaded, kept)
        learning, not_learning = _available(settings, [name for name in names if name in _LEARNING], tuning)
    except UserError:
        if not settings.run.resume:
            kept.discard()
        raise
    choices |= learning
    choices, refused = {name: choices[name] for name in names if name in choices}, refused | not_learning
    total = len(held_out) * len(slots) + sum(len(other.examples) * len(other.slots) for other in others)
    with SearchProgress(len(choices) * total) as progress:
        tuned = _tuned(choices, scorer, loaded.model.config, others, kept, progress)
        candidates = [Candidate(name, method=chosen.maker) for name, (chosen, _) in tuned.items()]
        progress.note("measuring on held-out questions")
        earlier = {name: outcome_of(kept_record) for name, kept_record in measurements.items()}
        outcomes = measured(candidates, earlier=earlier, on_prompts=progress.prompts)
        elsewhere: list[Measured] = []
        for other in others:
            progress.note(f"measuring on {other.part.title}")
            elsewhere.append(other_tasks.measure(other, candidates, settings, loaded, kept, progress.prompts))
        progress.note("timing")
        costs = _costs(loaded, outcomes[0].prompts[:_TIMED_PROMPTS], candidates, settings.methods.repeats)
    used = _as_record(settings) | {"model_identity": loaded.identity, "factors_model": factors_model}
    record = results_record(task, outcomes, slots, used, started)
    for name, figures in record["methods"].items():
        figures |= {
            "setting": tuned[name][0].setting,
            "tuning": {"tried": tuned[name][1]},
            **costs[name],
        }
    record |= {"refused": refused, "resumed": settings.run.resume}
    if elsewhere:
        record |= {"tuned_task": asked.title, "other_tasks": [one.record() for one in elsewhere]}
    return record, _write(settings, loaded, title_of(settings.task, task), outcomes, slots, record, elsewhere)


def _available(
    settings: CompareSettings, names: Sequence[str], tuning: Tuning
) -> tuple[dict[str, list[Choice]], dict[str, str]]:
    """The settings to try for each method; and for methods that are not available, the reason.

    Raises UserError for a method that is not available, unless the methods are `all`.
    """
    config = tuning.model.config
    choices: dict[str, list[Choice]] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            method_choices = METHODS[name](tuning)
            for choice in method_choices:
                if choice.maker is not None:
                    choice.maker(config, config.max_position_embeddings)
            choices[name] = method_choices
        except UserError as error:
            if "all" not in settings.methods.methods:
                raise
            refused[name] = str(error)
    return choices, refused


def _tuned(
    choices: dict[str, list[Choice]],
    scorer: LikelihoodScorer | None,
    config: Any,
    others: Sequence[OtherTask],
    kept: Parts,
    progress: SearchProgress,
) -> dict[str, tuple[Choice, list[dict[str, Any]]]]:
    """The best setting of each method, and the record of its tuning. Methods that are already tuned are not tuned again."""
    tuned: dict[str, tuple[Choice, list[dict[str, Any]]]] = {}
    tunings = kept.records["tuned"]
    for name, method_choices in choices.items():
        by_setting = {choice.setting: choice for first in method_choices for choice in (first, *first.then)}
        if tunings.get(name, {}).get("setting") not in by_setting:  # not tuned yet, or other channels were found
            progress.note(f"tuning {name}")
            choice, tried = _tune(scorer, method_choices, config)
            if name != BASELINE:
                kept.forget("measured", name)
                other_tasks.forget(others, name, kept)
            kept.keep("tuned", name, {"setting": choice.setting, "tried": tried})
        tuned[name] = by_setting[tunings[name]["setting"]], tunings[name]["tried"]
    return tuned


def _check_tuned(record: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError if this is not a record of a method's tuning."""
    if not isinstance(record["setting"], str):
        raise TypeError("a setting that is not a text")
    for tried in record["tried"]:
        likelihood = tried["log_likelihood"]
        if not (isinstance(tried["setting"], str) and is_number(tried["accuracy"])):
            raise TypeError("a setting without accuracy")
        if likelihood is not None and not is_number(likelihood):
            raise TypeError("a likelihood that is not a number")


def _check_refused(record: dict[str, Any]) -> None:
    """Raise KeyError or TypeError if this is not a record of a refused method."""
    if not isinstance(record["reason"], str):
        raise TypeError("a reason that is not a text")


PARTS = {
    **{"learnt": arrays_of, "tuned": _check_tuned, "measured": outcome_of},
    **{"other": outcome_of, "refused": _check_refused},  # of each method and other task
}
"""The records of each method that are kept until the results are written, and their checks."""


def _config(
    settings: CompareSettings, loaded: Loaded, found: LayerFactors | None, others: Sequence[OtherTask]
) -> dict[str, Any]:
    """Everything that determines a comparison's results; files by their content."""
    files = {name: path for name in ("data", "router", "text") if (path := settings.flat()[name]) is not None}
    contents = {name: content_sha256(path, f"--{name} ") for name, path in files.items()}
    if found is not None:
        contents["factors"] = found.sha256
    asked = {name: value for name, value in _as_record(settings).items() if name not in ("output_path", "batch_size")}
    config = {"model": loaded.identity, "settings": asked, "sha256": contents, "environment": environment()}
    return config | ({"other_tasks": {str(other.number): other.record() for other in others}} if others else {})


def _as_record(settings: CompareSettings) -> dict[str, Any]:
    flags = {name: value for name, value in settings.flat().items() if name not in ("resume", "overwrite")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}


def _tuning(
    settings: CompareSettings,
    loaded: Loaded,
    found: LayerFactors | None,
    scorer: LikelihoodScorer | None,
    prompts: Sequence[Prompt],
    once: Learnt,
) -> Tuning:
    router, seed = settings.router, settings.run.seed

    def score(maker: Maker) -> tuple[float, float] | None:
        if scorer is None:
            return None
        means = partial(_means, scorer, maker, loaded.model.config)
        [found] = once("score", lambda: [np.array(means(), np.float64)])
        return _ranked((float(found[0]), float(found[1])))

    def learn_once(name: str, apply: Apply, start: Any, passes: int, learning_rate: float) -> Any:
        asked, structure = () if scorer is None else prompts, jax.tree.structure(start)

        def learnt() -> list[np.ndarray]:
            found = learn(loaded.model, loaded.tokenizer, asked, seed, name, apply, start, passes, learning_rate)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]

        return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in once(name, learnt)])

    return Tuning(
        loaded.model,
        loaded.tokenizer,
        budget=settings.methods.budget,
        seed=seed,
        factors=found,
        factors_from=str(settings.factors.factors),
        router=router.router,
        text=partial(text_windows, router.text, loaded.model, loaded.tokenizer, seed),
        text_from="text that the model wrote" if router.text is None else router.text.name,
        router_steps=router.router_steps,
        router_batch=router.router_batch,
        channel_strings=settings.methods.channel_strings,
        score=score,
        learn=learn_once,
        once=once,
    )


def _search_prompts(
    settings: CompareSettings, loaded: Loaded, task: Any, examples: Sequence[Any], slots: Sequence[tuple[int, int]]
) -> list[Prompt]:
    """The prompts of the search questions that fit."""
    asked, _ = count_leaky(
        [task.prompt(example, slot, position) for example in examples for slot, position in slots],
        settings.questions.drop_leaky,
    )
    return fit(
        asked,
        loaded.tokenizer,
        loaded.model.config.max_position_embeddings,
        max_prompt_tokens=task.max_prompt_tokens,
        overlength=settings.questions.overlength,
    ).prompts


def _scorer(settings: CompareSettings, loaded: Loaded, task: Any, prompts: Sequence[Prompt]) -> LikelihoodScorer | None:
    """The scorer for tuning. None if the task has no short answers; then the first setting is used."""
    if task.decided_by == "options":
        return OptionScorer(
            loaded.model, loaded.tokenizer, prompts, batch_size=settings.devices.batch_size, individuals=settings.methods.budget
        )
    if not prompts or not short_answers(prompts):
        return None
    return Scorer(
        loaded.model,
        encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings),
        batch_size=settings.devices.batch_size,
        individuals=settings.methods.budget,
    )


def _tune(scorer: LikelihoodScorer | None, choices: Sequence[Choice], config: Any) -> tuple[Choice, list[dict[str, Any]]]:
    """The best setting, by accuracy and then likelihood on the search questions, and the record of all settings."""
    if scorer is None or (len(choices) == 1 and not choices[0].then):
        return choices[0], []
    tried: list[dict[str, Any]] = []

    def measured(choice: Choice) -> tuple[float, float]:
        assert scorer is not None and choice.maker is not None
        means = _means(scorer, choice.maker, config)
        finite = math.isfinite(means[1])
        tried.append({"setting": choice.setting, "accuracy": means[0], "log_likelihood": means[1] if finite else None})
        return _ranked(means)

    figures, best = max(((measured(choice), choice) for choice in choices), key=lambda pair: pair[0])
    return max([(figures, best), *((measured(choice), choice) for choice in best.then)], key=lambda pair: pair[0])[1], tried


def _means(scorer: LikelihoodScorer, maker: Maker, config: Any) -> tuple[float, float]:
    """The mean accuracy and log-likelihood of a maker's method on the search questions; NaN if logits are not finite."""
    correct, log_likelihood = scorer.method_scores(maker(config, scorer.longest))
    return float(correct.mean()), float(log_likelihood.mean())


def _ranked(means: tuple[float, float]) -> tuple[float, float]:
    """For comparisons: NaN is last. If it is the best all the same, the measurement reports the error."""
    return means if math.isfinite(means[1]) else (-math.inf, -math.inf)


def _costs(
    loaded: Loaded, prompts: Sequence[Any], candidates: Sequence[Candidate], repeats: int
) -> dict[str, dict[str, float | None]]:
    """Per method: passes per token, seconds per prompt (scored, with its answer), and its program's memory in bytes."""
    model = loaded.model
    asked = option_prompts(prompts) if prompts[0].options else prompts
    if all(prompt.answers for prompt in asked):
        encoded = encode(asked, loaded.tokenizer, model.config.max_position_embeddings)
    else:  # long answers: only the prompt is timed
        ids = [loaded.tokenizer(prompt.text, add_special_tokens=True)["input_ids"] for prompt in asked]
        encoded = [EncodedPrompt(prompt_ids[:-1], [prompt_ids[-1:]]) for prompt_ids in ids]
    batch = pack_rows([(prompt.ids, prompt.answers[0]) for prompt in encoded])
    programs, compiled = {}, {}
    for candidate in candidates:
        method = table_method(model.config.rope_table(batch.tokens.shape[1]))
        if candidate.method is not None:
            method = candidate.method(model.config, batch.tokens.shape[1])
        leaves, structure = jax.tree.flatten((model, batch, method))
        form = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if form not in compiled:  # tables of other numbers are arguments of the same program
            compiled[form] = _compiled(structure, leaves)
        programs[candidate.name] = method, compiled[form], leaves
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = np.random.default_rng(0)  # a new order each round, so that no method always follows the same one
    for _ in range(repeats + 1):
        for name in order.permutation(list(programs)):
            _, program, leaves = programs[name]
            begun = time.perf_counter()
            jax.block_until_ready(program(*leaves))
            seconds[name].append(time.perf_counter() - begun)
    costs: dict[str, dict[str, float | None]] = {}
    for name, (method, program, _) in programs.items():
        memory = program.memory_analysis()
        costs[name] = {
            "passes_per_token": method.passes,
            "seconds_per_prompt": statistics.median(seconds[name][1:]) / len(encoded),
            "seconds_against_baseline": statistics.median(seconds[name][1:]) / statistics.median(seconds[BASELINE][1:]),
            "program_memory_bytes": None if memory is None else float(memory.temp_size_in_bytes),
        }
    return costs


def _compiled(structure: Any, leaves: list[Any]) -> Any:
    """The compiled program that scores; its arguments are the leaves of model, batch and method."""

    def scores(*leaves: Any) -> Any:
        return batch_scores(*jax.tree.unflatten(structure, leaves))

    return jax.jit(scores).lower(*leaves).compile()


def _write(
    settings: CompareSettings,
    loaded: Loaded,
    what: str,
    outcomes: Sequence[Any],
    slots: Sequence[tuple[int, int]],
    record: dict[str, Any],
    elsewhere: Sequence[Measured],
) -> list[ScreenTable | str]:
    """Write the folder and return the text to print."""
    positions = [position for _, position in slots]
    title = f"{loaded.identity['name']}, {what}, {len(outcomes[0].main)} held-out questions"
    curves = {outcome.candidate.name: (outcome.main.mean(axis=0).tolist(), len(outcome.main)) for outcome in outcomes}
    header = ["method", "passes per token", "ms per prompt", "against baseline", "memory (MiB)", "setting"]
    cells: list[list[str]] = []
    for name, figures in record["methods"].items():
        memory = "-" if figures["program_memory_bytes"] is None else f"{figures['program_memory_bytes'] / 2**20:.0f}"
        seconds = [f"{1000 * figures['seconds_per_prompt']:.2f}", f"{figures['seconds_against_baseline']:.2f}"]
        cells.append([name, f"{figures['passes_per_token']:g}", *seconds, memory, figures["setting"] or "-"])
    left_out = [f"{name}: left out. {reason}" for name, reason in record["refused"].items()]
    table = (header, ["---", *["---:"] * 4, "---"], *cells)
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in table]
    table_rows, costs = rows(outcomes), "\n".join([*lines, *(f"\n{line}" for line in left_out)])
    compared = differences(record["methods"])
    text = f"{title}\n\n{markdown(table_rows, positions)}\n\n{compared}\n\n{costs}\n"
    samples, tasks, shown = list(outcomes), list[str](), list[ScreenTable | str]()
    if elsewhere:
        text += f"\n{other_tasks.sections(record['tuned_task'], record['methods'], elsewhere)}\n"
        samples += [outcome for one in elsewhere for outcome in one.outcomes]
        tasks = [record["tuned_task"]] * len(outcomes) + [one.title for one in elsewhere for _ in one.outcomes]
        header_of_tasks, *by_method = other_tasks.table(record["tuned_task"], record["methods"], elsewhere)
        shown = [ScreenTable("tuned on the first task only", header_of_tasks, by_method), *other_tasks.notes(elsewhere)]
    with output.staged(settings.run.output_path) as folder:
        write_samples(folder / "samples.jsonl", samples, tasks)
        picture = u_curve(folder / "positions", positions, curves, title)[1]
        write_text(folder / "results.md", text)
        write_page(folder, "compare", f"Compare: {title}", settings, record, text, {"Accuracy by position": picture})
        write_json(folder / "results.json", record)
    corrected = f"Holm's correction for all {len(outcomes) - 1} comparisons"
    return [
        position_table(table_rows, positions, title),
        *shown,
        ScreenTable("costs", header, cells),
        *left_out,
        f"p is against the baseline, over questions; results.md has it after {corrected}, too. "
        f"results: {settings.run.output_path}",
    ]
