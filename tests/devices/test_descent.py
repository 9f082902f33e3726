"""A descent over eight devices is that on one."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from descents import haystacks, looks_of
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.mesh import make_mesh
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.scoring import Scorer
from lpes_jax.search.algorithms import box_parameters, factors_applied
from lpes_jax.search.gradient import Look
from lpes_jax.search.minibatches import Data, pack, shared_groups
from lpes_jax.search.settings import search_space
from lpes_jax.settings.search import GradientSettings, SearchSettings, TextSettings

pytestmark = pytest.mark.promotes  # optax


@pytest.mark.long
def test_eight_devices_descend_as_one(model_folder: Path):
    model, prompts = lj.load_model(str(model_folder), "float32"), haystacks([3, 4, 3])
    groups = shared_groups(prompts, model.config, 4)
    train = Data([pack(prompts, np.linspace(0.1, 1, 10).tolist(), groups)], jnp.arange(120, dtype=jnp.int32).reshape(3, 40))
    settings = SearchSettings.of(curve="free", min_factor=0.9, max_factor=1.2)
    space = search_space(settings, model.config, range(3))
    parameters, project, values = box_parameters(settings.gradient, space)
    apply = factors_applied(space, values, model.config.rope_table(96))
    sizes = GradientSettings(minibatch_size=7, learning_rate=0.003, steps=3, look_every=3)
    text = TextSettings(text_weight=2.0, text_minibatch=2)

    def looks(mesh: jax.sharding.Mesh) -> list[Look]:
        pieces = put_model(model, mesh), train, train, parameters, apply, project
        return looks_of(pieces, sizes, text, penalty=lambda p: jnp.square(p["y"] - 1).mean())[0]

    on_one = looks(make_mesh(devices=jax.devices()[:1]))
    for mesh in (make_mesh(), make_mesh(2)):
        for one, several in zip(on_one, looks(mesh), strict=True):
            assert len(several.parameters["y"].devices()) == 1 and jax.device_count() == 8
            np.testing.assert_allclose(several.parameters["y"], one.parameters["y"], atol=1e-5)
            numbers = ([*measured[1:3], *measured[3], *measured[4], measured.text_loss] for measured in (several, one))
            np.testing.assert_allclose(*numbers, rtol=1e-4)
    assert float(jnp.abs(on_one[-1].parameters["y"] - 1).min()) > 1e-3


@pytest.mark.long
def test_eight_devices_measure_the_divergence_of_text_as_one(model_folder: Path):
    model, prompts = lj.load_model(str(model_folder), "float32"), haystacks([3, 4])
    text = jnp.arange(120, dtype=jnp.int32).reshape(3, 40)
    train = Data([pack(prompts, [1.0] * 7, shared_groups(prompts, model.config, 4))], text)
    space = search_space(SearchSettings.of(curve="free", min_factor=0.9, max_factor=1.2), model.config, range(3))
    parameters, project, values = box_parameters(GradientSettings(), space)
    apply = factors_applied(space, values, model.config.rope_table(96))
    sizes = GradientSettings(minibatch_size=7, learning_rate=0.003, steps=1)
    kept = TextSettings(text_weight=2.0, text_minibatch=2, text_objective="kl")
    one, eight = (
        looks_of((put_model(model, mesh), train, train, parameters, apply, project), sizes, kept)[0][-1]
        for mesh in (make_mesh(devices=jax.devices()[:1]), make_mesh())
    )
    np.testing.assert_allclose(eight.text_divergence, one.text_divergence, rtol=1e-2)
    np.testing.assert_allclose([eight.loss, eight.text_loss], [one.loss, one.text_loss], rtol=1e-3)
    assert one.text_divergence[0] > 0.01


OF_SPACES = {
    "both": {"curve": "free", "granularity": "layer_band", "bands": 4, "learn": "both"},
    "shared": {"curve": "shared"},
}


@pytest.mark.parametrize("flags", mostly_long(OF_SPACES, "both"))
def test_what_is_mapped_over_devices_has_elements(model_folder: Path, tmp_path: Path, flags: str):
    # On GPUs, XLA's Shardy pass crashes on an operand of a shard_map, or a constant in it, that has none.
    model, prompts = lj.load_model(str(model_folder), "float32"), haystacks([3, 4])
    text = jnp.arange(120, dtype=jnp.int32).reshape(3, 40)
    train = Data([pack(prompts, [1.0] * 7, shared_groups(prompts, model.config, 4))], text)
    sizes, kept = GradientSettings(minibatch_size=7, steps=1), TextSettings(text_weight=2.0, text_minibatch=2)
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        jax.clear_caches()
        space = search_space(SearchSettings.of(algorithm="gradient", **OF_SPACES[flags]), model.config, range(3))
        parameters, project, values = box_parameters(GradientSettings(), space)
        apply = factors_applied(space, values, model.config.rope_table(96))
        looks_of((put_model(model, make_mesh()), train, train, parameters, apply, project), sizes, kept)
        Scorer(model, prompts, mesh=make_mesh())(np.ones((3, 3)))
    finally:
        jax.config.update("jax_dump_ir_to", "")
    mapped = [
        line
        for path in tmp_path.rglob("*")
        if path.is_file()
        for line in path.read_text(errors="replace").splitlines()
        if "sdy.manual_computation" in line
    ]
    assert len(mapped) > 3
    assert not [line for line in mapped if re.search(r"tensor<(\d+x)*0x", line)]
