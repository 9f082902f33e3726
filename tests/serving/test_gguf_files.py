"""Patched copies of real .gguf files: SmolLM2's, and all in the folder that SERVE_MODELS names."""

import os
from pathlib import Path

import numpy as np
import pytest
from serving.venvs import ROOT

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import Mark
from lpes_jax.models.llama.checkpoint import open_checkpoint
from lpes_jax.models.zoo import resolve
from lpes_jax.ship.gguf_patch import patch_gguf
from lpes_jax.store.content import content_sha256

pytestmark = pytest.mark.serving
FOLDER = os.environ.get("SERVE_MODELS", "")
FILES = ["smollm2-135m-instruct", *(map(str, sorted(Path(FOLDER).glob("*.gguf"))) if FOLDER else ["more"])]


@pytest.mark.parametrize("name", FILES, ids=lambda name: Path(name).stem)
def test_nothing_but_query_rows_changes(tmp_path, monkeypatch, name):
    """Bytes, rows and metadata are read by the `gguf` package. A scale is off by half a unit of float16; K-quants have small
    ones (subnormal numbers), and rows of differences of two products."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    from serve_llama_cpp import compare_files

    if name == "more":
        pytest.skip("SERVE_MODELS names no folder of .gguf files")
    try:
        source = resolve(name)
    except UserError as error:
        pytest.skip(f"no model: {error}"[:200])
    config, before = open_checkpoint(source).config, content_sha256(source)
    gains = np.random.default_rng(0).uniform(0.7, 1.4, (config.num_layers, config.rotary_dim // 2))
    factors = LayerFactors(np.ones(config.num_layers), gains=gains, gains_granularity="layer_band")
    rounding = patch_gguf(source, tmp_path / "patched.gguf", factors)
    found = compare_files(source, tmp_path / "patched.gguf", config, factors)  # refuses what changes anywhere else
    assert content_sha256(source) == before
    assert open_checkpoint(tmp_path / "patched.gguf").config.mark == Mark(factors.sha256, gains="query weights")
    assert sum(found["tensors"].values()) == sum(rounding.types.values()) >= config.num_layers
    assert 0 < found["bytes_changed_in_percent"] < 2 and found["bytes_changed_elsewhere"] == 0
    k_quants = any("_K" in kind for kind in rounding.types)
    assert found["relative_error_of_a_row"]["largest"] < (1e-2 if k_quants else 2e-3)
    assert found["relative_error_of_a_row"]["mean"] < 1e-3
    assert found["largest_error_by_largest_weight_of_its_tensor"] < 2**-10
    assert found["relative_error_of_a_row"]["largest"] == pytest.approx(rounding.most, rel=1e-3)
