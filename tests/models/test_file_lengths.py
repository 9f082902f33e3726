"""Safetensors files of another length than they declare, and tied models whose files contain another head."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lpes_jax.errors import UserError
from lpes_jax.models.llama.checkpoint import is_tied, load_llama, open_checkpoint

sys.path.append(str(Path(__file__).parent))
from test_checkpoint import CONFIG, shard, write_folder  # noqa: E402


def both_sizes(file: Path, size: int) -> str:
    return f"{file.name}: {file.stat().st_size:,} bytes, but its header declares {size:,}"


@pytest.mark.parametrize("missing", [1, 2, 100, 5_000])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path, missing, sharded):
    write_folder(tmp_path)
    if sharded:
        shard(tmp_path)
    file = max(tmp_path.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-missing])
    with pytest.raises(UserError, match=f"{both_sizes(file, len(content))}; it is truncated, fetch it again"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("more", [1, 8, 16, 4096])
def test_a_tail_is_refused_with_both_sizes(tmp_path, more):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content + bytes(more))
    with pytest.raises(UserError, match=f"{both_sizes(file, len(content))}: {more:,} too many; fetch it again"):
        open_checkpoint(tmp_path)


def test_a_file_that_ends_in_its_header_is_refused_with_what_that_needs(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    header = int.from_bytes(content[:8], "little")
    for length in (8, 9, 8 + header // 2, 8 + header - 1):
        file.write_bytes(content[:length])
        with pytest.raises(UserError, match=both_sizes(file, 8 + header)):
            open_checkpoint(tmp_path)
    file.write_bytes(content[: 8 + header])
    with pytest.raises(UserError, match=both_sizes(file, len(content))):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{}", b"[]", b"7", b"not JSON", b"[" * 50_000, b'{"a": 3}', b'{"a": {"data_offsets": []}}', b'{"__metadata__": {}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_damaged_headers_are_refused(tmp_path, header):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="model.safetensors|hold only 0 tensors"):
        load_llama(open_checkpoint(tmp_path), "float32")


def test_a_pointer_of_git_lfs_says_what_to_do(tmp_path):
    write_folder(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 14483498224\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=r"model.safetensors: a pointer of Git LFS.*\(git lfs pull\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("change", ["none", "scaled", "one number", "last row"])
def test_a_tied_model_with_a_head_of_its_own_says_which_it_takes(tmp_path, capsys, change):
    """transformers 5 uses the files' head if it differs, and does not tie; 4 uses the embedding."""
    tensors = write_folder(tmp_path, replace(CONFIG, tie_word_embeddings=True))
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding * 2 if change == "scaled" else embedding.copy()
    if change == "one number":
        head[3, 4] += 1
    elif change == "last row":
        head[-1] = 0
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    model, said = load_llama(checkpoint, "float32"), capsys.readouterr()
    assert said.out == ""
    if change == "none":
        assert model.head is None and said.err == "" and is_tied(checkpoint)
        return
    assert said.err.startswith(f"note: {tmp_path}: lm_head.weight differs from the embedding") and said.err.count("\n") == 1
    assert "using lm_head.weight" in said.err and not is_tied(checkpoint)
    np.testing.assert_array_equal(model.head[...], head.T)
    assert not model.config.tie_word_embeddings


def test_transformers_takes_the_same_head(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tensors = write_folder(tmp_path, replace(CONFIG, tie_word_embeddings=True))
    head = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_array_equal(theirs.lm_head.weight.detach().numpy(), head)


def test_untied_models_and_models_without_a_head_say_nothing(tmp_path, capsys):
    write_folder(tmp_path / "untied")
    write_folder(tmp_path / "tied", replace(CONFIG, tie_word_embeddings=True))
    for name, tied in {"untied": False, "tied": True}.items():
        checkpoint = open_checkpoint(tmp_path / name)
        assert is_tied(checkpoint) == tied == (load_llama(checkpoint, "float32").head is None)
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"]
