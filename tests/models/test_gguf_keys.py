"""What metadata keys of .gguf files mean, which are ignored, and which are refused."""

import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.gguf_model import KEYS, hf_config, llama_config

sys.path.append(str(Path(__file__).parent))
from test_gguf_model import ROPE, write  # noqa: E402

YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("factor, attn_factor", [(4.0, 0.8782488562869419), (4.0, 1.0), (8.0, 0.5), (2.5, 3.0), (1.0, 0.7)])
def test_yarn_attn_factor_is_not_the_factor_of_cos_and_sin(tmp_path, architecture, factor, attn_factor):
    """1 + 0.1 ln(factor), as llama.cpp has it for these architectures, and transformers for the config.json it comes from."""
    keys = YARN | {"rope__scaling__factor": factor, "rope__scaling__yarn_attn_factor": attn_factor}
    rope = llama_config(write(tmp_path / "m.gguf", architecture, **keys)).rope
    assert rope.attention_factor == pytest.approx(1 + 0.1 * math.log(factor))
    without = llama_config(write(tmp_path / "m.gguf", architecture, **YARN | {"rope__scaling__factor": factor})).rope
    assert rope == without


def test_the_example_of_deepseeks_qwen3(tmp_path):
    keys = YARN | {"rope__scaling__yarn_attn_factor": 0.8782488562869419}
    assert llama_config(write(tmp_path / "m.gguf", "qwen3", **keys)).rope.attention_factor == pytest.approx(1.13862943611)


def test_keys_of_yarn_say_nothing_of_another_rope(tmp_path):
    plain = hf_config(write(tmp_path / "m.gguf"))
    keys = {"rope__scaling__yarn_attn_factor": 0.5, "rope__scaling__yarn_beta_fast": 24.0, "rope__scaling__finetuned": True}
    assert hf_config(write(tmp_path / "m.gguf", **keys)) == plain
    assert hf_config(write(tmp_path / "m.gguf", rope__scaling__type="none", rope__scaling__factor=4.0)) == plain
    assert hf_config(write(tmp_path / "m.gguf", rope__scaling__type="yarn")) == plain  # without a factor


@pytest.mark.parametrize(
    "keys, factor",
    [
        ({"rope__scale_linear": 4.0}, 4.0),
        ({"rope__scaling__factor": 3.0}, 3.0),
        ({"rope__scaling__factor": 3.0, "rope__scale_linear": 4.0}, 3.0),
        ({"rope__scaling__factor": 0.0, "rope__scale_linear": 4.0}, 1.0),  # the older name counts where the other is not there
        ({"rope__scaling__type": "linear", "rope__scale_linear": 2.0}, 2.0),
    ],
)
def test_a_factor_without_a_type_is_linear_and_has_an_older_name(tmp_path, keys, factor):
    rope = llama_config(write(tmp_path / "m.gguf", **keys)).rope
    assert (rope.rope_type, rope.factor) == (("linear", factor) if factor != 1 else ("default", 1.0))


def test_attn_factor_multiplies_cos_and_sin_where_frequencies_have_divisors(tmp_path):
    freqs, long = {"rope_freqs.weight": 2 * ROPE}, {"rope_factors_long.weight": 2 * ROPE, "rope_factors_short.weight": ROPE}
    for architecture, tensors in (("llama", freqs), ("phi3", long), ("llama", long)):
        keys: dict[str, Any] = {"rope__scaling__type": "longrope"} if architecture == "llama" and tensors is long else {}
        keys |= {"rope__scaling__original_context_length": 32}
        rope = llama_config(write(tmp_path / "m.gguf", architecture, tensors, **keys)).rope
        assert rope.attention_factor == 1.0  # llama.cpp's, without the key
        rope = llama_config(write(tmp_path / "m.gguf", architecture, tensors, rope__scaling__attn_factor=1.25, **keys)).rope
        assert (rope.attention_factor, rope.long_factor) == (1.25, (2.0, 2.0, 2.0, 2.0))
        with pytest.raises(UserError, match="together with rope.scaling.factor 4.0"):
            hf_config(write(tmp_path / "m.gguf", architecture, tensors, rope__scaling__factor=4.0, **keys))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3"])
def test_attn_factor_elsewhere_is_refused(tmp_path, architecture):
    with pytest.raises(UserError, match=f"{architecture}.rope.scaling.attn_factor=1.25 is not supported"):
        hf_config(write(tmp_path / "m.gguf", architecture, rope__scaling__attn_factor=1.25))


def test_numbers_for_each_layer_may_be_lists_of_one_number(tmp_path):
    plain = hf_config(write(tmp_path / "m.gguf"))
    keys = {"attention__head_count": [4, 4], "attention__head_count_kv": [2, 2], "feed_forward_length": [64, 64]}
    assert hf_config(write(tmp_path / "m.gguf", **keys)) == plain
    for other in ([2, 4], [2, 2, 2], []):
        with pytest.raises(UserError, match="llama.attention.head_count_kv must be one number"):
            hf_config(write(tmp_path / "m.gguf", attention__head_count_kv=other or [1]))


def keys_of_the_package() -> list[str]:
    """Every key below an architecture's name that the gguf package knows."""
    found = []
    groups: list[Any] = [gguf.constants.Keys]
    while groups:
        for value in vars(groups.pop()).values():
            if isinstance(value, type):
                groups.append(value)
            elif isinstance(value, str) and value.startswith("{arch}.") and value.count("{") == 1:
                found.append(value.removeprefix("{arch}."))
    return sorted({*found, *KEYS})


CHANGED: dict[str, Any] = {
    "attention.causal": False,
    "rope.dimension_sections": [2, 2],
    "attention.sliding_window_pattern": [True],
}
CHANGED |= {key: True for key in ("use_parallel_residual", "swin_norm", "expert_weights_norm")}


@pytest.mark.parametrize("key", keys_of_the_package())
def test_every_key_is_read_ignored_or_refused_by_its_name(tmp_path, key):
    name = key.replace(".", "__")
    changed, neutral = CHANGED.get(key, 7), {"attention.causal": True, "rope.dimension_sections": [0] * 4}.get(key, 0)
    fate = KEYS.get(key, ())
    if fate is None:  # read: elsewhere
        return
    plain = hf_config(write(tmp_path / "m.gguf"))
    if isinstance(fate, str):
        assert hf_config(write(tmp_path / "m.gguf", **{name: changed})) == plain
        return
    assert hf_config(write(tmp_path / "m.gguf", **{name: neutral})) == plain
    with pytest.raises(UserError, match=f"m.gguf: llama.{key}=") as refusal:
        hf_config(write(tmp_path / "m.gguf", **{name: changed}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [1, 0.5, True, "gelu", [0, 3]])
def test_keys_that_nobody_knows_are_refused_unless_they_say_nothing(tmp_path, value):
    with pytest.raises(
        UserError, match=r"llama.attention.new_scale=.* is unknown.*--remove-metadata llama.attention.new_scale"
    ):
        hf_config(write(tmp_path / "m.gguf", attention__new_scale=value))
    for nothing in (0, 0.0, False, "", [0, 0]):
        hf_config(write(tmp_path / "m.gguf", attention__new_scale=nothing))


def write_with(path: Path, **more: str) -> GgufFile:
    """The file with keys of other names than its architecture's."""
    file = write(path)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for key, value in more.items():
        writer.add_string(key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.ones((24, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


def test_keys_of_other_names_say_nothing(tmp_path):
    more = {"general__quantized_by": "x", "quantize__imatrix__file": "y", "qwen2__logit_scale": "z", "somebody__note": "w"}
    assert hf_config(write_with(tmp_path / "m.gguf", **more)) == hf_config(write(tmp_path / "n.gguf"))


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_files_that_are_no_model_are_refused(tmp_path, kind):
    with pytest.raises(UserError, match=f"general.type is '{kind}'"):
        hf_config(write_with(tmp_path / "m.gguf", general__type=kind))
    hf_config(write_with(tmp_path / "m.gguf", general__type="model"))


@pytest.mark.parametrize(
    "number, name, instead",
    [
        (4, "Q4_2", "Q4_0"), (5, "Q4_3", "Q4_1"), (31, "Q4_0_4_4", "Q4_0"), (32, "Q4_0_4_8", "Q4_0"), (33, "Q4_0_8_8", "Q4_0"),
        (36, "IQ4_NL_4_4", "IQ4_NL"), (37, "IQ4_NL_4_8", "IQ4_NL"), (38, "IQ4_NL_8_8", "IQ4_NL"),
    ],
)  # fmt: skip
def test_types_that_llama_cpp_removed_say_which_file_to_fetch(tmp_path, number, name, instead):
    write(tmp_path / "m.gguf")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    offset = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    content[offset : offset + 4] = number.to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(
        UserError, match=rf"'token_embd.weight' has type {name} .*removed; fetch the model's {instead} file"
    ) as refusal:
        GgufFile.open(tmp_path / "m.gguf")
    assert "pip install" not in str(refusal.value) and "\n" not in str(refusal.value)
