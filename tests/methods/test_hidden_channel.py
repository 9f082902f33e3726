"""Scaling a channel of the hidden states against NumPy, its search, and what it must not change."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import mostly_long
from straight_line import (
    LENGTH,
    LENGTHS,
    PROMPTS,
    causal,
    correlation_in_bfloat16,
    generated_and_recomputed,
    logits_of,
    method_logits_of,
    numpy_logits,
    padded,
    random_model,
    turned,
)

from lpes_jax.errors import UserError
from lpes_jax.methods.hidden_channel import hidden_channel, mean_states, middle_layers, rank_channels
from lpes_jax.models.llama import Llama
from lpes_jax.models.llama.model import output_logits, rms_norm
from lpes_jax.prefixes import pack_rows
from lpes_jax.scores import batch_scores

CHANNEL, LAYERS = 5, (1, 3)
ANSWER = [3, 11, 7, 20]


def reference(prompt_length: int):
    """Row by row, as the paper has it: the prompt's last token and those after it attend with scaled queries and keys."""

    def attend(layer: int, q, k, v, scaled_q, scaled_k) -> np.ndarray:
        out, shared, positions = np.empty_like(q), q.shape[1] // k.shape[1], np.arange(len(q))
        for head in range(q.shape[1]):
            before, behind = slice(0, prompt_length - 1), slice(prompt_length - 1, None)
            for queries, keys, rows in ((q, k, before), (scaled_q, scaled_k, behind)):
                scores = turned(queries[:, head], positions) @ turned(keys[:, head // shared], positions).T
                out[rows, head] = (causal(scores / np.sqrt(q.shape[-1])) @ v[:, head // shared])[rows]
        return out

    return attend


@pytest.mark.parametrize("kv_heads, factor", mostly_long([(2, 0.0), (4, -1.0)], (4, -1.0), names=2))
def test_equals_numpy_prompt_by_prompt(kv_heads, factor):
    """Also: a batch is its prompts one by one, with teacher-forced answers after them, and the padding is not seen."""
    model, rows = random_model(kv_heads), [ids + ANSWER for ids in PROMPTS]
    channels = np.ones((3, 32))
    channels[slice(*LAYERS), CHANNEL] = factor
    method = hidden_channel(CHANNEL, factor, LAYERS)(model.config, LENGTH)
    logits = np.asarray(method_logits_of(model, padded(rows), LENGTHS, method))
    for ids, prompt, row in zip(rows, PROMPTS, logits, strict=True):
        np.testing.assert_allclose(row[: len(ids)], numpy_logits(model, ids, reference(len(prompt)), channels), atol=3e-4)
    plain = logits_of(model)
    assert np.abs(logits - plain)[0, 39].max() > 1e-3
    np.testing.assert_array_equal(logits[0, :39], plain[0, :39])  # tokens before the last are read as ever


def test_answers_are_scored_as_the_whole_pass_gives_them():
    """Where only as many rows as an answer needs attend with scaled states."""
    model = random_model(2)
    method = hidden_channel(CHANNEL, 0.0, LAYERS)(model.config, LENGTH)
    _, scored = jax.jit(batch_scores)(model, pack_rows([(ids, ANSWER) for ids in PROMPTS]), method)
    log_p = jax.nn.log_softmax(method_logits_of(model, padded([ids + ANSWER for ids in PROMPTS]), LENGTHS, method), axis=-1)
    for ids, row, value in zip(PROMPTS, np.asarray(log_p), np.asarray(scored), strict=True):
        assert np.isclose(sum(row[len(ids) - 1 + offset, token] for offset, token in enumerate(ANSWER)), value, atol=1e-4)


def test_a_factor_of_1_and_a_channel_of_zeros_are_the_plain_model():
    model = random_model(2)
    plain = logits_of(model)
    np.testing.assert_array_equal(logits_of(model, hidden_channel(CHANNEL, 1.0)(model.config, LENGTH)), plain)
    silent = nnx.clone(model)
    silent.layers.attention_norm[...] = silent.layers.attention_norm[...].at[:, CHANNEL].set(0)
    ours = logits_of(silent, hidden_channel(CHANNEL, -1.0, LAYERS)(model.config, LENGTH))
    np.testing.assert_allclose(ours, logits_of(silent), atol=1e-5)
    assert np.abs(logits_of(silent) - plain).max() > 1e-3


def test_cache_equals_full_recompute():
    with_cache, without = generated_and_recomputed(random_model(2), hidden_channel(CHANNEL, -1.0, LAYERS))
    assert with_cache == without


def test_from_the_first_token_on_it_is_a_model_with_other_weights():
    """Biases, norms of queries and keys, and windows included: the reference is the plain model's own code."""
    config = replace(random_model(2).config, model_type="qwen3", attention_bias=True, sliding_window=6, sliding_layers=(1,))
    model = Llama(config, rngs=nnx.Rngs(7))
    model.layers = jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim > 2 else leaf + 0.1, model.layers)
    other = nnx.clone(model)
    for leaf in (other.layers.query, other.layers.key):
        leaf[...] = leaf[...].at[slice(*LAYERS), CHANNEL].multiply(-1.0)
    method = hidden_channel(CHANNEL, -1.0, LAYERS)(config, LENGTH)
    ours = method_logits_of(model, padded(PROMPTS), jnp.ones(4, jnp.int32), method)
    np.testing.assert_allclose(ours[0, :40], logits_of(other)[0, :40], atol=1e-4)
    assert np.abs(logits_of(other) - logits_of(model))[0, :40].max() > 1e-3


def test_bfloat16_goes_through():
    model = random_model(2)
    assert correlation_in_bfloat16(model, hidden_channel(CHANNEL, 0.0, LAYERS)(model.config, LENGTH)) > 0.99


def test_channels_are_ranked_by_hand():
    """8 layers, of which 2 to 6 count; a channel must be monotonic in 3 of them."""
    rng, up = np.random.default_rng(0), np.linspace(0, 1, 100)
    states = np.zeros((8, 100, 8), np.float32)
    states[:, :, 0] = up + 0.02 * rng.normal(size=100)  # rises, roughly
    states[:, :, 1] = -100 * up**3  # falls smoothly
    states[:, :, 2] = (up - 0.7) ** 2  # falls, then rises
    states[2:4, :, 3] = up  # in 2 layers only
    states[[0, 1, 7], :, 4] = up  # in layers that do not count
    states[2:4, :, 5], states[4:7, :, 5] = up, -up - 0.3 * up**2  # falls in more layers than it rises in
    states[:, :, 6] = 3.0  # never changes
    states[2:5, :, 7] = np.where(up < 0.15, 1 - up, up)[None]  # rises once the first positions are left out
    ranked = rank_channels(states, 10)
    assert ranked == [7, 5, 1, 0]  # a line, a parabola, a cubic, noise
    assert rank_channels(states, 2) == ranked[:2] and rank_channels(states[:, :, [2, 3, 6]], 10) == []


def test_mean_states_are_those_that_the_model_ends_with():
    model, tokens = random_model(2), np.asarray(padded(PROMPTS + PROMPTS[:1]))
    each = [mean_states(model, row[None]) for row in tokens]
    np.testing.assert_allclose(mean_states(model, tokens), np.mean(each, axis=0), rtol=1e-5, atol=1e-5)
    last = rms_norm(jnp.asarray(each[0][-1]), model.norm[...], model.config.rms_norm_eps)
    np.testing.assert_allclose(output_logits(model, last), logits_of(model)[0], atol=1e-4)


def test_layers_and_what_is_refused():
    assert [middle_layers(depth) for depth in (28, 32, 40, 16, 3, 1)] == [(10, 23), (10, 26), (10, 35), (5, 13), (0, 2), (0, 1)]
    config = random_model(2).config
    with pytest.raises(UserError, match="channels are 0 to 31, got 32"):
        hidden_channel(32)(config, LENGTH)
    with pytest.raises(UserError, match="layers 1 to 4 are not within the model's 3"):
        hidden_channel(0, layers=(1, 4))(config, LENGTH)
    with pytest.raises(UserError, match="finite number, got nan"):
        hidden_channel(0, float("nan"))
