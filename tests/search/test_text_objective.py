"""The KL divergence from the unchanged model on plain text, as a loss of gradient descent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import mostly_long
from test_gradient import looks_of, prompts_of

import lpes_jax as lj
from lpes_jax.models.llama.method import table_method
from lpes_jax.rope import RopeTable
from lpes_jax.search.gradient import initial_state, text_loss
from lpes_jax.search.minibatches import Data, pack
from lpes_jax.settings.search import GradientSettings, TextSettings
from lpes_jax.text_nll import token_divergence

pytestmark = pytest.mark.promotes
loss_of = jax.jit(text_loss)  # one program, not one per operation


def divided(own: RopeTable, y: jax.Array) -> RopeTable:
    """The table of factors `y` of layers."""
    return RopeTable(own.inv_freq / y[:, None, None], own.attention_scaling)


def windows_of(shape: tuple[int, int]) -> jax.Array:
    """Random token ids."""
    return jnp.asarray(np.random.default_rng(0).integers(1, 250, shape), jnp.int32)


@pytest.mark.parametrize("chunk", mostly_long([4, 5, 256], 5))
def test_the_loss_is_the_divergence_of_the_distributions(tiny_model, chunk):
    tokens, y = windows_of((2, 13)), np.array([1.5, 0.8, 2.0])
    own = tiny_model.config.rope_table(13)
    found = token_divergence(
        tiny_model, tokens, table_method(divided(own, jnp.asarray(y))), tiny_model, table_method(own), chunk
    )
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(lj.logits(tiny_model, tokens, factors)), np.float64)[:, :-1] for factors in (None, y)
    )
    np.testing.assert_allclose(found[:, 1:], (np.exp(log_p) * (log_p - log_q)).sum(axis=-1), rtol=1e-3, atol=1e-5)
    assert (np.asarray(found[:, 0]) == 0).all() and float(found[:, 1:].mean()) > 0.01
    same = token_divergence(tiny_model, tokens, table_method(own), tiny_model, table_method(own), chunk)
    np.testing.assert_allclose(same, 0, atol=1e-6)


def test_its_gradient_is_that_of_finite_differences_and_none_at_the_start(tiny_model):
    tokens = windows_of((2, 13))
    own = tiny_model.config.rope_table(13)

    @jax.jit
    def loss(y: jax.Array) -> jax.Array:
        return text_loss(tiny_model, tokens, divided(own, y), reference=tiny_model)

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(gradient(jnp.ones(3)), 0, atol=1e-4)
    y, step = jnp.array([1.05, 0.98, 1.1]), 1e-4
    for number, slope in enumerate(gradient(y)):
        beside = [float(loss(y.at[number].add(sign * step))) for sign in (1, -1)]
        assert float(slope) == pytest.approx((beside[0] - beside[1]) / (2 * step), rel=0.03, abs=1e-2)


@pytest.mark.parametrize("lengths", mostly_long([(12,), (10, 33)], (12,)))
def test_a_descent_counts_the_divergence_and_reports_the_likelihood(tiny_model, lengths):
    own = tiny_model.config.rope_table(64)
    prompts = [Data([pack(prompts_of(seed), [0.2, 0.3, 0.5] * 2)]) for seed in (2, 3)]
    texts = [windows_of((4, length)) for length in lengths]
    train, held_back = (Data(examples.tasks, texts if len(texts) > 1 else texts[0]) for examples in prompts)
    parameters = {"y": jnp.ones(3)}

    def apply(model, parameters):
        return model, divided(own, parameters["y"])

    def divergence(parameters) -> list[float]:
        table = apply(tiny_model, parameters)[1]
        return [float(loss_of(tiny_model, text, table, reference=tiny_model)) for text in texts]

    settings = GradientSettings(minibatch_size=6, learning_rate=0.02, steps=4, look_every=2)
    data = tiny_model, train, held_back, parameters, apply, lambda moved: moved
    looks, _ = looks_of(data, settings, TextSettings(text_minibatch=1, text_weight=3.0, text_objective="kl"))
    np.testing.assert_allclose(looks[0].text_divergence, [0] * len(texts), atol=1e-6)
    for measured in looks:
        np.testing.assert_allclose(measured.text_divergence, divergence(measured.parameters), rtol=1e-4, atol=1e-6)
        assert measured.loss == pytest.approx(measured.task_losses[0] + 3 * np.mean(measured.text_divergence), rel=1e-5)
        likelihood = np.mean([float(loss_of(tiny_model, text, apply(tiny_model, measured.parameters)[1])) for text in texts])
        assert measured.text_loss == pytest.approx(likelihood, rel=1e-5)
    # A heavy divergence holds the parameters where they were.
    held, _ = looks_of(data, settings, TextSettings(text_minibatch=1, text_weight=3000.0, text_objective="kl"))
    assert max(held[-1].text_divergence) < min(looks[-1].text_divergence)
    structure = jax.tree.structure(initial_state(parameters, 1, len(texts), divergence=True).best)
    assert structure == jax.tree.structure(looks[-1])
