"""Greedy continuations of prompts, and scores of individuals by generated text.

On a mesh, a batch of prompts is distributed over the population axis: see `lpes_jax.mesh`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.memory import tokens_of_a_compilation, tokens_that_fit, tokens_worth_it, unless_out_of_memory
from lpes_jax.mesh import mesh_of, to_host
from lpes_jax.models.llama.generate import continuation
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.prefixes import padded, round_up
from lpes_jax.rope import Granularity
from lpes_jax.scores import Scores
from lpes_jax.tasks.prompts import Prompt, encode


class GeneratedScorer:
    """Scores individuals one by one on generated text, by the task's own metric, `score(output, prompt)` in [0, 1].

    `correct` is that score. `log_likelihood` is 0, because nothing is teacher-forced, or NaN if logits were not finite.
    """

    has_likelihood = False
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
        self.longest = max(map(len, self._ids), default=0) + max_new_tokens
        self.answer_tokens = np.ones(len(prompts), int)

    def __call__(
        self,
        factors: Float[np.ndarray, "P ..."],
        granularity: Granularity = "layer",
        on_prompts: Callable[[int], None] = lambda count: None,
        *,
        gains: Float[np.ndarray, "P ..."] | None = None,
        gains_granularity: Granularity = "layer",
    ) -> Scores:
        """See `Scorer`."""
        rows, finite = [], []
        for number, individual in enumerate(factors):
            individual_gains = None if gains is None else gains[number]
            found = LayerFactors(individual, granularity, individual_gains, gains_granularity)
            ids, finite_rows = _generated(self._model, self._ids, factors=found, on_prompts=on_prompts, **self._settings)
            outputs = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            rows.append([self._score(output, prompt) for output, prompt in zip(outputs, self._prompts, strict=True)])
            finite.append(finite_rows)
        scores = np.array(rows, np.float32).reshape(len(factors), self.num_prompts)
        is_finite = np.array(finite, bool).reshape(scores.shape)
        return Scores(np.where(is_finite, scores, 0), np.where(is_finite, np.float32(0), np.float32(np.nan)))


def generate_ids(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    factors: LayerFactors | Float[np.ndarray, "..."] | None = None,
    granularity: Granularity = "layer",
    make_method: Callable[[int], Method] | None = None,
    max_new_tokens: int = 100,
    stop: Sequence[int] = (),
    keep_stop: bool = False,
    batch_size: int | None = None,
    on_prompts: Callable[[int], None] = lambda count: None,
    name: str = "",
) -> list[list[int]]:
    """Greedy continuations of token ids, in the order of the prompts, each up to the first id of `stop`.

    Args:
        model: The model.
        prompts: Token ids.
        factors: A `LayerFactors`, or an array without gains; None means the plain model.
        granularity: Granularity of an array.
        make_method: Makes a method for a length in tokens, in place of factors.
        max_new_tokens: The limit of new tokens.
        stop: Ids that end an output.
        keep_stop: Whether an output includes the id that ends it.
        batch_size: Prompts per pass and device; None means as many as fit the memory.
        on_prompts: Called with the number of finished prompts.
        name: The name of the factors or method, for the error about logits that are not finite.

    Raises:
        UserError: An id is outside the vocabulary, a count is below 1, or logits are not finite.
    """
    outputs, finite = _generated(
        model,
        prompts,
        factors=factors,
        granularity=granularity,
        make_method=make_method,
        max_new_tokens=max_new_tokens,
        stop=stop,
        keep_stop=keep_stop,
        batch_size=batch_size,
        on_prompts=on_prompts,
    )
    if not all(finite):
        bad = [[*ids, *output] for ids, output, is_finite in zip(prompts, outputs, finite, strict=True) if not is_finite]
        raise not_finite(model, bad, factors, granularity, name=name, method=make_method is not None)
    return outputs


def _generated(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    factors: LayerFactors | Float[np.ndarray, "..."] | None = None,
    granularity: Granularity = "layer",
    make_method: Callable[[int], Method] | None = None,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    keep_stop: bool = False,
    batch_size: int | None = None,
    on_prompts: Callable[[int], None] = lambda count: None,
) -> tuple[list[list[int]], list[bool]]:
    """The continuations of `generate_ids`, and whether all logits of each were finite."""
    check_ids(model, prompts)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    longest = max(len(ids) for ids in prompts)
    if make_method is None:
        scaled = jnp.asarray(factors, jnp.float32) if isinstance(factors, np.ndarray) else factors
        method = table_method(model.config.rope_table(longest + max_new_tokens, scaled, granularity))
    else:
        method = make_method(longest + max_new_tokens)
    longest = round_up(longest)
    whole = longest + max_new_tokens
    mesh = mesh_of(model)
    shards = 1 if mesh is None else mesh.shape["population"]
    at_once = (
        min(tokens_that_fit(model, whole, 1, cached=True), tokens_worth_it(model, whole, cached=True))
        // whole
        // len(method.tables.inv_freq)
    )
    fewest = math.ceil(len(prompts) / shards)
    per_device = max(1, min(fewest, at_once)) if batch_size is None else min(batch_size, fewest)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    width, compilation = longest, tokens_of_a_compilation(model)
    outputs: list[list[int]] = [[] for _ in prompts]
    finite = [True] * len(prompts)
    ends = frozenset(stop)
    start = 0
    while start < len(order):
        size = per_device * shards
        batch = order[start : start + size]
        chosen = [list(prompts[i]) for i in batch]
        padding = [chosen[0]] * (size - len(chosen))  # the last batch is as large as the others, for a single compilation
        # Few distinct widths: in steps of a quarter of the power of two, and only if the saving is worth a compilation.
        narrower = round_up(max(map(len, chosen)), 4)
        if (width - narrower) * (len(order) - start) > compilation:
            width = narrower
        tokens, lengths = (jnp.asarray(array) for array in padded(chosen + padding, width))
        arguments = model, tokens, lengths, method, jnp.array(stop, jnp.int32), max_new_tokens
        new, failed = unless_out_of_memory(partial(continuation, *arguments))
        if new is None:
            if failed is not None and per_device == 1:
                raise failed
            per_device = math.ceil(per_device / 2)
            continue
        for i, ids, is_finite in zip(batch, *(part.tolist() for part in to_host(new)), strict=False):
            end = next((n for n, token in enumerate(ids) if token in ends), len(ids))
            outputs[i], finite[i] = ids[: end + keep_stop], is_finite
        start += len(batch)
        on_prompts(len(batch))
    return outputs, finite
