"""Gains in a copy of a .gguf file: dequantised rows are rows times gains, and every other byte is as it was."""

import hashlib
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import drawn, mostly_long
from tiny_gguf import GROUPS, HEAD_DIM, HEADS, HIDDEN, Kind, block_scales, random_blocks, tensors_of, write_model

from lpes_jax.api import logits
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import fold_gains
from lpes_jax.mark import GGUF_KEY, Mark
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.ship.gguf_patch import SCALES, patch_gguf

ROWS, HALF = HEADS * HEAD_DIM, HEAD_DIM // 2
GAINS = np.random.default_rng(3).uniform(0.5, 2, (2, HALF))
ONES = np.ones(2)
PLAIN = {"F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}


def gains(values: np.ndarray = GAINS, granularity: Any = "layer_band") -> LayerFactors:
    return LayerFactors(ONES, gains=values, gains_granularity=granularity)


def row_gains(architecture: str, layer: int = 0, values: np.ndarray = GAINS) -> np.ndarray:
    """The gain of each query row: dims i and i + D/2 of a head turn together; in `llama` files they are neighbours."""
    head_gains = np.repeat(values[layer], 2) if architecture == "llama" else np.tile(values[layer], 2)
    return np.tile(head_gains, HEADS).astype(np.float32)[:, None]


def fields(reader: gguf.GGUFReader) -> list[tuple[str, bytes]]:
    """Keys with the bytes of all their parts, in order, but for the counts of the file's own header."""
    return [
        (name, b"".join(part.tobytes() for part in field.parts))
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    ]


def changed_tensors(source: Path, target: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tensors whose bytes differ, as (old, new) uint8 [rows, bytes]. All else of the two files must be equal."""
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert fields(new)[: len(fields(old))] == fields(old)
    assert new.alignment == old.alignment and new.data_offset % new.alignment == 0
    found = {}
    for one, other in zip(old.tensors, new.tensors[: len(old.tensors)], strict=True):
        assert (one.name, one.tensor_type, one.shape.tolist()) == (other.name, other.tensor_type, other.shape.tolist())
        assert one.data_offset - old.data_offset == other.data_offset - new.data_offset
        pair = [np.ascontiguousarray(t.data).view(np.uint8).reshape(t.data.shape[0], -1) for t in (one, other)]
        if (pair[0] != pair[1]).any():
            found[one.name] = pair[0], pair[1]
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", [*PLAIN, *SCALES])
def test_rows_are_rows_times_gains(tmp_path, kind):
    """Within half a unit of the last place of the numbers that were multiplied; nothing else of a block changes."""
    type_ = Kind[kind]
    if kind in SCALES:
        data = random_blocks(type_, ROWS, HIDDEN)
    else:
        data = gguf.quants.quantize(np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32), type_)
    weight = (data, type_) if data.dtype == np.uint8 else data
    source = write_model(tmp_path / "m.gguf", tensors=tensors_of("llama", queries={"attn_q.weight": weight}))
    before = sha256(source)
    rounding = patch_gguf(source, tmp_path / "out.gguf", gains())
    assert sha256(source) == before

    changed = changed_tensors(source, tmp_path / "out.gguf")
    assert set(changed) == {"blk.0.attn_q.weight", "blk.1.attn_q.weight"} and rounding.types == {kind: 2}
    step = {"F32": 2.0**-24, "BF16": 2.0**-8}.get(kind, 2.0**-11) * (1 + 1e-3)
    worst = 0.0
    for layer in range(2):
        old, new = changed[f"blk.{layer}.attn_q.weight"]
        wanted = gguf.quants.dequantize(old, type_).astype(np.float64) * row_gains("llama", layer)
        error = np.abs(gguf.quants.dequantize(new, type_) - wanted)
        worst = max(worst, (np.linalg.norm(error, axis=1) / np.linalg.norm(wanted, axis=1)).max())
        if kind in PLAIN:
            assert (error <= step * np.abs(wanted) + 2.0**-25).all()
            continue
        size, bound = gguf.GGML_QUANT_SIZES[type_][1], np.zeros_like(wanted)
        blocks = [rows.reshape(ROWS, -1, size).copy() for rows in (old, new)]
        for begin in block_scales(type_):  # what each scale alone contributes, to a difference of two say
            single = blocks[0].copy()
            for other in block_scales(type_):
                if other != begin:
                    single[:, :, other : other + 2] = 0
            bound += np.abs(gguf.quants.dequantize(single.reshape(ROWS, -1), type_) * row_gains("llama", layer))
        assert (error <= step * bound + 1e-7 * bound.max()).all()
        for block in blocks:
            for begin in block_scales(type_):
                block[:, :, begin : begin + 2] = 0
        np.testing.assert_array_equal(*blocks)
    assert rounding.most == pytest.approx(worst, rel=1e-3, abs=1e-9) and 0 < rounding.mean <= rounding.most


@pytest.mark.parametrize(
    "kind", [kind.name for kind in Kind if kind.name in ("IQ1_M", "MXFP4", "NVFP4", "Q1_0") and kind.name not in SCALES]
)
def test_types_whose_scales_cannot_take_a_gain_are_refused_by_name(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = np.zeros((ROWS, HIDDEN // block * size), np.uint8)
    tensors = tensors_of("llama", queries={"attn_q.weight": (data, Kind[kind])})
    with pytest.raises(UserError, match=f"m.gguf: tensor '?blk.[01].attn_q.weight'? .*{kind}"):
        patch_gguf(write_model(tmp_path / "m.gguf", tensors=tensors), tmp_path / "out.gguf", gains())
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_quantised_values_of_other_tensors_do_not_matter(tmp_path):
    """Types that cannot take a gain may be in all other tensors, and in a layer whose gains are 1."""
    data = np.full((16, HIDDEN // 32 * 17), 100, np.uint8)
    tensors = tensors_of("llama", queries={"attn_k.weight": (data, Kind.MXFP4)})
    tensors["blk.1.attn_q.weight"] = (np.full((ROWS, HIDDEN // 32 * 17), 100, np.uint8), Kind.MXFP4)
    source = write_model(tmp_path / "m.gguf", tensors=tensors)
    patch_gguf(source, tmp_path / "out.gguf", gains(np.array([[1.5] * HALF, [1.0] * HALF])))
    assert set(changed_tensors(source, tmp_path / "out.gguf")) == {"blk.0.attn_q.weight"}


FAMILIES = {
    "llama": {"attn_q.weight"},
    "qwen2": {"attn_q.weight", "attn_q.bias"},
    "qwen3": {"attn_q_norm.weight"},
    "phi3": {"attn_qkv.weight"},
}


@pytest.fixture(scope="module", params=mostly_long(FAMILIES, "llama", "phi3"))
def original(request, tmp_path_factory):
    """(architecture, file, loaded model)."""
    source = write_model(tmp_path_factory.mktemp("model") / "m.gguf", request.param)
    return request.param, source, load_llama(open_checkpoint(source), "float32")


@settings(max_examples=drawn(6), deadline=None)
@given(st.data())
def test_the_weights_are_those_that_folding_gives(original, data):
    """Any gains of any granularity, with 0 among them, as `fold_gains` puts them into the loaded model."""
    architecture, source, model = original
    target = source.with_name("out.gguf")
    target.unlink(missing_ok=True)
    shapes = {"layer": [2], "layer_band": [2, 2], "layer_group": [2, GROUPS], "layer_group_band": [2, GROUPS, HALF]}
    granularity = data.draw(st.sampled_from([name for name in shapes if architecture != "qwen3" or "group" not in name]))
    shape = shapes[granularity]
    gain = st.one_of(st.just(0.0), st.just(1.0), st.floats(2**-10, 2**10, width=32))
    values = data.draw(st.lists(gain, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    factors = gains(np.array(values).reshape(shape), granularity)
    patch_gguf(source, target, factors)
    changed = changed_tensors(source, target)
    assert {name.split(".", 2)[2] for name in changed} <= FAMILIES[architecture]
    wanted, patched = fold_gains(model, factors), load_llama(open_checkpoint(target), "float32")
    for name in ("query", "query_bias", "query_norm", "key", "value", "gate"):
        if (leaf := getattr(wanted.layers, name)) is not None:
            np.testing.assert_array_equal(getattr(patched.layers, name)[...], leaf[...])


def test_rows_after_the_queries_of_a_fused_tensor_stay(tmp_path):
    """And so do elements of a head that are not rotated."""
    source = write_model(tmp_path / "m.gguf", "phi3", rope__dimension_count=6)
    patch_gguf(source, tmp_path / "out.gguf", gains(np.full((2, 3), 1.5)))
    old, new = changed_tensors(source, tmp_path / "out.gguf")["blk.1.attn_qkv.weight"]
    moved = (old != new).any(axis=1)
    assert moved[:ROWS].tolist() == ([True] * 6 + [False] * 2) * HEADS and not moved[ROWS:].any()


def test_a_norm_of_all_heads_takes_no_gains_of_groups(tmp_path):
    source = write_model(tmp_path / "m.gguf", "qwen3")
    with pytest.raises(UserError, match="gains of KV groups cannot be folded into the weights"):
        patch_gguf(source, tmp_path / "out.gguf", gains(np.array([[1.0, 2.0], [1.0, 1.0]]), "layer_group"))
    patch_gguf(source, tmp_path / "out.gguf", gains(np.array([[2.0, 2.0], [1.0, 1.0]]), "layer_group"))
    assert set(changed_tensors(source, tmp_path / "out.gguf")) == {"blk.0.attn_q_norm.weight"}


def test_what_would_overflow_is_refused_and_leaves_nothing(tmp_path):
    data = random_blocks(Kind.Q4_K, ROWS, HIDDEN)
    source = write_model(tmp_path / "m.gguf", tensors=tensors_of("llama", queries={"attn_q.weight": (data, Kind.Q4_K)}))
    with pytest.raises(UserError, match="m.gguf: a gain of 1e\\+06 makes tensor blk.0.attn_q.weight overflow float16"):
        patch_gguf(source, tmp_path / "out.gguf", gains(np.full((2, HALF), 1e6)))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_scales_that_become_subnormal_are_counted(tmp_path):
    """A scale below 6.1e-5 keeps fewer digits: the rounding that is told is the one that is there."""
    data = random_blocks(Kind.Q4_K, ROWS, HIDDEN, smallest=1e-4)
    source = write_model(tmp_path / "m.gguf", tensors=tensors_of("llama", queries={"attn_q.weight": (data, Kind.Q4_K)}))
    rounding = patch_gguf(source, tmp_path / "out.gguf", gains(np.full((2, HALF), 1e-2)))
    assert 0.5 < rounding.scales_subnormal < 1 and 2.0**-11 < rounding.most < 1
    said = "\n".join(rounding.lines())
    assert "2 tensors (2 of type Q4_K)" in said and "subnormal" in said and f"{rounding.most:.2g} at most" in said


@pytest.mark.parametrize("alignment", [32, 256])
def test_metadata_and_divisors_are_appended(tmp_path, alignment):
    source = write_model(tmp_path / "m.gguf")
    if alignment != 32:  # the package writes that key where it writes the padding
        writer_alignment(source, alignment)
    rates = np.array([[1, 1.5, 2, np.inf]] * 2)
    rounding = patch_gguf(source, tmp_path / "out.gguf", LayerFactors(rates, "layer_band"))
    assert changed_tensors(source, tmp_path / "out.gguf") == {}
    new = gguf.GGUFReader(tmp_path / "out.gguf")
    assert list(new.fields)[-1] == GGUF_KEY and new.alignment == alignment
    assert [tensor.name for tensor in new.tensors][-1] == "rope_freqs.weight"
    np.testing.assert_array_equal(new.tensors[-1].data, np.array([1, 1.5, 2, 1e14], np.float32))
    assert (tmp_path / "out.gguf").stat().st_size % alignment == 0
    assert rounding.types == {} and rounding.lines() == ["rates: in rope_freqs.weight"]
    own, ours = (open_checkpoint(path).config for path in (source, tmp_path / "out.gguf"))
    table = own.rope_table(1, LayerFactors(rates, "layer_band"))
    np.testing.assert_allclose(ours.rope_table(1).inv_freq, table.inv_freq, rtol=3e-7, atol=1e-13)


def writer_alignment(path: Path, alignment: int) -> None:
    """Write the file again with another alignment."""
    old = gguf.GGUFReader(path)
    tensors = {tensor.name: np.array(tensor.data) for tensor in old.tensors}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name, field in old.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_divisors_of_phi3(tmp_path):
    """Two tensors, by the length of the context, added or multiplied; each a multiple of the alignment."""
    long = {"rope_factors_long.weight": np.array([1, 2, 8], np.float32), "rope_factors_short.weight": np.ones(3, np.float32)}
    rates = LayerFactors(np.array([[0.5, 1, 3]] * 2), "layer_band")
    for tensors in (tensors_of("phi3"), tensors_of("phi3") | long):
        keys = {"rope__dimension_count": 6, "rope__scaling__original_context_length": 32}
        source, target = write_model(tmp_path / "m.gguf", "phi3", tensors=tensors, **keys), tmp_path / "out.gguf"
        patch_gguf(source, target, rates)
        assert set(changed_tensors(source, target)) == set(tensors) & set(long)
        own, ours = (open_checkpoint(path).config for path in (source, target))
        for length in (1, 100):
            np.testing.assert_allclose(ours.rope_table(length).inv_freq, own.rope_table(length, rates).inv_freq, rtol=3e-7)
        target.unlink()


def test_divisors_that_are_there_are_multiplied(tmp_path):
    """Llama 3.1's: llama.cpp divides by the one tensor, so both are in it."""
    tensors = tensors_of("llama") | {"rope_freqs.weight": np.array([1, 1, 2.5, 8], np.float32)}
    source, target = write_model(tmp_path / "m.gguf", tensors=tensors), tmp_path / "out.gguf"
    factors = LayerFactors(np.array([[0.5, 1, 2, 3]] * 2), "layer_band", gains=GAINS, gains_granularity="layer_band")
    patch_gguf(source, target, factors)
    assert set(changed_tensors(source, target)) == {*(f"blk.{layer}.attn_q.weight" for layer in (0, 1)), "rope_freqs.weight"}
    own, ours = (open_checkpoint(path).config for path in (source, target))
    np.testing.assert_allclose(ours.rope_table(1).inv_freq, own.rope_table(1, factors).inv_freq, rtol=3e-7)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_one_factor_for_all_is_linear_scaling_elsewhere(tmp_path, architecture):
    source, target = write_model(tmp_path / "m.gguf", architecture), tmp_path / "out.gguf"
    factors = LayerFactors.uniform(0.9, 2)
    rounding = patch_gguf(source, target, factors)
    assert rounding.rates == "rope.scaling.factor" and "ollama" in rounding.lines()[-1]
    assert changed_tensors(source, target) == {}
    own, ours = (open_checkpoint(path).config for path in (source, target))
    np.testing.assert_allclose(ours.rope_table(1).inv_freq, own.rope_table(1, factors).inv_freq, rtol=3e-7)


SHARED = np.array([[1.0, 1.5, 2.0, 3.0]] * 2)
REFUSED = {
    "rates by layer": ({}, LayerFactors(np.array([1.0, 2.0])), "differ by layer or KV group.*--to hf.*--to hf-hook"),
    "rates by group": ({}, LayerFactors(np.array([[1.0, 2.0]] * 2), "layer_group"), "differ by layer or KV group"),
    "rates by frequency": ({"architecture": "qwen2"}, LayerFactors(SHARED, "layer_band"), "differ by frequency.*type qwen2"),
    "a scaling of its own": (
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
        LayerFactors(SHARED, "layer_band"),
        "RoPE is of type yarn",
    ),
    "a factor of its own": (
        {"architecture": "qwen2", "rope__scaling__factor": 4.0},
        LayerFactors.uniform(2.0, 2),
        "a scaling of its own .qwen2.rope.scaling.factor",
    ),
    "standing still": ({"architecture": "qwen2"}, LayerFactors.uniform(np.inf, 2), "stop the rotation"),
    "layers": ({}, LayerFactors(np.ones(3)), "3 layers of factors, but the model has 2"),
    "bands": ({}, gains(np.ones((2, 3))), "3 bands of gains do not divide"),
    "another model": ({"tensors": tensors_of("llama") | {"blk.0.attn_q.scale": np.ones(1, np.float32)}}, gains(), "q.scale"),
    "a part of a split": ({"split_count": 2}, gains(), "one part of a split model"),
}  # fmt: skip


@pytest.mark.parametrize("model, factors, named", REFUSED.values(), ids=REFUSED)
def test_what_a_file_has_no_place_for_is_refused_in_a_line(tmp_path, model, factors, named):
    source = write_model(tmp_path / "m.gguf", **model)
    with pytest.raises(UserError, match=named) as error:
        patch_gguf(source, tmp_path / "out.gguf", factors, "F.json")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_patched_file_is_marked_and_takes_factors_once(tmp_path):
    source, target = write_model(tmp_path / "m.gguf", "qwen2"), tmp_path / "out.gguf"
    both = LayerFactors.uniform(2.0, 2)
    for factors, stored in (
        (gains(), ("query weights", None)),
        (both, (None, "rope.scaling.factor")),
        (LayerFactors(ONES), (None, None)),
    ):
        patch_gguf(source, target, factors)
        assert open_checkpoint(target).config.mark == Mark(factors.sha256, *stored)
        for again in (gains(), LayerFactors(ONES)):
            with pytest.raises(UserError, match=f"F.json: the model already contains factors of sha256 {factors.sha256[:8]}"):
                patch_gguf(target, tmp_path / "twice.gguf", again, "F.json")
        assert not (tmp_path / "twice.gguf").exists()
        target.unlink()


def test_nothing_is_written_through_a_link_or_over_a_file(tmp_path):
    source = write_model(tmp_path / "m.gguf")
    before = sha256(source)
    (tmp_path / "out.gguf").symlink_to(source)
    for target in (tmp_path / "out.gguf", source):
        with pytest.raises(FileExistsError):
            patch_gguf(source, target, gains())
    assert sha256(source) == before and (tmp_path / "out.gguf").is_symlink()


def test_the_patched_file_answers_as_the_model_with_its_factors(tmp_path):
    source, target = write_model(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    factors = LayerFactors(SHARED, "layer_band", gains=GAINS, gains_granularity="layer_band")
    patch_gguf(source, target, factors)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (2, 19)))
    model = load_llama(open_checkpoint(source), "float32")
    wanted, plain = logits(model, tokens, factors), logits(model, tokens)
    found = logits(load_llama(open_checkpoint(target), "float32"), tokens)
    assert np.abs(wanted - plain).max() > 0.1
    np.testing.assert_allclose(found, wanted, atol=2e-4)
