"""Scores of one pass, as JAX traces it, and what every scorer offers.

No text is generated. The gold answer stands behind the prompt (teacher forcing); it is what greedy generation gives exactly if
each of its tokens is the argmax. Its log-likelihood comes from the same pass.

Letters: P population, N prompts, B trees of a batch, R rows of a tree, A answer tokens, M tokens of a tree that predict an
answer token, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.inputs import checked_factors
from lpes_jax.models.llama.method import Method, of_table
from lpes_jax.models.llama.model import Llama, check_ids, hidden_states, method_logits, over_tables
from lpes_jax.models.llama.prefix import states_read
from lpes_jax.prefixes import Batch
from lpes_jax.rope import Granularity, RopeTable, is_traced


class Scores(NamedTuple):
    """`correct`: an admitted answer is the greedy continuation. `log_likelihood`: of the admitted answers together, in nats.

    Where the logits of an answer were not finite, the log-likelihood is NaN and nothing is correct.
    """

    correct: Bool[np.ndarray, "P N"] | Float[np.ndarray, "P N"]
    log_likelihood: Float[np.ndarray, "P N"]


@runtime_checkable
class PopulationScorer(Protocol):
    """What scores populations on a fixed set of prompts.

    `answer_tokens`: of each prompt's shortest answer; `longest`: tokens of the longest prompt with its answer;
    `individuals_at_once`: of one pass over all devices; `has_likelihood`: whether `Scores.log_likelihood` says more than that
    logits were finite.
    """

    num_prompts: int
    answer_tokens: Int[np.ndarray, "N"]
    has_likelihood: bool

    @property
    def longest(self) -> int: ...

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


@runtime_checkable
class LikelihoodScorer(PopulationScorer, Protocol):
    """A scorer that teacher-forces answers or options; it scores methods as well.

    `compilations`: shapes compiled so far.
    """

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
    model: Llama, batch: Batch, method: Method, *, remat: bool = False
) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    """For each row: are all answer tokens the argmax, and the sum of their log-probabilities in nats.

    Row r of tree b is b R + r. `remat` recomputes each layer in the backward pass instead of keeping its activations. A
    log-likelihood that is not finite is that of logits which are not: such a row is not right. Raises TypeError for a method
    with a replacement on trees of several rows.
    """

    def states(table: RopeTable) -> Float[Array, "B M E"]:
        if method.replacement is None:
            return states_read(model, batch.trees, table, batch.read, remat=remat)
        _, rows_of_tree, answer_length = batch.answers.shape
        if rows_of_tree > 1:
            raise TypeError("an attention that replaces the model's own takes rows one by one, not trees of several")
        run = partial(hidden_states, model, batch.tokens, table, remat=remat, behind=answer_length - 1)
        hidden = run(replacement=method.replacement, lengths=batch.read[:, 0] + 1)
        return jnp.take_along_axis(hidden, batch.read[:, :, None], axis=1)

    logits = method_logits(model, over_tables(states, method.tables), method)  # [B, M, V]
    tree = jnp.arange(len(batch.read_index))[:, None, None]
    predicted = jnp.argmax(logits, axis=-1)[tree, batch.read_index]  # [B, R, A]
    chosen = logits[tree, batch.read_index, batch.answers] - jax.nn.logsumexp(logits, axis=-1)[tree, batch.read_index]
    correct = (predicted == batch.answers) | ~batch.is_answer
    log_likelihood = jnp.where(batch.is_answer, chosen, 0).sum(axis=-1)
    return (correct.all(axis=-1) & jnp.isfinite(log_likelihood)).ravel(), log_likelihood.ravel()


def population_scores(
    model: Llama,
    batch: Batch,
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
    if not is_traced(tokens := batch.tokens):
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
