"""Run prompts with shared prefixes in one pass: every shared token is computed once.

Each row of `Groups` contains the tokens of several prompts as a token tree in depth-first order: the root, which is the prefix
that all of them share, padded to `prefix` tokens; then the branches, which are what each prompt does not share with the one
before. A token attends only to its own path from the root, and is rotated at its position in its prompt. The hidden states
therefore equal those of the single prompts. A single prompt is a group without branches.

The last layer computes keys and values of all tokens, and everything else only of the tokens that are read (`run_layers`).

Letters: B groups, T = prefix + S tokens of a group, M tokens of it that are read, H heads, D head dim, E embedding.
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
class Groups:
    """Groups of prompts as token trees (see above).

    Attributes:
        tokens: Token ids.
        positions: The position of each token in its prompt.
        ends: The token with index j is seen by those with j <= index < ends[j].
        prefix: Tokens of the root, including padding; static.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    ends: Int[Array, "B T"]
    prefix: int


jax.tree_util.register_dataclass(Groups, data_fields=["tokens", "positions", "ends"], meta_fields=["prefix"])


def single_prompts(tokens: Int[Array, "B T"]) -> Groups:
    """A group per row, of one prompt that is padded on the right."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    return Groups(tokens, positions, jnp.full(tokens.shape, length, jnp.int32), length)


def states_read(
    model: Llama, groups: Groups, table: RopeTable, read: Int[Array, "B M"], *, remat: bool = False
) -> Float[Array, "B M E"]:
    """The normalised last hidden states of the tokens with the indices `read`, with the model's own attention.

    `remat` recomputes each layer in the backward pass instead of keeping its activations.
    """
    config, length = model.config, groups.tokens.shape[1]

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, None]:
        row, read = context.row, context.read
        cos, sin = cos_sin(row.inv_freq, row.attention_scaling, groups.positions)
        k = rotate(k, cos, sin)
        if read is not None:
            cos, sin = (jnp.take_along_axis(angles, read[:, :, None, None], axis=1) for angles in (cos, sin))
        q = rotate(q, cos * row.gains, sin * row.gains)
        return within_window(config, length, context.own, partial(_over_groups, groups, read), q, k, v), None

    rows, own = layer_rows(config, table), slides(config, length)
    return run_layers(model, model.embed[...][groups.tokens], rows, attend, own, read=read, remat=remat)[0]


def _over_groups(groups: Groups, read: Int[Array, "B M"] | None, window: int | None) -> Callable[..., Array]:
    return partial(_attention, groups, read, window)


def _attention(
    groups: Groups, read: Int[Array, "B M"] | None, window: int | None, q: Array, k: Array, v: Array
) -> Float[Array, "B S H D"]:
    """Attention of the tokens `read`, or of all tokens: the causal kernel for the root, masked attention for the branches."""
    prefix, (batch, length) = groups.prefix, groups.tokens.shape
    if read is not None:
        return masked_attention(q, k, v, read, groups.ends, groups.positions, window)
    root = causal_attention(q[:, :prefix], k[:, :prefix], v[:, :prefix], window)
    if prefix == length:
        return root
    queries = jnp.broadcast_to(jnp.arange(prefix, length, dtype=jnp.int32), (batch, length - prefix))
    branches = masked_attention(q[:, prefix:], k, v, queries, groups.ends, groups.positions, window)
    return jnp.concatenate([root, branches], axis=1)
