"""The example of a training step with factors: it trains only the chosen factors or adapter."""

import sys
from pathlib import Path

import numpy as np
import pytest

from lpes_jax.factors import LayerFactors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
import finetune_with_factors  # noqa: E402


@pytest.mark.promotes  # optax's schedules need standard promotion
@pytest.mark.long
def test_factors_then_an_adapter_with_them_in_place(model_folder, tmp_path, capsys):
    settings = {"model": str(model_folder), "num_pairs": 3, "key_length": 2, "steps": 3, "output_path": tmp_path}

    start = LayerFactors(np.full((3, 2), 1.2), "layer_band")
    start.save(tmp_path / "start.json")
    finetune_with_factors.main(finetune_with_factors.Settings(**settings, first_layer=1, factors=tmp_path / "start.json"))
    found = LayerFactors.load(tmp_path / "factors.json")
    assert found.granularity == "layer_band" and (found.factors[0] == 1.2).all() and (found.factors[1:] != 1.2).all()
    words = capsys.readouterr().out.splitlines()[-1].split()  # other questions: X nats before, Y after
    assert float(words[5]) < float(words[2])
    more = {"factors": tmp_path / "factors.json", "train": "adapter", "learning_rate": 1.0}
    finetune_with_factors.main(finetune_with_factors.Settings(**settings, **more))
    adapter = np.load(tmp_path / "adapter.npz")
    assert adapter["down"].shape == (3, 48, 4) and np.abs(adapter["up"]).min() > 0
