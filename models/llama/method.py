"""Replacements of the plain path from a prompt to logits: other RoPE tables, another attention, or scaled states.

A `Method` is data for `hidden_states`, `prefill` and `greedy`, like a table. It is one of four:

    TableMethod      only RoPE tables: one for LPES, position interpolation, NTK, YaRN; several for Attention Buckets, whose
                     passes are merged
    AttentionMethod  an attention that rotates and attends in place of the model's own: Ms-PoE, MoICE, Self-Extend,
                     ZeroTuning
    ChannelMethod    a channel of the hidden states that queries and keys see scaled
    OutputMethod     scaled outputs of the attention: SEAL. The scales are folded into the weights (`model.method_model`)

All four have `tables`, `replacement` (for the model's own attention or queries and keys, or None), `output_scales`, `merge` and
`passes`, so code that runs a method does not ask which one it is.

An `Attention` receives queries and keys before rotation and rotates them itself; the table's gains are already applied to the
queries. The cache then contains keys before rotation; entry s of a row is its position s. The attention's state is what it
computes from a prompt and needs again for every new token.

Letters: n tables, B batch, T queries, S keys, H heads, K key-value heads, D head dim, L layers, G = 1 or K, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.rope import RopeTable


class Layer(NamedTuple):
    """The layer's data for an attention. `parameters` are the method's own for this layer."""

    number: Int[Array, ""]
    inv_freq: Float[Array, "G half"]
    attention_scaling: Float[Array, ""]
    gains: Float[Array, "H half"]
    parameters: Any


@runtime_checkable
class Attention(Protocol):
    """Rotates and attends. Hashable, because it is compiled in; everything that varies belongs in `parameters`."""

    def prefill(
        self,
        layer: Layer,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        lengths: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T H D"], Any]:
        """Causal attention of prompts that are padded on the right, and the state for the tokens that follow.

        `lengths` are those of the prompts. What follows them (padding, a teacher-forced answer) must not affect a statistic.
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
        """Attention of one new token per row, at `positions`, over the cache up to and including itself."""
        ...


class Channel(NamedTuple):
    """The channel of the normalised hidden states that each layer's queries and keys see multiplied by `factor` (1: unchanged).

    This applies to the last token of a prompt and all that follow: to their queries and, for these queries only, to all keys.
    Values and the attention of earlier tokens are unchanged. The cache contains the changed keys, rotated.
    """

    number: Int[Array, "*layers"]
    factor: Float[Array, "*layers"]

    @property
    def attention(self) -> None:
        """None: the model's own attention is used."""
        return None

    @property
    def parameters(self) -> "Channel":
        """The parameters of each layer."""
        return self


@dataclass(frozen=True)
class OtherAttention:
    """An attention and its parameters, every leaf `[L, ...]`."""

    parameters: Any
    attention: Attention


Replacement = OtherAttention | Channel


@dataclass(frozen=True)
class TableMethod:
    """The model with other RoPE tables, every leaf `[n, L, ...]`. `merge` combines the logits of n > 1 passes into one.

    `passes`: forward passes per token.
    """

    tables: RopeTable
    merge: Callable[[Float[Array, "n B A V"]], Float[Array, "B A V"]] | None = None
    passes: float = 1.0
    replacement: ClassVar[None] = None
    output_scales: ClassVar[None] = None


@dataclass(frozen=True)
class AttentionMethod:
    """The model with another attention. `tables` has the model's own RoPE, n = 1."""

    tables: RopeTable
    replacement: OtherAttention
    output_scales: ClassVar[None] = None
    merge: ClassVar[None] = None
    passes: ClassVar[float] = 1.0


@dataclass(frozen=True)
class ChannelMethod:
    """The model with a scaled channel of its hidden states. `tables` has the model's own RoPE, n = 1."""

    tables: RopeTable
    replacement: Channel
    output_scales: ClassVar[None] = None
    merge: ClassVar[None] = None
    passes: ClassVar[float] = 1.0


@dataclass(frozen=True)
class OutputMethod:
    """The model with each channel of its attention's output scaled. `tables` has the model's own RoPE, n = 1."""

    tables: RopeTable
    output_scales: Float[Array, "*population L HD"]
    replacement: ClassVar[None] = None
    merge: ClassVar[None] = None
    passes: ClassVar[float] = 1.0


Method = TableMethod | AttentionMethod | ChannelMethod | OutputMethod

jax.tree_util.register_dataclass(OtherAttention, data_fields=["parameters"], meta_fields=["attention"])
jax.tree_util.register_dataclass(TableMethod, data_fields=["tables"], meta_fields=["merge", "passes"])
jax.tree_util.register_dataclass(AttentionMethod, data_fields=["tables", "replacement"], meta_fields=[])
jax.tree_util.register_dataclass(ChannelMethod, data_fields=["tables", "replacement"], meta_fields=[])
jax.tree_util.register_dataclass(OutputMethod, data_fields=["tables", "output_scales"], meta_fields=[])


def table_method(table: RopeTable) -> TableMethod:
    """The plain model with a table: `[L, G, half]`."""
    return TableMethod(jax.tree.map(lambda leaf: leaf[None], table))


def channel_method(channel: Channel, table: RopeTable) -> ChannelMethod:
    """The model with a scaled channel and a table: `[L, G, half]`."""
    return ChannelMethod(table_method(table).tables, channel)


def attention_method(
    name: str, attention: Attention, config: LlamaConfig, length: int, parameters: Any = None
) -> AttentionMethod:
    """The model with another attention and its own table, for texts of at most `length` tokens.

    Raises UserError if a layer uses a sliding window, because the method `name` would let it see the whole text.
    """
    if (config.windows(length) < length).any():
        raise UserError(
            f"{name} attends to the whole text, but layers of this model see only the last {config.sliding_window} tokens; "
            f"use texts of at most {config.sliding_window} tokens, including the answer, or a model without sliding windows"
        )
    return AttentionMethod(table_method(config.rope_table(length)).tables, OtherAttention(parameters, attention))
