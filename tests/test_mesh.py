"""Several devices: the same scores, texts and gradients, no word between places of the population, weights in shards.

All in one process of eight virtual devices.
"""

import os
import subprocess
import sys
from pathlib import Path

DEVICES = """
import re, sys, time
from functools import partial
import jax, jax.numpy as jnp, numpy as np
import lpes_jax as lj
import test_scoring as t
from lpes_jax import scoring
from lpes_jax.compilation import compilations
from lpes_jax.errors import UserError
from lpes_jax.generation import generate_ids
from lpes_jax.mesh import BY_POPULATION, EVERYWHERE, make_mesh, over_population, put, put_model
from lpes_jax.methods.ms_poe import ms_poe
from lpes_jax.models.llama.method import of_table
from lpes_jax.prefixes import pack_rows
from lpes_jax.rope import RopeTable, scale_layers
from lpes_jax.scoring import Scorer, batch_scores, population_scores
from lpes_jax.search import gradient as gradient_search
from lpes_jax.text_nll import token_nll

def close(one, other, rtol=1e-5):
    np.testing.assert_allclose(one, other, rtol=0, atol=rtol * np.abs(other).max())

def same(one, others):
    for other in others:
        np.testing.assert_array_equal(one.correct, other.correct)
        close(other.log_likelihood, one.log_likelihood)

one, eight, pairs = make_mesh(devices=jax.devices()[:1]), make_mesh(), make_mesh(2)
assert dict(eight.shape) == {"population": 8, "model": 1} and dict(pairs.shape) == {"population": 4, "model": 2}
model, config = lj.load_model(sys.argv[1], "float32"), lj.load_model(sys.argv[1], "float32").config
models = {mesh: lj.load_model(sys.argv[1], "float32", mesh) for mesh in (one, eight, pairs)}
split = models[pairs]
for leaf, whole in zip(jax.tree.leaves(split), jax.tree.leaves(model), strict=True):
    np.testing.assert_array_equal(leaf, whole)
assert {it.data.shape for it in split.layers.query[...].addressable_shards} == {(3, 48, 24)}
assert {it.data.shape for it in split.layers.down[...].addressable_shards} == {(3, 48, 48)}
assert put_model(split, pairs).layers.key[...] is split.layers.key[...]
for make, message in (
    (partial(make_mesh, 3), "--model-axis 3: does not divide the number of devices, 8; it can be 1, 2, 4, 8"),
    (partial(lj.load_model, sys.argv[1], "float32", make_mesh(4)), "its intermediate size of 96; it can be 1, 2"),
):
    try:
        make()
    except UserError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

prompts = t.with_likely_answers(model, t.prompts_of(9, 20, 33, 12))
scorers = {mesh: Scorer(it, prompts) for mesh, it in models.items()}
assert scorers[eight].individuals_at_once % 8 == 0 and scorers[pairs].individuals_at_once % 4 == 0
for size in (9, 2):  # over individuals, and over prompts
    factors = t.population_of((size, 3, 2))
    wanted, *others = (scorer(factors, "layer_group") for scorer in scorers.values())
    same(wanted, others)
    assert wanted.correct.any() and not wanted.correct.all()
make = ms_poe(first_layer=0)  # its statistic is of all heads
wanted, *others = (scorer.of_method(make(config, scorer.longest)) for scorer in scorers.values())
same(wanted, others)
generate = partial(generate_ids, prompts=[prompt.ids for prompt in prompts], max_new_tokens=3)
new = [generate(it, make_method=partial(make, config)) for it in models.values()]
assert new[0] == new[1] == new[2] != generate(model)
text = jnp.array([prompts[2].ids[:30]] * 3, jnp.int32)
wanted, *others = (token_nll(it, text, of_table(config.rope_table(30))) for it in models.values())
[close(it, wanted) for it in others]

def collectives(mesh, size):
    scorer, by_trees = scorers[mesh], size < mesh.shape["population"]
    plan = scorer._plan("trees" if by_trees else "individuals")
    factors = put(np.ones((size, 3), np.float32), scorer._everywhere if by_trees else scorer._by_population)
    inputs = scorer.model, plan.passes[0].batch, factors, factors, scorer._table, "layer", "layer", mesh, by_trees
    lines = scoring._sharded_scores.lower(*inputs).compile().as_text().splitlines()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return [line for line in lines if re.search(rf" ({kinds})(-start)?[(]", line)]

assert collectives(eight, 8) == collectives(eight, 2) == []
found = collectives(pairs, 4)  # two sums a layer, each over one copy of the model
assert found and all(" all-reduce" in line and "replica_groups=[4,2]<=[8]" in line for line in found), found

batch = pack_rows([(prompt.ids, prompt.answers[0]) for prompt in prompts])

def loss(model, batch, factors):
    own = config.rope_table(batch.tokens.shape[1])
    table = RopeTable(scale_layers(own.inv_freq, factors), own.attention_scaling)
    return -batch_scores(model, batch, of_table(table), remat=True)[1].sum()

def gradient(*inputs):
    return jax.lax.psum(jax.grad(loss, argnums=2)(*inputs), "population")

wanted = jax.jit(jax.grad(loss, argnums=2))(model, batch, jnp.array([1, 1.2, 1.4]))
spread = over_population(gradient, pairs, (EVERYWHERE, BY_POPULATION, EVERYWHERE), EVERYWHERE)
close(jax.jit(spread)(split, batch, jnp.array([1, 1.2, 1.4])), wanted, 1e-4)

factors = t.population_of((8, 3)).astype(np.float32)
wanted = scorers[eight](factors).log_likelihood
for batch, of, rows in scorers[one]._plan("individuals").passes:
    _, likelihood = jax.pmap(population_scores, in_axes=(None, None, 0))(model, jax.device_get(batch), factors[:, None])
    close(np.asarray(likelihood)[:, 0][:, of], wanted[:, rows])
# Programs that are compiled side by side, as for a GPU: the same scores, and nothing is compiled twice.
several = t.prompts_of(9, 40, 33, 12, 70)
wanted, since = Scorer(models[one], several, batch_size=2)(factors[:2]), []
scoring._sharded_scores.clear_cache()
scoring._compiles_side_by_side = lambda: since.append(time.time()) is None
scorer = Scorer(models[one], several, batch_size=2)
got, started = scorer(factors[:2]), since[0]
counted = compilations(started)
assert counted["programs"] + counted["from_cache"] == scorer.compilations == 3, (counted, scorer.compilations)
np.testing.assert_array_equal(got.log_likelihood, wanted.log_likelihood)
# XLA compiles the gradient's programs by GSPMD where several GPUs share them, and by Shardy after that.
shardy = []
jax.default_backend = lambda: "gpu"
for mesh in (None, eight):
    with gradient_search._partitioner(mesh):
        shardy.append(jax.config.jax_use_shardy_partitioner)
assert shardy == [True, False] and jax.config.jax_use_shardy_partitioner
print("same")
"""


def test_eight_devices_equal_one(model_folder):
    tests = Path(__file__).parent
    paths = f"{tests.parent}{os.pathsep}{tests}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster
    command = [sys.executable, "-W", "error", "-c", DEVICES, str(model_folder)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("same")
