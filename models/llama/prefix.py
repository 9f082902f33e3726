"""Prompts that begin alike in one pass: every shared token is computed once, and only where it is read up to the end.

A `Trees` has in each row the tokens of some prompts as a tree, written depth first: what all of them begin with, padded to
`prefix` tokens, then what follows in each, where it parts from the one before. A token attends to its own path from the root
alone, and is rotated at its position in its prompt. So the hidden states are those of the prompts one by one. A single prompt
is a tree without branches.

The last layer makes keys and values of all tokens, and the rest of the tokens that are read alone (`run_layers`).

Letters: B trees, T = prefix + S tokens of a tree, M tokens of it that are read, E embedding, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lpes_jax.models.llama.attention import causal_attention, masked_attention
from lpes_jax.models.llama.model import LayerContext, Llama, layer_rows, run_layers, slides, within_window
from lpes_jax.rope import RopeTable, cos_sin, rotate


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
    config, length = model.config, trees.tokens.shape[1]

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, None]:
        row, read = context.row, context.read
        cos, sin = cos_sin(row.inv_freq, row.attention_scaling, trees.positions)
        k = rotate(k, cos, sin)
        if read is not None:
            cos, sin = (jnp.take_along_axis(angles, read[:, :, None, None], axis=1) for angles in (cos, sin))
        q = rotate(q, cos * row.gains, sin * row.gains)
        return within_window(config, length, context.own, partial(_over_trees, trees, read), q, k, v), None

    rows, own = layer_rows(config, table), slides(config, length)
    return run_layers(model, model.embed[...][trees.tokens], rows, attend, own, read=read, remat=remat)[0]


def _over_trees(trees: Trees, read: Int[Array, "B M"] | None, window: int | None) -> Callable[..., Array]:
    return partial(_attention, trees, read, window)


def _attention(
    trees: Trees, read: Int[Array, "B M"] | None, window: int | None, q: Array, k: Array, v: Array
) -> Float[Array, "B S H D"]:
    """Of the tokens `read`, or of all: the root's by the causal kernel, the others' by a mask."""
    prefix, (batch, length) = trees.prefix, trees.tokens.shape
    if read is not None:
        return masked_attention(q, k, v, read, trees.ends, trees.positions, window)
    root = causal_attention(q[:, :prefix], k[:, :prefix], v[:, :prefix], window)
    if prefix == length:
        return root
    queries = jnp.broadcast_to(jnp.arange(prefix, length, dtype=jnp.int32), (batch, length - prefix))
    branches = masked_attention(q[:, prefix:], k, v, queries, trees.ends, trees.positions, window)
    return jnp.concatenate([root, branches], axis=1)
