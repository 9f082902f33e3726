"""Scaling one positional channel of the hidden states (Yu et al., arXiv 2406.02536; code in PositionalHidden/PositionalHidden).

Because of the causal mask, some channels of the hidden states rise or fall with the position. If the queries and keys of the
middle layers see such a channel multiplied by s < 1, attention depends less on the position. The original does this to

    the last token's attention    softmax(q_s K_s^T / sqrt(D)) V,  q_s and all keys K_s from states with the channel scaled
    all other tokens' attention   unchanged

where states are those after the attention's norm. V never changes. In generation each new token is the last one: its query and
key are scaled, and the cache contains scaled keys. A teacher-forced answer is treated as if it were generated.

The search for the channel, as released:
1. Average the hidden states after each layer by position, over 200 strings of random characters, 1,000 tokens each.
2. In each layer from the third to the last but one, fit a cubic to each channel without the first 300 positions. A channel is
   positional if the cubic rises everywhere, or falls everywhere, in more than a quarter of the layers.
3. Keep the 10 smoothest. Smoothness: scale to [0, 1] without the first 200 positions, filter (Savitzky-Golay, 10 points,
   cubic), and take the least sum of squared second differences over the layers in which the channel is monotonic.
4. Try each with s = 0 on key-value questions and choose the channel with the least loss on the answers. Then, as in the paper,
   try s in 0, 0.5, -0.5, -1.

    channels = positional_channels(model, tokenizer, seed=0)
    make = hidden_channel(channels[0], factor=0.0)

Where we differ:
- `python -m lpes_jax.compare` does step 4: on its search questions, by accuracy and then by likelihood, as for all methods.
- The paper's layers (10 to 25 of 32, and so on) are known for four depths; other depths use the same share as 32 layers.
- Models of fewer than 8 layers skip fewer than 2 first layers in step 2, and windows below 1,000 tokens skip the same share of
  the positions. Embeddings never count as a layer; the released code counts them if the number of layers is odd. Means are in
  float32; the released code sums in float16.
- Changing one channel adds a multiple of one row of the weights to a query or key, so nothing is projected twice. In 16 bits,
  this sum is rounded once more.
- A text that is scored whole (perplexity) has no predicted token after it, so its scores are the plain model's.

Letters: L layers, W strings, T tokens, E embedding.
"""

import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.signal import savgol_filter

from lpes_jax.errors import UserError
from lpes_jax.finite import not_finite
from lpes_jax.methods import Choice, Maker, Tuning
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Channel, Method, channel_method, table_method
from lpes_jax.models.llama.model import Llama, check_ids, states_after_layers

FACTORS = (0.0, 0.5, -0.5, -1.0)
_LAYERS = {28: (10, 23), 32: (10, 26), 40: (10, 35), 48: (10, 43)}  # the paper's (first, end), by depth
_LENGTH = 1000
_CHARACTERS = np.array(list(string.digits + string.ascii_letters + string.punctuation))
_STRINGS_AT_ONCE = 4


def hidden_channel(channel: int, factor: float = 0.0, layers: tuple[int, int] | None = None) -> Maker:
    """Scale one channel. A factor of 1 is the plain model, bit for bit.

    Args:
        channel: The channel's index.
        factor: Its multiplier.
        layers: (first, end) of the layers; None means the middle layers.

    Raises:
        UserError: The factor is not finite. From the maker: the model lacks the channel or the layers.
    """
    if not np.isfinite(factor):
        raise UserError(f"hidden channel: the factor must be a finite number, got {factor}")

    def make(config: LlamaConfig, length: int) -> Method:
        first, end = middle_layers(config.num_layers) if layers is None else layers
        if not 0 <= channel < config.hidden_size:
            raise UserError(f"hidden channel: the model's channels are 0 to {config.hidden_size - 1}, got {channel}")
        if not 0 <= first < end <= config.num_layers:
            raise UserError(f"hidden channel: layers {first} to {end} are not within the model's {config.num_layers}")
        table = config.rope_table(length)
        if factor == 1:
            return table_method(table)
        factors = np.ones(config.num_layers, np.float32)
        factors[first:end] = factor
        scaled = Channel(jnp.full(config.num_layers, channel, jnp.int32), jnp.asarray(factors))
        return channel_method(scaled, table)

    return make


def choices(tuning: Tuning) -> list[Choice]:
    """The paper's order: positional channels with factor 0, then the other factors of the best one."""
    count = max(1, min(10, tuning.budget - len(FACTORS[1:])))

    def found() -> list[np.ndarray]:
        channels = positional_channels(tuning.model, tuning.tokenizer, tuning.seed, count, tuning.channel_strings)
        return [np.array(channels, np.int32)]

    [channels] = tuning.once("hidden_channel", found)

    def choice(channel: int, factor: float, *then: Choice) -> Choice:
        return Choice(f"channel {channel}, factor {factor:g}", hidden_channel(channel, factor), then)

    more = FACTORS[1:][: tuning.budget - len(channels)]
    return [choice(channel, FACTORS[0], *(choice(channel, factor) for factor in more)) for channel in channels.tolist()]


def middle_layers(num_layers: int) -> tuple[int, int]:
    """The first layer that is changed, and the first one after the changed layers."""
    first, end = (layer * num_layers // 32 for layer in _LAYERS[32])
    return _LAYERS.get(num_layers, (first, max(end, first + 1)))


def positional_channels(model: Llama, tokenizer: Any, seed: int, count: int = 10, strings: int = 200) -> list[int]:
    """At most `count` positional channels, the smoothest first: steps 1 to 3.

    Raises:
        UserError: The model has none, its vocabulary lacks a token id, or its hidden states are not finite.
    """
    if min(count, strings) < 1:
        raise UserError(f"hidden channel: count and strings must be at least 1, got {count} and {strings}")
    length = min(_LENGTH, model.config.max_position_embeddings)
    drawn = np.random.default_rng(seed).choice(_CHARACTERS, (strings, 8 * length))
    ids = tokenizer(["".join(row) for row in drawn], add_special_tokens=False)["input_ids"]
    length = min(length, *map(len, ids))
    tokens = np.array([row[:length] for row in ids], np.int32)
    check_ids(model, tokens)
    if not np.isfinite(states := mean_states(model, tokens)).all():
        raise not_finite(model, tokens.tolist())
    if channels := rank_channels(states, count):
        return channels
    raise UserError(
        "hidden channel: no channel of this model's hidden states rises or falls with the position in more than "
        f"{model.config.num_layers // 4} layers, so there is none to scale"
    )


def mean_states(model: Llama, tokens: Int[np.ndarray, "W T"]) -> Float[np.ndarray, "L T E"]:
    """The hidden states after each layer, before the last norm, averaged over strings; float32."""
    parts = [tokens[start : start + _STRINGS_AT_ONCE] for start in range(0, len(tokens), _STRINGS_AT_ONCE)]
    total = sum((_sum_of_states(model, jnp.asarray(part)) for part in parts[1:]), _sum_of_states(model, jnp.asarray(parts[0])))
    return np.asarray(total) / len(tokens)


@jax.jit
def _sum_of_states(model: Llama, tokens: Int[Array, "W T"]) -> Float[Array, "L T E"]:
    table = model.config.rope_table(tokens.shape[1])
    return states_after_layers(model, tokens, table, lambda x: x.astype(jnp.float32).sum(axis=0))[1]


def rank_channels(states: Float[np.ndarray, "L T E"], count: int) -> list[int]:
    """The positional channels of mean states, the smoothest first, at most `count`: steps 2 and 3."""
    num_layers, length, width = states.shape
    rising, falling = np.zeros((num_layers, width), bool), np.zeros((num_layers, width), bool)
    roughness = np.full((num_layers, width), np.inf)
    for layer in range(min(2, num_layers // 4), num_layers - 1):
        fitted, curve = (states[layer, tenths * length // 10 :].astype(np.float64) for tenths in (3, 2))
        varies = np.ptp(fitted, axis=0) > 0
        positions = np.linspace(-1, 1, len(fitted))
        steps = np.diff(np.vander(positions, 4) @ np.polyfit(positions, fitted, 3), axis=0)
        rising[layer], falling[layer] = varies & (steps >= 0).all(axis=0), varies & (steps <= 0).all(axis=0)
        curve = (curve - curve.min(axis=0)) / np.where(varies, np.ptp(curve, axis=0), 1)
        bends = np.diff(np.diff(np.asarray(savgol_filter(curve, 10, 3, axis=0)), axis=0), axis=0)
        roughness[layer] = (bends**2).sum(axis=0)
    monotonic = np.where(rising.sum(axis=0) > falling.sum(axis=0), rising, falling)
    channels = np.flatnonzero(monotonic.sum(axis=0) > num_layers // 4)
    smoothest = np.where(monotonic, roughness, np.inf).min(axis=0)[channels]
    return channels[np.argsort(smoothest, kind="stable")[:count]].tolist()
