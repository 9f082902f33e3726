"""The prompts and the scorer of a search, made from its settings."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.generation import GeneratedScorer
from lpes_jax.mesh import make_mesh, mesh_of
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama, with_eight_bits
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.rope import Granularity
from lpes_jax.scores import LikelihoodScorer, PopulationScorer, Scores
from lpes_jax.scoring import OptionScorer, Scorer
from lpes_jax.search import racing
from lpes_jax.search.racing import StagedScorer
from lpes_jax.settings.search import SearchSettings
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.leaks import count_leaky
from lpes_jax.tasks.prompts import Prompt, Task


def search_prompts(
    settings: SearchSettings,
    config: LlamaConfig,
    task: Task,
    tokenizer: Any,
    examples: Sequence[Any],
    slots: Sequence[tuple[int, int]],
    counts: Counter[str],
) -> list[Prompt]:
    """The prompts of a task's search examples, question by question, each at all (slot, position) pairs.

    Adds the counts of `count_leaky` to `counts`. Raises UserError if the settings' fitness or algorithm cannot score the task.
    """
    generates = settings.objective.fitness == "metric" and task.decided_by == "generation"
    prompts = [task.prompt(example, *slot) for example in examples for slot in slots]
    prompts, leaky = count_leaky(prompts, settings.questions.drop_leaky)
    counts.update(leaky)
    prompts = fitting_prompts(settings, config, task, tokenizer, prompts, generates)
    if not generates and not task_prompts.short_answers(prompts):
        wanted = "--algorithm gradient" if settings.algorithm == "gradient" else f"--fitness {settings.objective.fitness}"
        raise UserError(f"{wanted}: --task {task.name} has no short answers to expect; use --fitness metric")
    return prompts


def fitting_prompts(
    settings: SearchSettings, config: LlamaConfig, task: Task, tokenizer: Any, prompts: Sequence[Prompt], generates: bool
) -> list[Prompt]:
    """The prompts, cut or skipped to fit the window. Raises UserError for one that is too long, or if all are skipped."""
    fitted = task_prompts.fit(
        prompts,
        tokenizer,
        config.max_position_embeddings,
        max_prompt_tokens=task.max_prompt_tokens,
        new_tokens=_new_tokens(settings, task) if generates else 0,
        overlength=settings.questions.overlength,
    )
    if prompts and not fitted.prompts:
        raise UserError("--overlength skip leaves out all questions; use fewer items per prompt")
    return fitted.prompts


def _new_tokens(settings: SearchSettings, task: Task) -> int:
    return task.max_new_tokens if settings.questions.max_new_tokens is None else settings.questions.max_new_tokens


def scoring_model(settings: SearchSettings, model: Llama) -> Llama:
    """The model that scores individuals: a copy on the mesh with weights in 8 bits (`--score-dtype`), or the model itself."""
    if settings.devices.score_dtype is None:
        return model
    mesh = mesh_of(model) or make_mesh()
    return put_model(with_eight_bits(model, settings.devices.score_dtype), mesh)


def make_scorer(
    settings: SearchSettings,
    model: Llama,
    tokenizer: Any,
    tasks: Sequence[Task],
    prompts: Sequence[Sequence[Prompt]],
    stop_ids: Sequence[int],
) -> PopulationScorer:
    """The scorer of the search prompts of all tasks. Generated text is scored only if all tasks are of one kind."""
    everything, task = list(itertools.chain(*prompts)), tasks[0]
    if settings.objective.fitness == "metric" and task.decided_by != "options":
        return _generated_scorer(settings, model, tokenizer, task, everything, stop_ids)
    kinds = [task.decided_by for task, task_prompts in zip(tasks, prompts, strict=True) for _ in task_prompts]
    parts = [
        (kind, [prompt for _, prompt in part])
        for kind, part in itertools.groupby(zip(kinds, everything, strict=True), key=lambda pair: pair[0])
    ]
    scorers = [_likelihood_scorer(settings, model, tokenizer, kind, part) for kind, part in parts]
    return scorers[0] if len(scorers) == 1 else JoinedScorer(scorers)


def make_staged_scorer(
    settings: SearchSettings, model: Llama, tokenizer: Any, tasks: Sequence[Task], prompts: Sequence[Sequence[Prompt]]
) -> StagedScorer:
    """The scorer for the stages of a race, of tasks of one kind. Raises UserError for too few questions to race on."""
    everything, task = list(itertools.chain(*prompts)), tasks[0]
    model = put_model(model, mesh_of(model) or make_mesh())  # once, for all parts
    per_question = len(settings.objective.search_positions) if task.num_items > 1 else 1
    units, questions = [], 0
    for own_prompts in prompts:
        first = task_prompts.token_ids(tokenizer, [prompt.text for prompt in own_prompts[::per_question]])
        units.append([[questions + question for question in unit] for unit in racing.units_of(first)])
        questions += len(first)

    def make(chosen: Sequence[int]) -> LikelihoodScorer:
        return _likelihood_scorer(settings, model, tokenizer, task.decided_by, [everything[prompt] for prompt in chosen])

    return StagedScorer(make, racing.eighths(units, settings.run.seed), per_question)


def _likelihood_scorer(
    settings: SearchSettings, model: Llama, tokenizer: Any, decided_by: str, prompts: Sequence[Prompt]
) -> LikelihoodScorer:
    """A scorer by the likelihood of answers, or of options."""
    devices, individuals = settings.devices, settings.objective.uniform_candidates
    if settings.algorithm != "gradient":
        ga = settings.ga
        individuals += ga.population_size * (ga.generations + 1) if ga.max_evaluations is None else ga.max_evaluations
    if decided_by == "options":
        return OptionScorer(model, tokenizer, prompts, batch_size=devices.batch_size, individuals=individuals)
    return Scorer(
        model,
        task_prompts.encode(prompts, tokenizer, model.config.max_position_embeddings),
        batch_size=devices.batch_size,
        population_chunk=devices.population_chunk,
        individuals=individuals,
    )


def _generated_scorer(
    settings: SearchSettings, model: Llama, tokenizer: Any, task: Task, prompts: Sequence[Prompt], stop_ids: Sequence[int]
) -> GeneratedScorer:
    """A scorer by the task's first metric, of generated text."""

    def score(output: str, prompt: Prompt) -> float:
        return task.score(task_prompts.before_stop(output, task.stop), prompt)[task.metrics[0]]

    return GeneratedScorer(
        model,
        tokenizer,
        prompts,
        score,
        max_new_tokens=_new_tokens(settings, task),
        stop_ids=stop_ids,
        batch_size=settings.devices.batch_size,
    )


class JoinedScorer:
    """Several scorers in turn, each for the prompts of some tasks: for a mixture of tasks with options and without."""

    has_likelihood = True

    def __init__(self, scorers: Sequence[LikelihoodScorer]):
        self._scorers = scorers
        self.longest = max(scorer.longest for scorer in scorers)
        for scorer in scorers:
            scorer.lengthen(self.longest)
        self.num_prompts = sum(scorer.num_prompts for scorer in scorers)
        self.answer_tokens = np.concatenate([scorer.answer_tokens for scorer in scorers])
        self.individuals_at_once = max(scorer.individuals_at_once for scorer in scorers)

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        **gains: Any,
    ) -> Scores:
        """As `Scorer.__call__`."""
        parts = [scorer(factors, granularity, on_prompts, **gains) for scorer in self._scorers]
        return Scores(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))
