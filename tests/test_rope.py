"""RoPE tables against float64, against transformers, and the equalities that layer factors must keep bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_jax.errors import UserError
from lpes_jax.rope import RopeParameters, cos_sin, inverse_frequencies, rope_table, rotate, scale_layers

ONE = jnp.ones((), jnp.float32)
FACTORS = [1.1, 1.3, 1.5, 2.0, 3.0]


def exact_frequencies(theta: float, head_dim: int, factor: float = 1.0) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim) / factor


def rotate_exactly(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x `[..., D]`, angles `[..., D/2]`, in float64: (first, second) turned as complex numbers."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("theta, head_dim", [(1e4, 64), (1e5, 64), (5e5, 128), (1e6, 128), (1e4, 8)])
def test_frequencies_equal_float64(theta, head_dim):
    default = inverse_frequencies(RopeParameters(theta), head_dim)
    assert default.dtype == jnp.float32 and default.shape == (head_dim // 2,) and default[0] == 1
    np.testing.assert_allclose(default, exact_frequencies(theta, head_dim), rtol=1e-6)
    linear = inverse_frequencies(RopeParameters(theta, "linear", 2.5), head_dim)
    np.testing.assert_allclose(linear, exact_frequencies(theta, head_dim, 2.5), rtol=1e-6)


@pytest.mark.parametrize("rope", [RopeParameters(1e5), RopeParameters(1e6, "linear", 4.0)])
def test_frequencies_equal_transformers(rope):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope.to_hf())
    module = LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), module.inv_freq.numpy(), rtol=1e-6)
    assert module.attention_scaling == 1.0


def test_layer_factors_divide_their_layer():
    frequencies = jnp.array([1.0, 0.5, 0.25, 0.125])
    scaled = scale_layers(frequencies, jnp.array([1.0, 2.0, 4.0]))
    wanted = [[[1, 0.5, 0.25, 0.125]], [[0.5, 0.25, 0.125, 0.0625]], [[0.25, 0.125, 0.0625, 0.03125]]]
    np.testing.assert_array_equal(scaled, np.array(wanted, np.float32))


def test_band_factors_divide_their_frequencies():
    frequencies = jnp.array([1.0, 0.5, 0.25, 0.125])
    scaled = scale_layers(frequencies, jnp.array([[1.0, 2.0], [4.0, 1.0]]), "layer_band")  # the highest frequencies first
    np.testing.assert_array_equal(scaled, np.array([[[1, 0.5, 0.125, 0.0625]], [[0.25, 0.125, 0.25, 0.125]]], np.float32))


def test_group_factors_divide_their_heads():
    frequencies = jnp.array([1.0, 0.5, 0.25, 0.125])
    scaled = scale_layers(frequencies, jnp.array([[1.0, 2.0], [4.0, 1.0]]), "layer_group")
    assert scaled.shape == (2, 2, 4)
    np.testing.assert_array_equal(scaled, frequencies / np.array([[1, 2], [4, 1]], np.float32)[:, :, None])


def test_group_band_factors_divide_both():
    frequencies = jnp.array([1.0, 0.5, 0.25, 0.125])
    factors = jnp.array([[[1.0, 2.0], [4.0, 8.0], [2.0, 1.0]]])  # one layer, three groups, two bands
    wanted = [[[1, 0.5, 0.125, 0.0625], [0.25, 0.125, 0.03125, 0.015625], [0.5, 0.25, 0.25, 0.125]]]
    np.testing.assert_array_equal(scale_layers(frequencies, factors, "layer_group_band"), np.array(wanted, np.float32))


@pytest.mark.parametrize(
    "granularity, shape", [("layer", (5,)), ("layer_band", (5, 4)), ("layer_group", (5, 2)), ("layer_group_band", (5, 2, 4))]
)
def test_leading_population_axes(granularity, shape):
    frequencies = inverse_frequencies(RopeParameters(1e4), 16)
    factors = jax.random.uniform(jax.random.key(0), (3, 2, *shape), minval=1, maxval=3)
    scaled = scale_layers(frequencies, factors, granularity)
    assert scaled.shape == (3, 2, 5, 2 if "group" in granularity else 1, 8)
    mapped = jax.vmap(jax.vmap(lambda own: scale_layers(frequencies, own, granularity)))(factors)
    np.testing.assert_array_equal(scaled, mapped)


def test_equal_bands_are_the_layer_factor():
    frequencies = inverse_frequencies(RopeParameters(1e4), 16)
    factors = jnp.array([1.3, 1.7])
    for bands in (1, 2, 4, 8):
        banded = scale_layers(frequencies, jnp.tile(factors[:, None], (1, bands)), "layer_band")
        np.testing.assert_array_equal(banded, scale_layers(frequencies, factors))


def test_unusable_factors_are_refused():
    frequencies = inverse_frequencies(RopeParameters(1e4), 16)
    with pytest.raises(ValueError, match="3 bands do not divide the 8 frequencies"):
        scale_layers(frequencies, jnp.ones((2, 3)), "layer_band")
    with pytest.raises(ValueError, match="16 bands do not divide"):
        scale_layers(frequencies, jnp.ones((2, 2, 16)), "layer_group_band")


def test_no_factors_repeat_the_checkpoints_own():
    rope = RopeParameters(1e4, "linear", 2.0)
    table = rope_table(rope, 16, 3)
    np.testing.assert_array_equal(table.inv_freq, np.tile(np.asarray(inverse_frequencies(rope, 16)), (3, 1, 1)))
    assert table.attention_scaling == 1


def test_factors_divide_what_linear_rope_divided():
    rope = RopeParameters(1e4, "linear", 2.0)
    table = rope_table(rope, 16, 2, jnp.array([1.0, 3.0]))
    wanted = [exact_frequencies(1e4, 16, 2), exact_frequencies(1e4, 16, 6)]
    np.testing.assert_allclose(table.inv_freq[:, 0], wanted, rtol=1e-6)


def test_factors_of_one_change_no_bit():
    for head_dim in (8, 64, 128):
        plain = rope_table(RopeParameters(5e5), head_dim, 4).inv_freq
        for scale in (rope_table, jax.jit(rope_table, static_argnums=(0, 1, 2))):
            scaled = scale(RopeParameters(5e5), head_dim, 4, jnp.ones(4)).inv_freq
            np.testing.assert_array_equal(plain, scaled)


@pytest.mark.parametrize("factor", FACTORS)
def test_uniform_factors_are_linear_rope_bit_for_bit(factor):
    rope, linear = RopeParameters(5e5), RopeParameters(5e5, "linear", factor)

    def table(factors):
        return rope_table(rope, 64, 3, factors).inv_freq

    def linear_table():
        return rope_table(linear, 64, 3).inv_freq

    factors = jnp.full(3, factor, jnp.float32)
    wanted = np.asarray(linear_table())
    np.testing.assert_array_equal(jax.jit(linear_table)(), wanted)
    np.testing.assert_array_equal(table(factors), wanted)
    np.testing.assert_array_equal(jax.jit(table)(factors), wanted)
    population = jnp.stack([factors, factors * 2])
    np.testing.assert_array_equal(jax.vmap(table)(population)[0], wanted)
    np.testing.assert_array_equal(jax.jit(jax.vmap(table))(population)[0], wanted)


@pytest.mark.parametrize("factor", FACTORS)
def test_uniform_factors_give_the_angles_of_linear_rope_bit_for_bit(factor):
    positions = jnp.arange(600)

    @jax.jit
    def tables(inv_freq):
        return cos_sin(inv_freq, ONE, positions)

    scaled = scale_layers(inverse_frequencies(RopeParameters(1e4), 64), jnp.full(2, factor, jnp.float32))[1]
    linear = inverse_frequencies(RopeParameters(1e4, "linear", factor), 64)[None]
    for one, other in zip(tables(scaled), tables(linear), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("position, error", [(256, 5e-5), (4095, 5e-4), (32767, 5e-3)])
def test_angles_are_float32_angles(position, error, factor):
    table = rope_table(RopeParameters(1e4), 128, 1, jnp.array([factor], jnp.float32))
    cos, sin = cos_sin(table.inv_freq[0], table.attention_scaling, jnp.array([position]))
    angles = position * exact_frequencies(1e4, 128, factor)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), rtol=0, atol=error)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), rtol=0, atol=error)


def test_scaled_positions_stay_distinct():
    table = rope_table(RopeParameters(1e4), 128, 1, jnp.array([1.5], jnp.float32))
    cos, sin = cos_sin(table.inv_freq[0], table.attention_scaling, jnp.arange(4096))
    # The slowest frequency turns by less than half a circle over all of them, so its sine alone would do.
    pairs = {(c, s) for c, s in zip(np.asarray(cos)[:, 0, 0].tolist(), np.asarray(sin)[:, 0, 0].tolist(), strict=True)}
    assert len(pairs) == 4096
    assert len(set(np.asarray(sin)[:, 0, -1].tolist())) == 4096


def test_attention_scaling_multiplies_cos_and_sin():
    inv_freq = jnp.array([[1.0, 0.1]])
    cos, sin = cos_sin(inv_freq, jnp.float32(1.25), jnp.array([0, 3]))
    np.testing.assert_allclose(cos[:, 0], 1.25 * np.cos([[0, 0], [3, 0.3]]), rtol=1e-6)
    np.testing.assert_allclose(sin[:, 0], 1.25 * np.sin([[0, 0], [3, 0.3]]), rtol=1e-6)


def test_rotation_pairs_the_halves():
    quarter = jnp.full((1, 1, 2), jnp.pi / 2)  # T 1, G 1, two frequencies, each a quarter turn
    x = jnp.array([[[1.0, 2.0, 30.0, 40.0]]])
    rotated = rotate(x, jnp.cos(quarter), jnp.sin(quarter))
    np.testing.assert_allclose(rotated[0, 0], [-30, -40, 1, 2], atol=1e-5)  # interleaved would be [-2, 1, -40, 30]


def test_position_zero_and_zero_rows_rotate_nothing():
    x = jax.random.normal(jax.random.key(0), (5, 2, 8))
    inv_freq = inverse_frequencies(RopeParameters(1e4), 8)[None]
    np.testing.assert_array_equal(rotate(x, *cos_sin(inv_freq, ONE, jnp.arange(5)))[0], x[0])
    np.testing.assert_array_equal(rotate(x, *cos_sin(jnp.zeros_like(inv_freq), ONE, jnp.arange(5))), x)


def test_bfloat16_rotates_within_one_unit_of_float64():
    x = jax.random.normal(jax.random.key(0), (1000, 3, 64)).astype(jnp.bfloat16)
    inv_freq = inverse_frequencies(RopeParameters(1e4), 64)
    rotated = rotate(x, *cos_sin(inv_freq[None], ONE, jnp.arange(1000)))
    assert rotated.dtype == jnp.bfloat16
    exact_x = np.asarray(x).astype(np.float64)
    angles = np.arange(1000)[:, None, None] * exact_frequencies(1e4, 64)
    wanted = rotate_exactly(exact_x, angles)
    length = np.hypot(exact_x[..., :32], exact_x[..., 32:])  # |q| of each pair
    unit = np.exp2(np.floor(np.log2(np.tile(length, 2))) - 7)  # bfloat16 has eight significant bits
    assert (np.abs(np.asarray(rotated).astype(np.float64) - wanted) <= unit).all()


def test_each_group_rotates_by_its_own_row():
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (2, 9, 6, 8))  # six heads in three groups
    inv_freq = jax.random.uniform(keys[1], (3, 4))
    together = rotate(x, *cos_sin(inv_freq, ONE, jnp.arange(9)))
    for group in range(3):
        heads = slice(2 * group, 2 * group + 2)
        alone = rotate(x[:, :, heads], *cos_sin(inv_freq[group : group + 1], ONE, jnp.arange(9)))
        np.testing.assert_array_equal(together[:, :, heads], alone)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    query=st.integers(0, 2000),
    key=st.integers(0, 2000),
    shift=st.integers(0, 2000),
    factor=st.floats(0.5, 4, width=32),
)
def test_scores_depend_on_the_distance_alone(seed, query, key, shift, factor):
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 16)).astype(np.float32)
    inv_freq = scale_layers(inverse_frequencies(RopeParameters(1e4), 16), jnp.array([factor], jnp.float32))[0]

    def score(at: int, other: int) -> float:
        rotated_q = rotate(jnp.asarray(q), *cos_sin(inv_freq, ONE, jnp.array([at])))
        rotated_k = rotate(jnp.asarray(k), *cos_sin(inv_freq, ONE, jnp.array([other])))
        return float(jnp.vdot(rotated_q, rotated_k))

    exact = exact_frequencies(1e4, 16, factor) * (query - key)
    wanted = float(np.vdot(rotate_exactly(q.astype(np.float64), exact), k.astype(np.float64)))
    tolerance = 4e-3 * float(np.linalg.norm(q) * np.linalg.norm(k))  # float32 angles up to 8000
    assert score(query, key) == pytest.approx(wanted, abs=tolerance)
    assert score(query + shift, key + shift) == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize(
    "config, wanted",
    [
        ({"rope_theta": 10000.0}, RopeParameters(10000.0)),
        ({"rope_theta": 500000}, RopeParameters(500000.0)),
        ({"rope_theta": 1e4, "rope_scaling": None}, RopeParameters(1e4)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeParameters(1e4, "linear", 2.0)),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2}}, RopeParameters(1e4, "linear", 2.0)),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}}, RopeParameters(1e4)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, RopeParameters(1e6)),
        ({"rope_parameters": {"rope_theta": 1000000}}, RopeParameters(1e6)),
        ({"rope_parameters": {"rope_theta": 1e6, "type": "linear", "factor": 4}}, RopeParameters(1e6, "linear", 4.0)),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 4}}, RopeParameters(1e6, "linear", 4.0)),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeParameters(1e6, "linear", 2.0),
        ),
    ],
)
def test_both_spellings_of_a_config(config, wanted):
    rope = RopeParameters.from_hf(config)
    assert rope == wanted and isinstance(rope.rope_theta, float)
    assert RopeParameters.from_hf({"rope_parameters": rope.to_hf()}) == rope


@pytest.mark.parametrize(
    "config, words",
    [
        ({}, ["no rope_theta"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["no rope_theta"]),
        ({"rope_theta": None}, ["no rope_theta"]),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "foo"}}, ["'foo'", "default, linear"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "foo", "factor": 2.0}}, ["'foo'", "default, linear"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}}, ["'llama3'", "default, linear"]),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["'yarn'"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": -2.0}}, ["factor", "-2.0"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, words):
    with pytest.raises(UserError) as refusal:
        RopeParameters.from_hf(config, "model/config.json")
    assert str(refusal.value).startswith("model/config.json: ")
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
