"""Ids, shapes and counts at the doors of the library: one line, before anything is computed; 0 is never "not given"."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lpes_jax as lj
from lpes_jax.compare import CompareSettings, run_comparison
from lpes_jax.doctor import DoctorSettings, example_tokens, new_tokens, run_doctor
from lpes_jax.evaluate.perplexity import text_nlls
from lpes_jax.evaluation import BASELINE, Candidate
from lpes_jax.factors import LEAST, MOST
from lpes_jax.generation import generate_ids
from lpes_jax.methods.moice import train_router
from lpes_jax.models.llama import load
from lpes_jax.search.plain_text import text_windows
from lpes_jax.tasks.perplexity import Window


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return lj.load_tokenizer(str(model_folder))


@pytest.mark.parametrize("bad", [-1, 300, 100_000, -(2**31)])
def test_ids_without_an_embedding_are_refused_at_every_door(tiny_model, bad):
    said = f"the id {bad}, but the model's embedding has 300 rows, 0 to 299"
    for tokens in (jnp.array([[1, bad]]), np.array([[1, bad]]), [[bad]]):
        with pytest.raises(lj.UserError, match=f"tokens contain {said}"):
            lj.logits(tiny_model, tokens)
    with pytest.raises(lj.UserError, match=said):
        generate_ids(tiny_model, [[1], [2, bad]], max_new_tokens=1)
    with pytest.raises(lj.UserError, match=said):
        text_nlls(tiny_model, [Window([1, bad], 1)], Candidate(BASELINE))
    with pytest.raises(lj.UserError, match=said):
        train_router(tiny_model, np.array([[1, bad]], np.int32), steps=1, batch=1)


NO_TOKENS = [[], [[]], [1, 2], [[1, 2], [3]], [[[1]]], [[1.0, 2.0]], [["a"]], [[True]], np.zeros((0, 3), int)]


@pytest.mark.parametrize("tokens", [*NO_TOKENS, np.zeros((2, 0), int), jnp.ones((1, 2)), jnp.ones(2, jnp.int32)])
def test_tokens_that_are_no_table_of_ids(tiny_model, tokens):
    with pytest.raises(lj.UserError, match=r"^tokens"):
        lj.logits(tiny_model, tokens)


@pytest.mark.parametrize(
    ("factors", "granularity", "said"),
    [
        (jnp.ones(1), "layer", "1 layers of factors, but the model has 3"),
        (np.ones(4), "layer", "4 layers of factors"),
        (jnp.float32(1.0), "layer", "needs factors of 1 axes"),
        (jnp.ones((3, 2)), "layer", "needs factors of 1 axes"),
        (jnp.ones((1, 2)), "layer_band", "1 layers of factors"),
        (jnp.ones((3, 3)), "layer_band", "3 bands do not divide"),
        (jnp.ones((3, 3)), "layer_group", "3 KV groups of factors"),
        ([1, 0, 1], "layer", "finite and above 0"),
        ([1, -1, 1], "layer", "finite and above 0"),
        ([1, np.nan, 1], "layer", "finite and above 0"),
        ([1, 1e-38, 1], "layer", "from 1e-20 to 1e\\+20"),
        ([1, 1e39, 1], "layer", "from 1e-20 to 1e\\+20"),
        ([[1, 1], [1]], "layer", "the same count in every layer"),
    ],
)
def test_factors_that_do_not_fit(tiny_model, tokenizer, factors, granularity, said):
    with pytest.raises(lj.UserError, match=said):
        lj.logits(tiny_model, [[1, 2]], factors, granularity)
    if granularity == "layer":
        with pytest.raises(lj.UserError, match=said):
            lj.generate(tiny_model, tokenizer, "hello", factors)


def test_one_factor_is_never_used_for_all_layers_of_a_table(tiny_config):
    table = tiny_config.rope_table(8).inv_freq
    with pytest.raises(lj.UserError, match="1 layers of factors, but the table has 3"):
        lj.scale_layers(table, jnp.ones(1))
    with pytest.raises(lj.UserError, match="needs factors of 1 axes"):
        lj.scale_layers(table, jnp.float32(1.0))
    assert lj.scale_layers(table[0, 0], jnp.ones(5)).shape == (5, 1, 4)  # the frequencies of one head, any number of layers


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_factor_is_taken_or_refused_when_it_is_read(value):
    if LEAST <= value <= MOST or value == np.inf:  # an infinite one: the frequency stands still
        with np.errstate(all="raise"):
            assert np.isfinite(1 / np.float32(lj.LayerFactors.uniform(value, 2).factors)).all()
    else:
        with pytest.raises(lj.UserError, match="factors must be"):
            lj.LayerFactors.uniform(value, 2)


@pytest.mark.parametrize("prompts", [[], ()])
def test_no_prompts(tiny_model, tokenizer, prompts):
    with pytest.raises(lj.UserError, match="prompts must be a text or a list of texts"):
        lj.generate(tiny_model, tokenizer, prompts)


@pytest.mark.parametrize("prompts", ["", [""], ["hello", ""]])
def test_a_prompt_without_tokens(tiny_model, tokenizer, prompts):
    with pytest.raises(lj.UserError, match="the prompt '' has no tokens"):
        lj.generate(tiny_model, tokenizer, prompts, max_new_tokens=1)


@pytest.mark.parametrize("count", [0, -1])
def test_counts_below_one(tiny_model, tokenizer, model_folder, tmp_path, count):
    with pytest.raises(lj.UserError, match=f"max_new_tokens must be at least 1, got {count}"):
        lj.generate(tiny_model, tokenizer, "hello", max_new_tokens=count)
    with pytest.raises(lj.UserError, match=f"max_new_tokens must be at least 1, got {count}"):
        generate_ids(tiny_model, [[1]], max_new_tokens=count)
    with pytest.raises(lj.UserError, match=f"batch_size must be at least 1, got {count}"):
        generate_ids(tiny_model, [[1]], max_new_tokens=1, batch_size=count)
    with pytest.raises(lj.UserError, match=f"--text-window must be at least 2 tokens, got {count}"):
        text_windows(None, tiny_model, tokenizer, seed=0, length=count)
    with pytest.raises(lj.UserError, match="num_layers must be at least 1"):
        lj.bezier(jnp.array([[0.0, 1.0], [1.0, 1.0]]), count)
    search_names = ("control_points", "population_chunk", "max_evaluations", "test_limit")
    comparison_names = ("router_batch", "router_steps", "repeats", "budget", "test_limit")
    verbs = [
        (lj.run_search, lj.SearchSettings, search_names),
        (lj.run_evaluation, lj.EvaluateSettings, ()),
        (run_comparison, CompareSettings, comparison_names),
    ]
    for run, settings, names in verbs:
        for name in ("max_new_tokens", "batch_size", "limit", *names):
            changes = {name: count, "num_pairs": 2, "output_path": tmp_path / "run", "model": str(tmp_path / "not there")}
            with pytest.raises(lj.UserError, match=f"--{name.replace('_', '-')} must be at least 1, got {count}"):
                run(settings.of(**changes))  # before the model is looked for
    assert not (tmp_path / "run").exists()


def test_a_prompt_beyond_the_window_is_refused_as_in_the_verbs(tiny_model, tokenizer):
    with pytest.raises(lj.UserError, match="is 520 tokens and the model's window is 512"):
        lj.generate(tiny_model, tokenizer, "a" * 500, max_new_tokens=20)


@pytest.mark.parametrize("dtype", ["fp16", "void", "int8", "float64", ""])
def test_a_dtype_is_named_as_it_was_given(model_folder, dtype):
    for load_it in (lj.load_model, load):
        with pytest.raises(
            lj.UserError, match=f"dtype '{dtype}' is not supported; supported: bfloat16, float16, float32 and auto"
        ):
            load_it(str(model_folder), dtype)


def test_the_precision_of_python_is_the_verbs(model_folder):
    given = load(str(model_folder), "auto").model.embed[...].dtype
    assert lj.load_model(str(model_folder)).embed[...].dtype == given


@pytest.mark.parametrize(
    "points", [[[0, 1]], [[0, 1], [0, 2]], [[1, 1], [0, 1]], [[0, 1], [1, np.nan]], [[0, 1, 2], [1, 1, 2]], [0, 1]]
)
def test_control_points_that_are_no_curve(points):
    with pytest.raises(lj.UserError, match="control points"):
        lj.bezier(jnp.array(points, jnp.float32), 4)


@pytest.mark.parametrize("window", [1, 2, 3, 15, 16, 17, 40])
def test_a_short_window_is_divided_among_the_prompt_and_its_continuation(window):
    assert 1 <= new_tokens(window) <= 16 and (window == 1 or new_tokens(window) < window)


def test_doctor_on_a_window_of_a_few_tokens(model_folder, tmp_path, capsys):
    folder = Path(shutil.copytree(model_folder, tmp_path / "short"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    assert len(example_tokens(load(str(folder), "float32"), 400)) == 8
    assert all(check.passed for check in run_doctor(DoctorSettings.of(model=str(folder), dtype="float32")))
