"""A search from its settings to its factors: the examples, the algorithm around what scores them, the held-out report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Outcome, default_metrics, environment, evaluate, slots_of
from lpes_jax.factors import LayerFactors, read_json, write_json
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.progress import SearchProgress
from lpes_jax.search.algorithms import make_algorithm
from lpes_jax.search.fitness import Fitness, fit, make_scorer, search_prompts
from lpes_jax.search.run_folder import RunFolder
from lpes_jax.search.settings import SearchSettings, as_record, scaled_layers, search_space
from lpes_jax.search.strategies import BudgetSpent
from lpes_jax.tasks.prompts import Task

_HELD_OUT = 5  # candidates of the held-out report: plain, baseline, uniform, pi, lpes


@dataclass(frozen=True)
class Report:
    """How what was found and the controls did on held-out questions of one task (length), in the report's order."""

    task: Task
    places: list[tuple[int, int]]
    outcomes: list[Outcome]


@dataclass(frozen=True)
class SearchResult:
    """What a search found, and how it did on each task (length). `control_points` are of a curve of one factor a layer."""

    factors: LayerFactors
    reports: list[Report]
    control_points: Float[np.ndarray, "C 2"] | None

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the first task."""
        return self.reports[0].outcomes


def search(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    tasks: Sequence[Task],
    identity: dict[str, Any],
    stop_ids: Sequence[int] = (),
) -> SearchResult:
    """Run the search, its settings checked, and leave its history. Factors are to be good for all `tasks` alike.

    `identity` names the model in the records (name, num_layers, sha256); `stop_ids` end a generated text. Raises UserError for
    what the user got wrong, before anything is scored.
    """
    started = time.time()
    config = model.config
    layers = scaled_layers(settings, config.num_layers)
    space = search_space(settings, config, layers)
    algorithm = make_algorithm(settings, space)
    metrics = settings.metrics or default_metrics(tasks[0])[:1]
    reported = [slots_of(task, settings.positions if task.num_items > 1 else (0,)) for task in tasks]
    searched = [slots_of(task, settings.search_positions if task.num_items > 1 else (0,)) for task in tasks]
    if len({(len(places), task.decided_by) for places, task in zip(searched, tasks, strict=True)}) > 1:
        raise UserError("tasks with and without positions, or with and without options, cannot be searched on together")
    prompts = [
        search_prompts(settings, config, task, tokenizer, task.examples("search", settings.limit, settings.seed), places)
        for task, places in zip(tasks, searched, strict=True)
    ]
    held_out = [task.examples("test", settings.test_limit, settings.seed) for task in tasks]
    scorer = make_scorer(settings, model, tokenizer, tasks, prompts, stop_ids)
    for task, examples, places in zip(tasks, held_out, reported, strict=True):
        _check_held_out(settings, model, tokenizer, task, examples, places, metrics)
    folder = RunFolder(settings.output_path, {"model": identity, "settings": as_record(settings)}, settings.resume)

    candidates = sum((_HELD_OUT - (task.plain is None)) * len(of_task) * len(places)
                     for task, of_task, places in zip(tasks, held_out, reported, strict=True))  # fmt: skip
    total = (algorithm.individuals + settings.uniform_candidates) * scorer.num_prompts + candidates
    with SearchProgress(total) as progress:
        fitness = Fitness(settings, scorer, [position for _, position in searched[0]], space.granularity, folder, progress)
        try:
            algorithm.run(model, tokenizer, prompts, fitness)
        except BudgetSpent:
            pass
        budget, fitness.settings = fitness.evaluations, replace(settings, max_evaluations=None)
        progress.note("tuning one uniform factor on the same examples")
        uniform = _tuned_uniform(settings, fitness, config.num_layers)
        progress.note("measuring on held-out questions")
        best = fitness.best
        points = best["control_points"]
        found = LayerFactors(
            np.array(best["factors"]),
            granularity=space.granularity,
            model=identity,
            curve={"type": settings.curve, "control_points": points, "layers": [layers[0], layers[-1]]},
            rope=config.rope.to_hf(),
            search={
                **as_record(settings),
                "search_space": algorithm.search_space,
                "fitness_of_best": best["fitness"],
                "best_individual": best["id"],
                "individuals": len(fitness.records),
                "evaluations": fitness.evaluations,
                "evaluations_of_algorithm": budget,
                "uniform": uniform,
                "compilations": scorer.compilations,
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
                        Candidate("pi", LayerFactors.uniform(float(found.factors.mean()), config.num_layers)),
                        Candidate("lpes", found),
                    ],
                    metrics=metrics,
                    max_new_tokens=settings.max_new_tokens,
                    stop_ids=stop_ids,
                    overlength=settings.overlength,
                    batch_size=settings.batch_size,
                    on_prompts=progress.prompts,
                ),
            )
            for task, examples, places in zip(tasks, held_out, reported, strict=True)
        ]
    return SearchResult(found, reports, None if points is None else np.array(points))


def _check_held_out(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    places: Sequence[tuple[int, int]],
    metrics: Sequence[str],
) -> None:
    """The same check for the held-out prompts as for the others, before the search and not after it."""
    generates = task.decided_by == "generation" and any(metric != "prefix" for metric in metrics)
    for version in (task, task.plain):
        if version is not None:
            asked = [version.prompt(example, *place) for example in examples for place in places]
            fit(settings, model.config, version, tokenizer, asked, generates)


def _tuned_uniform(settings: SearchSettings, fitness: Fitness, num_layers: int) -> dict[str, Any]:
    """The best of evenly spaced uniform factors, on the search examples, and the whole sweep.

    They lie within the bounds, and within 0.5 to 2 where the box is wider: no model's best single factor lies beyond.
    """
    path = fitness.folder.path / "uniform.json"
    low, high = max(settings.min_factor, min(0.5, settings.max_factor)), min(settings.max_factor, max(2.0, settings.min_factor))
    candidates = np.linspace(low, high, settings.uniform_candidates).round(4)
    if settings.resume and path.exists():
        return read_json(path)
    summaries = fitness.of_factors(np.repeat(candidates[:, None], num_layers, axis=1).astype(np.float32))
    sweep = [{"factor": float(factor)} | summary for factor, summary in zip(candidates, summaries, strict=True)]
    best = max(sweep, key=lambda entry: -np.inf if entry["fitness"] is None else entry["fitness"])
    record = {"factor": best["factor"], "fitness": best["fitness"], "sweep": sweep}
    write_json(path, record)
    return record
