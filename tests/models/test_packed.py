"""Packed weights: the values of GGUF's types, the same logits, scores, texts and gradients, and memory for one layer only."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf.quants import dequantize
from random_prompts import population_of, prompts_of
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import fold_gains
from lpes_jax.generation import generate_ids
from lpes_jax.methods.hidden_channel import hidden_channel
from lpes_jax.methods.seal import seal
from lpes_jax.models.llama import load
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint, save_llama
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.eight_bits import PROJECTIONS
from lpes_jax.models.llama.model import Llama, hidden_states, with_full_weights, with_weights
from lpes_jax.models.llama.packed import Packed
from lpes_jax.models.llama.packing import LAYOUTS, combined, from_gguf, pack, rounded
from lpes_jax.rope import RopeParameters
from lpes_jax.scoring import Scorer
from lpes_jax.text_nll import token_nll

sys.path.append(str(Path(__file__).resolve().parent.parent / "ship"))
from tiny_gguf import HIDDEN, random_blocks, tensors_of, write_model  # noqa: E402

Kind = gguf.GGMLQuantizationType
TOKENS = np.random.default_rng(1).integers(0, 200, (2, 12))


@jax.jit
def values(packed: Packed) -> jax.Array:
    return packed.unpacked(jnp.float32)


def packed_bytes(packed: Packed) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(packed))


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_each_type_has_the_values_and_bits_that_it_should(kind):
    data = random_blocks(kind, 6, 512)
    packed = pack([from_gguf(data, kind)])
    np.testing.assert_array_equal(values(packed)[0], dequantize(data, kind))
    assert 8 * (packed_bytes(packed) - 1) / (6 * 512) == LAYOUTS[kind].bits_per_weight


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("Q5_0", "Q8_0"), ("Q4_1", "Q5_K", "Q6_K"), ("Q3_K", "Q4_0")])
def test_layers_of_several_types_have_the_layout_of_the_widest(names):
    kinds = [Kind[name] for name in names]
    data = [random_blocks(kind, 6, 512, seed) for seed, kind in enumerate(kinds)]
    packed = pack([from_gguf(blocks, kind) for blocks, kind in zip(data, kinds, strict=True)])
    np.testing.assert_array_equal(values(packed), [dequantize(*pair) for pair in zip(data, kinds, strict=True)])
    assert combined([LAYOUTS[kind] for kind in kinds]).bits == max(LAYOUTS[kind].bits for kind in kinds)


def test_int8_is_off_by_half_a_step_of_each_block_at_most():
    weights = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32) * 10.0 ** np.arange(-4, 1)[:, None]
    weights[0, :32] = 0
    packed = pack([rounded(weights)])
    blocks = weights.reshape(5, 3, 32)
    error = np.abs(np.asarray(values(packed)[0]).reshape(blocks.shape) - blocks)
    step, needed = np.asarray(packed.scale[0], np.float64), np.abs(blocks).max(axis=2) / 127
    assert (error.max(axis=2) <= step / 2 * (1 + 1e-5)).all() and (step <= needed * 1.001 + 2.0**-24).all()
    assert packed_bytes(packed) - 1 == 5 * 96 + 5 * 3 * 2
    odd = weights[:, :50]  # not a multiple of 32: a scale per row
    assert np.abs(np.asarray(values(pack([rounded(odd)]))[0]) - odd).max() <= np.abs(odd).max() / 200


def packed_queries(layer: int, architecture: str) -> dict[str, tuple[np.ndarray, Kind]]:
    """Matrices with 256 inputs, of types that differ by layer as in a Q4_K_M file."""
    names = ("attn_qkv", "ffn_up") if architecture == "phi3" else ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    plain = tensors_of(architecture, layers=1)
    kinds = {"attn_v": ("Q4_K", "Q6_K"), "attn_k": ("Q8_0", "Q5_0"), "ffn_up": ("Q3_K", "Q5_1")}
    found = {}
    for seed, name in enumerate(names):
        kind = Kind[kinds.get(name, ("Q4_K", "Q4_K"))[layer]]
        data = random_blocks(kind, len(plain[f"blk.0.{name}.weight"]), HIDDEN, seed + 10 * layer, smallest=1e-4)
        found[f"blk.{layer}.{name}.weight"] = data, kind
    return found


@pytest.mark.parametrize("architecture", mostly_long(["llama", "qwen2", "qwen3", "phi3"], "llama", "phi3"))
def test_a_packed_gguf_file_gives_the_logits_of_the_unpacked_one(tmp_path, architecture):
    """Rows that the file has in Meta's order, fused matrices, biases, and matrices that the file does not quantise."""
    tensors = tensors_of(architecture) | packed_queries(0, architecture) | packed_queries(1, architecture)
    path = str(write_model(tmp_path / "model.gguf", architecture, tensors=tensors))
    full, packed, eight = (lj.load_model(path, "float32", weight_format=form) for form in ("full", "packed", "int8"))
    kinds = {name: type(getattr(packed.layers, name)) for name in PROJECTIONS}
    assert kinds == dict.fromkeys(PROJECTIONS, Packed) | {"output": nnx.Param, "down": nnx.Param}
    assert isinstance(eight.layers.down, Packed)
    wanted = np.asarray(lj.logits(full, TOKENS))
    np.testing.assert_allclose(lj.logits(packed, TOKENS), wanted, atol=1e-5 * np.abs(wanted).max())
    unpacked = with_full_weights(eight).layers
    for name in ("query", "value", "up"):
        np.testing.assert_array_equal(getattr(unpacked, name)[...], getattr(full.layers, name)[...])
    assert 0 < np.abs(unpacked.down[...] - full.layers.down[...]).max() < 0.01 * np.abs(full.layers.down[...]).max()


def test_bfloat16_rounds_the_same_values(tmp_path):
    tensors = tensors_of("llama") | packed_queries(0, "llama") | packed_queries(1, "llama")
    path = str(write_model(tmp_path / "model.gguf", tensors=tensors))
    full, packed = (lj.load_model(path, "bfloat16", weight_format=form) for form in ("full", "packed"))
    for name in PROJECTIONS:
        unpacked = getattr(with_full_weights(packed).layers, name)[...]
        np.testing.assert_array_equal(unpacked, getattr(full.layers, name)[...])


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> tuple[Llama, Llama]:
    """The tiny model in int8, and with the same rounded weights unpacked."""
    packed = lj.load_model(str(model_folder), "float32", weight_format="int8")
    return packed, with_full_weights(packed)


def close(one: Any, other: Any, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def test_populations_shared_prefixes_and_texts_are_those_of_the_unpacked_weights(pair):
    packed, full = pair
    head = prompts_of(30)[0].ids
    prompts = [replace(prompt, ids=[*head, *prompt.ids]) for prompt in prompts_of(3, 9, 5)] + prompts_of(11, seed=4)
    ours, theirs = (Scorer(model, prompts) for model in pair)
    assert ours.tokens_saved > 0.3
    population = population_of((4, 3))
    scores, wanted = ours(population), theirs(population)
    close(scores.log_likelihood, wanted.log_likelihood)
    np.testing.assert_array_equal(scores.correct, wanted.correct)
    texts = [prompt.ids for prompt in prompts]
    assert generate_ids(packed, texts, max_new_tokens=6) == generate_ids(full, texts, max_new_tokens=6)


def test_methods_that_change_weights_change_packed_ones(pair):
    packed, full = pair
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    makers = [seal(rng.uniform(0.5, 1.5, (3, 6)).astype(np.float32)), hidden_channel(7, 0.5)]
    for maker in makers:
        method = maker(packed.config, 12)
        close(token_nll(packed, tokens, method), token_nll(full, tokens, method))
    gains = LayerFactors(np.ones(3), "layer", rng.uniform(0.5, 2, (3, 4)), "layer_band")
    folded = [fold_gains(model, gains) for model in pair]
    close(lj.logits(folded[0], TOKENS), lj.logits(folded[1], TOKENS))
    close(lj.logits(folded[0], TOKENS), lj.logits(packed, TOKENS, gains), atol=1e-3)
    with pytest.raises(UserError, match="can be multiplied once; load the model with --weight-format full"):
        packed.layers.query.with_gains(rows=jnp.ones((3, 48))).with_gains(rows=jnp.ones((3, 48)))


def test_a_packed_model_can_be_saved(pair, tmp_path):
    save_llama(pair[0], tmp_path)
    saved = load_llama(open_checkpoint(tmp_path), "float32")
    np.testing.assert_array_equal(saved.layers.down[...], pair[1].layers.down[...])


def big(layers: int) -> Llama:
    """A model whose weights are much larger than the activations of the text below."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=512, num_layers=layers, num_heads=4, num_kv_heads=4, head_dim=32,
        rms_norm_eps=1e-5, max_position_embeddings=64, rope=RopeParameters(rope_theta=1e4),
    )  # fmt: skip
    model = Llama(config, rngs=nnx.Rngs(0))
    matrices = {name: np.asarray(getattr(model.layers, name)[...]).swapaxes(1, 2) for name in PROJECTIONS}
    return with_weights(model, **{name: pack([rounded(layer) for layer in matrix]) for name, matrix in matrices.items()})


@pytest.mark.long
def test_gradients_are_those_of_the_unpacked_weights_and_memory_does_not_grow_with_the_layers(pair):
    tokens = jnp.asarray(TOKENS[:1, :8], jnp.int32)

    def loss(factors, model, remat):
        table = model.config.rope_table(tokens.shape[1], factors)
        return (hidden_states(model, tokens, table, remat=remat) ** 2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    factors = jnp.asarray([1.0, 1.3, 0.8])
    for remat in (False, True):
        ours, theirs = (gradient(factors, model, remat) for model in pair)
        close(ours, theirs, atol=1e-4 * np.abs(theirs).max())

    layer = 4 * (4 * 128 * 128 + 3 * 128 * 512)  # bytes of the unpacked matrices of a layer
    for remat in (False, True):
        sizes = []
        for layers in (2, 6):
            memory: Any = gradient.lower(jnp.ones(layers), big(layers), remat).compile().memory_analysis()
            sizes.append(memory.temp_size_in_bytes)
        assert sizes[0] < 2 * layer and sizes[1] - sizes[0] < layer / 2  # four layers more, and not half of one unpacked


def test_a_folder_has_no_packed_weights(model_folder):
    with pytest.raises(UserError, match="--weight-format packed: .* give a quantised .gguf file, or --weight-format int8"):
        lj.load_model(str(model_folder), weight_format="packed")


def test_the_identity_of_a_model_says_how_its_weights_are_stored(model_folder):
    identities = [load(str(model_folder), "float32", weight_format=form).identity for form in ("full", "int8")]
    assert "weight_format" not in identities[0] and identities[1] == identities[0] | {"weight_format": "int8"}
