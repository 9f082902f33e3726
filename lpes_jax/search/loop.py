"""A search from its settings to its factors: the examples, the genetic algorithm around the scorer, the held-out report.

The fitness of an individual is the weighted sum over begin, middle and end (positions 0, 50 and 100) of the same examples'
accuracy (section 3.2), or of their mean answer log-likelihood. Individuals with the same factors are scored once.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.curves import CURVES
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, Outcome, default_metrics, environment, evaluate, slots_of
from lpes_jax.factors import LayerFactors, read_json, write_json
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.report.progress import SearchProgress
from lpes_jax.scoring import GeneratedScorer, OptionScorer, Scorer
from lpes_jax.search.genetic import CROSSOVER, FAILED_CROSSOVER, INITIAL, MUTATION, Lineage, PaperGA
from lpes_jax.search.gradient import GradientSettings, Look, descend, pack
from lpes_jax.search.run_folder import RunFolder
from lpes_jax.search.settings import (
    SearchSettings,
    as_record,
    genetic_settings,
    gradient_settings,
    scaled_layers,
    start_points,
)
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.prompts import Prompt, Task

SEARCH_POSITIONS = (0, 50, 100)
OPERATORS = {INITIAL: "initial", MUTATION: "mutation", CROSSOVER: "crossover", FAILED_CROSSOVER: "crossover_failed"}
_HELD_OUT = 5  # candidates of the held-out report: plain, baseline, uniform, pi, lpes


@dataclass(frozen=True)
class SearchResult:
    """What a search found, and how it and the controls did on held-out questions (in `outcomes`, in the report's order)."""

    factors: LayerFactors
    outcomes: list[Outcome]
    control_points: Float[np.ndarray, "C 2"]
    places: list[tuple[int, int]]


def search(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    task: Task,
    identity: dict[str, Any],
    stop_ids: Sequence[int] = (),
) -> SearchResult:
    """Run the search, its settings checked, and leave its history.

    `identity` names the model in the records (name, num_layers, sha256); `stop_ids` end a generated text. Raises UserError for
    what the user got wrong, before anything is scored.
    """
    started = time.time()
    config = model.config
    layers = scaled_layers(settings, config.num_layers)
    by_gradient = gradient_settings(settings) if settings.algorithm == "gradient" else None
    ga = None if by_gradient else PaperGA(genetic_settings(settings, len(layers)))
    movable = task.num_items > 1
    places = slots_of(task, settings.positions if movable else (0,))
    search_places = slots_of(task, SEARCH_POSITIONS if movable else (0,))
    examples = task.examples("search", settings.limit, settings.seed)
    held_out = task.examples("test", settings.test_limit, settings.seed)
    scorer = _scorer(settings, model, tokenizer, task, examples, search_places, stop_ids)
    metrics = settings.metrics or default_metrics(task)[:1]
    # The same check for the held-out prompts, now and not after the search.
    generates = task.decided_by == "generation" and any(metric != "prefix" for metric in metrics)
    for version in (task, task.plain):
        if version is not None:
            asked = [version.prompt(example, *place) for example in held_out for place in places]
            _fit(settings, config, version, tokenizer, asked, generates)
    folder = RunFolder(settings.output_path, {"model": identity, "settings": as_record(settings)}, settings.resume)

    individuals = settings.uniform_candidates
    if ga is not None:
        individuals += ga.settings.population_size + settings.generations * ga.population_size
    total = individuals * scorer.num_prompts + (_HELD_OUT - (task.plain is None)) * len(held_out) * len(places)
    with SearchProgress(total) as progress:
        positions = [position for _, position in search_places]
        to_factors = factors_of_points(settings, config.num_layers)
        fitness = _Fitness(settings, scorer, positions, jax.jit(jax.vmap(to_factors)), folder, progress)
        if ga is not None:
            _run(ga, settings, fitness)
        elif by_gradient is not None:
            prompts = [task.prompt(example, *place) for example in examples for place in search_places]
            prompts = _fit(settings, config, task, tokenizer, prompts, generates=False)
            _descend(settings, by_gradient, model, tokenizer, prompts, to_factors, fitness)
        progress.note("tuning one uniform factor on the same examples")
        uniform = _tuned_uniform(settings, fitness, folder.path / "uniform.json", config.num_layers)
        progress.note("measuring on held-out questions")
        best = fitness.best
        found = LayerFactors(
            np.array(best["factors"]),
            model=identity,
            curve={"type": settings.curve, "control_points": best["control_points"], "layers": [layers[0], layers[-1]]},
            rope=config.rope.to_hf(),
            search={
                **as_record(settings),
                "search_space": None if ga is None else {k: v and str(v) for k, v in ga.settings.search_space().items()},
                "fitness_of_best": best["fitness"],
                "best_individual": best["id"],
                "individuals": len(fitness.records),
                "evaluations": fitness.evaluations,
                "uniform": uniform,
                "compilations": scorer.compilations,
                "seconds": round(time.time() - started, 3),
                **environment(),
            },
        )
        pi = LayerFactors.uniform(float(found.factors.mean()), config.num_layers)
        outcomes = evaluate(
            model,
            tokenizer,
            task,
            held_out,
            places,
            [
                Candidate(PLAIN, plain=True),
                Candidate(BASELINE),
                Candidate("uniform", LayerFactors.uniform(uniform["factor"], config.num_layers)),
                Candidate("pi", pi),
                Candidate("lpes", found),
            ],
            metrics=metrics,
            max_new_tokens=settings.max_new_tokens,
            stop_ids=stop_ids,
            overlength=settings.overlength,
            batch_size=settings.batch_size,
            on_prompts=progress.prompts,
        )
    return SearchResult(found, outcomes, np.array(best["control_points"]), places)


def _scorer(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Any],
    places: Sequence[tuple[int, int]],
    stop_ids: Sequence[int],
) -> Scorer | OptionScorer | GeneratedScorer:
    """What scores the search examples. Raises UserError where the task cannot be scored in the way that is asked for."""
    prompts = [task.prompt(example, *place) for example in examples for place in places]
    by_text = settings.fitness == "metric" and task.decided_by == "generation"
    prompts = _fit(settings, model.config, task, tokenizer, prompts, by_text)
    if not by_text and not all(prompt.answers for prompt in prompts):
        raise UserError(
            f"--fitness {settings.fitness}: --task {task.name} has no short answers to expect; use --fitness metric"
        )
    if task.decided_by == "options":
        return OptionScorer(model, tokenizer, prompts, batch_size=settings.batch_size)
    if by_text:
        metric, new_tokens = task.metrics[0], settings.max_new_tokens or task.max_new_tokens

        def score(output: str, prompt: Prompt) -> float:
            return task.score(task_prompts.before_stop(output, task.stop), prompt)[metric]

        return GeneratedScorer(
            model, tokenizer, prompts, score, max_new_tokens=new_tokens, stop_ids=stop_ids, batch_size=settings.batch_size
        )
    encoded = task_prompts.encode(prompts, tokenizer, model.config.max_position_embeddings)
    return Scorer(model, encoded, batch_size=settings.batch_size, population_chunk=settings.population_chunk)


def _fit(
    settings: SearchSettings, config: LlamaConfig, task: Task, tokenizer: Any, prompts: Sequence[Prompt], generates: bool
) -> list[Prompt]:
    fitted = task_prompts.fit(
        prompts,
        tokenizer,
        config.max_position_embeddings,
        max_prompt_tokens=task.max_prompt_tokens,
        new_tokens=(settings.max_new_tokens or task.max_new_tokens) if generates else 0,
        overlength=settings.overlength,
    )
    if prompts and not fitted.prompts:
        raise UserError("--overlength skip leaves out all questions; use fewer items a prompt")
    return fitted.prompts


def factors_of_points(settings: SearchSettings, num_layers: int) -> Callable[[Float[Array, "C 2"]], Float[Array, "L"]]:
    """The map from control points to the factors of all layers: 1 where `--layers` leaves a layer out."""
    layers, curve = scaled_layers(settings, num_layers), CURVES[settings.curve]

    def factors(points: Float[Array, "C 2"]) -> Float[Array, "L"]:
        return jnp.ones(num_layers, points.dtype).at[layers.start : layers.stop].set(curve(points, len(layers)))

    return factors


def _descend(
    settings: SearchSettings,
    by_gradient: GradientSettings,
    model: Llama,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    to_factors: Callable[[Float[Array, "C 2"]], Float[Array, "L"]],
    fitness: "_Fitness",
) -> None:
    """Gradient descent on the first questions, looked at on the last ones; a line of history for each look."""
    if not all(prompt.answers for prompt in prompts):
        raise UserError("--algorithm gradient needs a task with answers to expect")
    config, places = model.config, len(fitness.positions)
    weights = settings.weights if places == len(SEARCH_POSITIONS) else (1.0,)
    questions = len(prompts) // places
    held_back = math.ceil(by_gradient.validation_share * questions)
    if held_back >= questions:
        raise UserError(f"--limit {questions} leaves no question to learn from beside --validation-share; raise it")
    encoded = task_prompts.encode(prompts, tokenizer, config.max_position_embeddings)
    border = (questions - held_back) * places
    train, validation = (pack(part, list(weights) * (len(part) // places)) for part in (encoded[:border], encoded[border:]))
    longest = max(len(prompt.ids) + max(map(len, prompt.answers)) for prompt in encoded)

    def on_look(look: Look) -> None:
        record = {
            "id": len(fitness.records),
            "generation": look.step,
            "operator": "gradient" if look.step else "initial",
            "control_points": look.points.tolist(),
            "factors": [round(float(factor), 7) for factor in look.factors],
            "fitness": round(-look.validation_loss, 9) if math.isfinite(look.validation_loss) else None,
            "validation_accuracy": look.validation_accuracy,
            "train_loss": round(look.train_loss, 6) if look.step else None,
        }
        fitness.records.append(record)
        fitness.folder.append([record])
        fitness.progress.note(f"step {look.step}/{by_gradient.steps}  loss on held-back questions {look.validation_loss:.4f}")

    points = start_points(settings, len(scaled_layers(settings, config.num_layers)))
    box = (settings.min_factor, settings.max_factor)
    table = config.rope_table(longest)
    descend(model, train, validation, points, to_factors, table, box, by_gradient, settings.seed, on_look=on_look)


def _run(ga: PaperGA, settings: SearchSettings, fitness: "_Fitness") -> None:
    """Algorithm 1, by evosax's init, ask and tell. Keys: one for the start, one for each generation's ask and tell."""
    key = jax.random.key(settings.seed)
    params = ga.default_params
    genes, lineage = ga.initial_population(jax.random.fold_in(key, 0), params)
    state = ga.init(jax.random.fold_in(key, 1), genes, -fitness(0, ga.recorded_points(genes), lineage), params)
    for generation in range(1, settings.generations + 1):
        key_ask, key_tell = jax.random.split(jax.random.fold_in(key, generation + 1))
        genes, state = ga.ask(key_ask, state, params)
        scores = fitness(generation, ga.recorded_points(genes), state.lineage)
        state, _ = ga.tell(key_tell, genes, -scores, state, params)


class _Fitness:
    """Scores generations and keeps the history: `records` are the lines of history.jsonl."""

    def __init__(
        self,
        settings: SearchSettings,
        scorer: Scorer | OptionScorer | GeneratedScorer,
        positions: Sequence[int],
        factors_of: Callable[[Float[Array, "P C 2"]], Float[Array, "P L"]],
        folder: RunFolder,
        progress: SearchProgress,
    ):
        self.settings, self.scorer, self.folder, self.progress = settings, scorer, folder, progress
        self.positions = positions
        self.records: list[dict[str, Any]] = []
        self.evaluations = 0  # individuals that the model scored: those whose factors had not been seen
        self._seen: dict[bytes, dict[str, Any]] = {}
        self._factors_of = factors_of

    @property
    def best(self) -> dict[str, Any]:
        """The fittest individual of all; the first of equals."""
        return max(self.records, key=lambda record: -np.inf if record["fitness"] is None else record["fitness"])

    def __call__(self, generation: int, points: Float[np.ndarray, "P C 2"], lineage: Lineage) -> Float[Array, "P"]:
        """The fitness of a generation, NaN where scores are not finite; a line of history for each individual."""
        best = f"best {self.best['fitness']:.4f}" if self.records and self.best["fitness"] is not None else ""
        self.progress.note(f"generation {generation}/{self.settings.generations}  {best}")
        factors = np.asarray(self._factors_of(jnp.asarray(points, jnp.float32)))
        origin = jax.tree.map(np.asarray, lineage)
        for start in range(0, len(points), self.scorer.individuals_at_once):
            block = slice(start, start + self.scorer.individuals_at_once)
            self._block(generation, points[block], factors[block], jax.tree.map(lambda field: field[block], origin))  # noqa: B023
        scores = [record["fitness"] for record in self.records[-len(points) :]]
        return jnp.array([np.nan if score is None else score for score in scores], jnp.float32)

    def of_factors(self, factors: Float[np.ndarray, "P L"]) -> list[dict[str, Any]]:
        """Fitness, accuracy and log-likelihood of factors, scored where they have not been seen."""
        unseen = {row.tobytes(): row for row in factors if row.tobytes() not in self._seen}
        self.progress.skip((len(factors) - len(unseen)) * self.scorer.num_prompts)
        if unseen:
            scores = self.scorer(np.stack(list(unseen.values())), on_prompts=self.progress.prompts)
            self.evaluations += len(unseen)
            for key, correct, log_likelihood in zip(unseen, *scores, strict=True):
                self._seen[key] = self._summary(correct, log_likelihood)
        return [self._seen[row.tobytes()] for row in factors]

    def _block(self, generation: int, points: np.ndarray, factors: np.ndarray, origin: Lineage) -> None:
        drafts = [
            {
                "id": int(origin.ids[i]),
                "generation": generation,
                "operator": OPERATORS[int(origin.operator[i])],
                "parents": [int(parent) for parent in origin.parents[i] if parent >= 0],
                "cut": int(origin.cut[i]) if origin.cut[i] >= 0 else None,
                "control_points": points[i].tolist(),
                "factors": [round(float(factor), 7) for factor in factors[i]],
                "cached": factors[i].tobytes() in self._seen or any((factors[i] == factors[j]).all() for j in range(i)),
            }
            for i in range(len(points))
        ]
        recorded = self.folder.recorded[len(self.records) : len(self.records) + len(drafts)]
        for draft, record, row in zip(drafts, recorded, factors, strict=False):
            self.folder.must_continue(draft, record)
            if not record["cached"]:
                self.evaluations += 1
                self.progress.skip(self.scorer.num_prompts)
            self._seen[row.tobytes()] = {name: record[name] for name in SCORES}
        summaries = self.of_factors(factors)
        records = [draft | summary for draft, summary in zip(drafts, summaries, strict=True)]
        self.folder.append(records[len(recorded) :])
        self.records += records

    def _summary(self, correct: np.ndarray, log_likelihood: np.ndarray) -> dict[str, Any]:
        places = len(self.positions)
        accuracy = correct.reshape(-1, places).mean(axis=0, dtype=np.float64)
        likelihood = log_likelihood.reshape(-1, places).astype(np.float64)
        # The geometric mean of the answer tokens' probabilities: in (0, 1], whatever the answer's length.
        probability = np.exp(likelihood / self.scorer.answer_tokens.reshape(-1, places)).mean(axis=0)
        weights = np.array(self.settings.weights) if places == len(SEARCH_POSITIONS) else np.ones(places)
        finite = bool(np.isfinite(likelihood).all())
        by_text = isinstance(self.scorer, GeneratedScorer)  # which has no likelihood
        if self.settings.fitness == "log_likelihood":
            fitness = float(weights @ likelihood.mean(axis=0))
        else:
            fitness = float(weights @ accuracy)
            if self.settings.tie_break and not by_text:
                fitness += tie_break_scale(weights.tolist(), len(likelihood)) * float(weights @ probability)
        return {
            "fitness": round(fitness, 9) if finite else None,
            "accuracy": {str(position): value for position, value in zip(self.positions, accuracy.tolist(), strict=True)},
            "log_likelihood": {
                str(position): round(value, 4) if finite and not by_text else None
                for position, value in zip(self.positions, likelihood.mean(axis=0).tolist(), strict=True)
            },
        }


SCORES = ("fitness", "accuracy", "log_likelihood")


def tie_break_scale(weights: Sequence[float], examples: int) -> float:
    """Half of the smallest difference that two weighted accuracies can have: what is added for likelihood stays below it.

    Weights are taken as decimals; two accuracies differ by a multiple of their greatest common divisor over `examples`.
    """
    fractions = [Fraction(str(weight)) for weight in weights if weight > 0]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator / examples / 2


def _tuned_uniform(settings: SearchSettings, fitness: _Fitness, path: Path, num_layers: int) -> dict[str, Any]:
    """The best of evenly spaced uniform factors within the bounds, on the search examples, and the whole sweep."""
    candidates = np.linspace(settings.min_factor, settings.max_factor, settings.uniform_candidates).round(4)
    if settings.resume and path.exists():
        return read_json(path)
    summaries = fitness.of_factors(np.repeat(candidates[:, None], num_layers, axis=1).astype(np.float32))
    sweep = [{"factor": float(factor)} | summary for factor, summary in zip(candidates, summaries, strict=True)]
    best = max(sweep, key=lambda entry: -np.inf if entry["fitness"] is None else entry["fitness"])
    record = {"factor": best["factor"], "fitness": best["fitness"], "sweep": sweep}
    write_json(path, record)
    return record
