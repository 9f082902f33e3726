"""What may stand in for the plain way from a prompt to logits: other RoPE tables, several of them, or another attention.

A `Method` is data for `hidden_states`, `prefill` and `greedy`, like a table. It is one of three:

    TableMethod      RoPE tables alone: one for LPES, position interpolation, NTK, YaRN; several for Attention Buckets, whose
                     passes are merged
    AttentionMethod  an attention that rotates and attends in place of the model's own: Ms-PoE, MoICE, Self-Extend
    ChannelMethod    a channel of the hidden states that queries and keys see scaled

All three have `tables`, `replacement` (what stands in for the model's own attention or queries and keys, or None), `merge` and
`passes`, so that nothing that runs a method asks which one it is.

An `Attention` gets queries and keys before rotation, and rotates as it likes; the queries have the table's gains already. The
cache then holds keys before rotation; entry s of a row is its position s. What it knows of a prompt and needs again for every
new token is its state.

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

    @property
    def attention(self) -> None:
        """None: the model's own attends."""
        return None

    @property
    def parameters(self) -> "Channel":
        """What each layer is told."""
        return self


@dataclass(frozen=True)
class OtherAttention:
    """An attention and its parameters, every leaf `[L, ...]`."""

    parameters: Any
    attention: Attention


Replacement = OtherAttention | Channel


@dataclass(frozen=True)
class TableMethod:
    """The model with other RoPE tables, every leaf `[n, L, ...]`; `merge` makes the logits of n > 1 passes one.

    `passes`: forward passes a token.
    """

    tables: RopeTable
    merge: Callable[[Float[Array, "n B A V"]], Float[Array, "B A V"]] | None = None
    passes: float = 1.0
    replacement: ClassVar[None] = None


@dataclass(frozen=True)
class AttentionMethod:
    """The model with another attention. `tables` are of the model's own RoPE, n = 1."""

    tables: RopeTable
    replacement: OtherAttention
    merge: ClassVar[None] = None
    passes: ClassVar[float] = 1.0


@dataclass(frozen=True)
class ChannelMethod:
    """The model with a channel of its hidden states scaled. `tables` are of the model's own RoPE, n = 1."""

    tables: RopeTable
    replacement: Channel
    merge: ClassVar[None] = None
    passes: ClassVar[float] = 1.0


Method = TableMethod | AttentionMethod | ChannelMethod

jax.tree_util.register_dataclass(OtherAttention, data_fields=["parameters"], meta_fields=["attention"])
jax.tree_util.register_dataclass(TableMethod, data_fields=["tables"], meta_fields=["merge", "passes"])
jax.tree_util.register_dataclass(AttentionMethod, data_fields=["tables", "replacement"], meta_fields=[])
jax.tree_util.register_dataclass(ChannelMethod, data_fields=["tables", "replacement"], meta_fields=[])


def of_table(table: RopeTable) -> TableMethod:
    """The plain model with a table: `[L, G, half]`."""
    return TableMethod(jax.tree.map(lambda leaf: leaf[None], table))


def of_channel(channel: Channel, table: RopeTable) -> ChannelMethod:
    """The model with a scaled channel and a table: `[L, G, half]`."""
    return ChannelMethod(of_table(table).tables, channel)


def of_attention(name: str, attention: Attention, config: LlamaConfig, length: int, parameters: Any = None) -> AttentionMethod:
    """The model with another attention and its own table, for texts of at most `length` tokens.

    Raises UserError where a layer has a sliding window in use: `name` (the method) would let it see the whole text.
    """
    if (config.windows(length) < length).any():
        raise UserError(
            f"{name} attends to the whole text, but layers of this model see only the last {config.sliding_window} tokens; "
            f"give it texts of at most {config.sliding_window} tokens, answer included, or a model without sliding windows"
        )
    return AttentionMethod(of_table(config.rope_table(length)).tables, OtherAttention(parameters, attention))
