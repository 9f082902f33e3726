"""Ms-PoE against NumPy, and what it must not change."""

from dataclasses import replace

import jax
import jax.numpy as jnp
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
    method_logits_of,
    numpy_logits,
    padded,
    random_model,
    softmax,
    turned,
)

from lpes_jax.errors import UserError
from lpes_jax.methods.ms_poe import ms_poe, outliers
from lpes_jax.prefixes import pack_rows
from lpes_jax.scores import batch_scores

MODES = ["paper", "original", "fixed"]
CASES = [(mode, kv_heads) for mode in MODES for kv_heads in (4, 2) if (mode, kv_heads) != ("original", 2)]


def head_ratios(mode: str, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The ratio of each KV group, written from the description of the released code, group by group."""
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    if mode == "fixed":
        return np.array([1.2 + 0.6 * (groups - 1 - group) / groups for group in range(groups)])
    fractions = []
    for group in range(groups):
        by_head = []
        for head in range(group * shared, (group + 1) * shared):
            weights = softmax(k[:, group] @ q[-1, head] / np.sqrt(q.shape[-1]))
            by_head.append(np.mean(weights > 3 * weights.mean()))
        fractions.append(np.mean(by_head))
    by_sensitivity = sorted(range(groups), key=lambda group: -fractions[group])  # stable
    if mode == "original":
        return np.array([1.2 + 0.6 * index / groups for index in by_sensitivity])
    ratios = np.empty(groups)
    for rank, group in enumerate(by_sensitivity):
        ratios[group] = 1.2 + 0.6 * rank / (groups - 1)
    return ratios


def reference(mode: str, first_layer: int):
    seen = []

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        ratios = head_ratios(mode, q, k) if layer >= first_layer else np.ones(k.shape[1])
        seen.append(tuple(ratios))
        out, shared, positions = np.empty_like(q), q.shape[1] // k.shape[1], np.arange(len(q))
        for head in range(q.shape[1]):
            positions_scaled = positions / ratios[head // shared]
            scores = (
                turned(q[:, head], positions_scaled) @ turned(k[:, head // shared], positions_scaled).T / np.sqrt(q.shape[-1])
            )
            out[:, head] = causal(scores) @ v[:, head // shared]
        return out

    return attend, seen


@pytest.mark.parametrize("mode, kv_heads", CASES)
def test_equals_numpy_prompt_by_prompt(mode, kv_heads):
    """Also: a batch of prompts is the prompts one by one, the padding is not seen, and each prompt has ratios of its own."""
    model, all_ratios = random_model(kv_heads), set()
    logits = logits_of(model, ms_poe(mode, first_layer=1)(model.config, LENGTH))
    for row, ids in zip(logits, PROMPTS, strict=True):
        attend, seen = reference(mode, first_layer=1)
        np.testing.assert_allclose(row[: len(ids)], numpy_logits(model, ids, attend), atol=3e-4)
        assert seen[0] == (1.0,) * kv_heads
        all_ratios.update(seen[1:])
    assert len(all_ratios) > 1 if mode != "fixed" else len(all_ratios) == 1


def test_the_three_modes_differ_from_each_other_and_from_the_plain_model():
    model = random_model(4)
    results = [logits_of(model)] + [logits_of(model, ms_poe(mode, first_layer=1)(model.config, LENGTH)) for mode in MODES]
    for index, first in enumerate(results):
        for second in results[:index]:
            assert np.abs(first - second)[0, :40].max() > 1e-3


@pytest.mark.parametrize(
    "kv_heads, settings",
    [(4, {"min_ratio": 1.0, "max_ratio": 1.0}), (2, {"min_ratio": 1.0, "max_ratio": 1.0}), (2, {"first_layer": 3})],
)
def test_ratios_of_1_and_no_layer_are_the_plain_model(kv_heads, settings):
    model = random_model(kv_heads)
    ours = logits_of(model, ms_poe(**settings)(model.config, LENGTH))
    np.testing.assert_allclose(ours, logits_of(model), atol=1e-5)


@pytest.mark.parametrize("mode, kv_heads", mostly_long([("paper", 2), ("original", 4)], ("paper", 2), names=2))
def test_cache_equals_full_recompute(mode, kv_heads):
    model, maker = random_model(kv_heads), ms_poe(mode, first_layer=1)
    assert_decode_is_prefill(model, maker)
    with_cache, without = generated_and_recomputed(model, maker)
    assert with_cache == without


def test_a_teacher_forced_answer_does_not_shape_the_ratios():
    """The answer's likelihood is that of a text whose ratios come from the prompt."""
    model, prompt = random_model(2), PROMPTS[0]
    method = ms_poe("paper", first_layer=1)(model.config, LENGTH)
    answers = [[3, 5, 7], [3, 11, 7], [1, 2, 3], [7, 7, 7]]
    _, scored = jax.jit(batch_scores)(model, pack_rows([(prompt, answer) for answer in answers]), method)
    tokens = padded([prompt + answer for answer in answers])
    log_p = np.asarray(jax.nn.log_softmax(method_logits_of(model, tokens, jnp.full(4, 40, jnp.int32), method), axis=-1))
    for row, answer, value in zip(log_p, answers, np.asarray(scored), strict=True):
        assert np.isclose(sum(row[39 + offset, token] for offset, token in enumerate(answer)), value, atol=1e-4)
    np.testing.assert_array_equal(log_p[0, :40], log_p[1, :40])


def test_outliers_by_hand():
    """8 keys: one of weight 1 - 7e is an outlier; two of nearly 1/2 are two; even weights are none, seen or not."""
    k = np.zeros((3, 9, 1, 2), np.float32)
    k[0, 2], k[1, [0, 5]], k[:, 8] = [9, 0], [9, 0], [99, 0]  # the last is behind the prompt
    q = np.full((3, 9, 2, 2), 50, np.float32)
    q[:, 7] = [2, 0]
    found = outliers(jnp.asarray(q), jnp.asarray(k), jnp.full(3, 8, jnp.int32))
    assert found.tolist() == [[2], [4], [0]]  # of both heads of the group


def test_bfloat16_goes_through():
    model = random_model(2)
    assert correlation_in_bfloat16(model, ms_poe("fixed", first_layer=1)(model.config, LENGTH)) > 0.99


def test_what_is_refused():
    with pytest.raises(UserError, match="4 heads share 2 keys"):
        ms_poe("original")(random_model(2).config, LENGTH)
    with pytest.raises(UserError, match="1.8 to 1.2"):
        ms_poe(min_ratio=1.8, max_ratio=1.2)
    config = replace(random_model(2).config, sliding_window=16, sliding_layers=(1,))
    ms_poe()(config, 16)
    with pytest.raises(UserError, match="Ms-PoE .*last 16 tokens"):
        ms_poe()(config, 17)
