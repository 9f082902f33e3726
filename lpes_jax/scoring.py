"""(model, prompts, factors [P, ...]) -> for every individual and prompt: does the model say the gold answer, how likely is it.

No text is generated. The gold answer stands behind the prompt (teacher forcing); it is what greedy generation gives exactly if
each of its tokens is the argmax. Its log-likelihood comes from the same pass.

A pass takes a batch of prompts and a slab of individuals: vmapped over the individuals of a device with the weights unmapped,
and spread over the devices by `shard_map` on the population axis (`jax.pmap` is a wrapper of that today, and can't be nested
in other transformations as freely). Factors are arguments of the compiled program: new factors never compile anything.

Letters: P population, N prompts, B rows of a batch, T tokens, A answer tokens, L layers, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.models.llama.generate import greedy
from lpes_jax.models.llama.method import Method, of_table
from lpes_jax.models.llama.model import Llama, hidden_states, method_logits, over_tables
from lpes_jax.rope import Granularity, RopeTable, scale_layers
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode, option_prompts

_TOKENS_AT_ONCE = {"cpu": 2**12, "gpu": 2**18}  # a pass this large keeps the device busy; more gains nothing
_CPU_MEMORY = 2**31  # bytes that activations may take where the device does not say how much it has


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Prompts with their answers behind them, padded on the right; `first` is where the first answer token is predicted."""

    tokens: Int[Array, "B T"]
    first: Int[Array, "B"]
    answers: Int[Array, "B A"]
    is_answer: Bool[Array, "B A"]


class Scores(NamedTuple):
    """`correct`: an admitted answer is the greedy continuation. `log_likelihood`: of the admitted answers together, in nats."""

    correct: Bool[np.ndarray, "P N"] | Float[np.ndarray, "P N"]
    log_likelihood: Float[np.ndarray, "P N"]


def batch_scores(
    model: Llama, batch: Batch, method: Method, *, remat: bool = False
) -> tuple[Bool[Array, "B"], Float[Array, "B"]]:
    """For each row: are all answer tokens the argmax, and the sum of their log-probabilities in nats.

    `remat` is `hidden_states`'s, for gradients.
    """
    at = jnp.minimum(batch.first[:, None] + jnp.arange(batch.answers.shape[1]), batch.tokens.shape[1] - 1)

    def hidden(table: RopeTable) -> Float[Array, "B A E"]:
        hidden = hidden_states(model, batch.tokens, table, remat=remat, replacement=method.replacement, lengths=batch.first + 1)
        return jnp.take_along_axis(hidden, at[:, :, None], axis=1)

    logits = method_logits(model, over_tables(hidden, method.tables), method)  # [B, A, V]
    chosen = jnp.take_along_axis(logits, batch.answers[:, :, None], axis=-1)[..., 0]
    log_probability = chosen - jax.nn.logsumexp(logits, axis=-1)
    correct = (jnp.argmax(logits, axis=-1) == batch.answers) | ~batch.is_answer
    return correct.all(axis=-1), jnp.where(batch.is_answer, log_probability, 0).sum(axis=-1)


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
    batch: Batch,
    factors: Float[Array, "P ..."],
    granularity: Granularity = "layer",
    table: RopeTable | None = None,
) -> tuple[Bool[Array, "P B"], Float[Array, "P B"]]:
    """`batch_scores` of every individual, vmapped over the factors alone, which divide `table` (None: the model's own)."""
    own = model.config.rope_table(batch.tokens.shape[1]) if table is None else table

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
    model: Llama, batch: Batch, factors: Float[Array, "P ..."], table: RopeTable, granularity: Granularity, mesh: Mesh
) -> tuple[Bool[Array, "P B"], Float[Array, "P B"]]:
    everywhere, split = PartitionSpec(), PartitionSpec("population")

    def score(model: Llama, batch: Batch, factors: Array, table: RopeTable) -> tuple[Array, Array]:
        return population_scores(model, batch, factors, granularity, table)

    specs = (everywhere, everywhere, split, everywhere)
    return jax.shard_map(score, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)(model, batch, factors, table)


_method_scores = jax.jit(batch_scores)


class Scorer:
    """Scores populations on a fixed set of prompts.

    `batch_size` is prompts a pass and `population_chunk` individuals a pass and device; both are chosen from the shapes and
    the device's memory where they are None, and neither changes a result. `compilations` counts compiled shapes.
    """

    def __init__(
        self,
        model: Llama,
        prompts: Sequence[EncodedPrompt],
        *,
        batch_size: int | None = None,
        population_chunk: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.mesh = population_mesh() if mesh is None else mesh
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self.model = jax.device_put(model, self._replicated)
        self.num_prompts = len(prompts)
        rows = [(prompt.ids, answer) for prompt in prompts for answer in prompt.answers]
        _check_ids(model, [ids + answer for ids, answer in rows])
        self._prompt_of_row = np.repeat(np.arange(len(prompts)), [len(prompt.answers) for prompt in prompts])
        self.answer_tokens = np.array([min(len(answer) for answer in prompt.answers) for prompt in prompts])
        self.longest = longest = max(len(ids) + len(answer) for ids, answer in rows)
        self._table = jax.device_put(self.model.config.rope_table(longest), self._replicated)
        longest = round_up(longest)
        at_once = _tokens_at_once(model, longest, max(len(answer) for _, answer in rows))
        if batch_size is None:
            batches = math.ceil(len(rows) * longest / at_once)
            batch_size = math.ceil(len(rows) / batches)
        self._chunk = population_chunk or max(1, at_once // (batch_size * longest))
        self._batches = [(at, jax.device_put(batch, self._replicated)) for at, batch in _batches(rows, batch_size)]
        self._shapes: set[tuple] = set()

    @property
    def compilations(self) -> int:
        return len(self._shapes)

    @property
    def individuals_at_once(self) -> int:
        """Individuals of one pass, over all devices."""
        return self._chunk * self.mesh.size

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
    ) -> Scores:
        """Scores of each individual on each prompt. `on_prompts` is told how many (individual, prompt) pairs were done."""
        factors = np.asarray(factors, np.float32)
        devices = self.mesh.size
        correct = np.empty((len(factors), len(self._prompt_of_row)), bool)
        log_likelihood = np.empty(correct.shape, np.float32)
        start = 0
        while start < len(factors):
            # Powers of two below the full slab, so that odd populations compile a few sizes and no more.
            needed = math.ceil((len(factors) - start) / devices)
            slab = min(self._chunk, 1 << (needed - 1).bit_length()) * devices  # individuals of this pass
            individuals = factors[start : start + slab]
            padded = np.concatenate([individuals, np.repeat(factors[:1], slab - len(individuals), axis=0)])
            padded = jax.device_put(padded, NamedSharding(self.mesh, PartitionSpec("population")))
            done = []
            for _, batch in self._batches:
                self._shapes.add((batch.tokens.shape, batch.answers.shape, padded.shape, granularity))
                done.append(_sharded_scores(self.model, batch, padded, self._table, granularity, self.mesh))
            seen: set[int] = set()  # the admitted answers of a prompt may stand in two batches
            for (at, _), scores in zip(self._batches, done, strict=True):
                batch_correct, batch_likelihood = (np.asarray(values)[: len(individuals), : len(at)] for values in scores)
                correct[start : start + len(individuals), at] = batch_correct
                log_likelihood[start : start + len(individuals), at] = batch_likelihood
                new = set(self._prompt_of_row[at].tolist()) - seen
                seen |= new
                on_prompts(len(individuals) * len(new))
            start += len(individuals)
        return self._by_prompt(correct, log_likelihood)

    def of_method(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        rows = len(self._prompt_of_row)
        correct, log_likelihood = np.empty((1, rows), bool), np.empty((1, rows), np.float32)
        for at, batch in self._batches:
            self._shapes.add((batch.tokens.shape, batch.answers.shape))
            of_batch = _method_scores(self.model, batch, method)
            correct[0, at], log_likelihood[0, at] = (np.asarray(values)[: len(at)] for values in of_batch)
        on_prompts(self.num_prompts)
        return self._by_prompt(correct, log_likelihood)

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
    batch_size: int | None = None,
    on_prompts: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Greedy continuations of token ids, each cut before the first id of `stop`, in the order of the prompts.

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
    at_once = _tokens_at_once(model, longest + max_new_tokens, 1) // longest // len(method.tables.inv_freq)
    batch_size = batch_size or max(1, min(len(prompts), at_once))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        at = order[start : start + batch_size]
        chosen = [list(prompts[i]) for i in at]
        padding = [chosen[0]] * (batch_size - len(chosen))  # the last batch is as large as the others: one compilation
        tokens, lengths = _padded(chosen + padding, round_up(len(chosen[-1])))
        new = greedy(model, jnp.asarray(tokens), jnp.asarray(lengths), method, jnp.array(stop, jnp.int32), max_new_tokens)
        for i, ids in zip(at, np.asarray(new).tolist(), strict=False):
            end = next((n for n, token in enumerate(ids) if token in stop), len(ids))
            outputs[i] = ids[:end]
        on_prompts(len(at))
    return outputs


def round_up(length: int) -> int:
    """The padded length of a prompt: up to the next 32, or sixteenth of its power of two: few shapes, little waste."""
    step = max(32, 1 << (length - 1).bit_length() >> 4)
    return -(-length // step) * step


def pack_rows(rows: Sequence[tuple[list[int], list[int]]], answer_length: int | None = None) -> Batch:
    """(prompt ids, answer ids) of each row as one batch, padded to the longest."""
    answer_length = answer_length or max(len(answer) for _, answer in rows)
    length = round_up(max(len(ids) + len(answer) for ids, answer in rows))
    tokens, _ = _padded([ids + answer for ids, answer in rows], length)
    answers, answer_lengths = _padded([answer for _, answer in rows], answer_length)
    return Batch(
        tokens=jnp.asarray(tokens),
        first=jnp.array([len(ids) - 1 for ids, _ in rows], jnp.int32),
        answers=jnp.asarray(answers),
        is_answer=jnp.asarray(np.arange(answer_length) < answer_lengths[:, None]),
    )


def _batches(rows: list[tuple[list[int], list[int]]], batch_size: int) -> list[tuple[np.ndarray, Batch]]:
    # Sorted by length, so that a batch holds rows alike; each with its rows' indices. A short batch repeats its first row.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    answer_length = max(len(answer) for _, answer in rows)
    batches = []
    for start in range(0, len(order), batch_size):
        at = order[start : start + batch_size]
        filled = [rows[i] for i in at] + [rows[at[0]]] * (batch_size - len(at))
        batches.append((np.array(at), pack_rows(filled, answer_length)))
    return batches


def _check_ids(model: Llama, sequences: Sequence[Sequence[int]]) -> None:
    # Looking up a row that is not there gives another one, without an error.
    highest = max(map(max, sequences))
    if highest >= model.config.vocab_size:
        raise UserError(
            f"the tokenizer gives the id {highest}, but the model's embedding has {model.config.vocab_size} rows; "
            "is it the tokenizer of this model?"
        )


def _padded(sequences: list[list[int]], length: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    tokens = np.zeros((len(sequences), length), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, np.array([len(sequence) for sequence in sequences], np.int32)


def _tokens_at_once(model: Llama, length: int, answer_length: int) -> int:
    # Peak activations of a token: some copies of the hidden state, of q, k, v and of the MLP; float32 logits at the answers.
    config = model.config
    width = 6 * config.hidden_size + 3 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    token = width * model.embed[...].dtype.itemsize + 3 * 4 * config.vocab_size * answer_length // length
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    memory = (stats["bytes_limit"] - stats["bytes_in_use"]) // 2 if "bytes_limit" in stats else _CPU_MEMORY
    return max(length, min(_TOKENS_AT_ONCE["cpu" if device.platform == "cpu" else "gpu"], memory // token))
