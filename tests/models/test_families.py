"""Every family and every RoPE kind, with a factor for each layer, against transformers' own modeling files in torch.

Live where torch is there, from the folder that `save_pretrained` writes; elsewhere against logits recorded from it in
golden/families.json. To record them again:

    python tests/models/test_families.py
"""

import copy
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import CASES, FAMILIES, ROPES, hf_config, weights_of, write_folder
from flax import nnx
from safetensors.numpy import load_file
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint, save_llama
from lpes_jax.models.llama.config import SUPPORTED_MODEL_TYPES, LlamaConfig
from lpes_jax.models.llama.generate import greedy
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import decoder_layer, hidden_states, layer_rows, output_logits, rms_norm, rotated
from lpes_jax.rope import ROPE_TYPES, RopeParameters, RopeTable, cos_sin, rotate
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt

GOLDEN = Path(__file__).parent / "golden" / "families.json"
CLOSE = 1e-4
FACTORS = [1.0, 1.7, 1.3, 2.2]
LENGTHS, NEW = [12, 7, 10], 4
TOKENS = [0, 3, 17, 42, 77, 127]  # recorded logits
# Each family, and each kind once, are recorded.
GOLDEN_CASES = [case for case in CASES if case[1] == "default" or case[0] in ("llama", "phi3-partial")]


def torch_model(config: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.set_num_threads(1)
    settings = CONFIG_MAPPING[config["model_type"]](**copy.deepcopy({k: v for k, v in config.items() if k != "model_type"}))
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").float().eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in weights_of(config).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    model.tie_weights()
    return model


def logits_of_torch(model: Any, rows: list[list[int]], factors: list[float] | None) -> list[np.ndarray]:
    """Of each row. Padded on the left, which is how transformers' users batch, and none of ours."""
    import torch

    base = model.model
    handles = []
    for layer, factor in zip(base.layers, factors or [], strict=False):

        def hook(module, args, kwargs, factor=factor):
            # The kind's own frequencies, as the model has just set them for the batch; the positions are divided.
            angles = (kwargs["position_ids"].float() / factor)[..., None] * base.rotary_emb.inv_freq
            angles, scaling = torch.cat([angles, angles], dim=-1), base.rotary_emb.attention_scaling
            kwargs["position_embeddings"] = angles.cos() * scaling, angles.sin() * scaling
            return args, kwargs

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    length = max(map(len, rows))
    tokens = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False).logits
    for handle in handles:
        handle.remove()
    return [row_logits[-len(row) :] for row, row_logits in zip(rows, logits.numpy(), strict=True)]


def rows_of(lengths: list[int]) -> list[list[int]]:
    rng = np.random.RandomState(1)
    return [rng.randint(0, 128, length).tolist() for length in lengths]


def padded(rows: list[list[int]]) -> jax.Array:
    return jnp.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], jnp.int32)


@jax.jit
def all_logits(model: lj.Llama, tokens: jax.Array, table: RopeTable) -> jax.Array:
    return output_logits(model, hidden_states(model, tokens, table))


def without_rope(model: lj.Llama) -> lj.Llama:
    """The same, so that all kinds of a family share a compiled program: a model takes its RoPE as a table."""
    plain = nnx.merge(*nnx.split(model))
    plain.config = replace(
        model.config, rope=RopeParameters(1e4, partial_rotary_factor=model.config.rope.partial_rotary_factor)
    )
    return plain


def ours(model: lj.Llama, rows: list[list[int]]) -> tuple[list[np.ndarray], list[list[int]]]:
    """With the factors: logits of each row, and its greedy continuation by `NEW` tokens. One table, for the longest text."""
    plain, tokens, lengths = without_rope(model), padded(rows), jnp.array([len(row) for row in rows], jnp.int32)
    table = model.config.rope_table(tokens.shape[1] + NEW, jnp.array(FACTORS))
    logits = np.asarray(all_logits(plain, tokens, table))
    new = greedy(plain, tokens, lengths, table_method(table), jnp.zeros(0, jnp.int32), NEW)
    return [logits[i, : len(row)] for i, row in enumerate(rows)], np.asarray(new).tolist()


def assert_parity(model: lj.Llama, reference: Any, rows: list[list[int]]) -> None:
    """One pass of theirs over prompt and continuation: each new token is theirs if it is the argmax after those before it."""
    logits, new = ours(model, rows)
    whole = [row + more for row, more in zip(rows, new, strict=True)]
    for row, found, more, wanted in zip(rows, logits, new, logits_of_torch(reference, whole, FACTORS), strict=True):
        assert wanted.std() > 0.5
        np.testing.assert_allclose(found, wanted[: len(row)], rtol=0, atol=CLOSE)
        assert wanted[len(row) - 1 : -1].argmax(-1).tolist() == more


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def test_every_family_and_kind_is_here():
    assert {config["model_type"] for config in FAMILIES.values()} == set(SUPPORTED_MODEL_TYPES)
    assert {rope.split("-")[0] for rope in ROPES} == set(ROPE_TYPES)


@pytest.mark.long
@pytest.mark.parametrize("family, rope", CASES)
def test_equals_transformers_at_twelve_tokens(tmp_path, family, rope):
    config = hf_config(family, rope)
    reference = torch_model(config)
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == LlamaConfig.from_hf(config)  # v5 spelling in the folder, v4 here
    assert_parity(load_llama(checkpoint, "float32"), reference, rows_of(LENGTHS))


# What they have, others have too: mistral a window in all layers, qwen3 tied embeddings and wide heads, phi3-partial fused
# projections, the windowed forms all else.
REPEATED = [(family, "default") for family in ("llama-tied", "qwen2", "smollm3", "phi3")]


@pytest.mark.parametrize("family, rope", mostly_long(GOLDEN_CASES, *(set(GOLDEN_CASES) - set(REPEATED)), names=2))
def test_equals_what_transformers_gave(tmp_path, family, rope):
    model = load_llama(open_checkpoint(write_folder(tmp_path, hf_config(family, rope))), "float32")
    logits, new = ours(model, rows_of(LENGTHS))
    recorded = golden()[f"{family} {rope}"]
    np.testing.assert_allclose([row[-1, TOKENS] for row in logits], recorded["logits"], rtol=0, atol=1.1 * CLOSE)
    assert new == recorded["new_ids"]


LONG_CASES = {
    "llama": ("llama", "default", {}),
    "dynamic": ("llama", "dynamic", {"max_position_embeddings": 1024}),
    "llama3": ("llama", "llama3", {"original_max_position_embeddings": 64}),
    "mistral": ("mistral", "default", {"sliding_window": 300}),
    "qwen2": ("qwen2-windows", "yarn", {"sliding_window": 700}),
    "qwen3": ("qwen3", "yarn-mscale", {}),
    "smollm3": ("smollm3", "linear", {}),
    "phi3": ("phi3-partial", "longrope", {"sliding_window": 1500, "original_max_position_embeddings": 1024}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_CASES)
def test_equals_transformers_at_two_thousand_tokens(tmp_path, name):
    family, rope, changes = LONG_CASES[name]
    reference = torch_model(hf_config(family, rope, **changes))
    reference.save_pretrained(tmp_path)
    assert_parity(load_llama(open_checkpoint(tmp_path), "float32"), reference, rows_of([2000, 1203]))


def test_kinds_and_families_differ():
    """Else a port that ignores the kind, a bias or a window would pass."""
    by_kind = [golden()[f"llama {rope}"]["logits"] for rope in ROPES]
    by_family = [golden()[f"{family} default"]["logits"] for family in FAMILIES]
    for logits in (by_kind, by_family):
        for i, one in enumerate(logits):
            for other in logits[:i]:
                assert np.abs(np.subtract(one, other)).max() > 30 * CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_in_the_layout_of_the_family(tmp_path, family):
    config = hf_config(family, "longrope" if family == "phi3-partial" else "default")
    model = load_llama(open_checkpoint(write_folder(tmp_path / "a", config)), "float32")
    save_llama(model, tmp_path / "b")
    saved, wanted = load_file(tmp_path / "b" / "model.safetensors"), weights_of(config)
    assert saved.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(saved[name], tensor)
    assert open_checkpoint(tmp_path / "b").config == model.config


@pytest.mark.parametrize("family", mostly_long(FAMILIES, "llama-biases", "qwen3", "phi3-partial"))
def test_transformers_reads_what_is_saved(tmp_path, family):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = hf_config(family, "longrope" if family == "phi3-partial" else "default")
    save_llama(load_llama(open_checkpoint(write_folder(tmp_path / "a", config)), "float32"), tmp_path / "b")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    rows = rows_of(LENGTHS)
    for one, other in zip(logits_of_torch(model, rows, None), logits_of_torch(torch_model(config), rows, None), strict=True):
        np.testing.assert_array_equal(one, other)


BEYOND = [("llama", "dynamic"), ("phi3-partial", "longrope"), ("mistral", "default")]


@pytest.mark.parametrize("family, rope", mostly_long(BEYOND, BEYOND[1], names=2))
def test_cached_decoding_equals_full_recomputation_beyond_the_window(tmp_path, family, rope):
    """Ten tokens and twenty more, past a trained window of 16: one table for the call, on either path."""
    changes = {"max_position_embeddings": 16} if rope == "dynamic" else {}
    changes |= {"original_max_position_embeddings": 16} if rope == "longrope" else {}
    config = hf_config(family, rope, **changes)
    model = load_llama(open_checkpoint(write_folder(tmp_path, config)), "float32")
    rows, factors = rows_of([10, 6]), np.array(FACTORS)
    for row, new in zip(rows, generate_ids(model, rows, factors=factors, max_new_tokens=20), strict=True):
        text = jnp.array([row + new], jnp.int32)
        whole = jnp.pad(text, ((0, 0), (0, 30 - text.shape[1])))  # 30 tokens long, as the call above was
        logits = lj.logits(model, whole, lj.LayerFactors(factors))[0]
        assert len(new) == 20
        assert logits.argmax(-1).tolist()[len(row) - 1 : len(row) + 19] == new


def test_short_texts_have_the_base_that_was_trained(tmp_path):
    """Whatever the kind may do to longer ones."""
    rows = rows_of([8, 5])
    plain, dynamic = (
        load_llama(open_checkpoint(write_folder(tmp_path / rope, hf_config("llama", rope))), "float32")
        for rope in ("default", "dynamic")
    )
    np.testing.assert_array_equal(lj.logits(plain, padded(rows)), lj.logits(dynamic, padded(rows)))
    longer = padded(rows_of([9, 5]))
    assert np.abs(lj.logits(plain, longer) - lj.logits(dynamic, longer)).max() > 1e-2


def test_scoring_and_generation_share_the_policy(tmp_path):
    """The scores of an answer are those of its text in one pass, at the length of prompt and answer together."""
    model = load_llama(open_checkpoint(write_folder(tmp_path, hf_config("llama", "dynamic"))), "float32")
    row = rows_of([20])[0]
    scores = Scorer(model, [EncodedPrompt(row[:15], [row[15:]])])(np.array([FACTORS], np.float32))
    logits = np.asarray(lj.logits(model, padded([row]), lj.LayerFactors(np.array(FACTORS))))[0]
    wanted = jax.nn.log_softmax(logits)[np.arange(14, 19), row[15:]].sum()
    np.testing.assert_allclose(scores.log_likelihood[0, 0], wanted, rtol=1e-5)


def test_bands_are_of_the_rotated_part(tmp_path):
    """Phi-4-mini's heads turn three quarters: 6 frequencies of a head of 16."""
    model = load_llama(open_checkpoint(write_folder(tmp_path, hf_config("phi3-partial", "longrope"))), "float32")
    tokens = padded(rows_of(LENGTHS))
    plain = lj.logits(model, tokens)
    ones = lj.logits(model, tokens, lj.LayerFactors(np.ones((4, 2, 3)), "layer_group_band"))
    np.testing.assert_array_equal(plain, ones)
    bands = np.ones((4, 3))
    bands[:, 2] = 2
    assert np.abs(plain - lj.logits(model, tokens, lj.LayerFactors(bands, "layer_band"))).max() > 1e-3
    with pytest.raises(lj.UserError, match="4 bands do not divide the model's 6 frequencies per head"):
        lj.logits(model, tokens, lj.LayerFactors(np.ones((4, 4)), "layer_band"))


def test_key_biases_of_qwen2_are_read(tmp_path):
    config, tokens = hf_config("qwen2", "default"), padded(rows_of(LENGTHS))
    tensors = weights_of(config)
    plain = lj.logits(load_llama(open_checkpoint(write_folder(tmp_path / "a", config)), "float32"), tokens)
    tensors["model.layers.1.self_attn.k_proj.bias"] += 10
    changed = load_llama(open_checkpoint(write_folder(tmp_path / "b", config, tensors)), "float32")
    assert np.abs(lj.logits(changed, tokens) - plain).max() > 0.1
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(lj.UserError, match="1 missing: model.layers.1.self_attn.k_proj.bias"):
        load_llama(open_checkpoint(write_folder(tmp_path / "c", config, tensors)), "float32")
    with pytest.raises(lj.UserError, match="12 unknown to this port: model.layers.0.self_attn.k_proj.bias"):
        unbiased = config | {"model_type": "llama", "sliding_window": None}
        load_llama(open_checkpoint(write_folder(tmp_path / "d", unbiased, weights_of(config))), "float32")


@pytest.mark.long
def test_qwen3_normalises_before_it_rotates(tmp_path):
    model = load_llama(open_checkpoint(write_folder(tmp_path, hf_config("qwen3", "default"))), "float32")
    config, table = model.config, model.config.rope_table(12)
    layer = jax.tree.map(lambda leaf: leaf[0], model.layers)
    x, positions = jax.random.normal(jax.random.key(0), (1, 12, 32)), jnp.arange(12)
    seen = {}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        row = jax.tree.map(lambda leaf: leaf[0], layer_rows(config, table))
        seen["q"], seen["k"] = rotated(q, k, row, positions)
        return q, None

    decoder_layer(config, layer, x, attend)
    normed = rms_norm(x, layer.attention_norm[...], config.rms_norm_eps)
    turn = cos_sin(table.inv_freq[0], table.attention_scaling, positions)
    for name, weights, norm in (("q", layer.query, layer.query_norm), ("k", layer.key, layer.key_norm)):
        heads = (normed @ weights[...]).reshape(1, 12, -1, 16)
        wanted = rotate(rms_norm(heads, norm[...], config.rms_norm_eps), *turn)
        swapped = rms_norm(rotate(heads, *turn), norm[...], config.rms_norm_eps)
        np.testing.assert_allclose(seen[name], wanted, rtol=0, atol=1e-5)
        assert np.abs(seen[name] - swapped).max() > 1e-3


def test_windows_in_some_layers_have_the_gradient_of_a_mask(tmp_path):
    """The branch in the scan differentiates: by finite differences of the factors, and the same with `remat`."""
    model = load_llama(open_checkpoint(write_folder(tmp_path, hf_config("qwen2-windows", "default"))), "float32")
    tokens = padded(rows_of([12]))

    @jax.jit
    def value(factors: jax.Array, model: lj.Llama) -> tuple[jax.Array, jax.Array]:
        def loss(factors: jax.Array, remat: bool) -> jax.Array:
            table = model.config.rope_table(12, factors)
            return jax.nn.logsumexp(output_logits(model, hidden_states(model, tokens, table, remat=remat))).sum()

        return loss(factors, False), jnp.stack([jax.grad(loss)(factors, remat) for remat in (False, True)])

    factors = jnp.array(FACTORS)
    _, (kept, recomputed) = value(factors, model)
    np.testing.assert_allclose(kept, recomputed, rtol=1e-4, atol=1e-6)
    step = 0.02
    differences = [
        float(value(factors.at[layer].add(step), model)[0] - value(factors.at[layer].add(-step), model)[0]) / (2 * step)
        for layer in range(4)
    ]
    np.testing.assert_allclose(kept, differences, rtol=0.02, atol=2e-3 * np.abs(kept).max())


def record() -> None:
    """Write GOLDEN from torch."""
    recorded, rows = {}, rows_of(LENGTHS)
    for family, rope in GOLDEN_CASES:
        model, whole = (
            torch_model(hf_config(family, rope)),
            [row + [0] * NEW for row in rows],
        )  # the length that the policy says
        for step in range(NEW):
            for row, ids, logits in zip(rows, whole, logits_of_torch(model, whole, FACTORS), strict=True):
                ids[len(row) + step] = int(logits[len(row) + step - 1].argmax())
        logits = logits_of_torch(model, whole, FACTORS)
        recorded[f"{family} {rope}"] = {
            "logits": [
                own[len(row) - 1, TOKENS].astype(float).round(5).tolist() for row, own in zip(rows, logits, strict=True)
            ],
            "new_ids": [ids[len(row) :] for row, ids in zip(rows, whole, strict=True)],
        }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in recorded.items()) + "\n}\n"
    )


if __name__ == "__main__":
    sys.exit(record())
