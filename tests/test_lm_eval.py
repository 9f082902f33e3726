"""The harness itself, offline, on tasks of each request type: our model class against the harness's own on torch."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from lpes_jax.api import generate
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import load_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's, and its libraries'
with_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
with_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{word}}"
metric_list: [{metric: byte_perplexity}]
""",
    "generation": """
output_type: generate_until
doc_to_text: "{{word}}"
doc_to_target: "nothing"
generation_kwargs: {until: STOP, max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
LENGTHS = (5, 30, 2, 12, 50, 90, 150)  # characters, that is tokens, of a question: the last three are cut to fit the window
FACTORS = LayerFactors(np.array([1.0, 1.5, 0.7]))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, list[str]]:
    """The tiny model with an end of text and a window of 64 tokens, factors and tasks; and how its short answers go on.

    One of the choices is what the model says itself, and the texts that stop generation are of such answers.
    """
    folder = tmp_path_factory.mktemp("harness")
    shutil.copytree(model_folder, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<end>"})
    tokenizer.save_pretrained(folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    config |= {"eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 64}
    (folder / "model/config.json").write_text(json.dumps(config))
    FACTORS.save(folder / "factors.json")
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), size=length)) for length in LENGTHS]
    greedy = generate(load_model(str(folder / "model"), "float32"), tokenizer, words[:4], FACTORS, max_new_tokens=24)
    stops = [found[0][:2] for text in greedy if (found := re.findall(r"[!-~]{2,}", text[3:]))][:1]  # of two tokens
    stops += [found[0] for text in greedy[::-1] if (found := re.findall(r"[!-~]", text[2:]))][:1]  # of one
    assert len(stops) == 2
    lines = []
    for index, word in enumerate(words):
        own = re.match(r"[!-~]*", greedy[index])[0] if index < len(greedy) else ""
        context = word + " " * (not own)  # a space at the end belongs to what follows
        lines.append(
            {"word": word, "context": context, "choices": [own or "b", word[:1], f"{word[:20]} {word[:9]}"], "gold": 1}
        )
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = f"{{data_files: {{test: {folder / 'questions.jsonl'}}}, cache_dir: {folder / 'cache'}}}"
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + text.replace("STOP", json.dumps(stops)))
    return folder, greedy


def answers(folder: Path, model: Any, tasks: list[str], arguments: str | None = None) -> dict[str, list]:
    """What the model answered to each request, task by task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options: dict[str, Any] = {"batch_size": 3, "log_samples": True, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(model, model_args=arguments, tasks=tasks, task_manager=manager, **options)
    by_task = {name: sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in tasks}
    return {
        name: [answer for sample in samples for request in sample["resps"] for answer in request]
        for name, samples in by_task.items()
    }


@pytest.fixture(scope="module")
def ours(asked: tuple[Path, list[str]]) -> dict[str, list]:
    import lpes_jax.lm_eval  # noqa: F401 (registers the model)

    folder = asked[0]
    arguments = f"pretrained={folder / 'model'},factors={folder / 'factors.json'},dtype=float32"
    return answers(folder, "lpes_jax", list(TASKS), arguments)


@with_harness
@with_torch
def test_sample_by_sample_as_the_harness_does_it_on_torch(asked, ours):
    from lm_eval.models.huggingface import HFLM

    from lpes_jax.torch import apply_layer_factors

    folder = asked[0]
    on_torch = HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=3)
    plain = answers(folder, on_torch, ["rolling"])
    apply_layer_factors(on_torch.model, folder / "factors.json")
    hooked = answers(folder, on_torch, list(TASKS))
    choices, expected = np.array(ours["choice"], float), np.array(hooked["choice"], float)
    assert choices.shape == (3 * len(LENGTHS), 2)
    assert np.allclose(choices[:, 0], expected[:, 0], rtol=0, atol=1e-3)
    assert (choices[:, 1] == expected[:, 1]).all() and 0 < choices[:, 1].sum() < len(choices)  # some are greedy
    assert np.allclose(ours["rolling"], hooked["rolling"], rtol=0, atol=1e-3)
    assert np.abs(np.subtract(plain["rolling"], hooked["rolling"])).min() > 0.1  # the factors are no trifle
    assert ours["generation"] == hooked["generation"]


@with_harness
def test_generation_stops_before_its_texts_and_at_its_length(asked, ours):
    _, greedy = asked
    short = ours["generation"][: len(greedy)]
    assert all(whole.startswith(text) for text, whole in zip(short, greedy, strict=True))
    assert {text == whole for text, whole in zip(short, greedy, strict=True)} == {True, False}


@with_harness
def test_the_command_line_is_the_harnesss_own(asked, ours):
    folder = asked[0]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "HF_HOME": str(folder / "cache"), "XLA_FLAGS": ""}

    def run(arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["-m", "lpes_jax.lm_eval", "run", "--model", "lpes_jax"]
        command += ["--model_args", f"pretrained={folder / 'model'},{arguments}"]
        command += ["--include_path", str(folder), "--tasks", "rolling", "--output_path", str(folder / "out"), "--log_samples"]
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)

    done = run(f"dtype=float32,factors={folder / 'factors.json'}")
    assert done.returncode == 0, done.stderr[-3000:]
    [samples] = (folder / "out").rglob("samples_rolling_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    assert np.allclose([float(line["resps"][0][0]) for line in lines], ours["rolling"], rtol=0, atol=1e-3)
    [results] = (folder / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["lpes_factors"]["factors"] == FACTORS.factors.tolist()
    refused = run("factors=not/there.json")
    assert refused.returncode == 2 and refused.stderr.splitlines()[-1].startswith("error: not/there.json: cannot be read")


@with_harness
def test_what_cannot_be_is_refused_by_name(asked):
    from lpes_jax.lm_eval import LayerFactorsLM

    folder = asked[0]
    model = LayerFactorsLM(str(folder / "model"), dtype="float32")
    for settings, named in (({"do_sample": True}, "do_sample"), ({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 64}, "64")):
        with pytest.raises(UserError, match=named):
            model.generate_until([SimpleNamespace(args=("ab", settings))])
    with pytest.raises(UserError, match="65 tokens"):
        model.loglikelihood([SimpleNamespace(args=("a", "b" * 65))])
    LayerFactors.uniform(1.5, 4).save(folder / "four.json")
    with pytest.raises(UserError, match="4 layers of factors, but the model has 3"):
        LayerFactorsLM(str(folder / "model"), factors=str(folder / "four.json"))


def test_without_the_harness_one_line_says_what_to_install():
    code = "import sys, runpy; sys.modules['lm_eval'] = None; runpy.run_module('lpes_jax.lm_eval', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and re.fullmatch(r"error: .*pip install 'lpes-jax\[lm-eval\]'", done.stderr.splitlines()[-1])
