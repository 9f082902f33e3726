"""Checkpoints on disk to `Llama` and back: layouts, dtypes, memory, and everything that must be refused."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.models import weight_hash
from lpes_jax.models.llama import checkpoint
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint, save_llama
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.gguf_model import TENSOR_NAMES
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import RopeParameters

# The heads do not add up to the embedding, and every size differs from every other: no wrong axis fits by chance.
CONFIG = LlamaConfig(
    vocab_size=48, hidden_size=20, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    rms_norm_eps=1e-5, max_position_embeddings=64, rope=RopeParameters(5e5),
)  # fmt: skip
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def write_folder(folder: Path, config: LlamaConfig = CONFIG, dtype=np.float32) -> dict[str, np.ndarray]:
    """A folder as Hugging Face writes it, with random weights, which are returned."""
    c, rng = config, np.random.default_rng(0)
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), "model.norm.weight": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    layer_shapes = {
        "input_layernorm": (c.hidden_size,), "post_attention_layernorm": (c.hidden_size,),
        "self_attn.q_proj": (heads, c.hidden_size), "self_attn.k_proj": (kv, c.hidden_size),
        "self_attn.v_proj": (kv, c.hidden_size), "self_attn.o_proj": (c.hidden_size, heads),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size), "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }  # fmt: skip
    for layer in range(c.num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()}
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def write_gguf(path: Path, config: LlamaConfig, tensors: dict[str, np.ndarray]) -> None:
    """The same weights as llama.cpp's converter writes them."""
    c, writer = config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope.rope_theta)
    for hf, name in TENSOR_NAMES.items():
        for layer in range(c.num_layers) if "{}" in hf else [0]:
            if hf.format(layer) not in tensors:
                continue
            array = tensors[hf.format(layer)]
            if "q_proj" in hf or "k_proj" in hf:  # LlamaModel.permute of convert_hf_to_gguf.py
                heads = c.num_heads if "q_proj" in hf else c.num_kv_heads
                array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(name.format(layer), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shard(folder: Path) -> dict:
    """Cut model.safetensors into two files with an index, which is returned."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def fuse(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Make the folder one of Phi-3, whose queries, keys and values are one tensor, as are gate and up; `tensors` too."""
    for layer in range(3):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        fused = [tensors.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
        tensors[f"{attention}qkv_proj.weight"] = np.concatenate(fused)
        tensors[f"{mlp}gate_up_proj.weight"] = np.concatenate([tensors.pop(f"{mlp}{n}_proj.weight") for n in ("gate", "up")])
    (folder / "config.json").write_text(json.dumps(replace(CONFIG, model_type="phi3").to_hf()))
    save_file(tensors, folder / "model.safetensors")


def assert_same(one: Llama, other: Llama) -> None:
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, nnx.split(one)[1], nnx.split(other)[1])


@pytest.mark.parametrize("tied", [False, True])
def test_every_leaf_is_its_tensor_transposed(tmp_path, tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    tensors = write_folder(tmp_path, config)
    model = load_llama(open_checkpoint(tmp_path), jnp.float32)
    assert model.config == config

    def layers(name: str) -> list[np.ndarray]:
        return [tensors[f"model.layers.{layer}.{name}.weight"].T for layer in range(3)]

    np.testing.assert_array_equal(model.embed[...], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.norm[...], tensors["model.norm.weight"])
    np.testing.assert_array_equal(model.layers.attention_norm[...], layers("input_layernorm"))
    np.testing.assert_array_equal(model.layers.query[...], layers("self_attn.q_proj"))
    np.testing.assert_array_equal(model.layers.key[...], layers("self_attn.k_proj"))
    np.testing.assert_array_equal(model.layers.value[...], layers("self_attn.v_proj"))
    np.testing.assert_array_equal(model.layers.output[...], layers("self_attn.o_proj"))
    np.testing.assert_array_equal(model.layers.mlp_norm[...], layers("post_attention_layernorm"))
    np.testing.assert_array_equal(model.layers.gate[...], layers("mlp.gate_proj"))
    np.testing.assert_array_equal(model.layers.up[...], layers("mlp.up_proj"))
    np.testing.assert_array_equal(model.layers.down[...], layers("mlp.down_proj"))
    assert model.layers.query.shape == (3, 20, 32) and model.layers.output.shape == (3, 32, 20)
    if tied:
        assert model.head is None
    else:
        np.testing.assert_array_equal(model.head[...], tensors["lm_head.weight"].T)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_and_loaded_dtypes(tmp_path, stored, dtype):
    tensors = write_folder(tmp_path, dtype=stored)
    model = load_llama(open_checkpoint(tmp_path), dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.split(model)[1])} == {dtype}
    np.testing.assert_array_equal(model.layers.query[1], tensors[Q_PROJ].T.astype(model.embed[...].dtype))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["folder", "fused", "gguf"])
def test_stacked_on_the_device_is_the_same(tmp_path, monkeypatch, kind, stored):
    """What a GPU does: it gets tensors as they lie in the file, transposes and stacks them."""
    tensors = write_folder(tmp_path, dtype=stored)
    path = tmp_path
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, CONFIG, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    elif kind == "fused":
        fuse(tmp_path, tensors)
    for dtype in ("float32", "bfloat16"):
        on_host = load_llama(open_checkpoint(path), dtype)
        monkeypatch.setattr(checkpoint, "_off_the_cpu", lambda mesh: True)
        on_device = load_llama(open_checkpoint(path), dtype)
        monkeypatch.undo()
        assert_same(on_device, on_host)
        assert not any(leaf.committed for leaf in jax.tree.leaves(on_device))


def test_a_tensor_that_lies_askew_in_the_file(tmp_path):
    """Headers are padded to eight bytes by convention only."""
    tensors = write_folder(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    found = open_checkpoint(tmp_path)
    assert found.read(Q_PROJ).flags.aligned
    np.testing.assert_array_equal(found.read(Q_PROJ), tensors[Q_PROJ])
    np.testing.assert_array_equal(found.read(Q_PROJ, slice(3, 7)), tensors[Q_PROJ][3:7])


@pytest.mark.parametrize(
    "dtype, tied",
    mostly_long(
        [("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)],
        *[("float32", False), ("bfloat16", True)],
        names=2,
    ),
)
def test_saved_and_loaded_again_is_the_same(tmp_path, dtype, tied):
    config = replace(CONFIG, tie_word_embeddings=tied, rope=RopeParameters(1e4, "linear", 2.0))
    model = Llama(config, rngs=nnx.Rngs(1), dtype=jnp.dtype(dtype))
    save_llama(model, tmp_path / "new" / "folder")
    assert_same(load_llama(open_checkpoint(tmp_path / "new" / "folder"), dtype), model)
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["config.json", "model.safetensors"]


def test_saving_writes_the_tensors_that_were_read(tmp_path):
    tensors = write_folder(tmp_path / "a")
    save_llama(load_llama(open_checkpoint(tmp_path / "a"), "float32"), tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(saved[name], tensor)


def test_transformers_reads_what_is_saved(tmp_path):
    pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    save_llama(Llama(CONFIG, rngs=nnx.Rngs(1), dtype=jnp.dtype("float32")), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    model, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    np.testing.assert_array_equal(model.model.layers[1].self_attn.q_proj.weight.detach().numpy(), saved[Q_PROJ])
    assert model.config.rope_parameters["rope_theta"] == 5e5 and model.config.head_dim == 8


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_weights_as_folder_and_as_gguf(tmp_path, tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    tensors = write_folder(tmp_path, config)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    folder, file = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "model.gguf")
    assert folder.names() == file.names() == tensors.keys()
    for name in tensors:
        assert file.shape(name) == folder.shape(name)
        np.testing.assert_array_equal(file.read(name), folder.read(name))
    assert_same(load_llama(file, "float32"), load_llama(folder, "float32"))


def test_shards_are_one_checkpoint(tmp_path):
    write_folder(tmp_path)
    whole = load_llama(open_checkpoint(tmp_path), "float32")
    shard(tmp_path)
    assert_same(load_llama(open_checkpoint(tmp_path), "float32"), whole)


def test_sha256_of_the_weight_files_in_order(tmp_path):
    write_folder(tmp_path)
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert open_checkpoint(tmp_path).sha256() == digest
    shard(tmp_path)
    both = b"".join((tmp_path / f"model-0000{number}-of-00002.safetensors").read_bytes() for number in (1, 2))
    assert open_checkpoint(tmp_path).sha256() == hashlib.sha256(both).hexdigest()


@pytest.mark.parametrize("kind", ["file", "shards", "gguf"])
def test_a_hash_that_was_begun_early_is_that_of_the_files(tmp_path, monkeypatch, kind):
    tensors, path = write_folder(tmp_path), tmp_path
    if kind == "shards":
        shard(tmp_path)
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, CONFIG, tensors)
    expected = open_checkpoint(path).sha256()
    weight_hash.begin(str(path))
    files = open_checkpoint(path).weight_files()
    [future] = weight_hash._begun.values()
    assert future.result() == expected
    monkeypatch.setattr(weight_hash, "_hashed", lambda files: "hashed again")
    assert open_checkpoint(path).sha256() == expected  # once
    assert open_checkpoint(path).sha256() == "hashed again"
    monkeypatch.undo()
    weight_hash.begin(str(path))
    with open(files[-1], "r+b") as file:  # a file that was written since is hashed again
        file.seek(-1, 2)
        file.write(b"\x77")
    os.utime(files[-1], ns=(0, 0))
    whole = b"".join(file.read_bytes() for file in files)
    assert open_checkpoint(path).sha256() == hashlib.sha256(whole).hexdigest() != expected
    weight_hash._begun.clear()


@pytest.mark.parametrize("index", [None, "[", "{}", '{"weight_map": {"a": ["b"], "c": 1}}', '{"weight_map": {"a": "absent"}}'])
def test_nothing_is_begun_for_what_cannot_be_hashed(tmp_path, index):
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    for name in (tmp_path, tmp_path / "absent.gguf", "", "tiny-retriever", "org/name"):
        weight_hash.begin(str(name))
    assert not weight_hash._begun


def test_missing_shards_are_listed(tmp_path):
    write_folder(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="1 of 2 shards missing: model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)


def test_tensors_that_only_the_index_has_are_listed(tmp_path):
    write_folder(tmp_path)
    index = shard(tmp_path)
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model.layers.9.mlp.up_proj.weight in model-00001-of-00002.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../b.safetensors"}}]
)
def test_bad_indices_are_refused(tmp_path, content):
    write_folder(tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="model.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_all_tensors_that_do_not_fit_are_told_at_once(tmp_path):
    tensors = write_folder(tmp_path)
    del tensors["model.norm.weight"]
    tensors[Q_PROJ] = tensors[Q_PROJ].T.copy()
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_llama(open_checkpoint(tmp_path), "float32")
    message = str(error.value)
    assert "1 missing: model.norm.weight" in message
    assert f"{Q_PROJ} is [20, 32], wanted [32, 20]" in message
    assert "model.layers.0.self_attn.q_proj.bias" in message
    assert str(tmp_path) in message and "\n" not in message


def test_what_follows_from_the_rest_may_be_there_or_not(tmp_path):
    config = replace(CONFIG, tie_word_embeddings=True)
    tensors = write_folder(tmp_path, config)
    plain = load_llama(open_checkpoint(tmp_path), "float32")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(load_llama(open_checkpoint(tmp_path), "float32"), plain)


def test_a_head_that_differs_is_taken_though_the_config_says_tied(tmp_path):
    """As transformers does: it ties if the two tensors are equal, or one is missing."""
    tensors = write_folder(tmp_path, replace(CONFIG, tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_llama(open_checkpoint(tmp_path), "float32")
    assert model.config == CONFIG and model.head is not None
    np.testing.assert_array_equal(model.head[...], tensors["lm_head.weight"].T)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:5]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head.weight is \[5, 20\], wanted \[48, 20\]"):
        load_llama(open_checkpoint(tmp_path), "float32")


def test_a_head_that_is_missing_is_no_tied_one(tmp_path):
    tensors = write_folder(tmp_path)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="1 missing: lm_head.weight"):
        load_llama(open_checkpoint(tmp_path), "float32")


def test_parts_of_fused_tensors(tmp_path):
    """Phi-3: queries, keys and values lie below one another in one tensor, gate and up in another."""
    tensors = write_folder(tmp_path)
    fuse(tmp_path, tensors)
    whole = load_llama(open_checkpoint(tmp_path), "float32")
    qkv, gate_up = tensors["model.layers.2.self_attn.qkv_proj.weight"], tensors["model.layers.2.mlp.gate_up_proj.weight"]
    assert qkv.shape == (32 + 16 + 16, 20) and gate_up.shape == (2 * 24, 20)
    np.testing.assert_array_equal(whole.layers.query[2], qkv[:32].T)
    np.testing.assert_array_equal(whole.layers.key[2], qkv[32:48].T)
    np.testing.assert_array_equal(whole.layers.value[2], qkv[48:].T)
    np.testing.assert_array_equal(whole.layers.gate[2], gate_up[:24].T)
    np.testing.assert_array_equal(whole.layers.up[2], gate_up[24:].T)
    shard(tmp_path)
    assert_same(load_llama(open_checkpoint(tmp_path), "float32"), whole)
    save_file(tensors | {"model.layers.2.self_attn.qkv_proj.weight": qkv[:60]}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.layers.2.self_attn.qkv_proj.weight is \[60, 20\], wanted \[64, 20\]"):
        load_llama(open_checkpoint(tmp_path), "float32")


def test_pickles_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "it-ran",)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="pytorch_model.bin.*convert them to safetensors"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_short_weight_files_are_refused(tmp_path, keep):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="model.safetensors: .*fetch it again"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["longer", "header-of-2**60", "header-beyond-the-file", "shape-of-2**60"])
def test_weight_files_that_contradict_themselves_are_refused_at_once(tmp_path, damage):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[Q_PROJ]["shape"] = [2**60, 20]
    huge = json.dumps(header).encode()
    file.write_bytes(
        {
            "longer": content + bytes(16),
            "header-of-2**60": (2**60).to_bytes(8, "little") + content[8:],
            "header-beyond-the-file": len(content).to_bytes(8, "little") + content[8:],
            "shape-of-2**60": len(huge).to_bytes(8, "little") + huge + content[8 + length :],
        }[damage]
    )
    with pytest.raises(UserError, match="model.safetensors: .*fetch it again"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_folder(tmp_path)
    index = shard(tmp_path)
    files = sorted(set(index["weight_map"].values()))
    tensors = [load_file(tmp_path / file) for file in files]
    name = next(iter(tensors[0]))
    save_file(tensors[1] | {name: tensors[0][name] + 1}, tmp_path / files[1])
    with pytest.raises(UserError, match=f"{files[1]}: also in {files[0]}: {name}"):
        open_checkpoint(tmp_path)


def test_dtypes_without_a_meaning_here_are_refused(tmp_path):
    tensors = write_folder(tmp_path)
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{Q_PROJ} is I8"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_unreadable_configs_are_refused(tmp_path, content):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="config.json"):
        open_checkpoint(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path):
    (tmp_path / "model.pkl").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "model.pkl"):
        with pytest.raises(UserError, match=str(path)):
            open_checkpoint(path)
    write_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json: no such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_configs_far_larger_than_the_files_are_refused_at_once(tmp_path, key):
    write_folder(tmp_path)
    config = CONFIG.to_hf() | {key: 2**30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    began = time.perf_counter()
    with pytest.raises(UserError, match=str(tmp_path)):
        load_llama(open_checkpoint(tmp_path), "float32")
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("dtype", ["int8", "float64", "no such"])
def test_other_target_dtypes_are_refused(tmp_path, dtype):
    write_folder(tmp_path)
    with pytest.raises(UserError, match="supported: bfloat16, float16, float32"):
        load_llama(open_checkpoint(tmp_path), dtype)


def run(script: str, *arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bfloat16_comes_back_bit_for_bit_without_torch(tmp_path):
    values = np.array([1.0, -2.5, 3.3895e38], ml_dtypes.bfloat16)
    tensors = write_folder(tmp_path, dtype=ml_dtypes.bfloat16)
    tensors["model.norm.weight"][:3] = values
    save_file(tensors, tmp_path / "model.safetensors")
    script = """
import sys
from pathlib import Path
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint, save_llama
folder = Path(sys.argv[1])
save_llama(load_llama(open_checkpoint(folder), "bfloat16"), folder / "again")
assert "torch" not in sys.modules
"""
    run(script, tmp_path)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert (
        again["model.norm.weight"][:3].view(np.uint16).tolist() == values.view(np.uint16).tolist() == [0x3F80, 0xC020, 0x7F7F]
    )
    assert all(again[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize("kind", mostly_long(["safetensors", "gguf"], "gguf"))
def test_peak_memory_of_loading(tmp_path, kind):
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_layers": 12,
        "num_heads": 6,
        "head_dim": 64,
    }
    config = replace(CONFIG, **sizes, tie_word_embeddings=True)
    path = tmp_path / "large"
    tensors = write_folder(path, config)
    if kind == "gguf":
        write_gguf(path / "model.gguf", config, tensors)
        path = path / "model.gguf"
    write_folder(tmp_path / "small")
    script = """
import sys
from pathlib import Path
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

load_llama(open_checkpoint(Path(sys.argv[1])), "float32")  # what is allocated once stays out of the figure
before = resident("VmRSS")
model = load_llama(open_checkpoint(Path(sys.argv[2])), "float32")
print(resident("VmHWM") - before)
"""
    peak = int(run(script, tmp_path / "small", path))
    loaded = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(tensor.nbytes for tensor in tensors.values())
    print(f"{peak / 1e6:.0f} MB for a model of {loaded / 1e6:.0f} MB")
    assert (
        loaded < peak < 1.5 * loaded + largest
    )  # a second copy would make it 2; the kernel reclaims some of what was there before
