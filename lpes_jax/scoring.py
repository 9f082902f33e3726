"""Score populations: (model, prompts, factors [P, ...]) -> whether each individual gives each gold answer, and its likelihood.

A pass processes a batch of prompts for some individuals. It is vmapped over the individuals of a device, with the weights
unmapped, and sharded over the population axis of a mesh (lpes_jax.mesh), without communication between shards. If there are
fewer individuals than shards, each shard has all individuals and a part of the prompts. Factors are arguments of the compiled
program, so new factors compile nothing.

Rows (a prompt with one of its answers) that share a prefix form a group, and the prefix is computed once per individual
(prefixes.py). plan.py plans the rows of each pass. `Scorer` puts the batches on the devices, runs the passes, plans smaller
ones if one runs out of memory, and collects the scores.

Letters: P population.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from lpes_jax.compilation import LARGE_PRODUCTS, compile_side_by_side
from lpes_jax.errors import UserError
from lpes_jax.memory import (
    pass_memory,
    planned_memory,
    tokens_of_a_compilation,
    tokens_that_fit,
    tokens_worth_it,
    unless_out_of_memory,
)
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, make_mesh, mesh_of, over_population, put, to_host
from lpes_jax.models.llama.method import Method
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.plan import Budget, Plan, group_rows, make_plan, smaller
from lpes_jax.prefixes import Batch, Costs, Group, Row, make_group, pack_groups, round_up
from lpes_jax.rope import Granularity, RopeTable
from lpes_jax.scores import Scores, batch_scores, population_scores
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode, option_prompts


@partial(jax.jit, static_argnames=("granularity", "gains_granularity", "mesh", "by_groups"), compiler_options=LARGE_PRODUCTS)
def _sharded_scores(
    model: Llama,
    batch: Batch,
    factors: Float[Array, "P ..."],
    gains: Float[Array, "P ..."],
    table: RopeTable,
    granularity: Granularity,
    gains_granularity: Granularity,
    mesh: Mesh,
    by_groups: bool = False,
) -> tuple[Bool[Array, "P rows"], Float[Array, "P rows"]]:
    """`population_scores`, sharded over the mesh by individuals or by groups."""

    def score(model: Llama, batch: Batch, factors: Array, gains: Array, table: RopeTable) -> tuple[Array, Array]:
        return population_scores(model, batch, factors, granularity, table, gains, gains_granularity)

    if by_groups:
        specs, out = (EVERYWHERE, BY_POPULATION, EVERYWHERE, EVERYWHERE, EVERYWHERE), PartitionSpec(None, "population")
    else:
        specs, out = (EVERYWHERE, EVERYWHERE, BY_POPULATION, BY_POPULATION, EVERYWHERE), BY_POPULATION
    return over_population(score, mesh, specs, out)(model, batch, factors, gains, table)


@partial(jax.jit, static_argnames="mesh", compiler_options=LARGE_PRODUCTS)
def _method_scores(model: Llama, batch: Batch, method: Method, mesh: Mesh) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    specs = EVERYWHERE, BY_POPULATION, EVERYWHERE
    return over_population(lambda *inputs: batch_scores(*inputs), mesh, specs, BY_POPULATION)(model, batch, method)


def _shapes(call: tuple[Any, ...]) -> Hashable:
    """The shapes and static arguments that a program is compiled for."""
    leaves, structure = jax.tree.flatten(call)
    return structure, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Array) else leaf for leaf in leaves)


def _compiles_side_by_side() -> bool:
    """Whether to compile in parallel. On a GPU, six programs of a 7B shape took 16 s on 16 cores; a CPU gains nothing."""
    return jax.default_backend() != "cpu" and jax.process_count() == 1


ShardedBy = Literal["individuals", "groups", "rows"]  # what is sharded over the devices; rows: groups of one row


@dataclass(frozen=True)
class DevicePlan:
    """A plan, and the batches of its passes on the devices."""

    plan: Plan
    batches: list[Batch]


class Scorer:
    """Scores populations on a fixed set of prompts. With several processes, all must make the same calls.

    Args:
        model: The model.
        prompts: The prompts.
        batch_size: Prompts per pass and device, counted as if all were the longest and shared nothing. None means as many as
            the shapes and the memory allow. It is halved if a pass runs out of memory, and changes no result.
        population_chunk: Individuals per pass and device; None, halving and results as for `batch_size`.
        individuals: About how many individuals will be scored in total; for few individuals, few shapes are compiled.
        mesh: None means the model's mesh, or one of all devices.
        share_prefixes: False computes every row by itself.

    Attributes:
        compilations: The number of compiled shapes.
        tokens_saved: The share of the rows' tokens that sharing saves.
    """

    has_likelihood = True

    def __init__(
        self,
        model: Llama,
        prompts: Sequence[EncodedPrompt],
        *,
        batch_size: int | None = None,
        population_chunk: int | None = None,
        individuals: int | None = None,
        mesh: Mesh | None = None,
        share_prefixes: bool = True,
    ):
        self.mesh = mesh or mesh_of(model) or make_mesh()
        self._shards = self.mesh.shape["population"]
        self._everywhere, self._by_population = (NamedSharding(self.mesh, spec) for spec in (EVERYWHERE, BY_POPULATION))
        self.model = put_model(model, self.mesh)
        for name, value in (("batch_size", batch_size), ("population_chunk", population_chunk)):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        self.num_prompts = len(prompts)
        self._rows: list[Row] = [(prompt.ids, answer) for prompt in prompts for answer in prompt.answers]
        check_ids(model, [part for row in self._rows for part in row])
        self._prompt_of_row = np.repeat(np.arange(len(prompts)), [len(prompt.answers) for prompt in prompts])
        self.answer_tokens = np.array([min(len(answer) for answer in prompt.answers) for prompt in prompts])
        self._answer_length = max(len(answer) for _, answer in self._rows)
        self.longest = max(len(ids) + len(answer) for ids, answer in self._rows)
        self._table = put(self.model.config.rope_table(self.longest), self._everywhere)
        # The tokens that one more shape must save. A replacement's program is compiled for a single pass.
        compilation = tokens_of_a_compilation(self.model)
        by_individuals = 0 if individuals is None else max(1, compilation // max(1, individuals))
        self._shape_cost: dict[ShardedBy, int] = {"rows": compilation, "groups": by_individuals, "individuals": by_individuals}
        width = round_up(self.longest)
        fits = batch_size * width if batch_size else tokens_that_fit(self.model, width, self._answer_length)
        at_once = batch_size * width if batch_size else min(fits, tokens_worth_it(self.model, width))
        self._budget = Budget(fits, at_once, 0, pass_memory(self.model), batch_size, population_chunk)
        self._costs, self._share = Costs.of(self.model.config, jax.default_backend()), share_prefixes
        self._device_plans: dict[tuple[ShardedBy, int], DevicePlan] = {}
        self._shapes: set[Hashable] = set()
        self._groups = self._grouped()
        unshared = sum(len(ids) + len(answer) - 1 for ids, answer in self._rows)
        self.tokens_saved = 1 - sum(len(group.tokens) for group in self._groups) / unshared
        self.individuals_at_once = self.device_plan("individuals").plan.individuals * self._shards  # not changed by halving

    def lengthen(self, longest: int) -> None:
        """Rebuild length-dependent RoPE for `longest` tokens, so that a subset of prompts scores as in the full set."""
        self._table = put(self.model.config.rope_table(longest), self._everywhere)

    def _grouped(self, tables: int = 1) -> list[Group]:
        cost = self._shape_cost["individuals"]
        return group_rows(self._rows, self._budget, self._costs, shape_cost=cost, tables=tables, share=self._share)

    def device_plan(self, split: ShardedBy, tables: int = 1) -> DevicePlan:
        """The plan that shards individuals, groups or rows over the devices, with its batches there."""
        if split == "groups" and self._shards == 1:
            split = "individuals"  # the same
        tables = 1 if self._budget.batch_size else tables  # a given batch size applies to every method
        if (split, tables) not in self._device_plans:
            self._device_plans[split, tables] = self._make_device_plan(split, tables)
        return self._device_plans[split, tables]

    def _make_device_plan(self, split: ShardedBy, tables: int) -> DevicePlan:
        if split == "rows":
            groups = [make_group(self._rows, [row]) for row in range(len(self._rows))]
        else:
            groups = self._groups if tables == 1 else self._grouped(tables)
        budget = replace(self._budget, memory=planned_memory())
        shards, sharding = (1, self._everywhere) if split == "individuals" else (self._shards, self._by_population)
        plan = make_plan(groups, budget, self._costs, shards=shards, tables=tables, shape_cost=self._shape_cost[split])
        batches = [pack_groups(one_pass.groups, self._rows, self._answer_length, one_pass.shape) for one_pass in plan.passes]
        return DevicePlan(plan, [put(batch, sharding) for batch in batches])

    @property
    def compilations(self) -> int:
        return len(self._shapes)

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        *,
        gains: Float[np.ndarray, "P ..."] | None = None,
        gains_granularity: Granularity = "layer",
    ) -> Scores:
        """Scores of each individual on each prompt.

        Args:
            factors: The factors of each individual.
            granularity: Their granularity.
            on_prompts: Called with the number of finished (individual, prompt) pairs.
            gains: The gains of each individual. None means 1; the program is that of one gain per layer.
            gains_granularity: Their granularity.

        Raises:
            UserError: The device's memory cannot hold a single prompt.
        """
        factors = np.asarray(factors, np.float32)
        if gains is None:
            gains, gains_granularity = np.ones((len(factors), self.model.config.num_layers)), "layer"
        gains = np.asarray(gains, np.float32)
        kinds: tuple[Granularity, Granularity] = granularity, gains_granularity
        correct = np.empty((len(factors), len(self._rows)), bool)
        log_likelihood = np.empty(correct.shape, np.float32)
        start = 0
        while start < len(factors):
            device_plan = self.device_plan("groups" if len(factors) < self._shards else "individuals")
            done = self._run_or_shrink(
                device_plan.plan, partial(self._run_individuals, device_plan, factors[start:], gains[start:], kinds)
            )
            if done is None:
                continue
            count = min(len(done[0][0]), len(factors) - start)
            seen: set[int] = set()  # the admitted answers of a prompt may be in two batches
            for (_, _, rows, score_of_row), scores in zip(device_plan.plan.passes, done, strict=True):
                correct[start : start + count, rows] = scores[0][:count, score_of_row]
                log_likelihood[start : start + count, rows] = scores[1][:count, score_of_row]
                new = set(self._prompt_of_row[rows].tolist()) - seen
                seen |= new
                on_prompts(count * len(new))
            start += count
        return self._by_prompt(correct, log_likelihood)

    def _run_individuals(
        self,
        device_plan: DevicePlan,
        factors: Float[np.ndarray, "P ..."],
        gains: Float[np.ndarray, "P ..."],
        kinds: tuple[Granularity, Granularity],
    ) -> list[tuple[Array, Array]]:
        """The scores of each batch for the individuals of one pass: the first individuals, padded with copies of the first."""
        plan = device_plan.plan
        # Sizes below a full pass are powers of two, so that few sizes are compiled for any population.
        shards = self._shards if plan.shards == 1 else 1
        needed = math.ceil(len(factors) / shards)
        count = min(plan.individuals, 1 << (needed - 1).bit_length()) * shards
        filled = [
            np.concatenate([values[:count], np.repeat(values[:1], max(0, count - len(values)), axis=0)])
            for values in (factors, gains)
        ]
        filled = put(filled, self._by_population if plan.shards == 1 else self._everywhere)
        table, by_groups = self._table, plan.shards > 1
        calls = [(self.model, batch, *filled, table, *kinds, self.mesh, by_groups) for batch in device_plan.batches]
        return self._run(_sharded_scores, calls)

    def method_scores(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        correct, log_likelihood = np.empty((1, len(self._rows)), bool), np.empty((1, len(self._rows)), np.float32)
        method = put(method, self._everywhere)
        split: ShardedBy = "groups" if method.replacement is None else "rows"
        done, passes = None, []
        while done is None:
            device_plan = self.device_plan(split, len(method.tables.inv_freq))
            passes, calls = device_plan.plan.passes, [(self.model, batch, method, self.mesh) for batch in device_plan.batches]
            done = self._run_or_shrink(replace(device_plan.plan, individuals=1), partial(self._run, _method_scores, calls))
        for (_, _, rows, score_of_row), scores in zip(passes, done, strict=True):
            correct[0, rows], log_likelihood[0, rows] = (values[score_of_row] for values in scores)
        on_prompts(self.num_prompts)
        return self._by_prompt(correct, log_likelihood)

    def _run(self, program: Any, calls: Sequence[tuple[Any, ...]]) -> list[tuple[Array, Array]]:
        """The results of the calls. New shapes are compiled first, in parallel where that helps."""
        new = {shapes: call for call in calls if (shapes := _shapes(call)) not in self._shapes}
        self._shapes |= new.keys()
        if len(new) > 1 and _compiles_side_by_side():
            compile_side_by_side([program.lower(*call) for call in new.values()])
        return [program(*call) for call in calls]

    def _run_or_shrink(self, plan: Plan, run: Callable[[], Any]) -> Any:
        """The result of `run`, on the host. If a device of any process runs out of memory: None, and the budget is reduced."""
        done, failed = unless_out_of_memory(run)
        if done is not None:
            return to_host(done)
        budget = smaller(self._budget, plan, self.longest)
        if budget is None:
            raise UserError(
                f"the device's memory does not hold one prompt of {self.longest} tokens beside the model; use shorter prompts, "
                "--dtype bfloat16 or a smaller model"
            ) from failed
        fewer_tokens = (
            budget.tokens_at_once < self._budget.tokens_at_once or budget.tokens_that_fit < self._budget.tokens_that_fit
        )
        self._budget, self._device_plans = budget, {}
        if fewer_tokens:
            self._groups = self._grouped()
        return None

    def sequences(self, prompt: int) -> list[list[int]]:
        """The token ids that are scored for a prompt: its text with each of its answers."""
        return [ids + answer for row in np.flatnonzero(self._prompt_of_row == prompt) for ids, answer in [self._rows[row]]]

    def _by_prompt(self, correct: np.ndarray, log_likelihood: np.ndarray) -> Scores:
        # Of a prompt's admitted answers, one must be correct, and their likelihoods are added.
        first_rows = np.searchsorted(self._prompt_of_row, np.arange(self.num_prompts))
        log_likelihood = np.where(np.isfinite(log_likelihood), log_likelihood, np.float32(np.nan))
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            total = np.logaddexp.reduceat(log_likelihood, first_rows, axis=1)
        return Scores(np.logical_or.reduceat(correct, first_rows, axis=1) & np.isfinite(total), total)


class OptionScorer:
    """Scores populations on prompts that are decided by options (`prompt.options`; `prompt.answers` has the gold one).

    `correct`: the gold option is the likeliest (of equal ones, the first). `log_likelihood`: of the gold option, normalised
    over the options. If a logit of an option is not finite, both are as in `Scores`.
    """

    has_likelihood = True

    def __init__(
        self,
        model: Llama,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = None,
        individuals: int | None = None,
    ):
        encoded = encode(option_prompts(prompts), tokenizer, model.config.max_position_embeddings)
        self._starts = np.cumsum([0, *(len(prompt.options) for prompt in prompts)])
        for prompt, start, end in zip(prompts, self._starts[:-1], self._starts[1:], strict=True):
            if len({tuple(option.answers[0]) for option in encoded[start:end]}) < end - start:
                raise UserError(
                    f"two of the options {', '.join(map(repr, prompt.options))} are the same tokens in this tokenizer, so that "
                    "neither can be the likelier one; use the model's own tokenizer"
                )
        self._scorer = Scorer(model, encoded, batch_size=batch_size, individuals=individuals)
        self._gold = [prompt.options.index(prompt.answers[0]) for prompt in prompts]
        self.num_prompts = len(prompts)
        self.answer_tokens = np.ones(len(prompts), int)

    @property
    def compilations(self) -> int:
        return self._scorer.compilations

    @property
    def individuals_at_once(self) -> int:
        return self._scorer.individuals_at_once

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        *,
        gains: Float[np.ndarray, "P ..."] | None = None,
        gains_granularity: Granularity = "layer",
    ) -> Scores:
        """See `Scorer.__call__`."""
        scores = self._scorer(factors, granularity, gains=gains, gains_granularity=gains_granularity)
        return self._from_options(scores.log_likelihood, on_prompts)

    @property
    def longest(self) -> int:
        return self._scorer.longest

    def sequences(self, prompt: int) -> list[list[int]]:
        """See `Scorer.sequences`; each option is an answer."""
        options = range(*self._starts[prompt : prompt + 2])
        return [ids for option in options for ids in self._scorer.sequences(option)]

    def lengthen(self, longest: int) -> None:
        """See `Scorer.lengthen`."""
        self._scorer.lengthen(longest)

    def method_scores(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """See `Scorer.method_scores`."""
        return self._from_options(self._scorer.method_scores(method).log_likelihood, on_prompts)

    def _from_options(self, options: Float[np.ndarray, "P rows"], on_prompts: Callable[[int], None]) -> Scores:
        correct = np.empty((len(options), self.num_prompts), bool)
        log_likelihood = np.empty(correct.shape, np.float32)
        for prompt, (start, end, gold) in enumerate(zip(self._starts[:-1], self._starts[1:], self._gold, strict=True)):
            own = options[:, start:end]
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                log_likelihood[:, prompt] = own[:, gold] - np.logaddexp.reduce(own, axis=1)
            correct[:, prompt] = (own.argmax(axis=1) == gold) & np.isfinite(log_likelihood[:, prompt])
        on_prompts(correct.size)
        return Scores(correct, log_likelihood)
