"""(model, prompts, factors [P, ...]) -> for every individual and prompt: does the model say the gold answer, how likely is it.

No text is generated. The gold answer stands behind the prompt (teacher forcing); it is what greedy generation gives exactly if
each of its tokens is the argmax. Its log-likelihood comes from the same pass.

A pass takes a batch of prompts and a slab of individuals: vmapped over the individuals of a device with the weights unmapped,
and spread over the population axis of a mesh (lpes_jax.mesh), whose places say nothing to each other. Where there are fewer
individuals than places, each place has all of them and a part of the prompts. Factors are arguments of the compiled program:
new factors never compile anything.

Rows (a prompt with one of its answers) that begin alike share a tree, and what they share is computed once for each individual:
see prefixes.py. A pass that runs out of the device's memory is done again in smaller ones.

Letters: P population, N prompts, B rows or trees of a batch, R rows of a tree, T tokens, A answer tokens, M tokens of a tree
that predict an answer token, L layers, V vocabulary.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.compilation import LARGE_PRODUCTS, compile_side_by_side
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.inputs import checked_factors
from lpes_jax.memory import out_of_memory, pass_bytes, planned_memory, tokens_of_a_compilation, tokens_that_fit, tokens_worth_it
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, least, make_mesh, mesh_of, over_population, put, to_host
from lpes_jax.models.llama.method import Method, of_table
from lpes_jax.models.llama.model import Llama, check_ids, hidden_states, method_logits, over_tables
from lpes_jax.models.llama.prefix import states_read
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.prefixes import (
    Batch,
    Costs,
    Row,
    Shape,
    SharedBatch,
    Tree,
    alone,
    batches,
    groups,
    of_one_prompt,
    pack_rows,
    pack_trees,
    round_up,
    tree_of,
)
from lpes_jax.rope import Granularity, RopeTable, is_traced
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode, option_prompts


class Scores(NamedTuple):
    """`correct`: an admitted answer is the greedy continuation. `log_likelihood`: of the admitted answers together, in nats.

    Where the logits of an answer were not finite, the log-likelihood is NaN and nothing is correct.
    """

    correct: Bool[np.ndarray, "P N"] | Float[np.ndarray, "P N"]
    log_likelihood: Float[np.ndarray, "P N"]


class PopulationScorer(Protocol):
    """What scores populations on a fixed set of prompts.

    `answer_tokens`: of each prompt's shortest answer; `individuals_at_once`: of one pass over all devices; `has_likelihood`:
    whether `Scores.log_likelihood` says anything but that logits were finite.
    """

    num_prompts: int
    answer_tokens: Int[np.ndarray, "N"]
    has_likelihood: bool

    @property
    def individuals_at_once(self) -> int: ...

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        *,
        gains: Float[np.ndarray, "P ..."] | None = None,
        gains_granularity: Granularity = "layer",
    ) -> Scores:
        """Scores of each individual on each prompt. `on_prompts` is told how many (individual, prompt) pairs were done."""
        ...


class LikelihoodScorer(PopulationScorer, Protocol):
    """A scorer that teacher-forces answers or options; it scores methods as well.

    `longest`: tokens of the longest prompt with its answer; `compilations`: shapes compiled so far.
    """

    @property
    def longest(self) -> int: ...

    @property
    def compilations(self) -> int: ...

    def lengthen(self, longest: int) -> None:
        """Make the RoPE table for texts of so many tokens."""
        ...

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        ...

    def sequences(self, prompt: int) -> list[list[int]]:
        """The token ids that the scores of a prompt are of."""
        ...


def batch_scores(
    model: Llama, batch: Batch | SharedBatch, method: Method, *, remat: bool = False
) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    """For each row: are all answer tokens the argmax, and the sum of their log-probabilities in nats.

    Of trees, row r of tree b is b R + r. A method with a replacement takes a `Batch`. `remat` recomputes each layer in the
    backward pass instead of keeping its activations. A log-likelihood that is not finite is that of logits which are not: such
    a row is not right.
    """
    shared = alone(batch) if isinstance(batch, Batch) else batch

    def states(table: RopeTable) -> Float[Array, "B M E"]:
        if method.replacement is None:
            return states_read(model, shared.trees, table, shared.read, remat=remat)
        if not isinstance(batch, Batch):
            raise TypeError("an attention that replaces the model's own takes rows one by one: a Batch, no SharedBatch")
        run = partial(hidden_states, model, batch.tokens, table, remat=remat, behind=batch.answers.shape[1] - 1)
        hidden = run(replacement=method.replacement, lengths=batch.first + 1)
        return jnp.take_along_axis(hidden, shared.read[:, :, None], axis=1)

    logits = method_logits(model, over_tables(states, method.tables), method)  # [B, M, V]
    tree = jnp.arange(len(shared.at))[:, None, None]
    predicted = jnp.argmax(logits, axis=-1)[tree, shared.at]  # [B, R, A]
    chosen = logits[tree, shared.at, shared.answers] - jax.nn.logsumexp(logits, axis=-1)[tree, shared.at]
    correct = (predicted == shared.answers) | ~shared.is_answer
    log_likelihood = jnp.where(shared.is_answer, chosen, 0).sum(axis=-1)
    return (correct.all(axis=-1) & jnp.isfinite(log_likelihood)).ravel(), log_likelihood.ravel()


def _shapes(call: tuple[Any, ...]) -> Hashable:
    """What a program is compiled for."""
    leaves, structure = jax.tree.flatten(call)
    return structure, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Array) else leaf for leaf in leaves)


def _compiles_side_by_side() -> bool:
    """For a GPU: six programs of a 7B shape took 16 s so, on 16 cores. For a CPU it made no difference."""
    return jax.default_backend() != "cpu" and jax.process_count() == 1


def _tokens(batch: Batch | SharedBatch) -> Int[Array, "B T"]:
    return batch.tokens if isinstance(batch, Batch) else batch.trees.tokens


def population_scores(
    model: Llama,
    batch: Batch | SharedBatch,
    factors: Float[Array, "P ..."],
    granularity: Granularity = "layer",
    table: RopeTable | None = None,
    gains: Float[Array, "P ..."] | None = None,
    gains_granularity: Granularity = "layer",
) -> tuple[Bool[Array, "P rows"], Float[Array, "P rows"]]:
    """`batch_scores` of every individual, vmapped over the factors, which divide `table` (None: the model's own), and gains.

    An individual whose logits are not finite has log-likelihoods that are not, and nothing right. Raises UserError for ids that
    the model does not have, for factors that do not fit it or are out of range, and where no individual's logits are finite; of
    what is traced (`jax.jit`) the shape alone is checked.
    """
    checked_factors(model.config, factors, granularity, population=True)
    checked_factors(model.config, gains, gains_granularity, population=True, what="gains")
    if not is_traced(tokens := _tokens(batch)):
        for ids in (tokens, batch.answers):
            check_ids(model, np.asarray(ids), "the batch holds")
    own = model.config.rope_table(tokens.shape[1]) if table is None else table

    def individual(factors: Array, gains: Array | None) -> tuple[Array, Array]:
        scaled = own.scaled(factors, granularity)
        return batch_scores(model, batch, of_table(scaled if gains is None else scaled.with_gains(gains, gains_granularity)))

    correct, log_likelihood = jax.vmap(individual)(factors, gains)
    if not is_traced(log_likelihood) and not np.isfinite(log_likelihood).all(axis=1).any():
        of_first = None if gains is None else np.asarray(gains[0])
        first = LayerFactors(np.asarray(factors[0]), granularity, of_first, None if gains is None else gains_granularity)
        raise not_finite(model, np.asarray(tokens).tolist(), first, name="individual 0")
    return correct, log_likelihood


@partial(jax.jit, static_argnames=("granularity", "gains_granularity", "mesh", "by_trees"), compiler_options=LARGE_PRODUCTS)
def _sharded_scores(
    model: Llama,
    batch: SharedBatch,
    factors: Float[Array, "P ..."],
    gains: Float[Array, "P ..."],
    table: RopeTable,
    granularity: Granularity,
    gains_granularity: Granularity,
    mesh: Mesh,
    by_trees: bool = False,
) -> tuple[Bool[Array, "P rows"], Float[Array, "P rows"]]:
    """`population_scores`, over the mesh by individuals or by trees."""

    def score(model: Llama, batch: SharedBatch, factors: Array, gains: Array, table: RopeTable) -> tuple[Array, Array]:
        return population_scores(model, batch, factors, granularity, table, gains, gains_granularity)

    if by_trees:
        specs, out = (EVERYWHERE, BY_POPULATION, EVERYWHERE, EVERYWHERE, EVERYWHERE), PartitionSpec(None, "population")
    else:
        specs, out = (EVERYWHERE, EVERYWHERE, BY_POPULATION, BY_POPULATION, EVERYWHERE), BY_POPULATION
    return over_population(score, mesh, specs, out)(model, batch, factors, gains, table)


@partial(jax.jit, static_argnames="mesh", compiler_options=LARGE_PRODUCTS)
def _method_scores(
    model: Llama, batch: Batch | SharedBatch, method: Method, mesh: Mesh
) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    specs = EVERYWHERE, BY_POPULATION, EVERYWHERE
    return over_population(lambda *inputs: batch_scores(*inputs), mesh, specs, BY_POPULATION)(model, batch, method)


class _Pass(NamedTuple):
    """A batch, and where its scores stand: `of[i]` of the flat scores belongs to row `rows[i]`."""

    batch: Any  # SharedBatch, or Batch for a replacement
    of: Int[np.ndarray, "rows"]
    rows: Int[np.ndarray, "rows"]


@dataclass
class _Plan:
    """Passes over all rows, each batch in so many parts for as many places; `chunk` individuals of a place at once.

    `tables`: how often a batch is read at once, by a method with so many.
    """

    passes: list[_Pass]
    parts: int
    chunk: int
    tables: int


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
        self._places = self.mesh.shape["population"]
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
        self._share, self._given_chunk, self._batch_size = share_prefixes, population_chunk, batch_size
        # What one more shape must save; a replacement's program is its own, and compiled for the sake of one pass.
        compilation = tokens_of_a_compilation(self.model)
        self._shape_cost = {
            "rows": compilation,
            "individuals": 0 if individuals is None else max(1, compilation // max(1, individuals)),
        }
        width = round_up(self.longest)
        self._fits = batch_size * width if batch_size else tokens_that_fit(self.model, width, self._answer_length)
        self._at_once = batch_size * width if batch_size else min(self._fits, tokens_worth_it(self.model, width))
        self._costs = Costs.of(self.model.config, jax.default_backend())
        self._plans: dict[tuple[str, int], _Plan] = {}
        self._shapes: set[Hashable] = set()
        self._group()
        self.individuals_at_once = self._plan("individuals").chunk * self._places  # of one pass; stays, whatever is halved

    def _group(self) -> None:
        """The rows as trees of at most `_fits` tokens."""
        self._trees = self._grouped(self._fits)
        written, alone = sum(len(tree.tokens) for tree in self._trees), sum(len(ids) + len(of) - 1 for ids, of in self._rows)
        self.tokens_saved = 1 - written / alone

    def _grouped(self, most_tokens: int) -> list[Tree]:
        """The rows as trees, by the grouping whose batches cost least: what two prompts share may not be worth its padding."""
        rows = self._rows
        if not self._share:
            return [tree_of(rows, [at]) for at in range(len(rows))]
        ways = groups(rows, self._costs, most_tokens), of_one_prompt(rows)
        of_ways = [[tree_of(rows, tree) for tree in trees] for trees in ways]
        return min(of_ways, key=lambda trees: self._batches(trees, 1, self._shape_cost["individuals"])[0])

    def _batches(
        self, trees: list[Tree], parts: int, shape_cost: int, tables: int = 1
    ) -> tuple[float, list[tuple[Shape, list[list[Tree]]]]]:
        return batches(trees, self._at_once // tables, self._costs, parts, self._batch_size, shape_cost)

    def lengthen(self, longest: int) -> None:
        """Make the RoPE table for so many tokens, where it hangs on them: a part of the prompts is scored as among all."""
        self._table = put(self.model.config.rope_table(longest), self._everywhere)

    def _plan(self, by: Literal["individuals", "trees", "rows"], tables: int = 1) -> _Plan:
        """The batches of about `_at_once` tokens a place, and the individuals of a pass.

        What the places have their own of: individuals, or trees, or rows one by one, for what knows nothing of trees.
        """
        if by == "trees" and self._places == 1:
            by = "individuals"  # the same
        tables = 1 if self._batch_size else tables  # prompts a pass that were given hold for every method
        if (by, tables) in self._plans:
            return self._plans[by, tables]
        parts = 1 if by == "individuals" else self._places
        trees = self._trees if tables == 1 else self._grouped(self._fits // tables)
        if by == "rows":
            trees = [tree_of(self._rows, [at]) for at in range(len(self._rows))]
        shape_cost = self._shape_cost["rows" if by == "rows" else "individuals"] * parts // tables
        passes = []
        for shape, of_shape in self._batches(trees, parts, shape_cost, tables)[1]:
            of_rows = [self._rows[at] for batch in of_shape for tree in batch for at in tree.rows]
            longest = max(len(ids) + len(answer) for ids, answer in of_rows)
            passes += [self._pass(batch, shape, longest, by) for batch in of_shape]
        tokens = max(_tokens(it.batch).size for it in passes) // parts
        read = max((it.batch.read if isinstance(it.batch, SharedBatch) else it.batch.answers).size for it in passes) // parts
        fits = planned_memory() // pass_bytes(self.model, tokens, read)
        chunk = self._given_chunk or max(1, min(self._at_once // tokens, fits))
        self._plans[by, tables] = _Plan(passes, parts, chunk, tables)
        return self._plans[by, tables]

    def _pass(self, trees: list[Tree], shape: Shape, longest: int, by: str) -> _Pass:
        """A batch of trees, padded to a shape, or to the longest row; a tree that has no rows only fills it up."""
        rows = np.concatenate([tree.rows for tree in trees]).astype(int)
        if by == "rows":
            filled = np.concatenate([rows, np.repeat(rows[:1], len(trees) - len(rows))])
            batch = pack_rows([self._rows[at] for at in filled], self._answer_length, longest)
            return _Pass(put(batch, self._by_population), np.arange(len(rows)), rows)
        batch = pack_trees(trees, self._rows, self._answer_length, shape)
        of = [b * shape.rows + r for b, tree in enumerate(trees) for r in range(len(tree.rows))]
        return _Pass(put(batch, self._everywhere if by == "individuals" else self._by_population), np.array(of), rows)

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
            plan = self._plan("trees" if len(factors) < self._places else "individuals")
            done = self._tried(plan, partial(self._slab, plan, factors[start:], gains[start:], kinds))
            if done is None:
                continue
            count = min(len(done[0][0]), len(factors) - start)
            seen: set[int] = set()  # the admitted answers of a prompt may stand in two batches
            for (_, of, rows), (batch_correct, batch_likelihood) in zip(plan.passes, done, strict=True):
                correct[start : start + count, rows] = batch_correct[:count, of]
                log_likelihood[start : start + count, rows] = batch_likelihood[:count, of]
                new = set(self._prompt_of_row[rows].tolist()) - seen
                seen |= new
                on_prompts(count * len(new))
            start += count
        return self._by_prompt(correct, log_likelihood)

    def _slab(
        self,
        plan: _Plan,
        factors: Float[np.ndarray, "P ..."],
        gains: Float[np.ndarray, "P ..."],
        kinds: tuple[Granularity, Granularity],
    ) -> list[tuple[Array, Array]]:
        """The scores of each batch, for the individuals of one pass: the first of all, or all and some once more."""
        # Powers of two below the full slab, so that odd populations compile a few sizes and no more.
        places = self._places if plan.parts == 1 else 1
        needed = math.ceil(len(factors) / places)
        slab = min(plan.chunk, 1 << (needed - 1).bit_length()) * places
        filled = [np.concatenate([it[:slab], np.repeat(it[:1], max(0, slab - len(it)), axis=0)]) for it in (factors, gains)]
        filled = put(filled, self._by_population if plan.parts == 1 else self._everywhere)
        table, by_trees = self._table, plan.parts > 1
        calls = [(self.model, it.batch, *filled, table, *kinds, self.mesh, by_trees) for it in plan.passes]
        return self._run(_sharded_scores, calls)

    def _run(self, program: Any, calls: Sequence[tuple[Any, ...]]) -> list[tuple[Array, Array]]:
        """What the calls give."""
        new = {shapes: call for call in calls if (shapes := _shapes(call)) not in self._shapes}
        self._shapes |= new.keys()
        if len(new) > 1 and _compiles_side_by_side():
            compile_side_by_side([program.lower(*call) for call in new.values()])
        return [program(*call) for call in calls]

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        correct, log_likelihood = np.empty((1, len(self._rows)), bool), np.empty((1, len(self._rows)), np.float32)
        method = put(method, self._everywhere)

        def run(passes: Sequence[_Pass]) -> list[tuple[Array, Array]]:
            return self._run(_method_scores, [(self.model, it.batch, method, self.mesh) for it in passes])

        plan_now = partial(self._plan, "trees" if method.replacement is None else "rows", len(method.tables.inv_freq))
        plan = replace(plan_now(), chunk=1)
        while (done := self._tried(plan, partial(run, plan.passes))) is None:
            plan = replace(plan_now(), chunk=1)
        for (_, of, rows), scores in zip(plan.passes, done, strict=True):
            correct[0, rows], log_likelihood[0, rows] = (values[of] for values in scores)
        on_prompts(self.num_prompts)
        return self._by_prompt(correct, log_likelihood)

    def _tried(self, plan: _Plan, run: Callable[[], Any]) -> Any:
        """What `run` gives, on the host; None, and a lesser `plan`, where a device of any process ran out of memory."""
        done, failed = None, None
        try:
            done = jax.block_until_ready(run())
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            failed = error
        if least(int(failed is None)):
            return to_host(done)
        return self._halve(plan, failed)

    def _halve(self, plan: _Plan, error: Exception | None) -> None:
        """Smaller passes, where one ran out of memory; raises where nothing is left to halve."""
        if plan.chunk > 1:
            plan.chunk = self._given_chunk = plan.chunk // 2
            return
        largest = max(_tokens(it.batch).size for it in plan.passes) // plan.parts
        if largest <= round_up(self.longest):
            raise UserError(
                f"the device's memory does not hold one prompt of {self.longest} tokens beside the model; use shorter prompts, "
                "--dtype bfloat16 or a smaller model"
            ) from error
        self._fits, self._at_once = (min(before, largest * plan.tables // 2) for before in (self._fits, self._at_once))
        self._given_chunk = 1
        self._group()
        self._plans = {}

    def sequences(self, prompt: int) -> list[list[int]]:
        """The token ids that the scores of a prompt are of: its text with each of its answers."""
        return [ids + answer for at in np.flatnonzero(self._prompt_of_row == prompt) for ids, answer in [self._rows[at]]]

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
        for at, (start, end, gold) in enumerate(zip(self._starts[:-1], self._starts[1:], self._gold, strict=True)):
            options = of_option[:, start:end]
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                log_likelihood[:, at] = options[:, gold] - np.logaddexp.reduce(options, axis=1)
            correct[:, at] = (options.argmax(axis=1) == gold) & np.isfinite(log_likelihood[:, at])
        on_prompts(correct.size)
        return Scores(correct, log_likelihood)
