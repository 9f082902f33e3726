"""A search from its settings to its factors: the examples, the scorer, the algorithm, and the held-out report."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax import hosts, process
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Conditions, Outcome, evaluate
from lpes_jax.factors import LayerFactors, array_of
from lpes_jax.finite import first_bad_layer
from lpes_jax.json_files import read_json
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.progress import SearchProgress
from lpes_jax.rope import Granularity
from lpes_jax.same_model import facts
from lpes_jax.scores import PopulationScorer
from lpes_jax.search.evaluator import Evaluator, FindLayer
from lpes_jax.search.history import History
from lpes_jax.search.individuals import Individuals
from lpes_jax.search.mixture import Mixture
from lpes_jax.search.objective import MixtureTask, Objective, mixture_tasks
from lpes_jax.search.plain_text import check_windows
from lpes_jax.search.questions import TaskQuestions, read_questions
from lpes_jax.search.racing import Race
from lpes_jax.search.scorers import make_scorer, make_staged_scorer, scoring_model
from lpes_jax.search.settings import scaled_layers, search_space
from lpes_jax.search.space import Space
from lpes_jax.search.stop import BudgetSpent, GracefulStop
from lpes_jax.search.uniform import tune_uniform
from lpes_jax.settings.search import SearchSettings, as_record
from lpes_jax.store.content import content_sha256
from lpes_jax.store.provenance import check_processes, environment
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks.prompts import Task, prompts_sha256, token_ids

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
    # Importing evosax initialises the devices, before which all processes must be connected.
    from lpes_jax.search.algorithms import make_algorithm

    started = time.time()
    space = search_space(settings, model.config, scaled_layers(settings, model.config.num_layers))
    algorithm = make_algorithm(settings, space)
    if settings.algorithm == "gradient" and (settings.text.text_weight or settings.text.max_text_loss_rise is not None):
        check_windows(settings.text.text_window, model.config.max_position_embeddings)
    mixture, tasks = (tasks, tasks.tasks) if isinstance(tasks, Mixture) else (None, tasks)
    questions, search_counts = read_questions(settings, model, tokenizer, tasks, mixture)
    scorer, objective, race, first_bad = _scoring(settings, model, tokenizer, questions, mixture, stop_ids)
    prompts = [own.prompts for own in questions]
    held_out = sum((_HELD_OUT - (own.task.plain is None)) * len(own.held_out) * len(own.reported) for own in questions)
    total = (algorithm.individuals + settings.objective.uniform_candidates) * scorer.num_prompts + held_out
    mixture_record = {} if mixture is None else {"mixture": mixture.record()}
    record = _config(settings, model, identity, space, questions) | mixture_record
    check_processes(record, batch_size=settings.devices.batch_size, population_chunk=settings.devices.population_chunk)
    with RunFolder(settings.run.output_path, record, settings.run.resume, settings.run.overwrite) as folder:
        if (complete := hosts.from_first(lambda: _complete_result(folder))) is not None:
            return complete
        message = f"interrupted; what was scored is in {folder.path}: the same command with --resume continues from there"
        with process.saying(lambda: message):
            with SearchProgress(total) as progress:
                with GracefulStop() as stop:
                    evaluator = Evaluator(scorer, objective, first_bad, space.granularities, progress, race)
                    limit, dtype = algorithm.max_evaluations, settings.devices.score_dtype
                    history = History(evaluator, folder, progress, stop, limit, dtype)
                    with contextlib.suppress(BudgetSpent):
                        algorithm.run(model, tokenizer, prompts, history)
                    spent = evaluator.evaluations
                    progress.note("tuning one uniform factor on the same examples")
                    uniform = tune_uniform(settings, history, model.config.num_layers)
                search_record = {
                    **as_record(settings),
                    **mixture_record,
                    "search_space": algorithm.search_space,
                    **algorithm.sizes,
                    "fitness_of_best": history.best["fitness"],
                    "best_individual": history.best["id"],
                    "individuals": len(history.records),
                    "evaluations": evaluator.evaluations,
                    "evaluations_of_algorithm": spent,
                    "prompts_scored": evaluator.prompts_scored,
                    "search_questions": search_counts,
                    "longest_tokens": scorer.longest,
                    "uniform": uniform,
                    "seconds": round(time.time() - started, 3),
                    **environment(),
                }
                learnt = _factors_of(
                    history.best, settings, space, identity | facts(model.config, tokenizer), model.config, search_record
                )
                progress.note("measuring on held-out questions")
                reports = _held_out_reports(
                    settings, model, tokenizer, questions, learnt, uniform["factor"], stop_ids, progress, measured
                )
            selection = _selection(settings, history, reports) | {"search_questions": search_counts}
            points = history.best["control_points"]
            result = SearchResult(learnt, reports, None if points is None else np.array(points), selection)
            with folder.writing():
                return finish(result, folder) if hosts.is_first() else result


def _scoring(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    questions: Sequence[TaskQuestions],
    mixture: Mixture | None,
    stop_ids: Sequence[int],
) -> tuple[PopulationScorer, Objective, Race | None, FindLayer]:
    """The scorer of all search prompts, the fitness, the race if there is one, and what finds the layer of a bad score."""
    tasks, prompts = [own.task for own in questions], [own.prompts for own in questions]
    everything = [prompt for own_prompts in prompts for prompt in own_prompts]
    scoring = scoring_model(settings, model)
    staged = make_staged_scorer(settings, scoring, tokenizer, tasks, prompts) if settings.ga.race else None
    scorer = make_scorer(settings, scoring, tokenizer, tasks, prompts, stop_ids) if staged is None else staged
    weighted_tasks: Sequence[MixtureTask] = ()
    if mixture is not None:
        slots = [own.searched for own in questions]
        weighted_tasks = mixture_tasks(mixture.titles, mixture.weights, slots, prompts, settings.objective.weights)
    positions = tuple(position for _, position in questions[0].searched)
    objective = Objective(settings.objective, positions, scorer.answer_tokens, scorer.has_likelihood, weighted_tasks)

    def first_bad(prompt: int, row: Individuals | None, kinds: tuple[Granularity, Granularity]) -> int | str | None:
        [ids] = token_ids(tokenizer, [everything[prompt].text + (everything[prompt].answers or ("",))[0]])
        if row is None:
            return first_bad_layer(scoring, ids)
        return first_bad_layer(scoring, ids, row.factors, kinds[0], row.gains, kinds[1])

    return scorer, objective, None if staged is None else Race(staged, objective), first_bad


def _factors_of(
    best: dict[str, Any],
    settings: SearchSettings,
    space: Space,
    model: dict[str, Any],
    config: LlamaConfig,
    search_record: dict[str, Any],
) -> LayerFactors:
    """The found factors and gains, with their records of the model, the curve and the search."""
    columns = {"learn": settings.space.learn, "parameter": settings.space.parameter}
    is_usual = columns == {"learn": "factors", "parameter": "factor"}
    return LayerFactors(
        array_of(best["factors"]),
        space.granularities[0],
        gains=None if "gains" not in best else np.array(best["gains"]),
        gains_granularity=space.granularities[1],
        model=model,
        curve={
            "type": settings.space.curve,
            "control_points": best["control_points"],
            "layers": [space.layers[0], space.layers[-1]],
            **({} if is_usual else columns),
        },
        rope=config.rope.to_hf(),
        search=search_record,
    )


def _held_out_reports(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    questions: Sequence[TaskQuestions],
    learnt: LayerFactors,
    uniform_factor: float,
    stop_ids: Sequence[int],
    progress: SearchProgress,
    measured: dict[Any, Any] | None,
) -> list[Report]:
    """The found factors and the controls on each task's held-out questions."""
    num_layers = model.config.num_layers
    candidates = [
        Candidate(PLAIN, plain=True),
        Candidate(BASELINE),
        Candidate("uniform", LayerFactors.uniform(uniform_factor, num_layers)),
        Candidate("pi", LayerFactors.uniform(learnt.mean, num_layers)),
        Candidate("lpes", learnt),
    ]
    reports = []
    for own in questions:
        conditions = Conditions.of(settings.questions, own.metrics, stop_ids, settings.devices.batch_size)
        outcomes = evaluate(
            model,
            tokenizer,
            own.task,
            own.held_out,
            own.reported,
            candidates,
            conditions,
            on_prompts=progress.prompts,
            measured=measured,
        )
        reports.append(Report(own.task, own.reported, outcomes, own.title))
    return reports


def _config(
    settings: SearchSettings, model: Llama, identity: dict[str, Any], space: Space, questions: Sequence[TaskQuestions]
) -> dict[str, Any]:
    """`config.json`: everything that determines a run's results; files by the hash of their content."""
    files = {"data": settings.task.data, "text": settings.text.text}
    asked = [prompt for own in questions for prompt in own.prompts]
    asked += [prompt for own in questions for prompt in own.held_out_prompts]
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


def _selection(settings: SearchSettings, history: History, reports: Sequence[Report]) -> dict[str, Any]:
    """Accuracy of the found factors on the questions that chose them, and of them and the baseline on held-out questions.

    Both at the search's positions and weights. Held-out accuracy only if it was measured at these, by the search's verdict.
    """
    best, task, objective = history.best, reports[0].task, history.evaluator.objective
    if objective.tasks:
        return _selection_by_task(history)
    if "accuracy" in best:
        chosen = float(np.dot(objective.weights, list(best["accuracy"].values())))
    else:
        chosen = float(np.mean(best["accuracies"]))
    selection = {"chosen_of": len(history.records), "accuracy_where_chosen": chosen}
    verdict = task.metrics[0] if task.decided_by == "options" or settings.objective.fitness == "metric" else "prefix"
    for name, label in (("lpes", "accuracy_held_out"), (BASELINE, "baseline_held_out")):
        means = []
        for report in reports:
            [outcome] = [outcome for outcome in report.outcomes if outcome.candidate.name == name]
            columns = [position for _, position in report.slots]
            if verdict not in outcome.scores or not set(objective.positions) <= set(columns):
                return selection
            indices = [columns.index(position) for position in objective.positions]
            means.append(float(outcome.scores[verdict].mean(axis=0)[indices] @ np.array(objective.weights)))
        selection[label] = float(np.mean(means))
    return selection


def _selection_by_task(history: History) -> dict[str, Any]:
    """For a mixture: accuracy on the questions that chose the factors, by the tasks' weights and per task, before and after."""
    best, first, weighted_tasks = history.best, history.records[0], history.evaluator.objective.tasks

    def by_task(record: dict[str, Any]) -> dict[str, float]:
        if "accuracies" in record:
            return dict(zip((task.title for task in weighted_tasks), record["accuracies"], strict=True))
        accuracies = record["accuracy"]
        return {task.title: float(np.dot(task.weights, list(accuracies[task.title].values()))) for task in weighted_tasks}

    tasks = {title: {"accuracy_at_start": start} for title, start in by_task(first).items()}
    for title, accuracy in by_task(best).items():
        tasks[title]["accuracy"] = accuracy
    if "task_losses" in best:
        for figures, loss_at_start, loss in zip(tasks.values(), first["task_losses"], best["task_losses"], strict=True):
            figures |= {"loss_at_start": loss_at_start, "loss": loss}
    chosen = sum(task.share * tasks[task.title]["accuracy"] for task in weighted_tasks)
    return {"chosen_of": len(history.records), "accuracy_where_chosen": float(chosen), "tasks": tasks}
