"""Products in 8 bits: known answers, their error, and whole passes of the model with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_prompts import population_of, prompts_of
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.errors import UserError
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama import Llama
from lpes_jax.models.llama.eight_bits import PROJECTIONS, EightBits, EightBitWeights, check_eight_bits, rounded, stacked
from lpes_jax.models.llama.model import with_eight_bits, with_weights
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt

KINDS = "int8", "fp8"
RELATIVE = {"int8": 0.5 / 127, "fp8": 2.0**-4}  # error of one number: of the largest number of its row; of the number itself


def one_layer(weights: np.ndarray, kind: EightBits) -> EightBitWeights:
    values, scales = stacked(jnp.asarray(weights)[None], kind)
    return EightBitWeights(values[0], scales[0])


def test_whole_numbers_up_to_127_give_exact_int8_products():
    rng = np.random.default_rng(0)
    x, weights = (rng.integers(-127, 128, shape).astype(np.float32) for shape in ((2, 3, 40), (40, 5)))
    x[..., 0], weights[0] = 127, -127  # the largest of each row and column: all scales are 1
    assert one_layer(weights, "int8").values.shape == (5, 40)  # [out, in]
    np.testing.assert_array_equal(one_layer(weights, "int8").product(jnp.asarray(x)), x @ weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_the_rounded_numbers(kind, dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 4, 64)) * rng.uniform(0.01, 100, (3, 4, 1)), dtype)
    weights = np.asarray(rng.normal(size=(64, 7)) * rng.uniform(0.01, 100, 7), np.float32)
    layer = one_layer(weights, kind)
    product = layer.product(x)
    assert product.dtype == dtype and layer.values.dtype == {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}[kind]
    exact = np.asarray(x, np.float64) @ weights
    values, scales = rounded(x, layer.values.dtype)
    seen = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[..., None]
    kept = (np.asarray(layer.values[...], np.float64) * np.asarray(layer.scales[...], np.float64)[:, None]).T
    tolerance = 1e-5 if dtype == jnp.float32 else 0.01
    np.testing.assert_allclose(np.asarray(product, np.float64), seen @ kept, rtol=tolerance, atol=1e-6 * np.abs(exact).max())
    for given, found, axis in ((np.asarray(x, np.float64), seen, -1), (weights, kept, 0)):
        largest = np.abs(given).max(axis=axis, keepdims=True)
        bound = RELATIVE[kind] * (largest if kind == "int8" else np.maximum(np.abs(given), largest / 2**14))
        assert (np.abs(found - given) <= 1.001 * bound).all()
    assert np.abs(np.asarray(product, np.float64) - exact).max() > 1e-4 * np.abs(exact).max()  # something was rounded


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_are_zero_and_what_is_not_finite_stays_so(kind):
    layer = one_layer(np.eye(4, dtype=np.float32), kind)
    x = jnp.asarray([[0, 0, 0, 0], [1, np.nan, 0, 0], [1, np.inf, 0, 0], [0, -2, 0, 0]], jnp.float32)
    product = np.asarray(layer.product(x))
    np.testing.assert_array_equal(np.isfinite(product).all(axis=1), [True, False, False, True])
    np.testing.assert_allclose(product[[0, 3]], np.asarray(x)[[0, 3]], rtol=1e-6)
    np.testing.assert_array_equal(one_layer(np.zeros((4, 2), np.float32), kind).product(x[3:]), [[0, 0]])


def unrounded(model: Llama, kind: EightBits) -> Llama:
    """The model with the weights that `with_eight_bits` keeps, in float32."""
    layers = with_eight_bits(model, kind).layers
    kept = {}
    for name in PROJECTIONS:
        weights = getattr(layers, name)
        kept[name] = jnp.swapaxes(weights.values[...].astype(jnp.float32) * weights.scales[...][..., None], 1, 2)
    return with_weights(model, **kept)


def shared_prompts() -> list[EncodedPrompt]:
    """Two prefixes of 30 tokens with three ends each."""
    rng = np.random.default_rng(3)
    prefixes = [rng.integers(0, 300, 30).tolist() for _ in range(2)]
    ids = [prefix + rng.integers(0, 300, 5 + number).tolist() for number in range(3) for prefix in prefixes]
    return [EncodedPrompt(row, [rng.integers(0, 300, 2).tolist()]) for row in ids]


@pytest.mark.parametrize("kind", mostly_long(KINDS, "int8"))
def test_a_population_with_gains_and_shared_prefixes_scores_as_single_rows_do(tiny_model, kind):
    model, prompts = with_eight_bits(tiny_model, kind), shared_prompts()
    factors, gains = population_of((4, 3)), population_of((4, 3, 4), seed=1)
    scorer = Scorer(model, prompts)
    assert scorer.tokens_saved > 0.3
    together = scorer(factors, gains=gains, gains_granularity="layer_band").log_likelihood
    single = Scorer(model, prompts, batch_size=1, population_chunk=1, share_prefixes=False)
    for row in range(4):
        alone = single(factors[row : row + 1], gains=gains[row : row + 1], gains_granularity="layer_band")
        # A state at the edge of two 8-bit numbers may fall to either side, by the order of a sum.
        np.testing.assert_allclose(together[row], alone.log_likelihood[0], rtol=0.02, atol=0.05)
    full = Scorer(tiny_model, prompts)(factors, gains=gains, gains_granularity="layer_band").log_likelihood
    assert np.abs(together - full).max() > 0.1  # random weights of this size are sensitive to rounding
    assert np.corrcoef(together.ravel(), full.ravel())[0, 1] > {"int8": 0.95, "fp8": 0.8}[kind]


def test_the_layers_alone_are_rounded_and_the_model_itself_is_not_changed(tiny_model):
    before = jax.tree.map(np.asarray, tiny_model)
    model = with_eight_bits(tiny_model, "int8")
    jax.tree.map(np.testing.assert_array_equal, before, tiny_model)
    assert model.embed[...] is tiny_model.embed[...] and model.layers.mlp_norm[...] is tiny_model.layers.mlp_norm[...]
    sizes = {str(leaf.dtype): leaf.size for leaf in jax.tree.leaves(model.layers) if leaf.dtype == jnp.int8}
    assert sizes["int8"] > 0
    tokens = jnp.asarray([prompts_of(40)[0].ids], jnp.int32)
    logits = [np.asarray(lj.logits(each, tokens)) for each in (model, unrounded(tiny_model, "int8"), tiny_model)]
    assert logits[0].dtype == np.float32
    errors = [np.abs(logits[0] - other).mean() for other in logits[1:]]
    assert 0 < errors[0] < errors[1] < 0.2 * np.abs(logits[2]).mean()  # of activations alone; of weights too


def test_generation_runs_in_8_bits(tiny_model):
    prompts = [prompt.ids for prompt in prompts_of(9, 20)]
    model = with_eight_bits(tiny_model, "int8")
    new = generate_ids(model, prompts, max_new_tokens=4)
    for ids, continuation in zip(prompts, new, strict=True):
        logits = np.asarray(lj.logits(model, jnp.asarray([ids], jnp.int32)))[0, -1]
        assert logits.argmax() == continuation[0]


def test_int8_runs_everywhere_and_fp8_is_refused_on_a_cpu():
    check_eight_bits("int8")
    if jax.default_backend() == "cpu":
        with pytest.raises(UserError, match="^--score-dtype fp8: the CPU has no fp8 products.*; use --score-dtype int8$"):
            check_eight_bits("fp8")


@pytest.mark.parametrize(
    "capability, allowed", [("8.0", False), ("8.9", True), ("9.0", True), ("10.0", True), ("gfx942", False)]
)
def test_fp8_needs_ada_or_newer(monkeypatch, capability, allowed):
    class Card:
        platform, device_kind, compute_capability = "gpu", "a card", capability

    monkeypatch.setattr(jax, "local_devices", lambda: [Card()])
    if allowed:
        check_eight_bits("fp8")
    else:
        with pytest.raises(UserError, match=r"this device \(a card\) has no fp8 products"):
            check_eight_bits("fp8")
