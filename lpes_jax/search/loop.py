"""A search from its settings to its factors: the examples, the scorer, the algorithm, and the held-out report."""

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax import hosts, process
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Outcome, default_metrics, evaluate, slots_of
from lpes_jax.factors import LayerFactors, array_of
from lpes_jax.finite import first_bad_layer
from lpes_jax.json_files import is_number, read_json
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.progress import SearchProgress
from lpes_jax.rope import Granularity
from lpes_jax.same_model import facts
from lpes_jax.search.fitness import Fitness
from lpes_jax.search.individuals import Individuals
from lpes_jax.search.mixture import Mixture
from lpes_jax.search.objective import Group, Objective, groups_of
from lpes_jax.search.plain_text import check_windows
from lpes_jax.search.racing import Race
from lpes_jax.search.scorers import fit, make_scorer, make_staged_scorer, scoring_model, search_prompts
from lpes_jax.search.settings import scaled_layers, search_space
from lpes_jax.search.space import Space
from lpes_jax.search.stop import BudgetSpent, GracefulStop
from lpes_jax.settings.search import SearchSettings, as_record
from lpes_jax.store.content import content_sha256
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import check_processes, environment
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.prompts import Prompt, Task, prompts_sha256, token_ids

_HELD_OUT = 5  # candidates of the held-out report: plain, baseline, uniform, pi, lpes


@dataclass(frozen=True)
class Report:
    """The outcomes of the found factors and the controls on held-out questions of one task (length), in the report's order.

    `slots` are the (slot, position) pairs that were measured.
    """

    task: Task
    slots: list[tuple[int, int]]
    outcomes: list[Outcome]
    title: str = ""  # in a mixture


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the found factors, and their scores on each task (length).

    `reports` is empty if a complete run was resumed: its folder has them. `control_points` are those of a curve of one factor
    per layer. `selection` is the weighted accuracy (0 to 1) on the questions that the factors were chosen on, and on held-out
    ones if these were measured in the same way.
    """

    factors: LayerFactors
    reports: list[Report]
    control_points: Float[np.ndarray, "C n"] | None
    selection: dict[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes on the first task."""
        return self.reports[0].outcomes


Finish = Callable[[SearchResult, RunFolder], SearchResult]


def search(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    tasks: Sequence[Task] | Mixture,
    identity: dict[str, Any],
    stop_ids: Sequence[int] = (),
    finish: Finish = lambda result, folder: result,
    measured: dict[Any, Any] | None = None,
) -> SearchResult:
    """Run a search, and write its history.

    Args:
        settings: The settings, checked.
        model: The model.
        tokenizer: Its tokenizer.
        tasks: The tasks to find factors for: lengths of one task, with equal weights, or a mixture, with its weights.
        identity: The model's name, num_layers and sha256, for the records.
        stop_ids: Tokens that end a generated text.
        finish: Gets the result while the folder is still locked, and may write there.
        measured: As in `evaluate`.

    Returns:
        The result of the search.

    Raises:
        UserError: A setting, the model or the data are unusable. Raised before anything is scored.
        Interrupted: SIGINT or SIGTERM arrived. All scores are saved.
    """
    from lpes_jax.search.algorithms import (
        make_algorithm,
    )  # importing evosax initialises the devices, so all processes must be connected

    started = time.time()
    config = model.config
    layers = scaled_layers(settings, config.num_layers)
    space = search_space(settings, config, layers)
    algorithm = make_algorithm(settings, space)
    if settings.algorithm == "gradient" and (settings.text.text_weight or settings.text.max_text_loss_rise is not None):
        check_windows(settings.text.text_window, config.max_position_embeddings)
    mixture, tasks = (tasks, tasks.tasks) if isinstance(tasks, Mixture) else (None, tasks)
    questions = settings.questions
    limits = [(part.limit, part.test_limit) for part in mixture.parts] if mixture else []
    limits = limits or [(questions.limit, questions.test_limit)] * len(tasks)
    naming = [part.told for part in mixture.parts] if mixture else [contextlib.nullcontext] * len(tasks)
    metrics = _metrics(settings, tasks, mixture is not None)
    reported = [slots_of(task, questions.positions if task.num_items > 1 else (0,)) for task in tasks]
    searched = [slots_of(task, settings.objective.search_positions if task.num_items > 1 else (0,)) for task in tasks]
    if mixture is None and len({(len(slots), task.decided_by) for slots, task in zip(searched, tasks, strict=True)}) > 1:
        raise UserError("tasks with and without positions, or with and without options, are searched on together in a Mixture")
    counts: Counter[str] = Counter()
    prompts, held_out, asked_later = [], [], []
    for index, task in enumerate(tasks):
        with naming[index]():
            examples = task.examples("search", limits[index][0], settings.run.seed)
            prompts.append(search_prompts(settings, config, task, tokenizer, examples, searched[index], counts))
            held_out.append(task.examples("test", limits[index][1], settings.run.seed))
            asked_later += _check_held_out(settings, model, tokenizer, task, held_out[index], reported[index], metrics[index])
            if mixture is not None:  # so that errors name the task
                task_prompts.encode(prompts[index], tokenizer, config.max_position_embeddings)
    everything = [prompt for own_prompts in prompts for prompt in own_prompts]
    asked = everything + asked_later
    scoring = scoring_model(settings, model)
    staged = make_staged_scorer(settings, scoring, tokenizer, tasks, prompts) if settings.ga.race else None
    scorer = make_scorer(settings, scoring, tokenizer, tasks, prompts, stop_ids) if staged is None else staged
    groups: Sequence[Group] = ()
    if mixture is not None:
        groups = groups_of(mixture.titles, mixture.weights, searched, prompts, settings.objective.weights)
    positions = tuple(position for _, position in searched[0])
    objective = Objective(settings.objective, positions, scorer.answer_tokens, scorer.has_likelihood, groups)
    race = None if staged is None else Race(staged, objective)

    def trace(prompt: int, row: Individuals | None, kinds: tuple[Granularity, Granularity]) -> int | str | None:
        [ids] = token_ids(tokenizer, [everything[prompt].text + (everything[prompt].answers or ("",))[0]])
        if row is None:
            return first_bad_layer(scoring, ids)
        return first_bad_layer(scoring, ids, row.factors, kinds[0], row.gains, kinds[1])

    candidates = sum((_HELD_OUT - (task.plain is None)) * len(examples) * len(slots)
                     for task, examples, slots in zip(tasks, held_out, reported, strict=True))  # fmt: skip
    total = (algorithm.individuals + settings.objective.uniform_candidates) * scorer.num_prompts + candidates
    mixture_record = {} if mixture is None else {"mixture": mixture.record()}
    record = _config(settings, model, identity, space, asked) | mixture_record
    check_processes(record, batch_size=settings.devices.batch_size, population_chunk=settings.devices.population_chunk)
    with RunFolder(settings.run.output_path, record, settings.run.resume, settings.run.overwrite) as folder:
        if (complete := hosts.from_first(lambda: _complete_result(folder))) is not None:
            return complete
        message = f"interrupted; what was scored is in {folder.path}: the same command with --resume continues from there"
        with process.saying(lambda: message):
            with SearchProgress(total) as progress:
                with GracefulStop() as stop:
                    budget = settings.ga.max_evaluations
                    kinds, dtype = space.granularities, settings.devices.score_dtype
                    fitness = Fitness(scorer, objective, trace, kinds, folder, progress, stop, budget, race, dtype)
                    try:
                        algorithm.run(model, tokenizer, prompts, fitness)
                    except BudgetSpent:
                        pass
                    spent, fitness.max_evaluations = fitness.evaluations, None
                    progress.note("tuning one uniform factor on the same examples")
                    uniform = _tuned_uniform(settings, fitness, config.num_layers)
                progress.note("measuring on held-out questions")
                best = fitness.best
                points = best["control_points"]
                numbers = {"learn": settings.space.learn, "parameter": settings.space.parameter}
                numbers = {} if numbers == {"learn": "factors", "parameter": "factor"} else numbers  # of a curve's columns
                learnt = LayerFactors(
                    array_of(best["factors"]),
                    space.granularities[0],
                    gains=None if "gains" not in best else np.array(best["gains"]),
                    gains_granularity=space.granularities[1],
                    model=identity | facts(config, tokenizer),
                    curve={
                        "type": settings.space.curve,
                        "control_points": points,
                        "layers": [layers[0], layers[-1]],
                        **numbers,
                    },
                    rope=config.rope.to_hf(),
                    search={
                        **as_record(settings),
                        **mixture_record,
                        "search_space": algorithm.search_space,
                        **algorithm.sizes,
                        "fitness_of_best": best["fitness"],
                        "best_individual": best["id"],
                        "individuals": len(fitness.records),
                        "evaluations": fitness.evaluations,
                        "evaluations_of_algorithm": spent,
                        "prompts_scored": fitness.prompts_scored,
                        "search_questions": dict(counts),
                        "longest_tokens": scorer.longest,
                        "uniform": uniform,
                        "seconds": round(time.time() - started, 3),
                        **environment(),
                    },
                )
                reports = [
                    Report(
                        task,
                        slots,
                        evaluate(
                            model,
                            tokenizer,
                            task,
                            examples,
                            slots,
                            [
                                Candidate(PLAIN, plain=True),
                                Candidate(BASELINE),
                                Candidate("uniform", LayerFactors.uniform(uniform["factor"], config.num_layers)),
                                Candidate("pi", LayerFactors.uniform(learnt.mean, config.num_layers)),
                                Candidate("lpes", learnt),
                            ],
                            metrics=own_metrics,
                            max_new_tokens=questions.max_new_tokens,
                            stop_ids=stop_ids,
                            overlength=questions.overlength,
                            drop_leaky=questions.drop_leaky,
                            batch_size=settings.devices.batch_size,
                            on_prompts=progress.prompts,
                            measured=measured,
                        ),
                        title,
                    )
                    for task, examples, slots, own_metrics, title in zip(
                        tasks, held_out, reported, metrics, mixture.titles if mixture else [""] * len(tasks), strict=True
                    )
                ]
            selection = _selection(settings, fitness, reports) | {"search_questions": dict(counts)}
            points = None if points is None else np.array(points)
            result = SearchResult(learnt, reports, points, selection)
            with folder.writing():
                return finish(result, folder) if hosts.is_first() else result


def _config(
    settings: SearchSettings, model: Llama, identity: dict[str, Any], space: Space, asked: Sequence[Prompt]
) -> dict[str, Any]:
    """`config.json`: everything that determines a run's results; files by the hash of their content."""
    files = {"data": settings.task.data, "text": settings.text.text}
    start = b"".join(values.tobytes() for values in (space.x, *(column for column, _, _ in space.learnt.values())))
    return {
        "model": identity | {"config_sha256": hashlib.sha256(repr(model.config).encode()).hexdigest()},
        "settings": as_record(settings),
        "sha256": {name: content_sha256(path, f"--{name} ") for name, path in files.items() if path is not None}
        | {"prompts": prompts_sha256(asked), "start": hashlib.sha256(start).hexdigest()},
        "environment": environment(),
    }


def _complete_result(folder: RunFolder) -> SearchResult | None:
    """The result of a complete run, whose results count all individuals of its history; else None."""
    results, factors_path = folder.path / "results.json", folder.path / "factors.json"
    if not (folder.recorded and results.exists() and factors_path.exists()):
        return None
    read_json(results, dict, hint="; remove it, and --resume writes it anew")
    factors = LayerFactors.load(factors_path)
    if factors.search.get("individuals") != len(folder.recorded):
        return None
    points = (factors.curve or {}).get("control_points")
    return SearchResult(factors, [], None if points is None else np.array(points))


def _selection(settings: SearchSettings, fitness: Fitness, reports: Sequence[Report]) -> dict[str, Any]:
    """Accuracy of the found factors on the questions that chose them, and of them and the baseline on held-out questions.

    Both at the search's positions and weights. Held-out accuracy only if it was measured at these, by the search's verdict.
    """
    best, task = fitness.best, reports[0].task
    if fitness.objective.groups:
        return _selection_by_task(fitness)
    if "accuracy" in best:
        chosen = float(np.dot(fitness.objective.weights, list(best["accuracy"].values())))
    else:
        chosen = float(np.mean(best["accuracies"]))
    selection = {"chosen_of": len(fitness.records), "accuracy_where_chosen": chosen}
    verdict = task.metrics[0] if task.decided_by == "options" or settings.objective.fitness == "metric" else "prefix"
    for name, label in (("lpes", "accuracy_held_out"), (BASELINE, "baseline_held_out")):
        means = []
        for report in reports:
            [outcome] = [outcome for outcome in report.outcomes if outcome.candidate.name == name]
            columns = [position for _, position in report.slots]
            if verdict not in outcome.scores or not set(fitness.objective.positions) <= set(columns):
                return selection
            indices = [columns.index(position) for position in fitness.objective.positions]
            means.append(float(outcome.scores[verdict].mean(axis=0)[indices] @ np.array(fitness.objective.weights)))
        selection[label] = float(np.mean(means))
    return selection


def _selection_by_task(fitness: Fitness) -> dict[str, Any]:
    """For a mixture: accuracy on the questions that chose the factors, by the tasks' weights and per task, before and after."""
    best, first = fitness.best, fitness.records[0]

    def by_task(record: dict[str, Any]) -> dict[str, float]:
        if "accuracies" in record:
            return dict(zip((group.title for group in fitness.objective.groups), record["accuracies"], strict=True))
        accuracies = record["accuracy"]
        return {
            group.title: float(np.dot(group.weights, list(accuracies[group.title].values())))
            for group in fitness.objective.groups
        }

    tasks = {title: {"accuracy_at_start": start} for title, start in by_task(first).items()}
    for title, accuracy in by_task(best).items():
        tasks[title]["accuracy"] = accuracy
    if "task_losses" in best:
        for figures, loss_at_start, loss in zip(tasks.values(), first["task_losses"], best["task_losses"], strict=True):
            figures |= {"loss_at_start": loss_at_start, "loss": loss}
    chosen = sum(group.share * tasks[group.title]["accuracy"] for group in fitness.objective.groups)
    return {"chosen_of": len(fitness.records), "accuracy_where_chosen": float(chosen), "tasks": tasks}


def _metrics(settings: SearchSettings, tasks: Sequence[Task], is_mixture: bool) -> list[Sequence[str]]:
    """The metrics of each task's held-out report.

    In a mixture a task has those of `--metrics` that it knows, or else its own: its first default metric, and F1 if it has it.
    Raises UserError for a metric that no task has.
    """
    if not is_mixture:
        return [settings.questions.metrics or default_metrics(tasks[0])[:1]] * len(tasks)
    known = [("prefix", *task.metrics) if task.decided_by == "generation" else task.metrics for task in tasks]
    if unknown := [metric for metric in settings.questions.metrics if not any(metric in own_metrics for own_metrics in known)]:
        raise UserError(
            f"--metrics {unknown[0]}: no task of the mixture has it; they have {', '.join(sorted({*sum(known, ())}))}"
        )
    reported = []
    for task, own_metrics in zip(tasks, known, strict=True):
        own = default_metrics(task)[:1]
        own += tuple(metric for metric in ("f1",) if metric in task.metrics and metric not in own)
        reported.append(tuple(metric for metric in settings.questions.metrics if metric in own_metrics) or own)
    return reported


def _check_held_out(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    slots: Sequence[tuple[int, int]],
    metrics: Sequence[str],
) -> list[Prompt]:
    """Check the held-out prompts like the search prompts, so that errors come before the search. Returns the prompts."""
    generates, fitted = task.decided_by == "generation" and any(metric != "prefix" for metric in metrics), []
    for version in (task, task.plain):
        if version is not None:
            version_prompts = [version.prompt(example, *slot) for example in examples for slot in slots]
            version_prompts, _ = count_leaky(version_prompts, settings.questions.drop_leaky)
            fitted += fit(settings, model.config, version, tokenizer, version_prompts, generates)
    if generates:
        new_tokens = settings.questions.max_new_tokens or task.max_new_tokens
        encoded = task_prompts.encode(fitted, tokenizer, model.config.max_position_embeddings)
        if new_tokens < (longest := max((len(ids) for prompt in encoded for ids in prompt.answers), default=0)):
            raise UserError(f"--max-new-tokens {new_tokens} is below the longest gold answer, {longest} tokens")
    return fitted


def _sweep(path: Path, candidates: Sequence[float]) -> dict[str, Any]:
    """The sweep in `uniform.json`. Raises UserError if it is not a search's sweep over these candidates."""
    record = read_json(path, dict)
    sweep = record.get("sweep")
    entries = sweep if isinstance(sweep, list) and all(isinstance(entry, dict) for entry in sweep) else [{}]
    if [entry.get("factor") for entry in entries] != list(candidates[: len(entries)]) or not (
        all("fitness" in entry and (entry["fitness"] is None or is_number(entry["fitness"])) for entry in entries)
        and is_number(record.get("factor"))
        and is_number(record.get("evaluations"))
    ):
        raise UserError(f"{path}: not the sweep of this search")
    return record


def _tuned_uniform(settings: SearchSettings, fitness: Fitness, num_layers: int) -> dict[str, Any]:
    """The best of evenly spaced uniform factors on the search examples, and the whole sweep.

    The factors are within the bounds, and within 0.5 to 2 if the box is wider: no model's best single factor lies beyond.
    `uniform.json` is written after each block, and a resumed run continues after the last one.
    """
    path = fitness.folder.path / "uniform.json"
    least, most = settings.space.min_factor, settings.space.max_factor
    low, high = max(least, min(0.5, most)), min(most, max(2.0, least))
    candidates = np.linspace(low, high, settings.objective.uniform_candidates).round(4)
    record: dict[str, Any] = {"sweep": [], "evaluations": 0}
    if fitness.folder.resumed:
        with contextlib.suppress(UserError):  # a missing or damaged file is written anew
            record = hosts.from_first(lambda: _sweep(path, candidates.tolist()))
    evaluations_before, sweep = fitness.evaluations, record["sweep"]
    fitness.evaluations += record["evaluations"]
    block_size = fitness.scorer.individuals_at_once
    for start in range(len(sweep), len(candidates), block_size):
        block = candidates[start : start + block_size]
        summaries = fitness.score_factors(np.repeat(block[:, None], num_layers, axis=1).astype(np.float32))
        sweep += [{"factor": float(factor)} | summary for factor, summary in zip(block, summaries, strict=True)]
        best = max(sweep, key=lambda entry: -np.inf if entry["fitness"] is None else entry["fitness"])
        factor_records = [{"factors": [entry["factor"]]} | entry for entry in sweep]
        fitness.check_model("tuning one uniform factor", factor_records)
        if len(sweep) == len(candidates):
            fitness.check_any("tuning one uniform factor", factor_records)
        scored = fitness.evaluations - evaluations_before
        record = {"factor": best["factor"], "fitness": best["fitness"], "evaluations": scored, "sweep": sweep}
        if hosts.is_first():
            with fitness.folder.writing():
                write_json(path, record)
        fitness.stop.check()
    return record
