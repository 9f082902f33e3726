"""(model, prompts, factors [P, ...]) -> for every individual and prompt: does the model say the gold answer, how likely is it.

No text is generated. The gold answer stands behind the prompt (teacher forcing); it is what greedy generation gives exactly if
each of its tokens is the argmax. Its log-likelihood comes from the same pass.

A pass takes a batch of prompts and a slab of individuals: vmapped over the individuals of a device with the weights unmapped,
and spread over the devices by `shard_map` on the population axis (`jax.pmap` is a wrapper of that today, and can't be nested
in other transformations as freely). Factors are arguments of the compiled program: new factors never compile anything.

Rows (a prompt with one of its answers) that begin alike share a tree, and what they share is computed once for each individual:
see prefixes.py. A pass that runs out of the device's memory is done again in smaller ones.

Letters: P population, N prompts, B rows or trees of a batch, R rows of a tree, T tokens, A answer tokens, M tokens of a tree
that predict an answer token, L layers, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.memory import out_of_memory, pass_bytes, planned_memory, tokens_that_fit, tokens_worth_it
from lpes_jax.models.llama.generate import greedy
from lpes_jax.models.llama.method import Method, of_table
from lpes_jax.models.llama.model import Llama, hidden_states, method_logits, over_tables
from lpes_jax.models.llama.prefix import states_read
from lpes_jax.prefixes import (
    Batch,
    Costs,
    Row,
    SharedBatch,
    Tree,
    alone,
    batches,
    groups,
    pack_rows,
    pack_trees,
    padded,
    round_up,
    tree_of,
)
from lpes_jax.rope import Granularity, RopeTable, scale_layers
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode, option_prompts


class Scores(NamedTuple):
    """`correct`: an admitted answer is the greedy continuation. `log_likelihood`: of the admitted answers together, in nats."""

    correct: Bool[np.ndarray, "P N"] | Float[np.ndarray, "P N"]
    log_likelihood: Float[np.ndarray, "P N"]


def batch_scores(
    model: Llama, batch: Batch | SharedBatch, method: Method, *, remat: bool = False
) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    """For each row: are all answer tokens the argmax, and the sum of their log-probabilities in nats.

    Of trees, row r of tree b is b R + r. A method with a replacement takes a `Batch`. `remat` recomputes each layer in the
    backward pass instead of keeping its activations.
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
    return correct.all(axis=-1).ravel(), log_likelihood.ravel()


@partial(jax.jit, static_argnames=("chunk", "remat"))
def token_nll(
    model: Llama, tokens: Int[Array, "B T"], method: Method, chunk: int = 256, *, remat: bool = False
) -> Float[Array, "B T"]:
    """-log p of each token in nats, float32; 0 for a row's first, which nothing predicts.

    The logits of `chunk` positions of every row are in memory together. `remat` is `hidden_states`'s, for gradients.
    """
    run = partial(hidden_states, model, tokens, remat=remat, replacement=method.replacement)
    hidden = over_tables(run, method.tables)[:, :, :-1]
    tables, batch, length, width = hidden.shape
    chunk = min(chunk, length)
    padding = -length % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(tables, batch, -1, chunk, width)
    wanted = jnp.pad(tokens[:, 1:], ((0, 0), (0, padding))).reshape(batch, -1, chunk).swapaxes(0, 1)

    def nll(hidden_and_wanted: tuple[Array, Array]) -> Array:
        hidden, wanted = hidden_and_wanted
        logits = method_logits(model, hidden, method)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]

    values = jax.lax.map(jax.checkpoint(nll) if remat else nll, (jnp.moveaxis(hidden, 2, 0), wanted))
    values = values.swapaxes(0, 1).reshape(batch, -1)[:, :length]
    return jnp.pad(values, ((0, 0), (1, 0)))


def population_scores(
    model: Llama,
    batch: Batch | SharedBatch,
    factors: Float[Array, "P ..."],
    granularity: Granularity = "layer",
    table: RopeTable | None = None,
) -> tuple[Bool[Array, "P rows"], Float[Array, "P rows"]]:
    """`batch_scores` of every individual, vmapped over the factors alone, which divide `table` (None: the model's own)."""
    tokens = batch.tokens if isinstance(batch, Batch) else batch.trees.tokens
    own = model.config.rope_table(tokens.shape[1]) if table is None else table

    def individual(factors: Array) -> tuple[Array, Array]:
        scaled = RopeTable(scale_layers(own.inv_freq, factors, granularity), own.attention_scaling)
        return batch_scores(model, batch, of_table(scaled))

    return jax.vmap(individual)(factors)


def population_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """`devices` (None: all local ones) along the population axis; the model axis has one."""
    devices = jax.local_devices() if devices is None else devices
    return Mesh(np.array(devices).reshape(-1, 1), ("population", "model"), axis_types=(AxisType.Auto,) * 2)


@partial(jax.jit, static_argnames=("granularity", "mesh"))
def _sharded_scores(
    model: Llama, batch: SharedBatch, factors: Float[Array, "P ..."], table: RopeTable, granularity: Granularity, mesh: Mesh
) -> tuple[Bool[Array, "P rows"], Float[Array, "P rows"]]:
    everywhere, split = PartitionSpec(), PartitionSpec("population")

    def score(model: Llama, batch: SharedBatch, factors: Array, table: RopeTable) -> tuple[Array, Array]:
        return population_scores(model, batch, factors, granularity, table)

    specs = (everywhere, everywhere, split, everywhere)
    return jax.shard_map(score, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)(model, batch, factors, table)


_method_scores = jax.jit(batch_scores)


class _Pass(NamedTuple):
    """A batch, and where its scores stand: `of[i]` of the flat scores belongs to row `rows[i]`."""

    batch: Any  # SharedBatch, or Batch for a replacement
    of: Int[np.ndarray, "rows"]
    rows: Int[np.ndarray, "rows"]


class Scorer:
    """Scores populations on a fixed set of prompts.

    `batch_size` is prompts a pass (of the longest, none sharing) and `population_chunk` individuals a pass and device; both are
    chosen from the shapes and the device's memory where they are None, and neither changes a result: where a pass does not fit
    after all, they are halved. `share_prefixes=False` computes every row on its own. `compilations` counts compiled shapes, and
    `tokens_saved` is the share of the rows' tokens that sharing leaves out.
    """

    def __init__(
        self,
        model: Llama,
        prompts: Sequence[EncodedPrompt],
        *,
        batch_size: int | None = None,
        population_chunk: int | None = None,
        mesh: Mesh | None = None,
        share_prefixes: bool = True,
    ):
        self.mesh = population_mesh() if mesh is None else mesh
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self.model = jax.device_put(model, self._replicated)
        self.num_prompts = len(prompts)
        self._rows: list[Row] = [(prompt.ids, answer) for prompt in prompts for answer in prompt.answers]
        _check_ids(model, [ids + answer for ids, answer in self._rows])
        self._prompt_of_row = np.repeat(np.arange(len(prompts)), [len(prompt.answers) for prompt in prompts])
        self.answer_tokens = np.array([min(len(answer) for answer in prompt.answers) for prompt in prompts])
        self._answer_length = max(len(answer) for _, answer in self._rows)
        self.longest = max(len(ids) + len(answer) for ids, answer in self._rows)
        self._table = jax.device_put(self.model.config.rope_table(self.longest), self._replicated)
        self._share, self._given_chunk = share_prefixes, population_chunk
        width = round_up(self.longest)
        self._fits = batch_size * width if batch_size else tokens_that_fit(self.model, width, self._answer_length)
        self._at_once = batch_size * width if batch_size else min(self._fits, tokens_worth_it(width))
        self._plan()
        self.individuals_at_once = self._chunk * self.mesh.size  # of one pass, over all devices; stays, whatever is halved
        self._shapes: set[tuple] = set()

    def _plan(self) -> None:
        """Trees of at most `_fits` tokens, their batches of about `_at_once`, and the individuals of a pass."""
        rows, at_once = self._rows, self._at_once
        if self._share:
            costs = Costs.of(self.model.config, jax.local_devices()[0].platform)
            trees = [tree_of(rows, group) for group in groups(rows, costs, self._fits)]
        else:
            trees = [tree_of(rows, [at]) for at in range(len(rows))]
        self.tokens_saved = 1 - sum(len(tree.tokens) for tree in trees) / sum(len(ids) + len(it) - 1 for ids, it in rows)
        single = [tree for tree in trees if len(tree.rows) == 1]
        several = [tree for tree in trees if len(tree.rows) > 1]
        self._passes = [self._pass(batch) for kind in (single, several) for batch in batches(kind, at_once)]
        self._plain_passes: list[_Pass] | None = None
        tokens = max(it.batch.trees.tokens.size for it in self._passes)
        read = max(it.batch.read.size for it in self._passes)
        fits = planned_memory() // pass_bytes(self.model, tokens, read)
        self._chunk = self._given_chunk or max(1, min(at_once // tokens, fits))

    def _pass(self, trees: list[Tree]) -> _Pass:
        """A batch of trees; one that has no rows only fills it up."""
        batch = pack_trees(trees, self._rows, self._answer_length)
        most = batch.at.shape[1]
        of = [b * most + r for b, tree in enumerate(trees) for r in range(len(tree.rows))]
        return _Pass(
            jax.device_put(batch, self._replicated), np.array(of), np.concatenate([tree.rows for tree in trees]).astype(int)
        )

    @property
    def compilations(self) -> int:
        return len(self._shapes)

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
    ) -> Scores:
        """Scores of each individual on each prompt. `on_prompts` is told how many (individual, prompt) pairs were done.

        Raises UserError where the device's memory does not hold a single prompt.
        """
        factors = np.asarray(factors, np.float32)
        correct = np.empty((len(factors), len(self._rows)), bool)
        log_likelihood = np.empty(correct.shape, np.float32)
        start = 0
        while start < len(factors):
            try:
                done = self._slab(factors[start:], granularity)
            except jax.errors.JaxRuntimeError as error:
                self._halve(error)
                continue
            seen: set[int] = set()  # the admitted answers of a prompt may stand in two batches
            for rows, batch_correct, batch_likelihood in done:
                count = len(batch_correct)
                correct[start : start + count, rows], log_likelihood[start : start + count, rows] = (
                    batch_correct,
                    batch_likelihood,
                )
                new = set(self._prompt_of_row[rows].tolist()) - seen
                seen |= new
                on_prompts(count * len(new))
            start += len(done[0][1])
        return self._by_prompt(correct, log_likelihood)

    def _slab(self, factors: Float[np.ndarray, "P ..."], granularity: Granularity) -> list[tuple[np.ndarray, ...]]:
        """Rows and their scores of each batch, for the individuals of one pass, the first of `factors`."""
        # Powers of two below the full slab, so that odd populations compile a few sizes and no more.
        needed = math.ceil(len(factors) / self.mesh.size)
        slab = min(self._chunk, 1 << (needed - 1).bit_length()) * self.mesh.size
        individuals = factors[:slab]
        filled = np.concatenate([individuals, np.repeat(factors[:1], slab - len(individuals), axis=0)])
        filled = jax.device_put(filled, NamedSharding(self.mesh, PartitionSpec("population")))
        done = []
        for batch, _, _ in self._passes:
            self._shapes.add(
                (batch.trees.tokens.shape, batch.trees.prefix, batch.read.shape, batch.at.shape, filled.shape, granularity)
            )
            done.append(_sharded_scores(self.model, batch, filled, self._table, granularity, self.mesh))
        return [
            (rows, *(np.asarray(values)[: len(individuals), of] for values in scores))
            for (_, of, rows), scores in zip(self._passes, done, strict=True)
        ]

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        correct, log_likelihood = np.empty((1, len(self._rows)), bool), np.empty((1, len(self._rows)), np.float32)
        while True:
            try:
                for batch, of, rows in self._passes if method.replacement is None else self._one_by_one():
                    self._shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(batch)))
                    scores = _method_scores(self.model, batch, method)
                    correct[0, rows], log_likelihood[0, rows] = (np.asarray(values)[of] for values in scores)
            except jax.errors.JaxRuntimeError as error:
                self._halve(error)
            else:
                break
        on_prompts(self.num_prompts)
        return self._by_prompt(correct, log_likelihood)

    def _one_by_one(self) -> list[_Pass]:
        """Passes without trees, for attentions that know nothing of them."""
        if self._plain_passes is None:
            self._plain_passes = []
            for trees in batches([tree_of(self._rows, [at]) for at in range(len(self._rows))], self._at_once):
                rows = np.concatenate([tree.rows for tree in trees]).astype(int)
                filled = np.concatenate([rows, np.repeat(rows[:1], len(trees) - len(rows))])
                packed = pack_rows([self._rows[at] for at in filled], self._answer_length)
                self._plain_passes.append(_Pass(jax.device_put(packed, self._replicated), np.arange(len(rows)), rows))
        return self._plain_passes

    def _halve(self, error: Exception) -> None:
        """Smaller passes, where a pass ran out of memory; raises where that was not it, or where nothing is left to halve."""
        if not out_of_memory(error):
            raise error
        if self._chunk > 1:
            self._chunk = self._given_chunk = self._chunk // 2
            return
        largest = max(of_pass.batch.trees.tokens.size for of_pass in self._passes)
        if largest <= round_up(self.longest):
            raise UserError(
                f"the device's memory does not hold one prompt of {self.longest} tokens beside the model; use shorter prompts, "
                "--dtype bfloat16 or a smaller model"
            ) from error
        self._fits = self._at_once = largest // 2
        self._given_chunk = 1
        self._plan()

    def _by_prompt(self, correct: np.ndarray, log_likelihood: np.ndarray) -> Scores:
        # The admitted answers of a prompt: right if one is, as likely as all together.
        first_rows = np.searchsorted(self._prompt_of_row, np.arange(self.num_prompts))
        return Scores(
            np.logical_or.reduceat(correct, first_rows, axis=1),
            np.logaddexp.reduceat(log_likelihood, first_rows, axis=1),
        )


class OptionScorer:
    """Scores populations on prompts that are decided by options (`prompt.options`, one of them in `prompt.answers`).

    `correct`: the gold option is the likeliest (of equals the first). `log_likelihood`: of the gold one among the options.
    """

    def __init__(self, model: Llama, tokenizer: Any, prompts: Sequence[Prompt], *, batch_size: int | None = None):
        options = option_prompts(prompts)
        self._scorer = Scorer(model, encode(options, tokenizer, model.config.max_position_embeddings), batch_size=batch_size)
        self._starts = np.cumsum([0, *(len(prompt.options) for prompt in prompts)])
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
    ) -> Scores:
        """As `Scorer`'s."""
        return self._of_options(self._scorer(factors, granularity).log_likelihood, on_prompts)

    @property
    def longest(self) -> int:
        return self._scorer.longest

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """As `Scorer`'s."""
        return self._of_options(self._scorer.of_method(method).log_likelihood, on_prompts)

    def _of_options(self, of_option: Float[np.ndarray, "P rows"], on_prompts: Callable[[int], None]) -> Scores:
        correct = np.empty((len(of_option), self.num_prompts), bool)
        log_likelihood = np.empty(correct.shape, np.float32)
        for at, (start, end, gold) in enumerate(zip(self._starts[:-1], self._starts[1:], self._gold, strict=True)):
            options = of_option[:, start:end]
            correct[:, at] = options.argmax(axis=1) == gold
            log_likelihood[:, at] = options[:, gold] - np.logaddexp.reduce(options, axis=1)
        on_prompts(correct.size)
        return Scores(correct, log_likelihood)


class GeneratedScorer:
    """Scores individuals one by one on the text that they generate: the task's own metric, `score(output, prompt)` in [0, 1].

    `correct` is that figure; `log_likelihood` is 0, nothing is teacher-forced.
    """

    compilations = 0
    individuals_at_once = 1

    def __init__(
        self,
        model: Llama,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        score: Callable[[str, Prompt], float],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        batch_size: int | None = None,
    ):
        self._model, self._tokenizer, self._prompts, self._score = model, tokenizer, prompts, score
        self._ids = [prompt.ids for prompt in encode(prompts, tokenizer, model.config.max_position_embeddings)]
        self._settings = {"max_new_tokens": max_new_tokens, "stop": stop_ids, "batch_size": batch_size}
        self.num_prompts = len(prompts)
        self.answer_tokens = np.ones(len(prompts), int)

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
    ) -> Scores:
        """As `Scorer`'s."""
        rows = []
        for individual in factors:
            ids = generate_ids(
                self._model, self._ids, factors=individual, granularity=granularity, on_prompts=on_prompts, **self._settings
            )
            outputs = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            rows.append([self._score(output, prompt) for output, prompt in zip(outputs, self._prompts, strict=True)])
        scores = np.array(rows, np.float32).reshape(len(factors), self.num_prompts)
        return Scores(scores, np.zeros_like(scores))


def generate_ids(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    factors: Float[np.ndarray, "..."] | None = None,
    granularity: Granularity = "layer",
    make_method: Callable[[int], Method] | None = None,
    max_new_tokens: int = 100,
    stop: Sequence[int] = (),
    keep_stop: bool = False,
    batch_size: int | None = None,
    on_prompts: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Greedy continuations of token ids, in the order of the prompts, each cut before the first id of `stop` (or behind it).

    By the model with `factors`, or by the method that `make_method` makes for a length in tokens.
    """
    _check_ids(model, prompts)
    longest = max(len(ids) for ids in prompts)
    if make_method is None:
        scaled = None if factors is None else jnp.asarray(factors, jnp.float32)
        method = of_table(model.config.rope_table(longest + max_new_tokens, scaled, granularity))
    else:
        method = make_method(longest + max_new_tokens)
    longest = round_up(longest)
    whole = longest + max_new_tokens
    at_once = min(tokens_that_fit(model, whole, 1, cached=True), tokens_worth_it(whole)) // whole // len(method.tables.inv_freq)
    batch_size = batch_size or max(1, min(len(prompts), at_once))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    ends = frozenset(stop)
    start = 0
    while start < len(order):
        at = order[start : start + batch_size]
        chosen = [list(prompts[i]) for i in at]
        padding = [chosen[0]] * (batch_size - len(chosen))  # the last batch is as large as the others: one compilation
        tokens, lengths = (jnp.asarray(array) for array in padded(chosen + padding, round_up(len(chosen[-1]))))
        try:
            new = np.asarray(greedy(model, tokens, lengths, method, jnp.array(stop, jnp.int32), max_new_tokens))
        except jax.errors.JaxRuntimeError as error:
            if batch_size == 1 or not out_of_memory(error):
                raise
            batch_size = math.ceil(batch_size / 2)
            continue
        for i, ids in zip(at, new.tolist(), strict=False):
            end = next((n for n, token in enumerate(ids) if token in ends), len(ids))
            outputs[i] = ids[: end + keep_stop]
        start += len(at)
        on_prompts(len(at))
    return outputs


def _check_ids(model: Llama, sequences: Sequence[Sequence[int]]) -> None:
    # Looking up a row that is not there gives another one, without an error.
    highest = max(map(max, sequences))
    if highest >= model.config.vocab_size:
        raise UserError(
            f"the tokenizer gives the id {highest}, but the model's embedding has {model.config.vocab_size} rows; "
            "is it the tokenizer of this model?"
        )
