"""Factors and gains that `compare` learns from its own search questions."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from tunings import questions, tuning

from lpes_jax.compare import METHODS
from lpes_jax.compare.learning import learn
from lpes_jax.factors import LayerFactors
from lpes_jax.methods.learnt_tables import with_table
from lpes_jax.methods.tables import lpes
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import encode

KINDS = {"learnt_factors": {"factors"}, "learnt_gains": {"gains"}, "learnt_both": {"factors", "gains"}}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_learnt_is_one_number_per_frequency_and_layer(name, tiny_model):
    """All start at 1, in as many passes as the budget; the setting's table has the learnt numbers."""
    config, calls = tiny_model.config, []

    def recorded(method, apply, start, passes, rate):
        calls.append((method, {kind: values.shape for kind, values in start.items()}, passes))
        own = config.rope_table(64)
        _, table = apply(tiny_model, start, 64)
        np.testing.assert_allclose(table.inv_freq, own.inv_freq, rtol=1e-6)
        np.testing.assert_array_equal(table.gains, own.gains)
        return {kind: values + np.log(2.0).astype(np.float32) for kind, values in start.items()}

    [choice] = METHODS[name](tuning(tiny_model, budget=5, learn=recorded))
    assert calls == [(name, dict.fromkeys(KINDS[name], (config.num_layers, config.rotary_dim // 2)), 5)]
    assert choice.setting == "5 passes" and choice.maker is not None
    doubled = {"factors": 2.0 if "factors" in KINDS[name] else 1.0, "gains": 2.0 if "gains" in KINDS[name] else 1.0}
    shape = (config.num_layers, config.rotary_dim // 2)
    wanted = LayerFactors(
        np.full(shape, doubled["factors"]), "layer_band", np.full(shape, doubled["gains"]), gains_granularity="layer_band"
    )
    found, same = choice.maker(config, 64), lpes(wanted)(config, 64)
    np.testing.assert_allclose(found.tables.inv_freq, same.tables.inv_freq, rtol=1e-6)
    np.testing.assert_allclose(*np.broadcast_arrays(found.tables.gains, same.tables.gains), rtol=1e-6)


@pytest.mark.promotes
def test_the_questions_that_choose_the_pass_get_likelier(tiny_model):
    """As the method measures them. A random model knows nothing of the questions' kind, so others would show nothing."""
    prompts, config = questions(6), tiny_model.config
    [choice] = METHODS["learnt_both"](
        tuning(tiny_model, budget=4, learn=partial(learn, tiny_model, byte_tokenizer(), prompts, 0))
    )
    scorer = Scorer(tiny_model, encode(prompts[8:], byte_tokenizer(), 128))  # the last quarter of the questions
    before, after = (
        float(scorer.method_scores(maker(config, scorer.longest)).log_likelihood.mean())
        for maker in (lpes(LayerFactors.uniform(1.0, config.num_layers)), choice.maker)
        if maker is not None
    )
    assert after > before + 1


def test_gains_alone_leave_the_rates(tiny_model):
    zeros = jnp.zeros((tiny_model.config.num_layers, tiny_model.config.rotary_dim // 2), jnp.float32)
    model, table = with_table(tiny_model, {"gains": zeros + 0.5}, 64)
    assert model is tiny_model
    np.testing.assert_array_equal(table.inv_freq, tiny_model.config.rope_table(64).inv_freq)
    np.testing.assert_allclose(table.gains, np.exp(0.5), rtol=1e-6)
