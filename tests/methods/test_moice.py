"""MoICE against NumPy, its router's training, and what it must not change."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
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
from lpes_jax.methods.moice import BASES, Router, moice, train_router
from lpes_jax.models.llama import Llama
from lpes_jax.text_nll import token_nll

FOUR = (10_000.0, 17_500.0, 40_000.0, 300_000.0)


def router_of(model: Llama, bases: tuple[float, ...] = FOUR) -> Router:
    """Random, and so large that the weights of the bases differ from token to token."""
    return jax.tree.map(lambda leaf: leaf * 4, Router.init(jax.random.key(5), model.config, bases))


def reference(router: Router, top_k: int, theta: float = 10_000.0):
    w1, w2, w3 = (np.asarray(leaf, np.float64) for leaf in (router.w1, router.w2, router.w3))

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out, shared, positions = np.empty_like(q), q.shape[1] // k.shape[1], np.arange(len(q))
        bases = [base / 10_000 * theta for base in router.bases]
        for head in range(q.shape[1]):
            x = turned(q[:, head], positions, bases[0])
            gate = x @ w1[layer]
            weights = softmax((gate / (1 + np.exp(-gate)) * (x @ w3[layer])) @ w2[layer])
            for row in weights:
                row[np.argsort(-row)[top_k:]] = 0
                row /= row.sum()
            outputs = []
            for base in bases:
                scores = turned(q[:, head], positions, base) @ turned(k[:, head // shared], positions, base).T
                outputs.append(causal(scores / np.sqrt(q.shape[-1])) @ v[:, head // shared])
            out[:, head] = sum(weights[:, [column]] * output for column, output in enumerate(outputs))
        return out

    return attend


@pytest.mark.parametrize("kv_heads, top_k", mostly_long([(2, None), (4, 2)], (4, 2), names=2))
def test_equals_numpy_prompt_by_prompt(kv_heads, top_k):
    """Also: a batch of prompts is the prompts one by one, and the padding is not seen."""
    model = random_model(kv_heads)
    router = router_of(model)
    logits = logits_of(model, moice(router, top_k)(model.config, LENGTH))
    for row, ids in zip(logits, PROMPTS, strict=True):
        np.testing.assert_allclose(row[: len(ids)], numpy_logits(model, ids, reference(router, top_k or 4)), atol=3e-4)
    assert np.abs(logits - logits_of(model))[0, :40].max() > 1e-3


def test_bases_are_relative_to_the_models_theta():
    model = random_model(2)
    million = replace(model.config, rope=replace(model.config.rope, rope_theta=1e6))
    router = router_of(model)
    row = logits_of(model, moice(router)(million, LENGTH))[1]
    np.testing.assert_allclose(row[:23], numpy_logits(model, PROMPTS[1], reference(router, 4, 1e6)), atol=3e-4)


@pytest.mark.parametrize("kv_heads, top_k", [(2, None), (4, 2)])
def test_equal_bases_are_the_plain_model(kv_heads, top_k):
    model = random_model(kv_heads)
    router = router_of(model, (10_000.0,) * 4)
    np.testing.assert_allclose(logits_of(model, moice(router, top_k)(model.config, LENGTH)), logits_of(model), atol=1e-5)


@pytest.mark.parametrize("kv_heads, top_k", mostly_long([(2, None), (4, 2)], (4, 2), names=2))
def test_cache_equals_full_recompute(kv_heads, top_k):
    model = random_model(kv_heads)
    maker = moice(router_of(model), top_k)
    assert_decode_is_prefill(model, maker)
    with_cache, without = generated_and_recomputed(model, maker)
    assert with_cache == without


def test_bfloat16_goes_through():
    model = random_model(2)
    assert correlation_in_bfloat16(model, moice(router_of(model))(model.config, LENGTH)) > 0.99


@pytest.mark.promotes  # optax does
def test_training_lowers_the_loss_and_does_not_change_the_model():
    """And microbatches change nothing."""
    model = random_model(2)
    before = jax.tree.map(np.array, model)
    windows = np.array([PROMPTS[0][start : start + 20] for start in range(12)], np.int32)
    told = []
    settings = {"bases": FOUR, "batch": 8, "learning_rate": 3e-3, "seed": 1}
    router, losses = train_router(model, windows, steps=12, on_step=lambda *step: told.append(step), **settings)
    assert told == list(enumerate(losses, start=1))
    start = Router.init(jax.random.key(1), model.config, FOUR)

    def loss(router: Router, rows: np.ndarray) -> float:
        method = moice(router)(model.config, 20)
        return float(token_nll(model, jnp.asarray(windows[rows]), method)[:, 1:].mean())

    everything = np.arange(12)
    assert loss(router, everything) < loss(start, everything) - 1e-3
    first = np.random.default_rng(1).permutation(12)[:8]
    assert np.isclose(losses[0], loss(start, first), atol=1e-4)  # LM loss over all tokens but the first, of the first batch
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(router), strict=True))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(old, new)
    parts, _ = train_router(model, windows, steps=1, **settings)
    whole, _ = train_router(model, windows, steps=1, microbatch=8, **settings)
    for old, a, b in zip(*map(jax.tree.leaves, (start, parts, whole)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
        assert np.median(np.abs(a - old)) == pytest.approx(3e-3, rel=0.05)  # Adam's first step: the rate, whatever the gradient


def test_a_saved_router_is_the_same(tmp_path):
    model = random_model(2)
    router = Router.init(jax.random.key(3), model.config)
    assert router.bases == BASES and router.w1.shape == (3, 8, 7) and router.w2.shape == (3, 7, 7)
    for leaf, inputs in ((router.w1, 8), (router.w2, 7), (router.w3, 8)):  # torch's linear layers start within this
        assert 0.9 * inputs**-0.5 < np.abs(leaf).max() <= inputs**-0.5
    path = tmp_path / "router.safetensors"
    router.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again = Router.load(path)
    assert again.bases == BASES
    for a, b in zip(jax.tree.leaves(router), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_not_a_router_is_refused(tmp_path):
    path, good = tmp_path / "router.safetensors", {name: np.zeros((3, 8, 7), np.float32) for name in ("w1", "w3")}
    good["w2"] = np.zeros((3, 7, 7), np.float32)
    with pytest.raises(UserError, match="no such file"):
        Router.load(path)
    path.write_bytes(b"none")
    with pytest.raises(UserError, match="not a router"):
        Router.load(path)
    bases = {"bases": str(list(BASES))}
    wrong = [
        (good, None),
        (good, {"bases": "[1.0]"}),
        (good, {"bases": "7"}),
        ({"w1": good["w1"]}, bases),
        (good | {"w2": good["w1"]}, bases),
        (good | {"w2": np.zeros((), np.float32)}, bases),
        (good | {"w1": np.zeros((), np.float32)}, bases),
    ]
    for tensors, metadata in wrong:
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(UserError, match="not a router"):
            Router.load(path)
    save_file(good, path, metadata=bases)
    assert Router.load(path).bases == BASES


def test_what_is_refused():
    model = random_model(2)
    router, config = router_of(model), model.config
    for top_k in (0, 5):
        with pytest.raises(UserError, match="top_k must be 1 to 4"):
            moice(router, top_k)
    with pytest.raises(UserError, match="3 layers with heads of 8, the model has 2 with heads of 8"):
        moice(router)(replace(config, num_layers=2), LENGTH)
    with pytest.raises(UserError, match="must be above 1"):
        moice(router_of(model, (0.5,)))(config, LENGTH)
    for bases in ((), (10_000.0, -1.0)):
        with pytest.raises(UserError, match="one or more positive numbers"):
            Router.init(jax.random.key(0), config, bases)
    sliding = replace(config, sliding_window=16, sliding_layers=(1,))
    moice(router)(sliding, 16)
    with pytest.raises(UserError, match="MoICE .*last 16 tokens"):
        moice(router)(sliding, 17)
    with pytest.raises(UserError, match="at least 1"):
        train_router(model, np.zeros((4, 8), np.int32), steps=0)
    with pytest.raises(UserError, match="2 tokens or more, got 4 of 1"):
        train_router(model, np.zeros((4, 1), np.int32))
