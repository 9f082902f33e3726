"""(model, prompts, factors [P, ...]) -> for every individual and prompt: does the model say the gold answer, how likely is it.

A pass takes a batch of prompts and some individuals: vmapped over the individuals of a device with the weights unmapped, and
spread over the population axis of a mesh (lpes_jax.mesh), without communication between its shards. Where there are fewer
individuals than shards, each shard has all of them and a part of the prompts. Factors are arguments of the compiled program:
new factors never compile anything.

Rows (a prompt with one of its answers) that begin alike share a tree, and what they share is computed once for each individual:
see prefixes.py. Which rows a pass has is planned beforehand (plan.py); `Scorer` puts the batches on the devices, runs the
passes, plans smaller ones where one ran out of memory, and collects the scores.

Letters: P population, N prompts, B rows or trees of a batch, R rows of a tree, T tokens, A answer tokens, M tokens of a tree
that predict an answer token, L layers, V vocabulary.
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
    out_of_memory,
    pass_memory,
    planned_memory,
    tokens_of_a_compilation,
    tokens_that_fit,
    tokens_worth_it,
)
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, least, make_mesh, mesh_of, over_population, put, to_host
from lpes_jax.models.llama.method import Method
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.plan import Budget, Plan, group_rows, make_plan, smaller
from lpes_jax.prefixes import Batch, Costs, Row, Tree, pack_trees, round_up, tree_of
from lpes_jax.rope import Granularity, RopeTable
from lpes_jax.scores import Scores, batch_scores, population_scores
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode, option_prompts


@partial(jax.jit, static_argnames=("granularity", "gains_granularity", "mesh", "by_trees"), compiler_options=LARGE_PRODUCTS)
def _sharded_scores(
    model: Llama,
    batch: Batch,
    factors: Float[Array, "P ..."],
    gains: Float[Array, "P ..."],
    table: RopeTable,
    granularity: Granularity,
    gains_granularity: Granularity,
    mesh: Mesh,
    by_trees: bool = False,
) -> tuple[Bool[Array, "P rows"], Float[Array, "P rows"]]:
    """`population_scores`, over the mesh by individuals or by trees."""

    def score(model: Llama, batch: Batch, factors: Array, gains: Array, table: RopeTable) -> tuple[Array, Array]:
        return population_scores(model, batch, factors, granularity, table, gains, gains_granularity)

    if by_trees:
        specs, out = (EVERYWHERE, BY_POPULATION, EVERYWHERE, EVERYWHERE, EVERYWHERE), PartitionSpec(None, "population")
    else:
        specs, out = (EVERYWHERE, EVERYWHERE, BY_POPULATION, BY_POPULATION, EVERYWHERE), BY_POPULATION
    return over_population(score, mesh, specs, out)(model, batch, factors, gains, table)


@partial(jax.jit, static_argnames="mesh", compiler_options=LARGE_PRODUCTS)
def _method_scores(model: Llama, batch: Batch, method: Method, mesh: Mesh) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    specs = EVERYWHERE, BY_POPULATION, EVERYWHERE
    return over_population(lambda *inputs: batch_scores(*inputs), mesh, specs, BY_POPULATION)(model, batch, method)


def _shapes(call: tuple[Any, ...]) -> Hashable:
    """What a program is compiled for."""
    leaves, structure = jax.tree.flatten(call)
    return structure, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Array) else leaf for leaf in leaves)


def _compiles_side_by_side() -> bool:
    """For a GPU: six programs of a 7B shape took 16 s so, on 16 cores. For a CPU it made no difference."""
    return jax.default_backend() != "cpu" and jax.process_count() == 1


Split = Literal["individuals", "trees", "rows"]  # what the devices each have their own of; rows: trees of one row


@dataclass(frozen=True)
class Placed:
    """A plan, and the batches of its passes on the devices."""

    plan: Plan
    batches: list[Batch]


class Scorer:
    """Scores populations on a fixed set of prompts.

    `batch_size` is prompts a pass and device (of the longest, none sharing) and `population_chunk` individuals a pass and
    device; both are chosen from the shapes and the device's memory where they are None, and neither changes a result: where a
    pass does not fit after all, they are halved. `individuals`: how many will be scored in all, about; few shapes
    are compiled for few. `mesh`: None for the model's, or one of all devices. `share_prefixes=False`
    computes every row on its own. `compilations` counts compiled shapes, and `tokens_saved` is the share of the rows' tokens
    that sharing leaves out. Of several processes, all make the same calls.
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
        # What one more shape must save; a replacement's program is its own, and compiled for the sake of one pass.
        compilation = tokens_of_a_compilation(self.model)
        by_individuals = 0 if individuals is None else max(1, compilation // max(1, individuals))
        self._shape_cost: dict[Split, int] = {"rows": compilation, "trees": by_individuals, "individuals": by_individuals}
        width = round_up(self.longest)
        fits = batch_size * width if batch_size else tokens_that_fit(self.model, width, self._answer_length)
        at_once = batch_size * width if batch_size else min(fits, tokens_worth_it(self.model, width))
        self._budget = Budget(fits, at_once, 0, pass_memory(self.model), batch_size, population_chunk)
        self._costs, self._share = Costs.of(self.model.config, jax.default_backend()), share_prefixes
        self._placed: dict[tuple[Split, int], Placed] = {}
        self._shapes: set[Hashable] = set()
        self._trees = self._grouped()
        written, unshared = sum(len(tree.tokens) for tree in self._trees), sum(len(ids) + len(of) - 1 for ids, of in self._rows)
        self.tokens_saved = 1 - written / unshared
        self.individuals_at_once = self.placed("individuals").plan.individuals * self._shards  # stays, whatever is halved

    def lengthen(self, longest: int) -> None:
        """Make the RoPE table for so many tokens, where it depends on them: a part of the prompts is scored as among all."""
        self._table = put(self.model.config.rope_table(longest), self._everywhere)

    def _grouped(self, tables: int = 1) -> list[Tree]:
        cost = self._shape_cost["individuals"]
        return group_rows(self._rows, self._budget, self._costs, shape_cost=cost, tables=tables, share=self._share)

    def placed(self, split: Split, tables: int = 1) -> Placed:
        """The plan by which the devices each have individuals, trees or rows of their own, and its batches on them."""
        if split == "trees" and self._shards == 1:
            split = "individuals"  # the same
        tables = 1 if self._budget.batch_size else tables  # prompts a pass that were given hold for every method
        if (split, tables) not in self._placed:
            self._placed[split, tables] = self._place(split, tables)
        return self._placed[split, tables]

    def _place(self, split: Split, tables: int) -> Placed:
        if split == "rows":
            trees = [tree_of(self._rows, [row]) for row in range(len(self._rows))]
        else:
            trees = self._trees if tables == 1 else self._grouped(tables)
        budget = replace(self._budget, memory=planned_memory())
        shards, sharding = (1, self._everywhere) if split == "individuals" else (self._shards, self._by_population)
        plan = make_plan(trees, budget, self._costs, shards=shards, tables=tables, shape_cost=self._shape_cost[split])
        batches = [pack_trees(it.trees, self._rows, self._answer_length, it.shape) for it in plan.passes]
        return Placed(plan, [put(batch, sharding) for batch in batches])

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
        """Scores of each individual on each prompt. `on_prompts` is told how many (individual, prompt) pairs were done.

        `gains`: None for 1, which is the same program as any of one gain a layer. Raises UserError where the device's memory
        does not hold a single prompt.
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
            placed = self.placed("trees" if len(factors) < self._shards else "individuals")
            done = self._tried(placed.plan, partial(self._run_individuals, placed, factors[start:], gains[start:], kinds))
            if done is None:
                continue
            count = min(len(done[0][0]), len(factors) - start)
            seen: set[int] = set()  # the admitted answers of a prompt may stand in two batches
            for (_, _, rows, score_of_row), scores in zip(placed.plan.passes, done, strict=True):
                correct[start : start + count, rows] = scores[0][:count, score_of_row]
                log_likelihood[start : start + count, rows] = scores[1][:count, score_of_row]
                new = set(self._prompt_of_row[rows].tolist()) - seen
                seen |= new
                on_prompts(count * len(new))
            start += count
        return self._by_prompt(correct, log_likelihood)

    def _run_individuals(
        self,
        placed: Placed,
        factors: Float[np.ndarray, "P ..."],
        gains: Float[np.ndarray, "P ..."],
        kinds: tuple[Granularity, Granularity],
    ) -> list[tuple[Array, Array]]:
        """The scores of each batch, for the individuals of one pass: the first of all, or all and some once more."""
        plan = placed.plan
        # Powers of two below the full pass, so that odd populations compile a few sizes and no more.
        shards = self._shards if plan.shards == 1 else 1
        needed = math.ceil(len(factors) / shards)
        count = min(plan.individuals, 1 << (needed - 1).bit_length()) * shards
        filled = [
            np.concatenate([values[:count], np.repeat(values[:1], max(0, count - len(values)), axis=0)])
            for values in (factors, gains)
        ]
        filled = put(filled, self._by_population if plan.shards == 1 else self._everywhere)
        table, by_trees = self._table, plan.shards > 1
        calls = [(self.model, batch, *filled, table, *kinds, self.mesh, by_trees) for batch in placed.batches]
        return self._run(_sharded_scores, calls)

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        correct, log_likelihood = np.empty((1, len(self._rows)), bool), np.empty((1, len(self._rows)), np.float32)
        method = put(method, self._everywhere)
        split: Split = "trees" if method.replacement is None else "rows"
        done, passes = None, []
        while done is None:
            placed = self.placed(split, len(method.tables.inv_freq))
            passes, calls = placed.plan.passes, [(self.model, batch, method, self.mesh) for batch in placed.batches]
            done = self._tried(replace(placed.plan, individuals=1), partial(self._run, _method_scores, calls))
        for (_, _, rows, score_of_row), scores in zip(passes, done, strict=True):
            correct[0, rows], log_likelihood[0, rows] = (values[score_of_row] for values in scores)
        on_prompts(self.num_prompts)
        return self._by_prompt(correct, log_likelihood)

    def _run(self, program: Any, calls: Sequence[tuple[Any, ...]]) -> list[tuple[Array, Array]]:
        """What the calls give."""
        new = {shapes: call for call in calls if (shapes := _shapes(call)) not in self._shapes}
        self._shapes |= new.keys()
        if len(new) > 1 and _compiles_side_by_side():
            compile_side_by_side([program.lower(*call) for call in new.values()])
        return [program(*call) for call in calls]

    def _tried(self, plan: Plan, run: Callable[[], Any]) -> Any:
        """What `run` gives, on the host; None, and a smaller budget, where a device of any process ran out of memory."""
        done, failed = None, None
        try:
            done = jax.block_until_ready(run())
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            failed = error
        if least(int(failed is None)):
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
        self._budget, self._placed = budget, {}
        if fewer_tokens:
            self._trees = self._grouped()
        return None

    def sequences(self, prompt: int) -> list[list[int]]:
        """The token ids that the scores of a prompt are of: its text with each of its answers."""
        return [ids + answer for row in np.flatnonzero(self._prompt_of_row == prompt) for ids, answer in [self._rows[row]]]

    def _by_prompt(self, correct: np.ndarray, log_likelihood: np.ndarray) -> Scores:
        # The admitted answers of a prompt: right if one is, as likely as all together.
        first_rows = np.searchsorted(self._prompt_of_row, np.arange(self.num_prompts))
        log_likelihood = np.where(np.isfinite(log_likelihood), log_likelihood, np.float32(np.nan))
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            together = np.logaddexp.reduceat(log_likelihood, first_rows, axis=1)
        return Scores(np.logical_or.reduceat(correct, first_rows, axis=1) & np.isfinite(together), together)


class OptionScorer:
    """Scores populations on prompts that are decided by options (`prompt.options`, one of them in `prompt.answers`).

    `correct`: the gold option is the likeliest (of equals the first). `log_likelihood`: of the gold one among the options.
    Both as `Scores` has them where the logits of one of the options are not finite.
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
        """As `Scorer`'s."""
        scores = self._scorer(factors, granularity, gains=gains, gains_granularity=gains_granularity)
        return self._of_options(scores.log_likelihood, on_prompts)

    @property
    def longest(self) -> int:
        return self._scorer.longest

    def sequences(self, prompt: int) -> list[list[int]]:
        """As `Scorer`'s, with each option as an answer."""
        options = range(*self._starts[prompt : prompt + 2])
        return [ids for option in options for ids in self._scorer.sequences(option)]

    def lengthen(self, longest: int) -> None:
        """As `Scorer`'s."""
        self._scorer.lengthen(longest)

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """As `Scorer`'s."""
        return self._of_options(self._scorer.of_method(method).log_likelihood, on_prompts)

    def _of_options(self, of_option: Float[np.ndarray, "P rows"], on_prompts: Callable[[int], None]) -> Scores:
        correct = np.empty((len(of_option), self.num_prompts), bool)
        log_likelihood = np.empty(correct.shape, np.float32)
        for prompt, (start, end, gold) in enumerate(zip(self._starts[:-1], self._starts[1:], self._gold, strict=True)):
            options = of_option[:, start:end]
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                log_likelihood[:, prompt] = options[:, gold] - np.logaddexp.reduce(options, axis=1)
            correct[:, prompt] = (options.argmax(axis=1) == gold) & np.isfinite(log_likelihood[:, prompt])
        on_prompts(correct.size)
        return Scores(correct, log_likelihood)
