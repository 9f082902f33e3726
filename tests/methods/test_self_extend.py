"""Self-Extend against NumPy, and what it must not change."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from selection import mostly_long
from straight_line import (
    LENGTH,
    PROMPTS,
    assert_decode_is_prefill,
    causal,
    correlation_in_bfloat16,
    generated_and_recomputed,
    logits_of,
    numpy_logits,
    random_model,
    softmax,
    turned,
)

from lpes_jax.errors import UserError
from lpes_jax.methods import Maker
from lpes_jax.methods.self_extend import self_extend, two_regions
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.method import Method, TableMethod
from lpes_jax.rope import RopeTable


def reference(group: int, window: int):
    """The paper's distances, query by query and key by key."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out, shared = np.empty_like(q), q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            for m in range(len(q)):
                keys = np.arange(m + 1)
                grouped = m // group + window - window // group - keys // group
                distances = np.where(m - keys < window, m - keys, grouped)
                query = np.broadcast_to(q[m, head], (m + 1, q.shape[-1]))
                scores = (turned(query, distances) * k[: m + 1, head // shared]).sum(axis=-1) / np.sqrt(q.shape[-1])
                out[m, head] = softmax(scores) @ v[: m + 1, head // shared]
        return out

    return attend


@pytest.mark.parametrize("group, window, kv_heads", [(4, 8, 2), (3, 7, 4), (5, 1, 2)])
def test_equals_numpy_prompt_by_prompt(group, window, kv_heads):
    """Also: a batch of prompts is the prompts one by one, and the padding is not seen."""
    model = random_model(kv_heads)
    logits = logits_of(model, self_extend(group, window)(model.config, LENGTH))
    for row, ids in zip(logits, PROMPTS, strict=True):
        np.testing.assert_allclose(row[: len(ids)], numpy_logits(model, ids, reference(group, window)), atol=3e-4)


@pytest.mark.parametrize("group, window, same", [(1, 8, LENGTH), (4, LENGTH, LENGTH), (4, 8, 8)])
def test_groups_of_1_and_near_keys_are_the_plain_model(group, window, same):
    model = random_model(2)
    for scaling in (1.0, 1.3):  # of cos and sin, as YaRN has it
        method = scaled(self_extend(group, window), scaling)(model.config, LENGTH)
        ours, plain = logits_of(model, method), logits_of(model, TableMethod(method.tables))
        np.testing.assert_allclose(ours[:, :same], plain[:, :same], atol=1e-5)
        if same < LENGTH:
            assert np.abs(ours - plain)[0, same:40].max() > 1e-3


BOTH = [(2, 4, 7, 1.3), (4, 3, 43, 1.0)]


@pytest.mark.parametrize("kv_heads, group, window, scaling", mostly_long(BOTH, BOTH[1], names=4))
def test_cache_equals_full_recompute(kv_heads, group, window, scaling):
    """43: the far region begins while the first prompt's answer is written."""
    model, maker = random_model(kv_heads), scaled(self_extend(group, window), scaling)
    assert_decode_is_prefill(model, maker)
    with_cache, without = generated_and_recomputed(model, maker)
    assert with_cache == without


def scaled(maker: Maker, scaling: float) -> Maker:
    """The same method around a model whose cos and sin are multiplied by `scaling`."""

    def make(config: LlamaConfig, length: int) -> Method:
        method = maker(config, length)
        return replace(method, tables=RopeTable(method.tables.inv_freq, method.tables.attention_scaling * scaling))

    return make


BLOCKS = [(127, 5), (300, 40), (128, 1), (257, 256), (400, 200)]


@pytest.mark.parametrize("length, window", mostly_long(BLOCKS, (127, 5), (257, 256), names=2))
def test_two_regions_in_blocks(length, window):
    keys = jax.random.split(jax.random.key(length), 5)
    parts = [jax.random.normal(key, (2, length, heads, 8)) for key, heads in zip(keys, (4, 2, 4, 2, 2), strict=True)]
    out = jax.jit(two_regions, static_argnums=5)(*parts, window)
    near_q, near_k, far_q, far_k, v = (np.asarray(part, np.float64) for part in parts)
    before = np.arange(length)[:, None] - np.arange(length)
    for row, head in np.ndindex(2, 4):
        near, far = (q[row, :, head] @ k[row, :, head // 2].T for q, k in ((near_q, near_k), (far_q, far_k)))
        weights = causal(np.where(before < window, near, far) / np.sqrt(8))
        np.testing.assert_allclose(out[row, :, head], weights @ v[row, :, head // 2], atol=1e-5)


def test_bfloat16_goes_through():
    model = random_model(2)
    assert correlation_in_bfloat16(model, self_extend(4, 8)(model.config, LENGTH)) > 0.99


def test_what_is_refused():
    with pytest.raises(UserError, match="group must be at least 1, got 0"):
        self_extend(group=0)
    with pytest.raises(UserError, match="window must be at least 1, got -3"):
        self_extend(window=-3)
    config = replace(random_model(2).config, sliding_window=16, sliding_layers=(1,))
    self_extend()(config, 16)
    with pytest.raises(UserError, match="Self-Extend .*last 16 tokens"):
        self_extend()(config, 17)
