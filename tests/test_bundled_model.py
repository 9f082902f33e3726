"""The bundled model: it shows the effect, a small search repairs it on held-out questions, and the wheel has it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import lpes_jax as lj
from lpes_jax.models import zoo
from lpes_jax.scoring import Scorer
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import KeyValue

NAME = "tiny-retriever"
ROOT = Path(__file__).resolve().parent.parent
# The paper's GA on few questions; every second position is left out.
SMALL_SEARCH = (
    *("--preset", "quick", "--limit", "4", "--test-limit", "12", "--positions", "0", "50", "100", "--population-size", "8"),
    *("--generations", "2", "--uniform-candidates", "3", "--seed", "5"),
)


@pytest.mark.long
@pytest.mark.slow
def test_the_bundled_model_loses_the_middle_of_a_long_prompt():
    model, tokenizer = lj.load_model(NAME, "float32"), lj.load_tokenizer(NAME)
    pairs, positions = 36, (0, 50, 100)
    task = KeyValue(pairs, key_length=8)
    examples = task.examples("test", 12, 0)
    prompts = [task.prompt(example, task_prompts.slot(p, pairs), p) for example in examples for p in positions]
    encoded = task_prompts.encode(prompts, tokenizer, model.config.max_position_embeddings)
    factors = np.ones((1, model.config.num_layers))
    begin, middle, end = 100 * Scorer(model, encoded)(factors).correct.reshape(-1, len(positions)).mean(axis=0)
    assert min(begin, end) >= 85
    assert middle <= min(begin, end) - 25


@pytest.mark.long
@pytest.mark.slow
def test_a_search_on_few_questions_repairs_it_on_others(tmp_path):
    command = [sys.executable, "-m", "lpes_jax.search", *SMALL_SEARCH, "--output-path", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    methods = json.loads((tmp_path / "run" / "results.json").read_text())["methods"]
    assert methods["lpes"]["acc,none"] >= methods["baseline"]["acc,none"] + 0.1
    assert methods["lpes"]["acc_by_position"]["50"] >= methods["baseline"]["acc_by_position"]["50"] + 0.2
    assert methods["lpes"]["acc,none"] > methods["uniform"]["acc,none"]
    found = json.loads((tmp_path / "run" / "factors.json").read_text())
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    best = max(history, key=lambda individual: individual["fitness"])
    assert (best["factors"], best["control_points"]) == (found["factors"], found["curve"]["control_points"])
    assert found["factors"][:2] == [1, 1] and found["curve"]["layers"] == [2, 9]
    curve = lj.bezier(jnp.array(found["curve"]["control_points"], jnp.float32), 8)
    np.testing.assert_allclose(found["factors"][2:], curve, rtol=1e-5)


@pytest.mark.long
def test_transformers_gives_the_same_logits():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = zoo.resolve(NAME)
    task = KeyValue(36, key_length=8)
    text = task.prompt(task.examples("test", 1, 3)[0], 15).text
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = lj.load_tokenizer(NAME)(text)["input_ids"]
    assert theirs(text)["input_ids"] == ids and theirs.decode(ids, skip_special_tokens=True) == text
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits.numpy()
    logits = lj.logits(lj.load_model(NAME, "float32"), jnp.array([ids]))
    np.testing.assert_allclose(logits, wanted, atol=1e-3, rtol=0)  # logits of a size of 20
    np.testing.assert_array_equal(np.argmax(logits, -1), np.argmax(wanted, -1))


@pytest.mark.long
def test_the_wheel_has_the_bundled_model(tmp_path):
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in ("lpes_jax", "models"):  # without what an earlier build left beside them
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, cwd=elsewhere, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, cwd=elsewhere, timeout=300)

    environment = os.environ | {"PYTHONPATH": str(site), "LPES_JAX_CACHE": str(tmp_path / "cache")}
    where = [sys.executable, "-c", "import lpes_jax; print(lpes_jax.__file__)"]
    package = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(package.strip()).is_relative_to(site)
    smallest = ("--limit", "1", "--test-limit", "1", "--population-size", "2", "--parents", "2", "--generations", "0")
    search = [sys.executable, "-m", "lpes_jax.search", "--preset", "quick", *smallest, "--uniform-candidates", "1"]
    done = subprocess.run(search, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "runs" / "search" / "factors.json").exists()
