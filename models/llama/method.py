"""What may stand in for the plain way from a prompt to logits: other RoPE tables, several of them, or another attention.

A `Method` is data for `hidden_states`, `prefill` and `greedy`, like a table:

    tables       one RoPE table for LPES, position interpolation, NTK, YaRN; several for Attention Buckets, a pass for each
    merge        how the logits of several passes become one (None for a single table)
    replacement  what rotates and attends in place of the model's own attention (Ms-PoE, MoICE, Self-Extend), or the channel of
                 the hidden states that queries and keys see scaled; None: neither

An `Attention` gets queries and keys before rotation, and rotates as it likes; the queries have the table's gains already. The
cache then holds keys before rotation; entry s of a row is its position s. What it knows of a prompt and needs again for every
new token is its state.

Letters: n tables, B batch, T queries, S keys, H heads, K key-value heads, D head dim, L layers, G = 1 or K, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.rope import RopeTable


class Layer(NamedTuple):
    """What an attention is told about the layer that it stands in. `parameters` are the layer's own, of the method."""

    number: Int[Array, ""]
    inv_freq: Float[Array, "G half"]
    attention_scaling: Float[Array, ""]
    gains: Float[Array, "H half"]
    parameters: Any


@runtime_checkable
class Attention(Protocol):
    """Rotates and attends. Hashable: it is compiled in, so all that varies goes into `parameters`."""

    def prefill(
        self,
        layer: Layer,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        lengths: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T H D"], Any]:
        """Causal attention of prompts that are padded on the right, and the state for the tokens that follow.

        `lengths` are those of the prompts: what stands behind (padding, a teacher-forced answer) must not shape a statistic.
        """
        ...

    def decode(
        self,
        layer: Layer,
        state: Any,
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B S K D"],
        v: Float[Array, "B S K D"],
        positions: Int[Array, "B"],
    ) -> Float[Array, "B 1 H D"]:
        """Attention of one new token a row, at `positions`, over the cache up to itself."""
        ...


class Channel(NamedTuple):
    """The channel of the normalised hidden states that each layer's queries and keys see multiplied by `factor` (1: none).

    So for the last token of a prompt and all that follow: their queries and, for these alone, all keys. Values are left as
    they are, and so is the attention of the tokens before. The cache holds the changed keys, rotated.
    """

    number: Int[Array, "*layers"]
    factor: Float[Array, "*layers"]


@dataclass(frozen=True)
class Replacement:
    """An attention and its parameters, every leaf `[L, ...]`; or no attention, and a `Channel` as the parameters."""

    parameters: Any
    attention: Attention | None


@dataclass(frozen=True)
class Method:
    """See above. `tables`: with an axis n in front of every leaf. `passes`: forward passes a token."""

    tables: RopeTable
    replacement: Replacement | None = None
    merge: Callable[[Float[Array, "n B A V"]], Float[Array, "B A V"]] | None = None
    passes: float = 1.0


jax.tree_util.register_dataclass(Replacement, data_fields=["parameters"], meta_fields=["attention"])
jax.tree_util.register_dataclass(Method, data_fields=["tables", "replacement"], meta_fields=["merge", "passes"])


def of_table(table: RopeTable) -> Method:
    """The plain model with a table: `[L, G, half]`."""
    return Method(jax.tree.map(lambda leaf: leaf[None], table))


def of_attention(name: str, attention: Attention, config: LlamaConfig, length: int, parameters: Any = None) -> Method:
    """The model with another attention and its own table, for texts of at most `length` tokens.

    Raises UserError where a layer has a sliding window in use: `name` (the method) would let it see the whole text.
    """
    if (config.windows(length) < length).any():
        raise UserError(
            f"{name} attends to the whole text, but layers of this model see only the last {config.sliding_window} tokens; "
            f"give it texts of at most {config.sliding_window} tokens, answer included, or a model without sliding windows"
        )
    return replace(of_table(config.rope_table(length)), replacement=Replacement(parameters, attention))
