"""SEAL against NumPy, its fold into the weights, and what is learnt."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
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
from tunings import questions, tuning

from lpes_jax.compare.learning import learn
from lpes_jax.errors import UserError
from lpes_jax.generation import generate_ids
from lpes_jax.methods.seal import choices, folded, seal, with_scales
from lpes_jax.models.llama import Llama
from lpes_jax.models.llama.method import table_method
from lpes_jax.prefixes import pack_rows
from lpes_jax.scores import batch_scores
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode
from lpes_jax.text_nll import token_nll


def scales_of(numbers: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.5, 2, (3, numbers)).astype(np.float32)


def reference(scales: np.ndarray):
    """The attention's outputs are scaled, before the output weights."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out, shared, positions = np.empty_like(q), q.shape[1] // k.shape[1], np.arange(len(q))
        for head in range(q.shape[1]):
            scores = turned(q[:, head], positions) @ turned(k[:, head // shared], positions).T / np.sqrt(q.shape[-1])
            out[:, head] = causal(scores) @ v[:, head // shared]
        return out * scales[layer].reshape(q.shape[1], -1)

    return attend


@pytest.mark.parametrize("numbers, kv_heads", [(4, 2), (32, 2), (4, 4)])
def test_equals_numpy_prompt_by_prompt(numbers, kv_heads):
    model, scales = random_model(kv_heads), scales_of(numbers)
    logits, plain = logits_of(model, seal(scales)(model.config, LENGTH)), logits_of(model)
    for row, unchanged, ids in zip(logits, plain, PROMPTS, strict=True):
        np.testing.assert_allclose(row[: len(ids)], numpy_logits(model, ids, reference(scales)), atol=3e-4)
        assert np.abs(row - unchanged)[: len(ids)].max() > 1e-2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scales_of_1_are_the_plain_model_bit_for_bit(dtype):
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), random_model(2))
    for numbers in (4, 32):
        ones = np.ones((3, numbers), np.float32)
        np.testing.assert_array_equal(logits_of(model, seal(ones)(model.config, LENGTH)), logits_of(model))
        np.testing.assert_array_equal(folded(model, ones).layers.output[...], model.layers.output[...])


def test_the_folded_model_is_the_method():
    """Scores over shared prefixes, text losses and generated tokens; all other weights are those of the model, not copies."""
    model, scales = random_model(2), scales_of(32)
    maker, whole = seal(scales), folded(model, scales)
    assert whole.layers.query[...] is model.layers.query[...] and whole.embed[...] is model.embed[...]
    plain, method = table_method(model.config.rope_table(LENGTH)), maker(model.config, LENGTH)

    shared = PROMPTS[0]
    prompts = [EncodedPrompt([*shared[:30], *rest], [[5, 7]]) for rest in ([1, 2], [3], [4, 5, 6])]
    scorer = Scorer(model, prompts)
    assert scorer.tokens_saved > 0.5
    ours, theirs = scorer.method_scores(method), Scorer(whole, prompts).method_scores(plain)
    np.testing.assert_allclose(ours.log_likelihood, theirs.log_likelihood, atol=1e-4)
    assert (ours.correct == theirs.correct).all()

    tokens = padded(PROMPTS)
    np.testing.assert_allclose(token_nll(model, tokens, method), token_nll(whole, tokens, plain), atol=1e-4)
    with_method = generate_ids(model, PROMPTS, make_method=lambda length: maker(model.config, length), max_new_tokens=6)
    assert with_method == generate_ids(whole, PROMPTS, max_new_tokens=6)


def test_cache_equals_full_recompute():
    with_cache, without = generated_and_recomputed(random_model(2), seal(scales_of(4)))
    assert with_cache == without


def test_scales_can_be_vmapped():
    model, scales = random_model(2), np.stack([scales_of(32, seed) for seed in range(2)])

    def logits(scales: jax.Array) -> jax.Array:
        return method_logits_of(model, padded(PROMPTS), LENGTHS, seal(scales)(model.config, LENGTH))

    for row, values in zip(jax.vmap(logits)(jnp.asarray(scales)), scales, strict=True):
        np.testing.assert_allclose(row, logits_of(model, seal(values)(model.config, LENGTH)), atol=1e-4)


@pytest.mark.promotes
@pytest.mark.long
def test_gradient_equals_finite_differences_in_float64():
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), random_model(2))
        batch = pack_rows([(PROMPTS[1], [3, 5])])

        @jax.jit
        def log_p(scales: jax.Array) -> jax.Array:
            method = seal(scales)(model.config, LENGTH)
            return batch_scores(model, batch, method, remat=True)[1].sum()

        scales = jnp.asarray(scales_of(4), jnp.float64)
        direction = jnp.asarray(scales_of(4, seed=1), jnp.float64)
        slope = float((jax.jit(jax.grad(log_p))(scales) * direction).sum())
        step = 1e-5
        numeric = float(log_p(scales + step * direction) - log_p(scales - step * direction)) / (2 * step)
    assert slope == pytest.approx(numeric, rel=1e-5) and abs(slope) > 1e-3


def test_bfloat16_goes_through():
    model = random_model(2)
    assert correlation_in_bfloat16(model, seal(scales_of(4))(model.config, LENGTH)) > 0.99


def mean_log_p(model: Llama, prompts: list[Prompt]) -> float:
    scorer = Scorer(model, encode(prompts, byte_tokenizer(), 128))
    return float(scorer.method_scores(table_method(model.config.rope_table(scorer.longest))).log_likelihood.mean())


@pytest.mark.promotes
def test_scales_are_learnt_from_the_questions(tiny_model):
    """On other questions of their kind the answer gets likelier."""
    prompts, heads = questions(8), tiny_model.config.num_heads
    start = jnp.ones((3, heads), jnp.float32)
    scales = np.asarray(learn(tiny_model, byte_tokenizer(), prompts[:12], 0, "seal", with_scales, start, 3, 0.05))
    assert scales.shape == (3, heads) and np.abs(scales - 1).max() > 0.02
    before = mean_log_p(tiny_model, prompts[12:])
    assert mean_log_p(folded(tiny_model, scales), prompts[12:]) > before


def test_choices_turn_the_budget_into_passes(tiny_model):
    calls = []

    def recorded(name, apply, start, passes, rate):
        calls.append((start.shape, passes, rate))
        return start + 0.5

    heads, channels = tiny_model.config.num_heads, tiny_model.config.num_heads * tiny_model.config.head_dim
    for budget, settings in (
        (1, ["a scale per head, 1 pass"]),
        (16, [f"a scale per {k}, 7 passes" for k in ("head", "channel")]),
    ):
        found = choices(tuning(tiny_model, budget=budget, learn=recorded))
        assert [choice.setting for choice in found] == settings
        for choice in found:
            assert choice.maker is not None
            choice.maker(tiny_model.config, 64)
    assert calls == [((3, heads), 1, 1e-2), ((3, heads), 7, 1e-2), ((3, channels), 7, 2e-2)]


def test_what_is_refused(tiny_model):
    config = random_model(2).config
    with pytest.raises(
        UserError, match="3 layers with 4 heads of 8 channels, so scales have 3 rows of 4 or 32 numbers; got 3 x 8"
    ):
        seal(np.ones((3, 8), np.float32))(config, 16)
    with pytest.raises(UserError, match="got 2 x 4"):
        folded(random_model(2), np.ones((2, 4), np.float32))
    with pytest.raises(UserError, match="every scale must be a finite number"):
        seal(np.full((3, 4), np.nan, np.float32))
    with pytest.raises(UserError, match="--methods seal learns from short answers"):
        learn(tiny_model, byte_tokenizer(), [], 0, "seal", with_scales, jnp.ones((3, 4)), 1, 0.01)
    with pytest.raises(UserError, match="give --limit 2 or more"):
        learn(tiny_model, byte_tokenizer(), questions(1), 0, "seal", with_scales, jnp.ones((3, 4)), 1, 0.01)
    sliding = replace(config, sliding_window=16, sliding_layers=(1,))
    seal(np.ones((3, 4), np.float32))(sliding, 64)  # the weights do not care what a head attends to
