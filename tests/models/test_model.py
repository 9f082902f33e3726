"""The decoder: attention against float64 NumPy, padding, factors, gradients and dtypes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.models.llama.attention import (
    blocked_attention,
    blocked_masked_attention,
    cached_attention,
    causal_attention,
    one_kernel,
    with_even_length,
)
from lpes_jax.models.llama.model import hidden_states, output_logits
from lpes_jax.rope import RopeParameters, RopeTable, inverse_frequencies, rope_table, scale_layers


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
    """softmax(q k^T / sqrt(D) + causal mask) v, one head at a time, in float64; a query sees the last `window` keys."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    shared = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        logits = q[row, :, head] @ k[row, :, head // shared].T / np.sqrt(q.shape[-1])
        logits[np.triu_indices(len(logits), 1)] = -np.inf
        if window is not None:
            logits[np.tril_indices(len(logits), -window)] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[row, :, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[row, :, head // shared]
    return out


def qkv(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype=jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(length)  # not JAX's: it would compile a program for each shape
    shapes = [(batch, length, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(2 * rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def table_of(model: lj.Llama, factors=None, granularity="layer") -> RopeTable:
    config = model.config
    return rope_table(config.rope, config.head_dim, config.num_layers, factors, granularity)


def tokens_of(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 300)


@jax.jit
def log_likelihood(model: lj.Llama, tokens: jax.Array, table: RopeTable) -> jax.Array:
    """Of every token but the first, summed."""
    logits = output_logits(model, hidden_states(model, tokens, table))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return chosen.sum()


SHAPES = [
    (1, 1, 2, 2, 128), (2, 7, 4, 2, 3), (3, 33, 6, 2, 8), (2, 65, 3, 1, 64), (5, 19, 4, 4, 128), (2, 129, 6, 3, 128),
    (1, 147, 2, 1, 7),
]  # fmt: skip
WINDOWS = [(147, 7, 5), (147, 7, 33), (147, 7, 146), (65, 64, 1), (65, 64, 64), (20, 128, 2)]


@pytest.mark.parametrize(
    "batch, length, heads, kv_heads, block", mostly_long(SHAPES, SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[6], names=5)
)
def test_blocked_attention_equals_plain(batch, length, heads, kv_heads, block):
    q, k, v = qkv(batch, length, heads, kv_heads, 8)
    wanted = exact_attention(q, k, v)
    np.testing.assert_allclose(jax.jit(blocked_attention, static_argnums=3)(q, k, v, block), wanted, atol=1e-5)
    if block == 128:
        np.testing.assert_allclose(jax.jit(causal_attention)(q, k, v), wanted, atol=1e-5)


@pytest.mark.parametrize("length, block, window", mostly_long(WINDOWS, WINDOWS[1], WINDOWS[3], WINDOWS[5], names=3))
def test_windowed_attention_equals_plain(length, block, window):
    """A window of w is w keys, the query's own among them; spans, blocks and windows end in all combinations."""
    q, k, v = qkv(2, length, 4, 2, 8)
    out = jax.jit(blocked_attention, static_argnums=(3, 4))(q, k, v, block, window)
    np.testing.assert_allclose(out, exact_attention(q, k, v, window), atol=1e-5)


def test_a_window_as_long_as_the_text_is_none():
    q, k, v = qkv(2, 40, 4, 2, 8)
    plain = str(jax.make_jaxpr(causal_attention)(q, k, v))
    for window, same in ((39, False), (40, True), (4096, True)):
        assert (str(jax.make_jaxpr(lambda *qkv, w=window: causal_attention(*qkv, w))(q, k, v)) == plain) == same


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN runs on a GPU alone")
@pytest.mark.parametrize("window", [1, 17, 64, 200, None])
def test_windows_of_cudnn_are_ours(window):
    """Also as the layers call it: in a branch, under vmap."""
    q, k, v = qkv(2, 200, 4, 2, 64, jnp.bfloat16)
    wanted = exact_attention(q, k, v, window)

    @jax.jit
    @jax.vmap
    def attend(q, k, v):
        return jax.lax.cond(jnp.bool_(True), lambda *qkv: causal_attention(*qkv, window), causal_attention, q, k, v)

    assert "cudnn" in attend.lower(q[None], k[None], v[None]).as_text()
    np.testing.assert_allclose(np.asarray(attend(q[None], k[None], v[None])[0], np.float64), wanted, atol=0.06)


@pytest.mark.parametrize("length", mostly_long([1, 2, 7, 8], 1))
def test_odd_lengths_are_padded_to_even_ones(length):
    """As for cuDNN, which refuses gradients of odd lengths; values and gradients are those without padding."""
    q, k, v = qkv(2, length, 4, 2, 16)
    lengths = []

    def even_alone(q, k, v):
        lengths.append(q.shape[1])
        return blocked_attention(q, k, v)

    def total(attend, q, k, v):
        return (attend(q, k, v) ** 2).sum()

    runs = (partial(with_even_length, even_alone), blocked_attention)
    found, wanted = (jax.jit(jax.value_and_grad(partial(total, attend), (0, 1, 2)))(q, k, v) for attend in runs)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5), found, wanted)
    assert set(lengths) == {length + length % 2}


def test_one_kernel_is_the_masked_attention_under_vmap_and_in_gradients():
    """By XLA's attention here; on a GPU by cuDNN's, in 16 bits."""
    on_gpu = jax.default_backend() == "gpu"
    q, k, v = qkv(2, 160, 4, 2, 64, jnp.bfloat16 if on_gpu else jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(160, dtype=jnp.int32), (2, 160))
    ends = jnp.full((2, 160), 160, jnp.int32).at[:, 40:90].set(90).at[:, 50:60].set(60)  # branches, and one within a branch

    def wanted(q, k, v):
        return blocked_masked_attention(q, k, v, positions, ends, positions)

    def ours(q, k, v):
        return one_kernel(q, k, v, positions, ends)

    close = partial(np.testing.assert_allclose, atol=0.06 if on_gpu else 1e-4, rtol=0.06 if on_gpu else 1e-4)
    individuals = jnp.stack([q, 2 * q, -q])
    close(*(np.asarray(jax.jit(jax.vmap(run, (0, None, None)))(individuals, k, v), np.float32) for run in (ours, wanted)))
    gradients = [jax.jit(jax.grad(lambda *qkv, run=run: (run(*qkv) ** 2).sum(), (0, 1, 2)))(q, k, v) for run in (ours, wanted)]
    for found, other in zip(*gradients, strict=True):
        close(np.asarray(found, np.float32), np.asarray(other, np.float32))


def test_cached_attention_sees_the_window():
    q, k, v = qkv(3, 20, 6, 2, 8)
    positions = jnp.array([0, 6, 19])
    for window in (1, 4, 20, 50):
        full = exact_attention(q, k, v, window)[np.arange(3), np.asarray(positions)]
        last = jax.jit(cached_attention)(q[jnp.arange(3), positions][:, None], k, v, positions + 1, jnp.int32(window))
        np.testing.assert_allclose(last[:, 0], full, atol=1e-5)


def test_windows_skip_what_they_hide():
    """Of 4,096 positions with a window of 256, far fewer products are computed."""
    shapes = [jax.ShapeDtypeStruct((1, 4096, heads, 32), jnp.float32) for heads in (4, 2, 2)]
    costs = [
        jax.jit(blocked_attention, static_argnums=(3, 4)).lower(*shapes, 512, window).compile().cost_analysis()["flops"]
        for window in (None, 256)
    ]
    assert costs[1] < 0.6 * costs[0]


def test_blocked_attention_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr("lpes_jax.models.llama.attention.logits_at_once", lambda: 2 * 4 * 4 * 8 * 30)  # two rows of five
    q, k, v = qkv(5, 30, 4, 2, 8)
    np.testing.assert_allclose(jax.jit(blocked_attention, static_argnums=3)(q, k, v, 8), exact_attention(q, k, v), atol=1e-5)


def test_programs_do_not_grow_with_the_prompt():
    sizes = []
    for length in (4096, 32_768):
        q, k, v = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32) for heads in (4, 2, 2))
        sizes.append(str(jax.make_jaxpr(blocked_attention)(q, k, v)).count("dot_general"))
    assert sizes[0] == sizes[1] < 20


def test_grouped_queries_share_neighbouring_heads():
    """Heads 0 to 2 read key-value head 0, 3 to 5 the other; not 0, 2, 4 and 1, 3, 5."""
    q, k, v = qkv(1, 4, 6, 2, 8)
    v = v.at[:, :, 0].set(1.0).at[:, :, 1].set(2.0)
    out = jax.jit(blocked_attention)(q, k, v)
    np.testing.assert_allclose(out[0, :, :, 0], np.tile([1, 1, 1, 2, 2, 2], (4, 1)), rtol=1e-6)


def test_attention_of_bfloat16_sums_in_float32():
    q, k, v = qkv(2, 50, 4, 2, 16, jnp.bfloat16)
    out = jax.jit(blocked_attention, static_argnums=3)(q, k, v, 16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), exact_attention(q, k, v), atol=0.06)  # |v| is up to 8


def test_cached_attention_is_the_last_row_of_full_attention():
    q, k, v = qkv(3, 20, 6, 2, 8)
    for lengths in ([20, 20, 20], [1, 7, 20]):
        positions = jnp.array(lengths) - 1
        full = exact_attention(q, k, v)[np.arange(3), np.asarray(positions)]
        last = jax.jit(cached_attention)(q[jnp.arange(3), positions][:, None], k, v, positions + 1)
        np.testing.assert_allclose(last[:, 0], full, atol=1e-5)


def test_attention_never_holds_all_logits():
    batch, length, heads, kv_heads, head_dim = 2, 4096, 8, 4, 32
    shapes = [jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.float32) for n in (heads, kv_heads, kv_heads)]
    compiled = jax.jit(blocked_attention).lower(*shapes).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert 0 < temporary < batch * heads * length * length * 4 / 8


def test_the_model_never_holds_all_logits(tiny_model):
    batch, length = 4, 2048
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    table = table_of(tiny_model)

    def run(model, tokens, inv_freq, scaling):
        return hidden_states(model, tokens, RopeTable(inv_freq, scaling))

    compiled = jax.jit(run).lower(tiny_model, tokens, table.inv_freq, table.attention_scaling).compile()
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < batch * 6 * length * length * 4 / 4


@pytest.mark.parametrize("windows", [{}, {"sliding_window": 8, "sliding_layers": (0, 1, 2)}], ids=["none", "all"])
def test_equal_windows_need_no_branch(tiny_model, windows):
    graph, state = nnx.split(tiny_model)
    model = nnx.merge(graph, state)
    tokens, table = tokens_of(1, 40), table_of(model)
    model.config = replace(tiny_model.config, **windows)
    assert "cond[" not in str(jax.make_jaxpr(hidden_states)(model, tokens, table))
    model.config = replace(tiny_model.config, sliding_window=8, sliding_layers=(1,))
    assert "cond[" in str(jax.make_jaxpr(hidden_states)(model, tokens, table))
    assert "cond[" not in str(jax.make_jaxpr(hidden_states)(model, tokens[:, :8], table))


def test_windows_beyond_the_text_change_no_bit(tiny_model):
    graph, state = nnx.split(tiny_model)
    windowed, tokens = nnx.merge(graph, state), tokens_of(2, 40)
    plain = lj.logits(tiny_model, tokens)
    windowed.config = replace(tiny_model.config, sliding_window=40, sliding_layers=(0, 2))
    np.testing.assert_array_equal(lj.logits(windowed, tokens), plain)
    windowed.config = replace(tiny_model.config, sliding_window=39, sliding_layers=(0, 2))
    changed = np.abs(lj.logits(windowed, tokens) - plain).max(axis=(0, 2))
    assert changed[:39].max() < 1e-3 < 1e-2 < changed[39]  # the last position alone no longer sees the first


def test_padding_on_the_right_changes_nothing(tiny_model):
    tokens = tokens_of(2, 40)
    whole = lj.logits(tiny_model, tokens)
    other_end = lj.logits(tiny_model, tokens.at[:, 23:].set(7))
    np.testing.assert_array_equal(whole[:, :23], other_end[:, :23])
    assert not np.allclose(whole[:, 23:], other_end[:, 23:], atol=1e-2)
    np.testing.assert_allclose(lj.logits(tiny_model, tokens[:, :23]), whole[:, :23], rtol=0, atol=1e-3)  # of logits up to 20


def test_a_batch_of_unequal_lengths_equals_single_runs(tiny_model):
    tokens, factors = tokens_of(4, 32), jnp.array([1.0, 2.0, 1.5])
    together = lj.logits(tiny_model, tokens, factors)
    for row, length in enumerate([5, 10, 31, 32]):
        single = lj.logits(tiny_model, tokens[row : row + 1, :length], factors)
        np.testing.assert_allclose(together[row, :length], single[0], rtol=0, atol=1e-3)  # of logits up to 20


@pytest.mark.parametrize(
    "granularity, shape", [("layer", (3,)), ("layer_band", (3, 4)), ("layer_group", (3, 2)), ("layer_group_band", (3, 2, 4))]
)
def test_factors_of_one_change_no_bit(tiny_model, granularity, shape):
    tokens = tokens_of(2, 40)
    plain = lj.logits(tiny_model, tokens)
    assert plain.dtype == jnp.float32 and plain.shape == (2, 40, 300)
    np.testing.assert_array_equal(plain, lj.logits(tiny_model, tokens, lj.LayerFactors(np.ones(shape), granularity)))
    if granularity == "layer":
        np.testing.assert_array_equal(plain, lj.logits(tiny_model, tokens, jnp.ones(3)))


def test_uniform_factors_are_position_interpolation_bit_for_bit(tiny_model):
    tokens = tokens_of(2, 40)
    graph, state = nnx.split(tiny_model)
    interpolated = nnx.merge(graph, state)
    interpolated.config = replace(tiny_model.config, rope=RopeParameters(10_000.0, "linear", 1.3))
    np.testing.assert_array_equal(lj.logits(tiny_model, tokens, jnp.full(3, 1.3)), lj.logits(interpolated, tokens))


def test_each_layer_has_its_own_factor(tiny_model):
    tokens = tokens_of(1, 40)
    plain = lj.logits(tiny_model, tokens)
    changed = [lj.logits(tiny_model, tokens, jnp.ones(3).at[layer].set(2.0)) for layer in range(3)]
    for layer, logits in enumerate(changed):
        np.testing.assert_array_equal(plain[:, 0], logits[:, 0])  # the first token has no distances
        assert float(jnp.abs(plain - logits).max()) > 0.1
        for other in changed[:layer]:
            assert float(jnp.abs(other - logits).max()) > 0.1


def test_groups_and_bands_of_one_shape_differ(tiny_model):
    tokens, factors = tokens_of(1, 40), np.array([[1.0, 2.0]] * 3)
    by_band = lj.logits(tiny_model, tokens, lj.LayerFactors(factors, "layer_band"))
    by_group = lj.logits(tiny_model, tokens, lj.LayerFactors(factors, "layer_group"))
    assert float(jnp.abs(by_band - by_group).max()) > 0.1


def test_group_factors_reach_only_their_heads(tiny_model):
    """Silenced heads of group 1 leave a model in which the factors of group 1 do nothing, and those of group 0 do."""
    silent = nnx.clone(tiny_model)
    silent.layers.output[...] = silent.layers.output[...].at[:, 3 * 8 :].set(0)
    tokens = tokens_of(1, 40)
    plain = lj.logits(silent, tokens)
    second = lj.logits(silent, tokens, lj.LayerFactors(np.array([[1.0, 3.0]] * 3), "layer_group"))
    first = lj.logits(silent, tokens, lj.LayerFactors(np.array([[3.0, 1.0]] * 3), "layer_group"))
    np.testing.assert_array_equal(plain, second)
    assert float(jnp.abs(plain - first).max()) > 0.1


def test_factors_of_another_model_are_refused(tiny_model):
    with pytest.raises(lj.UserError, match="4 layers of factors, but the model has 3"):
        lj.logits(tiny_model, tokens_of(1, 4), lj.LayerFactors.uniform(1.5, 4))


@pytest.mark.long
def test_rematerialised_layers_have_the_same_gradient(tiny_model):
    tokens = tokens_of(2, 24)

    @jax.jit
    def gradients(model, factors):
        def loss(model, factors, remat):
            hidden = hidden_states(model, tokens, table_of(model, factors), remat=remat)
            return jax.nn.logsumexp(output_logits(model, hidden), axis=-1).sum()

        return [jax.value_and_grad(loss, argnums=(0, 1))(model, factors, remat) for remat in (False, True)]

    kept, recomputed = gradients(tiny_model, jnp.array([1.0, 1.5, 2.0]))
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("granularity", mostly_long(["layer", "layer_group_band"], "layer_group_band"))
def test_gradient_in_the_factors_equals_finite_differences(tiny_model, granularity):
    tokens, config = tokens_of(2, 24), tiny_model.config
    factors = {"layer": np.array([1.1, 1.5, 1.9]), "layer_group_band": np.linspace(1.0, 2.0, 24).reshape(3, 2, 4)}[granularity]
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tiny_model)
        inv_freq = inverse_frequencies(config.rope, config.head_dim).astype(jnp.float64)

        @jax.jit
        def value(factors):
            table = RopeTable(scale_layers(inv_freq, factors, granularity), jnp.ones((), jnp.float64))
            return log_likelihood(model, tokens, table)

        factors = jnp.asarray(factors, jnp.float64)
        gradient = np.asarray(jax.jit(jax.grad(value))(factors))
        assert gradient.dtype == np.float64
        step, chosen = 1e-5, list(np.ndindex(factors.shape))[:: max(1, factors.size // 4)]
        differences = []
        for index in chosen:
            moved = [float(value(factors.at[index].add(k * step))) for k in (-2, -1, 1, 2)]
            differences.append((moved[0] - 8 * moved[1] + 8 * moved[2] - moved[3]) / (12 * step))
        largest = np.abs(gradient).max()
        assert largest > 0.1
        np.testing.assert_allclose([gradient[index] for index in chosen], differences, rtol=1e-6, atol=1e-7 * largest)


def test_bfloat16_is_close_to_float32(tiny_model):
    """Weights and activations of eight bits: logits agree to a few percent of their spread, as do clear argmaxes."""
    tokens, factors = tokens_of(4, 64), jnp.array([1.0, 1.5, 2.0])
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_model)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)  # the same weights
    exact = np.asarray(lj.logits(wide, tokens, factors))
    short = lj.logits(rounded, tokens, factors)
    assert short.dtype == jnp.float32
    short = np.asarray(short)
    errors = np.abs(short - exact).mean()
    assert 0 < errors < 0.1 * exact.std()
    top = np.sort(exact, axis=-1)
    clear = top[..., -1] - top[..., -2] > 0.3 * exact.std()
    assert clear.mean() > 0.3
    assert (short.argmax(-1) == exact.argmax(-1))[clear].mean() > 0.98


def test_bfloat16_does_not_change_the_tables(tiny_model):
    """Casting every weight casts no position: the tables are no part of the model."""
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_model)
    np.testing.assert_array_equal(table_of(rounded).inv_freq, table_of(tiny_model).inv_freq)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype(jnp.bfloat16)}
