"""RoPE tables against float64, against transformers, and the equalities that layer factors must keep bit for bit."""

import copy
import math

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


# Config entries of released models (Llama-2, Vicuna-16k, Yarn-Llama-2, Qwen2.5, Llama-3.1, Phi-3-mini-128k), and head sizes.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.05 + i / 50 for i in range(48)], "long_factor": [1.1 + i for i in range(48)]}
KINDS: dict[str, tuple[dict, int]] = {
    "default": ({"rope_theta": 1e4, "max_position_embeddings": 4096}, 128),
    "linear": ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 4096}, 128),
    "dynamic": ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096}, 128),
    "yarn": (
        {
            "rope_theta": 1e6, "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        128,
    ),
    "yarn-all-keys": (
        {
            "rope_theta": 1e4, "max_position_embeddings": 163_840,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 24, "beta_slow": 2,
                "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False,
            },
        },
        64,
    ),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 131_072}, 128),
    "longrope": (
        {
            "rope_theta": 1e4, "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
            "rope_scaling": LONGROPE,
        },
        96,
    ),
}  # fmt: skip


@pytest.mark.parametrize("length", [100, 4096, 4097, 50_000])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_equal_transformers(name, length):
    """Also if they depend on the length of the text: up to the trained window, and beyond."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config, head_dim = copy.deepcopy(KINDS[name])
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, **config))
    module(torch.zeros(1), torch.arange(length)[None])  # sets the frequencies of this length
    rope = RopeParameters.from_hf(KINDS[name][0])
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim, length), module.inv_freq.numpy(), rtol=3e-6)
    assert rope_table(rope, head_dim, 1).attention_scaling == pytest.approx(module.attention_scaling, rel=1e-6)


def test_llama3_frequencies():
    """High frequencies stay, low ones are divided by 8, and three of the 64 lie between."""
    frequencies = np.asarray(inverse_frequencies(RopeParameters.from_hf(KINDS["llama3"][0]), 128))
    plain = exact_frequencies(5e5, 128)
    wanted = {28: 3.21144599e-3, 29: 2.16657076e-3, 34: 1.78507813e-4, 35: 9.55621235e-5, 63: 3.06892599e-7}
    for index, value in wanted.items():
        assert frequencies[index] == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(frequencies[:29], plain[:29], rtol=1e-6)
    np.testing.assert_allclose(frequencies[35:], plain[35:] / 8, rtol=1e-6)


def test_dynamic_base_grows_only_beyond_the_trained_window():
    rope = RopeParameters.from_hf(KINDS["dynamic"][0])
    plain = inverse_frequencies(RopeParameters(1e4), 128)
    for length in (0, 1, 4096):
        np.testing.assert_array_equal(inverse_frequencies(rope, 128, length), plain)
    base = 1e4 * (2 * 10_000 / 4096 - 1) ** (128 / 126)
    np.testing.assert_allclose(inverse_frequencies(rope, 128, 10_000), exact_frequencies(base, 128), rtol=1e-6)


def test_longrope_changes_its_divisors_beyond_the_trained_window():
    rope, plain = RopeParameters.from_hf(KINDS["longrope"][0]), exact_frequencies(1e4, 96)
    short, long = plain / LONGROPE["short_factor"], plain / LONGROPE["long_factor"]
    for length, wanted in ((0, short), (4096, short), (4097, long)):
        np.testing.assert_allclose(inverse_frequencies(rope, 96, length), wanted, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_yarn_keeps_high_frequencies_and_divides_low_ones():
    """Qwen2.5's: in 32,768 positions, frequencies up to index 23 turn 32 times or more, those from 40 on once or less."""
    rope, plain = RopeParameters.from_hf(KINDS["yarn"][0]), exact_frequencies(1e6, 128)
    frequencies = np.asarray(inverse_frequencies(rope, 128))
    np.testing.assert_allclose(frequencies[:24], plain[:24], rtol=1e-6)
    np.testing.assert_allclose(frequencies[40:], plain[40:] / 4, rtol=1e-6)
    middle = plain[30] * (1 - 7 / 17) + plain[30] / 4 * 7 / 17
    assert frequencies[30] == pytest.approx(middle, rel=1e-6)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    for factor in (1.0, 1.5):
        config = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": factor}, "rope_theta": 1e4}
        assert RopeParameters.from_hf(config).attention_factor == pytest.approx(0.1 * math.log(factor) + 1)


@pytest.mark.parametrize("granularity, shape", [("layer", (3,)), ("layer_band", (3, 4)), ("layer_group_band", (3, 2, 8))])
@pytest.mark.parametrize("name", KINDS)
def test_factors_divide_the_frequencies_of_every_kind(name, granularity, shape):
    """They compose with the kind, whose attention scaling stays; layers without RoPE stay without."""
    config, head_dim = KINDS[name]
    rope = RopeParameters.from_hf(config)
    factors = np.random.default_rng(0).uniform(1, 2, shape)
    table = rope_table(rope, head_dim, 3, jnp.asarray(factors, jnp.float32), granularity, length=5000, nope_layers=[1])
    own = np.asarray(inverse_frequencies(rope, head_dim, 5000))
    each = factors.reshape(3, 1 if "group" not in granularity else 2, -1).repeat(
        head_dim // 2 // shape[-1] if len(shape) > 1 else 1, -1
    )
    wanted = own / each * np.array([1, 0, 1])[:, None, None]
    np.testing.assert_allclose(table.inv_freq, np.broadcast_to(wanted, table.inv_freq.shape), rtol=1e-6)
    assert table.attention_scaling == np.float32(rope.attention_factor)


@pytest.mark.parametrize("name", KINDS)
def test_factors_of_one_change_no_bit_of_any_kind(name):
    config, head_dim = KINDS[name]
    rope = RopeParameters.from_hf(config)
    for length in (100, 50_000):
        plain = rope_table(rope, head_dim, 2, length=length)
        np.testing.assert_array_equal(plain.inv_freq, rope_table(rope, head_dim, 2, jnp.ones(2), length=length).inv_freq)


@pytest.mark.parametrize("position", [8191, 32_767])
@pytest.mark.parametrize("name", KINDS)
def test_angles_of_every_kind_are_float32_angles_far_out(name, position):
    """Against float64 from the float32 frequencies' exact values; bfloat16 frequencies or positions are off by more than 1."""
    config, head_dim = KINDS[name]
    table = rope_table(RopeParameters.from_hf(config), head_dim, 1, jnp.array([1.5]), length=position + 1)
    cos, sin = cos_sin(table.inv_freq[0], table.attention_scaling, jnp.array([position]))
    angles, scaling = position * np.asarray(table.inv_freq[0, 0], np.float64), float(table.attention_scaling)
    error = 5e-3 * position / 32_767
    np.testing.assert_allclose(cos[0, 0], scaling * np.cos(angles), rtol=0, atol=error)
    np.testing.assert_allclose(sin[0, 0], scaling * np.sin(angles), rtol=0, atol=error)


@pytest.mark.parametrize("heads", [2, 12])  # 12: as many as there are rotated elements
def test_rotating_a_part_leaves_the_rest(heads):
    """partial_rotary_factor 0.75 of a head of 16: element i pairs with i + 6, and the last four pass."""
    rope = RopeParameters(1e4, partial_rotary_factor=0.75)
    table = rope_table(rope, 16, 1)
    assert table.inv_freq.shape == (1, 1, 6)
    np.testing.assert_allclose(table.inv_freq[0, 0], exact_frequencies(1e4, 12), rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (20, heads, 16))
    turned = rotate(x, *cos_sin(table.inv_freq[0], ONE, jnp.arange(20)))
    wanted = rotate_exactly(np.asarray(x[..., :12], np.float64), np.arange(20)[:, None, None] * exact_frequencies(1e4, 12))
    np.testing.assert_allclose(turned[..., :12], wanted, atol=1e-5)
    np.testing.assert_array_equal(turned[..., 12:], x[..., 12:])


def test_layers_without_rope_have_no_attention_scaling():
    rope = RopeParameters.from_hf(KINDS["yarn"][0])
    table = rope_table(rope, 128, 2, nope_layers=[1])
    x = jax.random.normal(jax.random.key(0), (5, 2, 128))
    np.testing.assert_array_equal(rotate(x, *cos_sin(table.inv_freq[1], table.layer_scaling[1], jnp.arange(5))), x)
    turned = rotate(x, *cos_sin(table.inv_freq[0], table.layer_scaling[0], jnp.arange(5)))
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1) * 1.1386294, rtol=1e-5)


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


@pytest.mark.parametrize("start", [0, 7500, 31_500])
def test_bfloat16_rotates_within_one_unit_of_float64(start):
    x = jax.random.normal(jax.random.key(0), (1000, 3, 64)).astype(jnp.bfloat16)
    inv_freq = inverse_frequencies(RopeParameters(1e4), 64)
    rotated = rotate(x, *cos_sin(inv_freq[None], ONE, jnp.arange(start, start + 1000)))
    assert rotated.dtype == jnp.bfloat16
    exact_x = np.asarray(x).astype(np.float64)
    angles = np.arange(start, start + 1000)[:, None, None] * exact_frequencies(1e4, 64)
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
        single = rotate(x[:, :, heads], *cos_sin(inv_freq[group : group + 1], ONE, jnp.arange(9)))
        np.testing.assert_array_equal(together[:, :, heads], single)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    query=st.integers(0, 2000),
    key=st.integers(0, 2000),
    shift=st.integers(0, 2000),
    factor=st.floats(0.5, 4, width=32),
)
def test_scores_depend_only_on_the_distance(seed, query, key, shift, factor):
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 16)).astype(np.float32)
    inv_freq = scale_layers(inverse_frequencies(RopeParameters(1e4), 16), jnp.array([factor], jnp.float32))[0]

    def score(query_position: int, key_position: int) -> float:
        rotated_q = rotate(jnp.asarray(q), *cos_sin(inv_freq, ONE, jnp.array([query_position])))
        rotated_k = rotate(jnp.asarray(k), *cos_sin(inv_freq, ONE, jnp.array([key_position])))
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
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "foo"}},
            ["'foo'", "default, linear, dynamic, yarn, llama3, longrope"],
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "foo", "factor": 2.0}}, ["'foo'", "default, linear"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": ["linear"]}}, ["['linear']", "default, linear"]),
        ({"rope_theta": 1e4, "rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_theta": 0.5}, ["rope_theta", "0.5"]),
        ({"rope_theta": "10000"}, ["rope_theta", "'10000'"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, ["'yarn'", "'linear'"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["rope_theta", "1000000.0", "10000.0"]),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
            },
            ["rope_scaling", "rope_parameters", "have different types"],
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 8.0}}, ["alpha", "'linear'", "factor"]),
        (
            {"rope_theta": 1e4, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "default"}},
            ["mrope_section", "'default'"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["full_attention"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["max_position_embeddings", "None"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}}, ["'llama3'", "original_max"]),
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"low_freq_factor": None}}, ["low_freq_factor", "None"]),
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3, "original_max_position_embeddings": 4096}, ["8192", "4096"]),
        ({"rope_theta": 1e4, "rope_scaling": LONGROPE}, ["original_max_position_embeddings", "None"]),
        (
            {"rope_theta": 1e4, "rope_scaling": LONGROPE | {"long_factor": 2.0}, "original_max_position_embeddings": 4096}
            | {"max_position_embeddings": 8192},
            ["long_factor", "list", "2.0"],
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": LONGROPE | {"short_factor": [0.0]}, "original_max_position_embeddings": 4096}
            | {"max_position_embeddings": 8192},
            ["short_factor", "0.0"],
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["original_max_position_embeddings"]),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1}},
            ["got 1"],
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": "no"},
            },
            ["truncate", "'no'"],
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": -2.0}}, ["factor", "-2.0"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "1.5"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, ["partial_rotary_factor", "0"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, words):
    with pytest.raises(UserError) as refusal:
        RopeParameters.from_hf(config, "model/config.json")
    assert str(refusal.value).startswith("model/config.json: ") and "\n" not in str(refusal.value)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
