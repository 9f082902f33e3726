"""Prompts that begin alike in one pass: every shared token is computed once, and only where it is read up to the end.

A `Trees` has in each row the tokens of some prompts as a tree, written depth first: what all of them begin with, padded to
`prefix` tokens, then what follows in each, where it parts from the one before. A token attends to its own path from the root
alone, and is rotated at its position in its prompt. So the hidden states are those of the prompts one by one. A single prompt
is a tree without branches.

The last layer makes keys and values of all tokens, and the rest of the tokens that are read alone: nothing else needs it. It is
then compiled beside the others, which short prompts do not win back, and not in gradients.

Letters: B trees, T = prefix + S tokens of a tree, M tokens of it that are read, E embedding, L layers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lpes_jax.models.llama.attention import causal_attention, masked_attention
from lpes_jax.models.llama.model import Llama, decoder_layer, layer_rows, rms_norm
from lpes_jax.rope import RopeTable, cos_sin, rotate

_SHORT = 256  # tokens of a tree, below which the last layer is as the others


@dataclass(frozen=True)
class Trees:
    """See above. The token with index j is seen by those with j <= index < ends[j]. `prefix`: static, the root's width."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    ends: Int[Array, "B T"]
    prefix: int


jax.tree_util.register_dataclass(Trees, data_fields=["tokens", "positions", "ends"], meta_fields=["prefix"])


def single_prompts(tokens: Int[Array, "B T"]) -> Trees:
    """Each row a prompt of its own, padded on the right."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    return Trees(tokens, positions, jnp.full(tokens.shape, length, jnp.int32), length)


def states_read(
    model: Llama, trees: Trees, table: RopeTable, read: Int[Array, "B M"], *, remat: bool = False
) -> Float[Array, "B M E"]:
    """The normalised last hidden states of the tokens with the indices `read`, by the model's own attention.

    `remat` recomputes each layer in the backward pass instead of keeping its activations.
    """
    config, last = model.config, model.config.num_layers - 1
    slides = config.windows(trees.tokens.shape[1]) < trees.tokens.shape[1]
    inputs = model.layers, layer_rows(config, table), jnp.asarray(slides)

    def layer(x: Array, inputs: Any, only: Int[Array, "B M"] | None = None) -> Array:
        weights, row, here = inputs

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            cos, sin = cos_sin(row.inv_freq, row.attention_scaling, trees.positions)
            k = rotate(k, cos, sin)
            if only is not None:
                cos, sin = (jnp.take_along_axis(angles, only[:, :, None, None], axis=1) for angles in (cos, sin))
            operands = rotate(q, cos * row.gains, sin * row.gains), k, v
            if slides.all() or not slides.any():  # nothing to choose: no branch in the program
                return _attention(trees, only, config.sliding_window if slides.all() else None, *operands), None
            windowed, whole = (partial(_attention, trees, only, window) for window in (config.sliding_window, None))
            return jax.lax.cond(here, windowed, whole, *operands), None

        return decoder_layer(config, weights, x, attend, only)[0]

    x = model.embed[...][trees.tokens]
    if remat or trees.tokens.shape[1] < _SHORT:  # gradients of the weights come stacked, as the weights are
        step = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(lambda x, inputs: (step(x, inputs), None), x, inputs)
        x = jnp.take_along_axis(x, read[:, :, None], axis=1)
    else:

        def of(at: Int[Array, ""] | int) -> Any:  # stacks without their last layer would be copies
            return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), inputs)

        x, _ = jax.lax.scan(lambda x, at: (layer(x, of(at)), None), x, jnp.arange(last))
        x = layer(x, of(last), read)
    return rms_norm(x, model.norm[...], config.rms_norm_eps)


def _attention(
    trees: Trees, only: Int[Array, "B M"] | None, window: int | None, q: Array, k: Array, v: Array
) -> Float[Array, "B S H D"]:
    """Of the tokens `only`, or of all: the root's by the causal kernel, the others' by a mask."""
    prefix, (batch, length) = trees.prefix, trees.tokens.shape
    if only is not None:
        return masked_attention(q, k, v, only, trees.ends, trees.positions, window)
    root = causal_attention(q[:, :prefix], k[:, :prefix], v[:, :prefix], window)
    if prefix == length:
        return root
    at = jnp.broadcast_to(jnp.arange(prefix, length, dtype=jnp.int32), (batch, length - prefix))
    branches = masked_attention(q[:, prefix:], k, v, at, trees.ends, trees.positions, window)
    return jnp.concatenate([root, branches], axis=1)
