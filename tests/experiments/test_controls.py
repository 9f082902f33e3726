"""Controls and transfer: controls that start as the model itself, temperatures, and factors at another depth."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama
from lpes_jax.models.llama.attention import causal_attention
from lpes_jax.models.llama.model import decoder_layer, hidden_states, layer_rows, rotated
from lpes_jax.rope import RopeParameters
from lpes_jax.search.gradient import answer_loss
from lpes_jax.search.minibatches import pack
from lpes_jax.tasks.prompts import EncodedPrompt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import controls  # noqa: E402
import transfer  # noqa: E402
from control_parameters import CONTROLS, START, temperature  # noqa: E402

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 24)), jnp.int32)
states = jax.jit(hidden_states)


def values_at_start(control: str, count: int) -> jax.Array:
    return jnp.full((3, count), START[control], jnp.float32)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("control", CONTROLS)
def test_at_its_start_a_control_is_the_model_itself(tiny_model, tiny_config, control, count):
    own = tiny_config.rope_table(24)
    if control == "both" and count == 1:
        with pytest.raises(UserError, match="--counts 1 must be even"):
            CONTROLS[control](tiny_model, own, values_at_start(control, count))
        return
    model, table = CONTROLS[control](tiny_model, own, values_at_start(control, count))
    np.testing.assert_array_equal(states(model, TOKENS, table), states(tiny_model, TOKENS, own))


def test_every_number_of_a_control_has_a_gradient(tiny_model, tiny_config):
    """All controls at once, as each starts as the model itself."""
    rng = np.random.default_rng(1)
    prompts = [EncodedPrompt(rng.integers(1, 250, 28).tolist(), [rng.integers(1, 250, 2).tolist()]) for _ in range(2)]
    examples, own = pack(prompts, [0.5, 0.5]), tiny_config.rope_table(32)

    @jax.jit
    @jax.grad
    def gradient(values: dict[str, jax.Array], model: Llama) -> jax.Array:
        table = own
        for control, apply in CONTROLS.items():
            model, table = apply(model, table, values[control])
        return answer_loss(model, examples, table)

    before = [np.array(leaf) for leaf in jax.tree.leaves(tiny_model)]
    found = gradient({control: values_at_start(control, 2) for control in CONTROLS}, tiny_model)
    for gradient in map(np.asarray, found.values()):
        assert gradient.shape == (3, 2) and np.isfinite(gradient).all() and (np.abs(gradient) > 1e-6).all()
    for was, leaf in zip(before, jax.tree.leaves(tiny_model), strict=True):  # the given model is not touched
        np.testing.assert_array_equal(was, leaf)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_a_temperature_multiplies_the_attention_logits(tiny_config, family, count):
    """Against a layer whose attention gets its rotated queries times t; biases, norms of queries and unrotated dims as well."""
    rope = RopeParameters(rope_theta=10_000.0, partial_rotary_factor=0.5 if family == "phi3" else 1.0)
    config = replace(tiny_config, num_layers=1, model_type=family, rope=rope)
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)
    own, x = config.rope_table(24), jax.random.normal(jax.random.key(3), (2, 24, 48))
    half, t = config.rotary_dim // 2, [[1.7]] if count == 1 else [[1.7, 0.6]]
    # By hand: frequency i turns dims i and i + half; the first half of the frequencies is band 0.
    by_dim = np.full(8, 1.7 if count == 1 else 1.0, np.float32)
    for dim in range(2 * half if count == 2 else 0):
        by_dim[dim] = 1.7 if dim % half < half // 2 else 0.6

    @jax.jit
    def out(model: Llama, by_dim: jax.Array) -> jax.Array:
        layer = jax.tree.map(lambda leaf: leaf[0], model.layers)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            q, k = rotated(q, k, jax.tree.map(lambda leaf: leaf[0], layer_rows(config, own)), jnp.arange(24))
            return causal_attention(q * by_dim, k, v), None

        return decoder_layer(config, layer, x, attend)[0]

    changed, table = temperature(model, own, jnp.asarray(t, jnp.float32))
    wanted = out(model, by_dim)
    np.testing.assert_allclose(out(changed, np.ones_like(by_dim)), wanted, atol=2e-4)
    assert table is own and float(jnp.abs(wanted - out(model, np.ones_like(by_dim))).max()) > 0.1


def test_gains_scale_blocks_of_channels_and_the_adapter_has_the_size_it_says(tiny_model, tiny_config):
    own = tiny_config.rope_table(24)
    gains = jnp.asarray([[1.0, 2.0], [0.5, 1.0], [1.0, 1.0]])
    changed, _ = CONTROLS["norm_gain"](tiny_model, own, gains)
    wanted = np.array(tiny_model.layers.attention_norm[...])
    wanted[0, 24:] *= 2
    wanted[1, :24] *= 0.5
    np.testing.assert_array_equal(changed.layers.attention_norm[...], wanted)

    changed, _ = CONTROLS["adapter"](tiny_model, own, jnp.asarray([[0.3], [0.0], [-0.1]]))
    before = np.asarray(tiny_model.layers.query[...], np.float64)
    change = np.asarray(changed.layers.query[...], np.float64) - before
    sizes = np.linalg.norm(change, axis=(1, 2)) / np.linalg.norm(before, axis=(1, 2))
    np.testing.assert_allclose(sizes, [0.3, 0, 0.1], atol=1e-6)
    assert np.linalg.svd(change[0], compute_uv=False)[1] < 1e-5 * np.linalg.norm(change[0])  # rank 1
    with pytest.raises(UserError, match="--counts 3 must divide the 4 frequencies"):
        temperature(tiny_model, own, jnp.ones((3, 3)))


def test_factors_at_another_depth():
    found = LayerFactors(np.array([[1.0, 4.0], [2.0, 2.0], [4.0, 1.0]]), "layer_band")
    assert transfer.resampled(found, 3) is found
    np.testing.assert_allclose(transfer.resampled(found, 5).factors, [[1, 4], [1.5, 3], [2, 2], [3, 1.5], [4, 1]])
    np.testing.assert_allclose(transfer.resampled(found, 2).factors, [[1, 4], [4, 1]])
    ramp = LayerFactors(np.linspace(1, 2, 30))
    np.testing.assert_allclose(transfer.resampled(ramp, 24).factors, np.linspace(1, 2, 24))


def test_finer_factors_need_a_model_that_they_fit(tiny_config):
    bands, groups = (LayerFactors(np.full((6, 3), 1.5), kind) for kind in ("layer_band", "layer_group"))
    with pytest.raises(UserError, match="bands: 3 bands do not divide"):
        transfer.fitted(bands, tiny_config, "bands")
    with pytest.raises(UserError, match="groups: 3 KV groups of factors, but the model has 2"):
        transfer.fitted(groups, tiny_config, "groups")
    assert transfer.fitted(LayerFactors(np.full((6, 2), 1.5), "layer_group"), tiny_config, "groups").num_layers == 3


def test_the_reading_of_figures():
    baseline = np.tile([1.0, 0, 0, 0, 1], (40, 1))
    middle, everywhere = baseline.copy(), 0 * baseline
    middle[:, 1:4] = np.arange(40)[:, None] < 30
    gains = controls.middle_against_ends(middle, baseline, (0, 25, 50, 75, 100))
    assert gains["middle"] == gains["middle_share"] == 0.75 and gains["ends"] == gains["ends_share"] == 0
    assert gains["p"] < 1e-3 and gains["p_gain"] < 1e-3
    even = everywhere + (np.arange(40)[:, None] < 30)
    tuned = controls.middle_against_ends(even, everywhere, (0, 25, 50, 75, 100))
    assert tuned["middle"] == tuned["ends"] == 0.75 and tuned["p"] == 1

    def target(difference: float, p: float) -> dict[str, float]:
        return {"difference": difference, "p": p}

    searched, far = {"kv": target(0.4, 1e-4)}, ["kv"]
    read = partial(controls.reading, searched=far)
    assert read(searched | {"needle": target(0.1, 1e-4)}, gains) == ("position repair", ["needle"], [])
    assert read(searched | {"needle": target(0.1, 0.04), "mdqa": target(0, 1)}, gains)[0] == "position repair, of this task"
    assert read(searched | {"needle": target(0.1, 1e-4), "mdqa": target(-0.2, 1e-4)}, gains)[0].endswith("of this task")
    assert read(searched, tuned)[0] == "task tuning"
    assert read(searched, gains | {"p_gain": 0.2})[0] == "no gain"


@pytest.mark.promotes  # optax
@pytest.mark.long
def test_a_whole_run_stops_goes_on_and_says_what_it_did(model_folder, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("the boat went out and came back again. " * 30)
    shared = {"num_pairs": (2,), "key_length": 1, "test_limit": 2, "positions": (0, 50, 100), "dtype": "float32"}
    settings = controls.Settings(
        **shared, model=str(model_folder), output_path=tmp_path / "controls", controls=("rotary", "both"), counts=(2,),
        limit=4, steps=1, minibatch_size=2, text=(words,), text_window=(16, 32), text_limit=2,
    )  # fmt: skip
    for part in ("0/2", "1/2"):
        with pytest.raises(SystemExit, match="is done"):
            controls.main(replace(settings, part=part))
    cell = settings.output_path / "rotary_2_seed0.json"
    written = cell.stat().st_mtime_ns
    controls.main(settings)
    assert cell.stat().st_mtime_ns == written
    assert json.loads(cell.read_text())["training"]["parameters"] == 3 * 2
    assert "| rotary, 2 a layer | 6 |" in (settings.output_path / "tables.md").read_text()
    with pytest.raises(UserError, match="was run with steps=1, not 2"):
        controls.main(replace(settings, steps=2))

    deep = tmp_path / "deep.json"
    LayerFactors(np.linspace(1.0, 1.2, 10).reshape(5, 2), "layer_band").save(deep)
    moved = transfer.Settings(
        **shared, models=(str(model_folder),), output_path=tmp_path / "transfer",
        factors=(f"own={settings.output_path}/rotary_2_seed0.factors.json", f"deep={deep}"), text=(words,),
        text_window=(16, 32), text_limit=2,
    )  # fmt: skip
    transfer.main(moved)
    pairs = json.loads((moved.output_path / "summary.json").read_text())["pairs"]
    own, (resampled, *texts) = pairs[0], pairs[len(pairs) // 2 :]
    assert [text["target"] for text in texts] == ["plain text, words, windows of 16", "plain text, words, windows of 32"]
    assert all(len(text["by_position"]) == transfer.QUARTERS and text["difference"] != 0 for text in texts)
    assert resampled["note"] == "resampled from 5 layers" and own["note"] == ""
    found = json.loads(cell.read_text())["targets"]["kv, 2 pairs"]["scores"]
    assert own["found"] == pytest.approx(np.mean(found))  # the saved factors are what was measured


@pytest.mark.parametrize("control", ["rotary", "temperature", "both"])
def test_what_is_learnt_in_the_table_is_measured_as_a_factors_file(tiny_model, tiny_config, control):
    """Both halves of `both`: the model that was trained and the file's table give the same states."""
    values = np.random.default_rng(2).uniform(0.7, 1.4, (3, 4)).astype(np.float32)
    own = tiny_config.rope_table(24)
    model, table = CONTROLS[control](tiny_model, own, jnp.asarray(values))
    trained = states(model, TOKENS, table)
    found = controls.as_factors(control, values.astype(np.float64))
    assert found is not None and controls.as_factors("adapter", values.astype(np.float64)) is None
    np.testing.assert_allclose(states(tiny_model, TOKENS, tiny_config.rope_table(24, found)), trained, atol=2e-3)
    assert np.abs(np.asarray(trained) - np.asarray(states(tiny_model, TOKENS, own))).max() > 0.01
