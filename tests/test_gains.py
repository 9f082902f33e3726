"""Gains of frequencies: in the table, in the file, in the weights and in torch. Letters as in `lpes_jax.rope`."""

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
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.evaluation import Candidate, Conditions, evaluate
from lpes_jax.gains import fold_gains
from lpes_jax.generation import generate_ids
from lpes_jax.methods.ms_poe import ms_poe
from lpes_jax.methods.self_extend import self_extend
from lpes_jax.methods.tables import lpes
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import hidden_states, layer_rows, output_logits
from lpes_jax.rope import GRANULARITIES, RopeTable, apply_gains, cos_sin, expand, rotate
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt

sys.path.append(str(Path(__file__).parent / "models"))
from family_models import FAMILIES, hf_config, write_folder  # noqa: E402

SHAPES = {"layer": (4,), "layer_band": (4, 2), "layer_group": (4, 2), "layer_group_band": (4, 2, 2)}  # L 4, K 2, 2 bands
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 120, (2, 12)), jnp.int32)


def found(granularity: str, gains: str, seed: int = 0) -> lj.LayerFactors:
    rng = np.random.default_rng(seed)
    factors, gain_values = rng.uniform(0.5, 2.0, SHAPES[granularity]), rng.uniform(0.4, 2.5, SHAPES[gains])
    return lj.LayerFactors(factors, granularity, gain_values, gains)


@jax.jit
def by_table(model: lj.Llama, tokens: jax.Array, table: RopeTable) -> jax.Array:
    return output_logits(model, hidden_states(model, tokens, table))


def by_group(model: lj.Llama, table: RopeTable) -> RopeTable:
    """The table with a row for each KV group, so that all granularities of a model are one compiled program."""
    config = model.config
    shape = config.num_layers, config.num_kv_heads, config.rotary_dim // 2
    return replace(table, inv_freq=jnp.broadcast_to(table.inv_freq, shape), gains=jnp.broadcast_to(table.gains, shape))


def family(name: str, folder: Path) -> lj.Llama:
    return load_llama(open_checkpoint(write_folder(folder, hf_config(name, "default"))), "float32")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_gain_multiplies_its_frequencies_part_of_q_k(granularity):
    """By hand: the dot product of each pair of elements, rotated, times the pair's gain; others have no gain."""
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 3, heads, 12)), jnp.float32) for heads in (4, 2))
    inv_freq = jnp.asarray([1.0, 0.3, 0.1, 0.02])[None]
    gains = np.asarray(expand(jnp.asarray(rng.uniform(0.5, 2, SHAPES[granularity])), 4, granularity))[2]  # [G, 4]
    cos, sin = cos_sin(inv_freq, jnp.float32(1), jnp.arange(3))
    rotated_k, plain = rotate(k, cos, sin), rotate(q, cos, sin)
    for scaled in (rotate(q, cos * gains, sin * gains), rotate(apply_gains(q, jnp.asarray(gains)), cos, sin)):
        for head in range(4):
            head_gains = gains[head // 2 if len(gains) > 1 else 0]
            one, other = np.asarray(plain)[0, :, head], np.asarray(rotated_k)[0, :, head // 2]
            pairs = one[:, None] * other[None]
            wanted = (pairs[..., :4] + pairs[..., 4:8]) @ head_gains + pairs[..., 8:].sum(-1)
            np.testing.assert_allclose(np.asarray(scaled)[0, :, head] @ other.T, wanted, rtol=2e-5, atol=1e-5)


def test_a_table_of_two_arguments_has_gains_of_1_and_rotates_all_layers(tiny_config):
    own = tiny_config.rope_table(9)
    short = RopeTable(own.inv_freq, own.attention_scaling)
    for one, other in zip(jax.tree.leaves(short), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(one, other)
    stacked = jax.vmap(lambda scale: replace(own, inv_freq=own.inv_freq * scale))(jnp.ones(2))
    assert stacked.gains.shape == (2, 3, 1, 4) and stacked.rotates.shape == (2, 3)


def test_layers_without_rope_have_no_gains_and_standing_frequencies_keep_the_scaling():
    config = lj.LlamaConfig.from_hf(hf_config("smollm3", "yarn"))  # every fourth layer has no RoPE
    standing = np.ones((4, 4))
    standing[1, 2] = np.inf
    table = config.rope_table(12, lj.LayerFactors(standing, "layer_band", np.full(4, 2.0)))
    assert table.rotates.tolist() == [True, True, True, False]
    assert (table.gains[:3] == 2).all() and (table.gains[3] == 1).all()
    assert table.inv_freq[1, 0, 2] == 0 and (table.inv_freq[:3] == 0).sum() == 1 and (table.inv_freq[3] == 0).all()
    scaling = layer_rows(config, table).attention_scaling
    np.testing.assert_array_equal(scaling, [table.attention_scaling] * 3 + [1])
    cos, sin = cos_sin(table.inv_freq[1], scaling[1], jnp.arange(5))
    np.testing.assert_array_equal(cos[:, 0, 2], np.full(5, table.attention_scaling))
    assert (sin[:, 0, 2] == 0).all()
    doubled = config.rope_table(12).multiplied(jnp.array([1.0, 0.0, 2.0, 3.0]))
    np.testing.assert_array_equal(doubled.inv_freq[2], 2 * config.rope_table(12).inv_freq[2])
    assert (doubled.inv_freq[jnp.array([1, 3])] == 0).all()


@pytest.mark.parametrize("name", mostly_long(FAMILIES, "llama", "qwen3"))
def test_gains_in_the_table_in_the_weights_and_in_torch_are_the_same(tmp_path, name):
    model = family(name, tmp_path)
    table_of = partial(model.config.rope_table, 12)
    plain = np.asarray(by_table(model, TOKENS, by_group(model, table_of())))
    ones = lj.LayerFactors(np.ones(4), gains=np.ones(4))
    np.testing.assert_array_equal(by_table(model, TOKENS, by_group(model, table_of(ones))), plain)
    torch = _torch()
    reference = None if torch is None else _reference(torch, tmp_path)
    for gains in GRANULARITIES:
        loaded = found("layer_band", gains)
        wanted = np.asarray(by_table(model, TOKENS, by_group(model, table_of(loaded))))
        without = replace(loaded, gains=None, gains_granularity=None)
        without_gains = by_group(model, table_of(without))
        assert np.abs(by_table(model, TOKENS, without_gains) - wanted).max() > 1e-2
        if name == "qwen3" and "group" in gains:
            with pytest.raises(lj.UserError, match="found.json: gains of KV groups cannot be folded into the weights"):
                fold_gains(model, loaded, "found.json")
        else:
            folded = fold_gains(model, loaded)
            folded.config = model.config  # without its mark: one compiled program
            np.testing.assert_allclose(by_table(folded, TOKENS, without_gains), wanted, rtol=1e-5, atol=1e-5)
        if reference is not None:
            import lpes_jax.torch as lpes_torch

            with lpes_torch.apply_layer_factors(reference, loaded):
                np.testing.assert_allclose(_torch_logits(torch, reference), wanted, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(by_table(model, TOKENS, by_group(model, table_of())), plain)  # nothing was changed in place
    if reference is not None:
        np.testing.assert_allclose(_torch_logits(torch, reference), plain, rtol=0, atol=1e-4)  # undone


def _torch():
    try:
        import torch
    except ImportError:
        return None
    return torch


def _reference(torch, folder: Path):
    import transformers

    torch.set_num_threads(1)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _torch_logits(torch, reference) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.tensor(np.asarray(TOKENS)), use_cache=False).logits.numpy()


def test_torch_takes_files_with_standing_frequencies_and_refuses_other_gains(tmp_path):
    torch = pytest.importorskip("torch")
    import lpes_jax.torch as lpes_torch

    model = family("llama", tmp_path)
    reference = _reference(torch, tmp_path)
    standing = replace(found("layer_band", "layer"), factors=np.array([[1.0, np.inf], [1, 1], [np.inf, 2], [1, 1]]))
    standing.save(tmp_path / "f.json")
    wanted = by_table(model, TOKENS, by_group(model, model.config.rope_table(12, standing)))
    for given in (standing, tmp_path / "f.json", standing.numbers):
        with lpes_torch.apply_layer_factors(reference, given):
            np.testing.assert_allclose(_torch_logits(torch, reference), wanted, rtol=0, atol=1e-4)
    for words, gains, granularity in (
        ("gains must be finite and not below 0", [1.0, -1.0, 1.0, 1.0], "layer"),
        ("3 layers of gains, but the model has 4", [1.0] * 3, "layer"),
        ("3 KV groups of gains, but the model has 2", np.ones((4, 3)).tolist(), "layer_group"),
    ):
        with pytest.raises(ValueError, match=words):
            given = {"factors": [1.0] * 4, "gains": gains, "gains_granularity": granularity}
            lpes_torch.apply_layer_factors(reference, given)


@pytest.mark.long
def test_gradients_in_gains_are_those_of_finite_differences(tiny_model):
    with jax.enable_x64(True):
        graph, state = nnx.split(tiny_model)
        model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), state))
        single = tiny_model.config.rope_table(12)
        own = RopeTable(single.inv_freq.astype(jnp.float64), single.attention_scaling.astype(jnp.float64))
        tokens, rng = TOKENS[:1], np.random.default_rng(3)

        @jax.jit
        def loss(numbers):
            table = own.scaled(numbers[0], "layer_band").with_gains(numbers[1], "layer_band")
            logits = output_logits(model, hidden_states(model, tokens, table))
            return jax.nn.log_softmax(logits[0, :-1])[jnp.arange(11), tokens[0, 1:]].sum()

        point = jnp.asarray(rng.uniform(0.6, 1.6, (2, 3, 4)))
        gradient = jax.jit(jax.grad(loss))(point)
        for index in [(1, layer, band) for layer in range(3) for band in range(4)] + [(0, 1, 2)]:
            step = jnp.zeros_like(point).at[index].set(1e-5)
            np.testing.assert_allclose((loss(point + step) - loss(point - step)) / 2e-5, gradient[index], rtol=1e-5, atol=1e-7)


def prompts() -> list[EncodedPrompt]:
    """Some that share a beginning, and one that does not."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 290, 40).tolist()
    shared = [[*head, *rng.integers(3, 290, 3 + index).tolist()] for index in range(3)]
    return [EncodedPrompt(ids, [rng.integers(3, 290, 2).tolist()]) for ids in (*shared, rng.integers(3, 290, 9).tolist())]


def test_populations_of_gains_score_as_one_by_one_and_with_shared_prefixes_as_without(tiny_model):
    rng = np.random.default_rng(6)
    factors, gains = rng.uniform(0.7, 1.5, (5, 3)), rng.uniform(0.5, 2, (5, 3, 4))
    scorer = Scorer(tiny_model, prompts())
    assert scorer.tokens_saved > 0.3
    together = scorer(factors, gains=gains, gains_granularity="layer_band").log_likelihood
    compiled = scorer.compilations
    others = scorer(factors[::-1], gains=gains[::-1] * 1.1, gains_granularity="layer_band").log_likelihood
    assert scorer.compilations == compiled and np.abs(others - together[::-1]).max() > 1e-3
    separate = [
        scorer(factors[index : index + 1], gains=gains[index : index + 1], gains_granularity="layer_band") for index in range(5)
    ]
    np.testing.assert_allclose(np.concatenate([scores.log_likelihood for scores in separate]), together, rtol=1e-5, atol=3e-4)
    plain = Scorer(tiny_model, prompts(), share_prefixes=False)(factors, gains=gains, gains_granularity="layer_band")
    np.testing.assert_allclose(plain.log_likelihood, together, rtol=1e-5, atol=3e-4)
    by_model = lj.logits(tiny_model, jnp.array([prompts()[3].ids + prompts()[3].answers[0]]), lj.LayerFactors(
        factors[2], gains=gains[2], gains_granularity="layer_band"))[0]  # fmt: skip
    answer = jnp.array(prompts()[3].answers[0])
    wanted = jax.nn.log_softmax(by_model[8:10])[jnp.arange(2), answer].sum()
    np.testing.assert_allclose(together[2, 3], wanted, rtol=1e-5, atol=3e-4)
    # Gains that are left out are gains of 1 a layer, by the same program.
    as_it_is = scorer(factors).log_likelihood
    compiled = scorer.compilations
    np.testing.assert_array_equal(scorer(factors, gains=np.ones((5, 3))).log_likelihood, as_it_is)
    assert scorer.compilations == compiled


def test_generation_with_a_cache_is_generation_without_one(tiny_model):
    loaded = lj.LayerFactors(
        np.linspace(0.8, 1.4, 3), "layer", np.random.default_rng(7).uniform(0.4, 2, (3, 2, 4)), "layer_group_band"
    )
    ids = [prompt.ids for prompt in prompts()]
    new = generate_ids(tiny_model, ids, factors=loaded, max_new_tokens=5)
    assert new != generate_ids(tiny_model, ids, factors=replace(loaded, gains=None, gains_granularity=None), max_new_tokens=5)
    for row, more in zip(ids, new, strict=True):
        logits = np.asarray(lj.logits(tiny_model, jnp.array([row + more]), loaded))[0]
        assert logits[len(row) - 1 : -1].argmax(axis=-1).tolist() == more
    # A method that rotates by itself gets queries that have the gains: one that changes nothing is the plain model.
    method = lpes(loaded)
    assert generate_ids(tiny_model, ids, make_method=partial(method, tiny_model.config), max_new_tokens=5) == new

    def kept_whole(length: int) -> Method:
        return replace(self_extend(1, 512)(tiny_model.config, length), tables=method(tiny_model.config, length).tables)

    assert generate_ids(tiny_model, ids, make_method=kept_whole, max_new_tokens=5) == new


def test_a_replaced_attention_sees_the_gains_as_it_sees_them_in_the_weights(tiny_model):
    loaded = lj.LayerFactors(np.ones(3), gains=np.array([0.4, 1.5, 2.0]))
    method = ms_poe(first_layer=0)(tiny_model.config, 12)
    lengths = jnp.array([12, 7], jnp.int32)

    @jax.jit
    def states(model, table):
        return hidden_states(model, TOKENS, table, replacement=method.replacement, lengths=lengths)

    plain = tiny_model.config.rope_table(12)
    with_gains = states(tiny_model, tiny_model.config.rope_table(12, loaded))
    np.testing.assert_allclose(states(fold_gains(tiny_model, loaded), plain), with_gains, rtol=1e-5, atol=3e-4)
    assert np.abs(states(tiny_model, plain) - with_gains).max() > 1e-2


def test_the_file_keeps_gains_and_standing_frequencies(tmp_path):
    for gains in GRANULARITIES:
        loaded = replace(found("layer_band", gains), search={"seed": 0})
        loaded.factors[1, 1] = np.inf
        loaded.save(tmp_path / "f.json")
        again = lj.LayerFactors.load(tmp_path / "f.json")
        assert again.key == loaded.key and again.gains_granularity == gains and again.search == {"seed": 0}
    record = json.loads((tmp_path / "f.json").read_text())
    assert record["factors"][1] == [pytest.approx(loaded.factors[1, 0]), None] and record["format"] == "lpes-factors/2"
    assert loaded.mean == pytest.approx(1 / (1 / loaded.factors).mean())
    assert lj.LayerFactors(np.full(3, np.inf)).mean == np.inf


def test_format_1_gives_the_same_table_bit_for_bit(tmp_path, tiny_config):
    factors = np.random.default_rng(8).uniform(0.5, 2, (3, 4)).tolist()
    old = {"format": "lpes-factors/1", "factors": factors, "granularity": "layer_band", "gains": "no key of that format"}
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = lj.LayerFactors.load(tmp_path / "old.json")
    assert loaded.gains is None and loaded.gains_granularity is None
    own, table = tiny_config.rope_table(12), tiny_config.rope_table(12, loaded)
    np.testing.assert_array_equal(table.inv_freq, own.inv_freq * (1 / np.asarray(factors, np.float32))[:, None])
    assert (table.gains == 1).all() and table.attention_scaling == own.attention_scaling


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"gains": [1.0, -0.5, 1.0]}, "gains must be finite and not below 0, got -0.5"),
        ({"gains": [1.0, None, 1.0]}, "gains must be finite and not below 0, got nan"),
        ({"gains": [1.0, float("inf"), 1.0]}, "gains must be finite and not below 0, got inf"),
        ({"gains": [1.0, 1.0]}, "gains of 2 layers do not match factors of 3"),
        ({"gains": [1.0] * 3, "gains_granularity": "layer_band"}, "granularity layer_band needs gains of 2 axes"),
        ({"gains": [1.0] * 3, "gains_granularity": "head"}, "granularity 'head' is not one of"),
        ({"gains": "one"}, "gains must be numbers"),
        ({"factors": [1.0, float("inf"), 1.0]}, "factors must be finite and above 0, got inf"),
        ({"factors": [1.0, [None], 1.0]}, "factors must be numbers, the same count in every layer"),
    ],
)
def test_unusable_gains_and_factors_are_refused(tmp_path, changes, words):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"format": "lpes-factors/2", "factors": [1.0] * 3} | changes))
    with pytest.raises(lj.UserError, match=words) as refusal:
        lj.LayerFactors.load(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


def test_gains_that_do_not_fit_a_model_are_refused():
    fits = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8, "where": "f.json"}
    for gains in GRANULARITIES:
        found("layer", gains).for_model(**fits)
    for words, gains, granularity in (
        ("f.json: 3 KV groups of gains, but the model has 2", np.ones((4, 3)), "layer_group"),
        ("f.json: 3 bands of gains do not divide the model's 4 frequencies", np.ones((4, 3)), "layer_band"),
    ):
        with pytest.raises(lj.UserError, match=words):
            lj.LayerFactors(np.ones(4), gains=gains, gains_granularity=granularity).for_model(**fits)


def test_an_evaluation_tells_gains_apart(tiny_model, model_folder):
    tokenizer = lj.load_tokenizer(str(model_folder))
    from lpes_jax.tasks import make_task

    task = make_task("kv", num_pairs=2, key_length=2)
    gains = lj.LayerFactors(np.ones(3), gains=np.array([0.3, 2.0, 0.5]))
    ones = lj.LayerFactors(np.ones(3), gains=np.ones(3))
    candidates = [Candidate("as it is"), Candidate("ones", ones), Candidate("gains", gains)]
    found = evaluate(
        tiny_model, tokenizer, task, task.examples("test", 3, 0), [(0, 0), (1, 100)], candidates,
        Conditions(("prefix", "substring"), max_new_tokens=4),
    )  # fmt: skip
    as_it_is, with_ones, with_gains = (outcome.log_likelihood for outcome in found)
    np.testing.assert_array_equal(as_it_is, with_ones)
    assert np.abs(with_gains - as_it_is).max() > 1e-2 and found[2].outputs != found[0].outputs
    assert gains.key != lj.LayerFactors(np.ones(3)).key == ones.key
    assert table_method(tiny_model.config.rope_table(3, gains)).tables.gains.shape == (1, 3, 1, 4)
