"""`export --to gguf`: the folder that it leaves, and what it refuses."""

import hashlib
import json

import numpy as np
import pytest
from tiny_gguf import HEAD_DIM, write_model

from lpes_jax.errors import UserError
from lpes_jax.export import ExportSettings, run_export
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import fold_gains
from lpes_jax.mark import Mark
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint

GAINS = np.random.default_rng(0).uniform(0.5, 2, (2, HEAD_DIM // 2))
FOUND = LayerFactors(np.ones(2), gains=GAINS, gains_granularity="layer_band")


@pytest.fixture
def settings(tmp_path):
    write_model(tmp_path / "m.Q4.gguf", "qwen2")
    FOUND.save(tmp_path / "f.json")
    paths = {"factors": tmp_path / "f.json", "output_path": tmp_path / "out"}
    return ExportSettings.of(model=str(tmp_path / "m.Q4.gguf"), **paths, to="gguf", no_self_test=True)


def test_a_folder_with_the_patched_file(settings, tmp_path, capsys):
    before = hashlib.sha256((tmp_path / "m.Q4.gguf").read_bytes()).hexdigest()
    (tmp_path / "m.gguf").symlink_to("m.Q4.gguf")
    folder = run_export(settings.replace(model=str(tmp_path / "m.gguf")))
    assert {"m-lpes.gguf", "factors.json", "exported.json"} <= {path.name for path in folder.iterdir()}
    patched = folder / "m-lpes.gguf"
    assert not patched.is_symlink() and hashlib.sha256((tmp_path / "m.Q4.gguf").read_bytes()).hexdigest() == before
    assert open_checkpoint(patched).config.mark == Mark(FOUND.sha256, gains="query weights")
    record = json.loads((folder / "exported.json").read_text())
    assert (record["to"], record["model"]["sha256"], record["factors"]["sha256"]) == ("gguf", before, FOUND.sha256)
    said = capsys.readouterr().out
    assert "gains: in 4 tensors (4 of type F32)" in said and f"llama-cli -m {patched}" in said
    wanted = fold_gains(load_llama(open_checkpoint(tmp_path / "m.gguf"), "float32"), FOUND).layers
    found = load_llama(open_checkpoint(patched), "float32").layers
    for name in ("query", "query_bias"):
        np.testing.assert_array_equal(getattr(found, name)[...], getattr(wanted, name)[...])


def test_it_is_replaced_with_overwrite_alone(settings, tmp_path):
    patched = run_export(settings) / "m.Q4-lpes.gguf"
    first = patched.read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        run_export(settings)
    LayerFactors(np.ones(2), gains=GAINS[::-1].copy(), gains_granularity="layer_band").save(tmp_path / "f.json")
    run_export(settings.replace(overwrite=True))
    assert patched.read_bytes() != first
    with pytest.raises(UserError, match="holds the model that is to be exported"):
        run_export(settings.replace(overwrite=True, model=str(patched)))
    assert patched.exists()


def test_what_it_refuses_leaves_nothing(settings, tmp_path, model_folder):
    there = sorted(path.name for path in tmp_path.iterdir())
    LayerFactors(np.array([1.0, 1.5]), model={}).save(tmp_path / "f.json")
    with pytest.raises(UserError, match="differ by layer or KV group.*--to hf-hook"):
        run_export(settings)
    LayerFactors(np.ones(3)).save(tmp_path / "f.json")
    with pytest.raises(UserError, match="--to gguf copies a .gguf file, and --model .* is a folder; give --to hf"):
        run_export(settings.replace(model=str(model_folder)))
    assert sorted(path.name for path in tmp_path.iterdir()) == there
