"""A search from its settings to its factors: the examples, the algorithm around what scores them, the held-out report."""

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
from lpes_jax.search.scorers import fit, make_scorer, make_staged_scorer, search_prompts
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
    """How what was found and the controls did on held-out questions of one task (length), in the report's order."""

    task: Task
    places: list[tuple[int, int]]
    outcomes: list[Outcome]
    title: str = ""  # in a mixture


@dataclass(frozen=True)
class SearchResult:
    """What a search found, and how it did on each task (length). `control_points` are of a curve of one factor a layer.

    `reports` is empty where a run was resumed that is complete: its folder has them. `selection` is the accuracy (weighted,
    0 to 1) on the questions that the factors were chosen on, and on held-out ones where these are measured likewise.
    """

    factors: LayerFactors
    reports: list[Report]
    control_points: Float[np.ndarray, "C n"] | None
    selection: dict[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the first task."""
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
    """Run the search, its settings checked, and leave its history. Factors are to be good for all `tasks`: alike where they are
    lengths of one task, by their weights where they are a mixture.

    `identity` names the model in the records (name, num_layers, sha256); `stop_ids` end a generated text; `finish` gets the
    result while the folder is still locked, and may write there; `measured` is that of `evaluate`. Raises UserError for what
    the user got wrong, before anything is scored, and Interrupted for a SIGINT or SIGTERM, with all that was scored saved.
    """
    from lpes_jax.search.algorithms import make_algorithm  # evosax wants devices at once: not before several processes have met

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
    told = [part.told for part in mixture.parts] if mixture else [contextlib.nullcontext] * len(tasks)
    metrics = _metrics(settings, tasks, mixture is not None)
    reported = [slots_of(task, questions.positions if task.num_items > 1 else (0,)) for task in tasks]
    searched = [slots_of(task, settings.objective.search_positions if task.num_items > 1 else (0,)) for task in tasks]
    if mixture is None and len({(len(places), task.decided_by) for places, task in zip(searched, tasks, strict=True)}) > 1:
        raise UserError("tasks with and without positions, or with and without options, are searched on together in a Mixture")
    counts: Counter[str] = Counter()
    prompts, held_out, asked_later = [], [], []
    for at, task in enumerate(tasks):
        with told[at]():
            examples = task.examples("search", limits[at][0], settings.run.seed)
            prompts.append(search_prompts(settings, config, task, tokenizer, examples, searched[at], counts))
            held_out.append(task.examples("test", limits[at][1], settings.run.seed))
            asked_later += _check_held_out(settings, model, tokenizer, task, held_out[at], reported[at], metrics[at])
            if mixture is not None:  # what merges or is too long is said of its task
                task_prompts.encode(prompts[at], tokenizer, config.max_position_embeddings)
    everything = [prompt for of_task in prompts for prompt in of_task]
    asked = everything + asked_later
    staged = make_staged_scorer(settings, model, tokenizer, tasks, prompts) if settings.ga.race else None
    scorer = make_scorer(settings, model, tokenizer, tasks, prompts, stop_ids) if staged is None else staged
    groups: Sequence[Group] = ()
    if mixture is not None:
        groups = groups_of(mixture.titles, mixture.weights, searched, prompts, settings.objective.weights)
    positions = tuple(position for _, position in searched[0])
    objective = Objective(settings.objective, positions, scorer.answer_tokens, scorer.has_likelihood, groups)
    race = None if staged is None else Race(staged, objective)

    def trace(prompt: int, row: Individuals | None, kinds: tuple[Granularity, Granularity]) -> int | str | None:
        [ids] = token_ids(tokenizer, [everything[prompt].text + (everything[prompt].answers or ("",))[0]])
        if row is None:
            return first_bad_layer(model, ids)
        return first_bad_layer(model, ids, row.factors, kinds[0], row.gains, kinds[1])

    candidates = sum((_HELD_OUT - (task.plain is None)) * len(of_task) * len(places)
                     for task, of_task, places in zip(tasks, held_out, reported, strict=True))  # fmt: skip
    total = (algorithm.individuals + settings.objective.uniform_candidates) * scorer.num_prompts + candidates
    of_mixture = {} if mixture is None else {"mixture": mixture.record()}
    record = _config(settings, model, identity, space, asked) | of_mixture
    check_processes(record, batch_size=settings.devices.batch_size, population_chunk=settings.devices.population_chunk)
    with RunFolder(settings.run.output_path, record, settings.run.resume, settings.run.overwrite) as folder:
        if (complete := hosts.from_first(lambda: _as_left(folder))) is not None:
            return complete
        way_on = f"interrupted; what was scored is in {folder.path}: the same command with --resume goes on from there"
        with process.saying(lambda: way_on):
            with SearchProgress(total) as progress:
                with GracefulStop() as stop:
                    budget = settings.ga.max_evaluations
                    fitness = Fitness(scorer, objective, trace, space.granularities, folder, progress, stop, budget, race)
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
                found = LayerFactors(
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
                        **of_mixture,
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
                        places,
                        evaluate(
                            model,
                            tokenizer,
                            task,
                            examples,
                            places,
                            [
                                Candidate(PLAIN, plain=True),
                                Candidate(BASELINE),
                                Candidate("uniform", LayerFactors.uniform(uniform["factor"], config.num_layers)),
                                Candidate("pi", LayerFactors.uniform(found.mean, config.num_layers)),
                                Candidate("lpes", found),
                            ],
                            metrics=of_task,
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
                    for task, examples, places, of_task, title in zip(
                        tasks, held_out, reported, metrics, mixture.titles if mixture else [""] * len(tasks), strict=True
                    )
                ]
            selection = _selection(settings, fitness, reports) | {"search_questions": dict(counts)}
            points = None if points is None else np.array(points)
            result = SearchResult(found, reports, points, selection)
            with folder.writing():
                return finish(result, folder) if hosts.is_first() else result


def _config(
    settings: SearchSettings, model: Llama, identity: dict[str, Any], space: Space, asked: Sequence[Prompt]
) -> dict[str, Any]:
    """`config.json`: all that decides a run's results, by content where it is a file's."""
    files = {"data": settings.task.data, "text": settings.text.text}
    start = b"".join(values.tobytes() for values in (space.x, *(column for column, _, _ in space.learnt.values())))
    return {
        "model": identity | {"config_sha256": hashlib.sha256(repr(model.config).encode()).hexdigest()},
        "settings": as_record(settings),
        "sha256": {name: content_sha256(path, f"--{name} ") for name, path in files.items() if path is not None}
        | {"prompts": prompts_sha256(asked), "start": hashlib.sha256(start).hexdigest()},
        "environment": environment(),
    }


def _as_left(folder: RunFolder) -> SearchResult | None:
    """The result of a complete run, whose results are of as many individuals as its history has; else None."""
    results, found = folder.path / "results.json", folder.path / "factors.json"
    if not (folder.recorded and results.exists() and found.exists()):
        return None
    read_json(results, dict, hint="; remove it, and --resume writes it anew")
    factors = LayerFactors.load(found)
    if factors.search.get("individuals") != len(folder.recorded):
        return None
    points = (factors.curve or {}).get("control_points")
    return SearchResult(factors, [], None if points is None else np.array(points))


def _selection(settings: SearchSettings, fitness: Fitness, reports: Sequence[Report]) -> dict[str, Any]:
    """Accuracy of the found factors where they were chosen, and of them and the baseline on held-out questions.

    Both at the search's positions and weights; held-out ones only if they were measured there, by the search's verdict.
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
            columns = [position for _, position in report.places]
            if verdict not in outcome.scores or not set(fitness.objective.positions) <= set(columns):
                return selection
            at = [columns.index(position) for position in fitness.objective.positions]
            means.append(float(outcome.scores[verdict].mean(axis=0)[at] @ np.array(fitness.objective.weights)))
        selection[label] = float(np.mean(means))
    return selection


def _selection_by_task(fitness: Fitness) -> dict[str, Any]:
    """Of a mixture: accuracy where the factors were chosen, by the tasks' weights, and of each task, as it was and as found."""
    best, first = fitness.best, fitness.records[0]

    def by_task(record: dict[str, Any]) -> dict[str, float]:
        if "accuracies" in record:
            return dict(zip((group.title for group in fitness.objective.groups), record["accuracies"], strict=True))
        of_tasks = record["accuracy"]
        return {
            group.title: float(np.dot(group.weights, list(of_tasks[group.title].values())))
            for group in fitness.objective.groups
        }

    tasks = {title: {"accuracy_at_start": start} for title, start in by_task(first).items()}
    for title, accuracy in by_task(best).items():
        tasks[title]["accuracy"] = accuracy
    if "task_losses" in best:
        for of_task, before, now in zip(tasks.values(), first["task_losses"], best["task_losses"], strict=True):
            of_task |= {"loss_at_start": before, "loss": now}
    chosen = sum(group.share * tasks[group.title]["accuracy"] for group in fitness.objective.groups)
    return {"chosen_of": len(fitness.records), "accuracy_where_chosen": float(chosen), "tasks": tasks}


def _metrics(settings: SearchSettings, tasks: Sequence[Task], is_mixture: bool) -> list[Sequence[str]]:
    """The metrics of each task's held-out report.

    In a mixture those of `--metrics` that a task has, or its own: its first, and F1 beside a substring. Raises UserError for a
    metric that none has.
    """
    if not is_mixture:
        return [settings.questions.metrics or default_metrics(tasks[0])[:1]] * len(tasks)
    known = [("prefix", *task.metrics) if task.decided_by == "generation" else task.metrics for task in tasks]
    if unknown := [metric for metric in settings.questions.metrics if not any(metric in of_task for of_task in known)]:
        raise UserError(
            f"--metrics {unknown[0]}: no task of the mixture has it; they have {', '.join(sorted({*sum(known, ())}))}"
        )
    of_tasks = []
    for task, has in zip(tasks, known, strict=True):
        own = default_metrics(task)[:1]
        own += tuple(metric for metric in ("f1",) if metric in task.metrics and metric not in own)
        of_tasks.append(tuple(metric for metric in settings.questions.metrics if metric in has) or own)
    return of_tasks


def _check_held_out(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    places: Sequence[tuple[int, int]],
    metrics: Sequence[str],
) -> list[Prompt]:
    """The same check for the held-out prompts as for the others, before the search and not after it. The prompts."""
    generates, fitted = task.decided_by == "generation" and any(metric != "prefix" for metric in metrics), []
    for version in (task, task.plain):
        if version is not None:
            asked = [version.prompt(example, *place) for example in examples for place in places]
            asked, _ = count_leaky(asked, settings.questions.drop_leaky)
            fitted += fit(settings, model.config, version, tokenizer, asked, generates)
    if generates:
        new_tokens = settings.questions.max_new_tokens or task.max_new_tokens
        encoded = task_prompts.encode(fitted, tokenizer, model.config.max_position_embeddings)
        if new_tokens < (longest := max((len(ids) for prompt in encoded for ids in prompt.answers), default=0)):
            raise UserError(f"--max-new-tokens {new_tokens} is below the longest gold answer, {longest} tokens")
    return fitted


def _sweep(path: Path, candidates: Sequence[float]) -> dict[str, Any]:
    """What `uniform.json` has of these candidates. Raises UserError where it is not what a search left there."""
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
    """The best of evenly spaced uniform factors, on the search examples, and the whole sweep.

    They lie within the bounds, and within 0.5 to 2 where the box is wider: no model's best single factor lies beyond.
    `uniform.json` is written with each block of them, and a resumed run goes on behind it.
    """
    path = fitness.folder.path / "uniform.json"
    least, most = settings.space.min_factor, settings.space.max_factor
    low, high = max(least, min(0.5, most)), min(most, max(2.0, least))
    candidates = np.linspace(low, high, settings.objective.uniform_candidates).round(4)
    record: dict[str, Any] = {"sweep": [], "evaluations": 0}
    if fitness.folder.resumed:
        with contextlib.suppress(UserError):  # a file that is not there, or damaged, is written anew
            record = hosts.from_first(lambda: _sweep(path, candidates.tolist()))
    before, sweep = fitness.evaluations, record["sweep"]
    fitness.evaluations += record["evaluations"]
    at_once = fitness.scorer.individuals_at_once
    for start in range(len(sweep), len(candidates), at_once):
        block = candidates[start : start + at_once]
        summaries = fitness.score_factors(np.repeat(block[:, None], num_layers, axis=1).astype(np.float32))
        sweep += [{"factor": float(factor)} | summary for factor, summary in zip(block, summaries, strict=True)]
        best = max(sweep, key=lambda entry: -np.inf if entry["fitness"] is None else entry["fitness"])
        told = [{"factors": [entry["factor"]]} | entry for entry in sweep]
        fitness.check_model("tuning one uniform factor", told)
        if len(sweep) == len(candidates):
            fitness.check_any("tuning one uniform factor", told)
        scored = fitness.evaluations - before
        record = {"factor": best["factor"], "fitness": best["fitness"], "evaluations": scored, "sweep": sweep}
        if hosts.is_first():
            with fitness.folder.writing():
                write_json(path, record)
        fitness.stop.check()
    return record
