"""Methods that are one table: known frequencies, transformers' logits, and the plain model if nothing is stretched."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lpes_jax as lj
from lpes_jax.methods import Maker
from lpes_jax.methods.tables import dynamic_ntk, lpes, mean_of, ntk_by_base, position_interpolation, uniform, yarn
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import hidden_states, method_logits, over_tables
from lpes_jax.rope import RopeParameters, RopeTable

WINDOW = 512  # of the tiny model
FOUND = lj.LayerFactors(np.array([1.0, 2.5, 1.5]))
BANDS = lj.LayerFactors(np.array([[1.0, 2.0], [1.5, 3.0], [1.2, 1.1]]), "layer_group")
# Each method with a setting that changes something at this length, and one that changes nothing.
CHANGING: dict[str, tuple[Maker, int]] = {
    "interpolation": (position_interpolation(1.7), WINDOW),
    "mean": (mean_of(FOUND), WINDOW),
    "dynamic": (dynamic_ntk(2.0), 4 * WINDOW),
    "base": (ntk_by_base(4.0), WINDOW),
    "yarn": (yarn(4.0, 64), WINDOW),
    "lpes": (lpes(FOUND), WINDOW),
    "lpes-groups": (lpes(BANDS), WINDOW),
    "lpes-linear": (lpes(FOUND, "linear", 3.0), WINDOW + 1),
    "lpes-dynamic": (lpes(FOUND, "dynamic", 2.0), 4 * WINDOW),
}
ONES = lj.LayerFactors(np.ones(3))
CHANGELESS: dict[str, tuple[Maker, int]] = {
    "interpolation": (position_interpolation(1.0), WINDOW),
    "mean": (mean_of(lj.LayerFactors(np.array([0.5, 1.0, 1.5]))), WINDOW),
    "dynamic": (dynamic_ntk(8.0), WINDOW),
    "base": (ntk_by_base(1.0), WINDOW),
    "lpes": (lpes(ONES), WINDOW),
    "lpes-linear": (lpes(ONES, "linear", 3.0), WINDOW),
    "lpes-dynamic": (lpes(ONES, "dynamic", 3.0), WINDOW),
}


@jax.jit
def logits_of(model: lj.Llama, tokens: jax.Array, method: Method) -> jax.Array:
    return method_logits(model, over_tables(partial(hidden_states, model, tokens), method.tables), method)


def table_of(maker: Maker, config: lj.LlamaConfig, length: int = WINDOW) -> RopeTable:
    """The only one, without its axis in front."""
    tables = maker(config, length).tables
    assert len(tables.inv_freq) == 1
    return jax.tree.map(lambda leaf: leaf[0], tables)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 40)), jnp.int32)


@pytest.fixture(scope="module")
def plain_logits(tiny_model, tokens) -> np.ndarray:
    return np.asarray(logits_of(tiny_model, tokens, table_method(tiny_model.config.rope_table(WINDOW))))


@pytest.mark.parametrize("name", CHANGELESS)
def test_nothing_stretched_is_the_plain_model(tiny_model, tokens, plain_logits, name):
    maker, length = CHANGELESS[name]
    np.testing.assert_array_equal(logits_of(tiny_model, tokens, maker(tiny_model.config, length)), plain_logits)


def test_yarn_by_one_is_the_plain_model(tiny_model, tokens, plain_logits):
    """To rounding: its ramp adds two parts of each frequency."""
    table = table_of(yarn(1.0, 64), tiny_model.config)
    np.testing.assert_allclose(table.inv_freq, tiny_model.config.rope_table(WINDOW).inv_freq, rtol=1e-6)
    found = logits_of(tiny_model, tokens, yarn(1.0, 64)(tiny_model.config, WINDOW))
    np.testing.assert_allclose(found, plain_logits, rtol=0, atol=1e-5 * np.abs(plain_logits).max())


@pytest.mark.parametrize("name", CHANGING)
def test_a_stretched_model_is_another(tiny_model, tokens, plain_logits, name):
    maker, length = CHANGING[name]
    method = maker(tiny_model.config, length)
    found = np.asarray(logits_of(tiny_model, tokens, method))
    assert method.passes == 1 and np.isfinite(found).all()
    assert (np.abs(found - plain_logits).max(-1)[:, 1:] > 1e-3).all()


def test_known_frequencies(tiny_config):
    plain = np.asarray(tiny_config.rope_table(WINDOW).inv_freq)
    assert plain.shape == (3, 1, 4)
    np.testing.assert_array_equal(table_of(position_interpolation(2.0), tiny_config).inv_freq, plain / 2)
    np.testing.assert_array_equal(
        table_of(mean_of(lj.LayerFactors(np.array([1.0, 2.0, 3.0]))), tiny_config).inv_freq, plain / 2
    )
    np.testing.assert_array_equal(table_of(uniform(4.0), tiny_config).inv_freq, plain / 4)

    # Changed bases keep the highest frequency; the lowest is divided by the factor, or by f n / W - (f - 1) = 2 x 3 - 1.
    for maker, length, lowest in (
        (ntk_by_base(4.0), 9, 4),
        (ntk_by_base(4.0), 4 * WINDOW, 4),
        (dynamic_ntk(2.0), 3 * WINDOW, 5),
    ):
        inv_freq = table_of(maker, tiny_config, length).inv_freq
        np.testing.assert_allclose(inv_freq[..., 0], 1)
        np.testing.assert_allclose(inv_freq[..., -1], plain[..., -1] / lowest, rtol=1e-5)
        np.testing.assert_allclose(inv_freq[..., 1], plain[..., 1] / lowest ** (1 / 3), rtol=1e-5)

    table = table_of(yarn(4.0), tiny_config)  # its window is the model's
    np.testing.assert_allclose(table.inv_freq[..., 0], 1)
    np.testing.assert_allclose(table.inv_freq[..., -1], plain[..., -1] / 4, rtol=1e-6)
    np.testing.assert_allclose(table.attention_scaling, 0.1 * np.log(4) + 1, rtol=1e-6)
    by_window = [np.asarray(table_of(yarn(4.0, window), tiny_config).inv_freq) for window in (WINDOW, 16)]
    np.testing.assert_array_equal(by_window[0], table.inv_freq)
    assert (by_window[1] <= by_window[0]).all() and (by_window[1] < by_window[0]).any()  # fewer turns in a short window


def test_lpes_beyond_the_window(tiny_config):
    plain = np.asarray(tiny_config.rope_table(WINDOW).inv_freq)
    layers = plain / np.array([1.0, 2.5, 1.5])[:, None, None]
    for beyond in (None, "linear", "dynamic"):
        table = table_of(lpes(FOUND, beyond, None if beyond is None else 2.0), tiny_config, WINDOW)
        np.testing.assert_allclose(table.inv_freq, layers, rtol=1e-6)
    table_for = partial(table_of, config=tiny_config, length=3 * WINDOW)
    np.testing.assert_allclose(table_for(lpes(FOUND)).inv_freq, layers, rtol=1e-6)
    np.testing.assert_allclose(table_for(lpes(FOUND, "linear", 2.0)).inv_freq, layers / 2, rtol=1e-6)
    np.testing.assert_allclose(
        table_for(lpes(FOUND, "dynamic", 2.0)).inv_freq,
        np.asarray(table_for(dynamic_ntk(2.0)).inv_freq) / np.array([1.0, 2.5, 1.5])[:, None, None],
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "rope",
    [
        RopeParameters(1e4, "linear", 2.0),
        RopeParameters(1e4, "dynamic", 2.0, original_max_position_embeddings=64),
        RopeParameters(5e5, "llama3", 8.0, original_max_position_embeddings=64),
        RopeParameters(1e4, "yarn", 4.0, original_max_position_embeddings=64, attention_factor=1.2),
    ],
    ids=lambda rope: rope.rope_type,
)
def test_a_model_with_a_rope_type_of_its_own(tiny_config, rope):
    config = replace(tiny_config, rope=rope)
    own = config.rope_table(100)
    for maker, factors in ((position_interpolation(1.5), 1.5), (lpes(FOUND), np.array([1.0, 2.5, 1.5])[:, None, None])):
        table = table_of(maker, config, 100)
        np.testing.assert_allclose(table.inv_freq, own.inv_freq / factors, rtol=1e-6)
        np.testing.assert_array_equal(table.attention_scaling, own.attention_scaling)
    for maker in (dynamic_ntk(2.0), ntk_by_base(2.0), yarn(2.0), lpes(FOUND, "dynamic", 2.0)):
        with pytest.raises(lj.UserError, match=f"already has the type '{rope.rope_type}'"):
            maker(config, 100)


@pytest.mark.parametrize("name", CHANGING)
def test_layers_without_positions_stay_so(tiny_config, name):
    maker, length = CHANGING[name]
    inv_freq = table_of(maker, replace(tiny_config, nope_layers=(1,)), length).inv_freq
    assert (inv_freq[1] == 0).all() and (inv_freq[0] > 0).all() and (inv_freq[2] > 0).all()


@pytest.mark.parametrize("method", [position_interpolation, dynamic_ntk, ntk_by_base, yarn, partial(lpes, FOUND, "linear")])
@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_unusable_factors_are_refused(method, factor):
    with pytest.raises(lj.UserError, match="must be a number above 0, got"):
        method(factor)


def test_unusable_settings_are_refused(tiny_config):
    for bad, message in (
        (lambda: lpes(FOUND, "yarn", 2.0), "beyond='yarn' is not one of linear, dynamic"),
        (lambda: lpes(FOUND, "linear"), "beyond and factor go together"),
        (lambda: lpes(FOUND, factor=2.0), "beyond and factor go together"),
        (lambda: yarn(2.0, beta_fast=1.0, beta_slow=2.0), "beta_fast must be above beta_slow"),
        (lambda: yarn(2.0, 0)(tiny_config, 9), "original_max_position_embeddings of RoPE type 'yarn' must be"),
        (lambda: lpes(lj.LayerFactors(np.ones(4)))(tiny_config, 9), "LPES: 4 layers of factors, but the model has 3"),
        (lambda: mean_of(lj.LayerFactors(np.ones(4)))(tiny_config, 9), "mean_of: 4 layers of factors"),
        (lambda: ntk_by_base(2.0)(replace(tiny_config, head_dim=2), 9), "at least 4 rotated elements"),
    ):
        with pytest.raises(lj.UserError, match=message) as error:
            bad()
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def pair(request, tiny_config, tmp_path_factory):
    """A random model with a window of 32, and a function of `rope_parameters` that gives transformers' logits of it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    heads = {"llama": 6, "qwen2": 2}[request.param]  # each query its own key, and grouped
    config = replace(tiny_config, model_type=request.param, num_kv_heads=heads, max_position_embeddings=32)
    graph, state = nnx.split(lj.Llama(config, rngs=nnx.Rngs(3), dtype=jnp.float32))
    rng = np.random.default_rng(0)
    noisy = [leaf * 3 + 0.05 * rng.standard_normal(leaf.shape, np.float32) for leaf in jax.tree.leaves(state)]
    model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), noisy))
    folder = tmp_path_factory.mktemp(request.param)
    save_llama(nnx.clone(model), folder)
    saved = json.loads((folder / "config.json").read_text())

    def reference(tokens: np.ndarray, rope: dict) -> np.ndarray:
        rope = {"rope_theta": 10_000.0} | rope
        (folder / "config.json").write_text(json.dumps(saved | {"rope_parameters": rope}))
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor(tokens)).logits.numpy()

    return model, reference


def test_logits_of_transformers(pair):
    model, reference = pair
    tokens = np.random.default_rng(1).integers(0, 300, (2, 50))  # beyond the window
    plain = reference(tokens, {"rope_type": "default"})
    assert 0.5 < plain.std() < 5
    yarn_keys = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    other_yarn = {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 2.0}
    for maker, rope in (
        (position_interpolation(1.0), {"rope_type": "default"}),
        (position_interpolation(2.5), {"rope_type": "linear", "factor": 2.5}),
        (dynamic_ntk(2.0), {"rope_type": "dynamic", "factor": 2.0}),
        (yarn(4.0), yarn_keys),
        (yarn(8.0, 16, 8.0, 2.0), yarn_keys | other_yarn),
    ):
        wanted = reference(tokens, rope)
        assert rope["rope_type"] == "default" or np.abs(wanted - plain).max() > 1
        found = logits_of(model, jnp.asarray(tokens, jnp.int32), maker(model.config, 50))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
