"""Logits and text of a model with factors, for use from Python."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.choices import Granularity, PromptForm
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.generation import generate_ids
from lpes_jax.inputs import checked_factors, checked_tokens
from lpes_jax.models.llama.chat import make_chat
from lpes_jax.models.llama.model import Llama, hidden_states, output_logits
from lpes_jax.rope import RopeTable, is_traced
from lpes_jax.same_model import check_model
from lpes_jax.tasks.prompts import token_ids

Tokens = Array | np.ndarray | Sequence[Any]  # whole numbers [B, T]; anything else raises UserError
Factors = LayerFactors | Array | np.ndarray | Sequence[Any] | None


def logits(
    model: Llama,
    tokens: Tokens,
    factors: Factors = None,
    granularity: Granularity = "layer",
    gains: Array | np.ndarray | Sequence[float] | None = None,
    gains_granularity: Granularity = "layer",
    *,
    other_model: bool = False,
) -> Float[Array, "B T V"]:
    """float32 logits at every position of `tokens` `[B, T]`; rows may be padded on the right.

    Differentiable in arrays of factors and gains, and usable in a jitted training step with the model and the factors as its
    arguments. Factors and gains of 1 change no bit. RoPE of the types `dynamic` and `longrope` uses the length T (see
    `lpes_jax.rope`). For traced arguments (`jax.jit`, `jax.grad`) only the shapes are checked.

    Args:
        model: The model.
        tokens: Token ids.
        factors: A `LayerFactors` with its own gains, or an array (`lpes_jax.scale_layers`); None means the plain model.
        granularity: Granularity of an array of factors.
        gains: An array of gains, for use with an array of factors.
        gains_granularity: Its granularity.
        other_model: Whether to accept LayerFactors that were found for another model.

    Raises:
        UserError: Tokens are not ids `[B, T]` of the model's vocabulary (B and T at least 1), factors do not fit the model or
            exceed float32, a logit is not finite, or LayerFactors were found for a model of other sizes or another RoPE.
    """
    ids = checked_tokens(model, tokens)
    checked_factors(model.config, factors, granularity)
    checked_factors(model.config, gains, gains_granularity, what="gains")
    if isinstance(factors, LayerFactors):
        check_model(factors, model.config, other_model=other_model, quiet=True)
    numbers = factors if isinstance(factors, LayerFactors) else _floating(factors)
    table = model.config.rope_table(ids.shape[1], numbers, granularity, _floating(gains), gains_granularity)
    found, finite = _logits(model, ids, table)
    if not is_traced(finite) and not (is_finite := np.asarray(finite)).all():
        raise not_finite(model, np.asarray(ids)[~is_finite].tolist(), _found(factors, granularity, gains, gains_granularity))
    return found


def generate(
    model: Llama,
    tokenizer: Any,
    prompts: str | Sequence[str],
    factors: Factors = None,
    max_new_tokens: int = 100,
    *,
    other_model: bool = False,
    stop_ids: Sequence[int] | None = None,
    apply_chat_template: bool = False,
    prompt_form: PromptForm | None = None,
    system_prompt: str | None = None,
) -> list[str]:
    """The greedy continuation of each prompt, up to an id that ends a text or `max_new_tokens`.

    A tokenizer from `lpes_jax.load_tokenizer` has the ids that end a text: those of the model's generation_config.json,
    config.json and tokenizer, as for every verb. For any other tokenizer it is its `eos_token_id`.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: Texts, or a single text, which counts as a list of one.
        factors: A `LayerFactors` or an array of one factor per layer; None means the plain model.
        max_new_tokens: The limit of new tokens.
        other_model: Whether to accept LayerFactors that were found for another model.
        stop_ids: Ids that end a text, in place of the tokenizer's.
        apply_chat_template: As the verbs' flag.
        prompt_form: As the verbs' flag.
        system_prompt: As the verbs' flag.

    Raises:
        UserError: The factors do not fit the model, or were found for a model of other sizes, another RoPE or another tokenizer
            (other weights of the same sizes are not detected here; `evaluate` warns about them); there are no prompts, a prompt
            has no tokens or exceeds the window, `max_new_tokens` is below 1, an id is outside the vocabulary, or logits are not
            finite.
    """
    config = model.config
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"prompts must be a text or a list of texts, at least one; got {prompts!r:.60}")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    chat = make_chat(tokenizer, apply_chat_template=apply_chat_template, prompt_form=prompt_form, system_prompt=system_prompt)
    ids = token_ids(tokenizer, texts if chat is None else [chat.render(text) for text in texts])
    if empty := [text for text, tokens in zip(texts, ids, strict=True) if not tokens]:
        raise UserError(f"the prompt {empty[0]!r:.40} has no tokens, and this tokenizer adds no BOS; give it some text")
    if (longest := max(map(len, ids)) + max_new_tokens) > config.max_position_embeddings:
        raise UserError(
            f"the longest prompt with max_new_tokens {max_new_tokens} is {longest} tokens and the model's window is "
            f"{config.max_position_embeddings}; shorten it, or lower max_new_tokens"
        )
    checked_factors(config, factors, "layer")
    found = _found(factors, "layer", None, "layer")
    if found is not None:
        check_model(found, config, tokenizer=tokenizer, other_model=other_model, quiet=True)
    new = generate_ids(
        model,
        ids,
        factors=found,
        max_new_tokens=max_new_tokens,
        stop=_ends(tokenizer) if stop_ids is None else stop_ids,
    )
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def _ends(tokenizer: Any) -> Sequence[int]:
    """The ids that end a text, according to a tokenizer."""
    if (ends := getattr(tokenizer, "stop_ids", None)) is not None:
        return ends
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


@jax.jit
def _logits(model: Llama, tokens: Int[Array, "B T"], table: RopeTable) -> tuple[Float[Array, "B T V"], Bool[Array, "B"]]:
    """The logits, and whether all logits of each row are finite."""
    found = output_logits(model, hidden_states(model, tokens, table))
    return found, jnp.isfinite(found).all(axis=(1, 2))


def _floating(numbers: Any) -> Array | None:
    """Convert to an array of floats; an array of floats is unchanged."""
    if numbers is None or (isinstance(numbers, Array) and jnp.issubdtype(numbers.dtype, jnp.floating)):
        return numbers
    return jnp.asarray(numbers, jnp.float32)


def _found(factors: Factors, granularity: Granularity, gains: Any, gains_granularity: Granularity) -> LayerFactors | None:
    """The arguments as LayerFactors; None for the plain model."""
    if isinstance(factors, LayerFactors) or (factors is None and gains is None):
        return factors
    if gains is None:
        return LayerFactors(np.asarray(factors, np.float64), granularity)
    values = np.asarray(gains, np.float64)
    if factors is None:
        factors, granularity = np.ones(len(values)), "layer"
    return LayerFactors(np.asarray(factors, np.float64), granularity, values, gains_granularity)
