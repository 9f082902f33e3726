"""Several devices: the same scores, texts and gradients, no word between places of the population, weights in shards."""

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import Mesh
from random_prompts import population_of, prompts_of, with_likely_answers

import lpes_jax as lj
from lpes_jax import scoring
from lpes_jax.compilation import compilations
from lpes_jax.errors import UserError
from lpes_jax.generation import generate_ids
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, make_mesh, over_population, put
from lpes_jax.methods.ms_poe import ms_poe
from lpes_jax.models.llama import checkpoint
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import with_eight_bits
from lpes_jax.models.llama.sharding import put_model
from lpes_jax.prefixes import pack_rows
from lpes_jax.rope import RopeTable, scale_layers
from lpes_jax.scores import batch_scores, population_scores
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt
from lpes_jax.text_nll import token_nll

ONE, EIGHT, PAIRS = make_mesh(devices=jax.devices()[:1]), make_mesh(), make_mesh(2)
MESHES = (ONE, EIGHT, PAIRS)  # PAIRS: four copies of the model, each on two devices


@pytest.fixture(scope="module")
def models(model_folder: Path) -> dict[Mesh, lj.Llama]:
    return {mesh: lj.load_model(str(model_folder), "float32", mesh) for mesh in MESHES}


@pytest.fixture(scope="module")
def prompts(tiny_model: lj.Llama) -> list[EncodedPrompt]:
    return with_likely_answers(tiny_model, prompts_of(9, 21, 28, 12))  # with their answers at most 32 tokens: one batch


@pytest.fixture(scope="module")
def scorers(models: dict[Mesh, lj.Llama], prompts: list[EncodedPrompt]) -> dict[Mesh, Scorer]:
    return {mesh: Scorer(model, prompts) for mesh, model in models.items()}


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """For JAX's own ways to lower a program, which put descriptions in the place of arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def close(one: np.ndarray, other: np.ndarray, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=rtol * np.abs(other).max())


def same(one: scoring.Scores, *others: scoring.Scores) -> None:
    for other in others:
        np.testing.assert_array_equal(one.correct, other.correct)
        close(other.log_likelihood, one.log_likelihood)


def test_a_mesh_has_the_population_s_devices_and_the_model_s(model_folder):
    assert dict(EIGHT.shape) == {"population": 8, "model": 1} and dict(PAIRS.shape) == {"population": 4, "model": 2}
    refused = "--model-axis 3: does not divide the number of devices, 8; it can be 1, 2, 4, 8"
    with pytest.raises(UserError, match=refused):
        make_mesh(3)
    with pytest.raises(UserError, match="its intermediate size of 96; it can be 1, 2"):
        lj.load_model(str(model_folder), "float32", make_mesh(4))


def test_weights_stand_in_shards_and_are_whole_together(models, tiny_model):
    split = models[PAIRS]
    for leaf, whole in zip(jax.tree.leaves(split), jax.tree.leaves(tiny_model), strict=True):
        np.testing.assert_array_equal(leaf, whole)
    assert {shard.data.shape for shard in split.layers.query[...].addressable_shards} == {(3, 48, 24)}
    assert {shard.data.shape for shard in split.layers.down[...].addressable_shards} == {(3, 48, 48)}
    assert put_model(split, PAIRS).layers.key[...] is split.layers.key[...]  # what is there already is not copied


@pytest.mark.parametrize("size", [9, 2])  # spread over individuals, and over prompts
def test_scores_are_those_of_one_device(scorers, size):
    assert scorers[EIGHT].individuals_at_once % 8 == 0 and scorers[PAIRS].individuals_at_once % 4 == 0
    factors = population_of((size, 3, 2))
    wanted, *others = (scorers[mesh](factors, "layer_group") for mesh in MESHES)
    same(wanted, *others)
    assert wanted.correct.any() and not wanted.correct.all()


@pytest.mark.long
def test_scores_in_8_bits_are_those_of_one_device(models, prompts):
    factors = population_of((4, 3))
    eight_bits = {mesh: put_model(with_eight_bits(model, "int8"), mesh) for mesh, model in models.items()}
    assert {shard.data.shape for shard in eight_bits[PAIRS].layers.query.values[...].addressable_shards} == {(3, 24, 48)}
    assert {shard.data.shape for shard in eight_bits[PAIRS].layers.down.values[...].addressable_shards} == {(3, 48, 48)}
    wanted, *others = (Scorer(model, prompts)(factors).log_likelihood for model in eight_bits.values())
    for other in others:
        close(other, wanted, 0.02)  # a state at the edge of two 8-bit numbers may fall to either side


def test_a_method_that_looks_at_all_heads_scores_and_writes_the_same(scorers, models, prompts, tiny_model):
    make = ms_poe(first_layer=0)  # its statistic is of all heads
    wanted, *others = (scorers[mesh].method_scores(make(tiny_model.config, scorers[mesh].longest)) for mesh in MESHES)
    same(wanted, *others)
    assert len(scorers[EIGHT].device_plan("rows").batches[0].tokens) == 8  # four rows, and what fills the other devices
    generate = partial(generate_ids, prompts=[prompt.ids for prompt in prompts], max_new_tokens=3)
    new = [generate(models[mesh], make_method=partial(make, tiny_model.config)) for mesh in MESHES]
    assert new[0] == new[1] == new[2] != generate(tiny_model)


@pytest.mark.long
def test_the_likelihood_of_texts_is_that_of_one_device(models, prompts, tiny_model):
    text = jnp.array([prompts[2].ids] * 3, jnp.int32)
    wanted, *others = (token_nll(models[mesh], text, table_method(tiny_model.config.rope_table(28))) for mesh in MESHES)
    for other in others:
        close(other, wanted)


def collectives(scorer: Scorer, mesh: Mesh, size: int) -> list[str]:
    """The communication between devices in the compiled program, for a number of individuals."""
    by_trees = size < mesh.shape["population"]
    placed = scorer.device_plan("groups" if by_trees else "individuals")
    factors = put(np.ones((size, 3), np.float32), scorer._everywhere if by_trees else scorer._by_population)
    inputs = scorer.model, placed.batches[0], factors, factors, scorer._table, "layer", "layer", mesh, by_trees
    lines = scoring._sharded_scores.lower(*inputs).compile().as_text().splitlines()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return [line for line in lines if re.search(rf" ({kinds})(-start)?[(]", line)]


def test_only_the_devices_of_one_copy_of_the_model_speak_to_each_other(scorers, unchecked_shapes):
    assert collectives(scorers[EIGHT], EIGHT, 8) == collectives(scorers[EIGHT], EIGHT, 2) == []
    found = collectives(scorers[PAIRS], PAIRS, 4)  # two sums a layer, each over one copy of the model
    assert found and all(" all-reduce" in line and "replica_groups=[4,2]<=[8]" in line for line in found), found


def test_gradients_over_shards_are_those_of_one_device(models, prompts, tiny_model):
    batch = pack_rows([(prompt.ids, prompt.answers[0]) for prompt in prompts])
    config, factors = tiny_model.config, jnp.array([1, 1.2, 1.4])

    def loss(model, batch, factors):
        own = config.rope_table(batch.tokens.shape[1])
        table = RopeTable(scale_layers(own.inv_freq, factors), own.attention_scaling)
        return -batch_scores(model, batch, table_method(table), remat=True)[1].sum()

    def gradient(*inputs):
        return jax.lax.psum(jax.grad(loss, argnums=2)(*inputs), "population")

    wanted = jax.jit(jax.grad(loss, argnums=2))(tiny_model, batch, factors)
    spread = over_population(gradient, PAIRS, (EVERYWHERE, BY_POPULATION, EVERYWHERE), EVERYWHERE)
    close(jax.jit(spread)(models[PAIRS], batch, factors), wanted, 1e-4)


@pytest.mark.long
def test_scores_are_those_of_pmap(scorers, tiny_model, unchecked_shapes):
    factors = population_of((8, 3)).astype(np.float32)
    wanted = scorers[EIGHT](factors).log_likelihood
    placed = scorers[ONE].device_plan("individuals")
    for (_, _, rows, score_of_row), batch in zip(placed.plan.passes, placed.batches, strict=True):
        scores = jax.pmap(population_scores, in_axes=(None, None, 0))
        _, likelihood = scores(tiny_model, jax.device_get(batch), factors[:, None])
        close(np.asarray(likelihood)[:, 0][:, score_of_row], wanted[:, rows])


@pytest.mark.long
def test_programs_compiled_side_by_side_give_the_same_scores_and_are_compiled_once(models, monkeypatch, unchecked_shapes):
    """As for a GPU."""
    prompts, factors, begun = prompts_of(9, 40, 33, 12, 70), population_of((2, 3)), []
    wanted = Scorer(models[ONE], prompts, batch_size=2)(factors)
    scoring._sharded_scores.clear_cache()
    monkeypatch.setattr(scoring, "_compiles_side_by_side", lambda: begun.append(time.time()) is None)
    scorer = Scorer(models[ONE], prompts, batch_size=2)
    found = scorer(factors)
    counted = compilations(begun[0])
    assert counted["programs"] + counted["from_cache"] == scorer.compilations == 3, (counted, scorer.compilations)
    np.testing.assert_array_equal(found.log_likelihood, wanted.log_likelihood)


def test_weights_that_are_stacked_on_the_devices_have_the_same_shards(model_folder, models, monkeypatch):
    """As on GPUs, which get tensors as they lie in the file."""
    monkeypatch.setattr(checkpoint, "_off_the_cpu", lambda mesh: True)
    for mesh, model in models.items():
        found = lj.load_model(str(model_folder), "float32", mesh)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.sharding == other.sharding


@pytest.mark.long
def test_packed_weights_score_the_same_on_any_mesh(model_folder, prompts):
    packed = [lj.load_model(str(model_folder), "float32", mesh, weight_format="int8") for mesh in (ONE, EIGHT)]
    same(*(Scorer(model, prompts)(population_of((5, 3))) for model in packed))


def test_packed_weights_are_whole_blocks_or_refused(model_folder):
    whole_blocks = lj.load_model(str(model_folder), "float32", ONE, weight_format="int8").layers.query
    assert whole_blocks.codes[...].sharding.is_fully_replicated
    refused = "--model-axis 2: does not divide the 3 blocks of 32 packed weights in a row of 'down'; use --weight-format full"
    with pytest.raises(UserError, match=refused):
        lj.load_model(str(model_folder), "float32", PAIRS, weight_format="int8")
