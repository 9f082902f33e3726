"""The factors file: written files are read back, and unusable ones are refused in one line."""

import json
import os

import numpy as np
import pytest

import lpes_jax.factors as lpes_factors
from lpes_jax.errors import UserError
from lpes_jax.factors import FORMAT, LayerFactors, read_json
from lpes_jax.rope import GRANULARITIES
from lpes_jax.store.files import write_json

SHAPES = {"layer": (3,), "layer_band": (3, 4), "layer_group": (3, 2), "layer_group_band": (3, 2, 4)}
FITS = dict(num_layers=3, num_kv_heads=2, head_dim=8)


def record(**changes) -> dict:
    return {"format": FORMAT, "factors": [1.0, 1.5, 2.0], "granularity": "layer"} | changes


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_round_trip(tmp_path, granularity):
    factors = LayerFactors(
        np.random.default_rng(0).uniform(1, 2, SHAPES[granularity]),  # doubles come back to the last bit
        granularity,
        model={"name": "tiny", "num_layers": 3, "sha256": "ab"},
        curve={"kind": "bezier", "points": [[0, 1.5], [2, 1.5]]},
        rope={"rope_type": "default", "rope_theta": 1e4},
        search={"seed": 0, "note": "π"},
        evaluation={"gain": None},
    )
    factors.save(tmp_path / "factors.json")
    again = LayerFactors.load(tmp_path / "factors.json")
    np.testing.assert_array_equal(again.factors, factors.factors)
    assert again.granularity == granularity and again.num_layers == 3
    for name in ("model", "curve", "rope", "search", "evaluation"):
        assert getattr(again, name) == getattr(factors, name)
    written = json.loads((tmp_path / "factors.json").read_text(encoding="utf-8"))
    assert written["format"] == "lpes-factors/2" and written["gains"] is None and written["applies_to"] == "position / factor"


def test_the_smallest_file_is_enough(tmp_path):
    (tmp_path / "f.json").write_text('{"format": "lpes-factors/1", "factors": [1, 2]}')
    factors = LayerFactors.load(tmp_path / "f.json")
    np.testing.assert_array_equal(factors.factors, [1.0, 2.0])
    assert factors.granularity == "layer" and factors.curve is None and factors.model == {}


def test_uniform():
    factors = LayerFactors.uniform(1.5, 4)
    np.testing.assert_array_equal(factors.factors, [1.5] * 4)
    assert factors.granularity == "layer"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_model_they_fit(granularity):
    factors = LayerFactors(np.ones(SHAPES[granularity]), granularity)
    assert factors.for_model(**FITS) is factors


@pytest.mark.parametrize(
    "granularity, shape, words",
    [
        ("layer", (4,), "4 layers of factors, but the model has 3"),
        ("layer_band", (2, 4), "2 layers of factors, but the model has 3"),
        ("layer_group", (3, 4), "4 KV groups of factors, but the model has 2"),
        ("layer_group_band", (3, 1, 4), "1 KV groups of factors, but the model has 2"),
        ("layer_band", (3, 3), "3 bands do not divide the model's 4 frequencies"),
        ("layer_band", (3, 8), "8 bands do not divide the model's 4 frequencies"),
        ("layer_group_band", (3, 2, 3), "3 bands do not divide the model's 4 frequencies"),
    ],
)
def test_a_model_they_do_not_fit(granularity, shape, words):
    with pytest.raises(UserError, match=words) as refusal:
        LayerFactors(np.ones(shape), granularity).for_model(**FITS, where="found.json")
    assert str(refusal.value).startswith("found.json: ") and "\n" not in str(refusal.value)


def test_groups_and_bands_of_one_shape_are_kept_apart(tmp_path):
    """`[L, K]` and `[L, bands]` look the same: only the granularity says which one is meant."""
    factors = np.array([[1.0, 2.0], [1.5, 1.0], [1.0, 1.0]])
    for granularity in ("layer_band", "layer_group"):
        LayerFactors(factors, granularity).save(tmp_path / "f.json")
        assert LayerFactors.load(tmp_path / "f.json").granularity == granularity
    with pytest.raises(UserError, match=r"granularity layer needs factors of 1 axes, got shape \[3, 2\]"):
        LayerFactors(factors)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"factors": [1.0, float("nan")]}, "finite and above 0, got nan"),
        ({"factors": [1.0, float("inf")]}, "finite and above 0, got inf"),
        ({"factors": [1.0, 0.0]}, r"finite and above 0, got 0\.0"),
        ({"factors": [1.0, -1.5]}, r"finite and above 0, got -1\.5"),
        ({"factors": [1.0, None], "format": "lpes-factors/1"}, "factors must be"),
        ({"factors": [1.0, "x"]}, "must be numbers"),
        ({"factors": "one"}, "must be numbers"),
        ({"factors": None}, "factors"),
        ({"factors": {"0": 1.0}}, "must be numbers"),
        ({"factors": []}, "needs factors of 1 axes"),
        ({"factors": 1.5}, "needs factors of 1 axes"),
        ({"factors": [[1.0, 2.0], [1.0]], "granularity": "layer_band"}, "the same count in every layer"),
        ({"factors": [[1.0, 2.0]], "granularity": "layer"}, "needs factors of 1 axes"),
        ({"factors": [1.0], "granularity": "layer_group_band"}, "needs factors of 3 axes"),
        ({"granularity": "head"}, "granularity 'head' is not one of layer, layer_band"),
        ({"granularity": None}, "granularity None is not one of"),
        ({"granularity": ["layer"]}, "granularity"),
        ({"format": "lpes-factors/3"}, "not a lpes-factors/2 file"),
        ({"format": None}, "not a lpes-factors/2 file"),
    ],
)
def test_unusable_files_are_refused(tmp_path, changes, words):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(record(**changes)))
    with pytest.raises(UserError, match=words) as refusal:
        LayerFactors.load(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


def test_a_file_without_factors_is_refused(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"format": FORMAT}))
    with pytest.raises(UserError, match="factors are missing"):
        LayerFactors.load(tmp_path / "f.json")


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "lpes-factors/1"', b"\xff\xfe\x00"])
def test_what_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(UserError, match="f.json: not a JSON file"):
        LayerFactors.load(tmp_path / "f.json")


@pytest.mark.parametrize("content", ["[1.0, 1.5]", "1.5", "null", '"lpes-factors/1"'])
def test_json_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(UserError, match="not a lpes-factors/2 file; give the factors.json that a search wrote"):
        LayerFactors.load(tmp_path / "f.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere.json: cannot be read"):
        LayerFactors.load(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="a folder; give the factors.json"):
        LayerFactors.load(tmp_path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f.json"
    LayerFactors.uniform(1.5, 3).save(path)
    LayerFactors.uniform(2.0, 3).save(path)
    assert os.listdir(tmp_path) == ["f.json"]
    with pytest.raises(ValueError):
        write_json(path, {"value": float("nan")})  # NaN is not JSON
    assert os.listdir(tmp_path) == ["f.json"]
    np.testing.assert_array_equal(LayerFactors.load(path).factors, [2.0] * 3)
    assert read_json(path)["factors"] == [2.0] * 3


def test_factors_of_the_zoo_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    factors = LayerFactors.load("smollm2-135m-instruct/best-kv-5-10-20")
    assert factors.factors.shape == (30, 32) and factors.granularity == "layer_band"
    np.testing.assert_array_equal(LayerFactors.load("best-kv-5-10-20").factors, factors.factors)  # one model alone has these
    with pytest.raises(
        UserError, match="best-kv: no such .*, which has .*, smollm2-135m-instruct/best-kv-5-10-20, "
    ) as refusal:
        LayerFactors.load("smollm2-135m-instruct/best-kv")
    assert "\n" not in str(refusal.value)
    for model in ("one", "other"):
        (tmp_path / model / "factors").mkdir(parents=True)
        LayerFactors.uniform(2.0, 3).save(tmp_path / model / "factors" / "best.json")
    monkeypatch.setattr(lpes_factors, "_ZOO", tmp_path)
    with pytest.raises(UserError, match="several models have factors best; give one of one/best, other/best"):
        LayerFactors.load("best")
    assert LayerFactors.load("other/best").num_layers == LayerFactors.load("other/factors/best.json").num_layers == 3
