"""The traced computation of one pass's scores, and the interfaces of scorers.

Scoring generates no text. The gold answer follows the prompt (teacher forcing). It is the greedy continuation exactly if each
of its tokens is the argmax. The same pass gives its log-likelihood.

Letters: P population, N prompts, B groups of a batch, R rows of a group, A answer tokens, M tokens of a group that predict an
answer token, E embedding, V vocabulary.
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
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import Llama, check_ids, hidden_states, method_logits, method_model, over_tables
from lpes_jax.models.llama.prefix import states_read
from lpes_jax.prefixes import Batch
from lpes_jax.rope import Granularity, RopeTable, is_traced


class Scores(NamedTuple):
    """`correct`: an admitted answer is the greedy continuation. `log_likelihood`: of the admitted answers together, in nats.

    If the logits of an answer are not finite, the log-likelihood is NaN and `correct` is False.
    """

    correct: Bool[np.ndarray, "P N"] | Float[np.ndarray, "P N"]
    log_likelihood: Float[np.ndarray, "P N"]


@runtime_checkable
class PopulationScorer(Protocol):
    """Scores populations on a fixed set of prompts.

    Attributes:
        num_prompts: The number of prompts.
        answer_tokens: Tokens of each prompt's shortest answer.
        longest: Tokens of the longest prompt with its answer.
        individuals_at_once: Individuals of one pass over all devices.
        has_likelihood: Whether `Scores.log_likelihood` is a likelihood; otherwise it only tells whether logits were finite.
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
        """Scores of each individual on each prompt. `on_prompts` gets the number of finished (individual, prompt) pairs."""
        ...


@runtime_checkable
class LikelihoodScorer(PopulationScorer, Protocol):
    """A scorer that teacher-forces answers or options, and also scores methods.

    `compilations`: the number of shapes compiled so far.
    """

    @property
    def compilations(self) -> int: ...

    def lengthen(self, longest: int) -> None:
        """Rebuild length-dependent RoPE for texts of `longest` tokens."""
        ...

    def method_scores(self, method: Method, on_prompts: Callable[[int], None] = lambda count: None) -> Scores:
        """Scores of one method (made for `longest` tokens), P = 1."""
        ...

    def sequences(self, prompt: int) -> list[list[int]]:
        """The token ids that are scored for a prompt."""
        ...


def batch_scores(
    model: Llama, batch: Batch, method: Method, *, remat: bool = False
) -> tuple[Bool[Array, "rows"], Float[Array, "rows"]]:
    """For each row: whether all answer tokens are the argmax, and the sum of their log-probabilities in nats.

    The scores of row r of group b have the index b R + r. If logits are not finite, neither is the log-likelihood, and the row
    is not correct.

    Args:
        model: The model.
        batch: The rows.
        method: The method to use.
        remat: Whether to recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        TypeError: The method has a replacement, and a group has several rows.
    """

    model = method_model(model, method)

    def states(table: RopeTable) -> Float[Array, "B M E"]:
        if method.replacement is None:
            return states_read(model, batch.groups, table, batch.read, remat=remat)
        _, rows_per_group, answer_length = batch.answers.shape
        if rows_per_group > 1:
            raise TypeError("an attention that replaces the model's own takes single rows, not groups of several")
        run = partial(hidden_states, model, batch.tokens, table, remat=remat, tokens_after=answer_length - 1)
        hidden = run(replacement=method.replacement, lengths=batch.read[:, 0] + 1)
        return jnp.take_along_axis(hidden, batch.read[:, :, None], axis=1)

    logits = method_logits(model, over_tables(states, method.tables), method)  # [B, M, V]
    group = jnp.arange(len(batch.read_index))[:, None, None]
    predicted = jnp.argmax(logits, axis=-1)[group, batch.read_index]  # [B, R, A]
    chosen = logits[group, batch.read_index, batch.answers] - jax.nn.logsumexp(logits, axis=-1)[group, batch.read_index]
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
    """`batch_scores` of every individual, vmapped over factors and gains. Of traced arguments, only shapes are checked.

    Args:
        model: The model.
        batch: The rows.
        factors: The factors of each individual, which divide the frequencies of `table`.
        granularity: Their granularity.
        table: The RoPE table; None means the model's own.
        gains: The gains of each individual; None means 1.
        gains_granularity: Their granularity.

    Raises:
        UserError: The model lacks an id, factors or gains do not fit it or are out of range, or no individual has finite
            logits.
    """
    checked_factors(model.config, factors, granularity, population=True)
    checked_factors(model.config, gains, gains_granularity, population=True, what="gains")
    if not is_traced(tokens := batch.tokens):
        for ids in (tokens, batch.answers):
            check_ids(model, np.asarray(ids), "the batch holds")
    own = model.config.rope_table(tokens.shape[1]) if table is None else table

    def individual(factors: Array, gains: Array | None) -> tuple[Array, Array]:
        scaled = own.scaled(factors, granularity)
        return batch_scores(
            model, batch, table_method(scaled if gains is None else scaled.with_gains(gains, gains_granularity))
        )

    correct, log_likelihood = jax.vmap(individual)(factors, gains)
    if not is_traced(log_likelihood) and not np.isfinite(log_likelihood).all(axis=1).any():
        first_gains = None if gains is None else np.asarray(gains[0])
        first = LayerFactors(np.asarray(factors[0]), granularity, first_gains, None if gains is None else gains_granularity)
        raise not_finite(model, np.asarray(tokens).tolist(), first, name="individual 0")
    return correct, log_likelihood
