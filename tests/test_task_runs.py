"""Every kind of task through the verbs: the folder's figures against figures computed again from the outputs."""

import csv
import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from schemas import check_folder
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.evaluate.__main__ import main as evaluate
from lpes_jax.search.__main__ import main as search
from lpes_jax.tasks import make_task
from lpes_jax.tasks.metrics import effective_length

pytestmark = pytest.mark.promotes
SMALL = ["--population-size", "3", "--parents", "2", "--mutations", "1", "--crossovers", "1", "--generations", "1"]
SMALL += ["--control-points", "3", "--uniform-candidates", "2"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multi-document file of twelve questions with three short documents each."""
    rows = [
        {
            "question": f"who is number {n}",
            "answers": [f"Name{n}", f"N{n}"],
            "ctxs": [
                {"title": f"T{n}{index}", "text": f"It is Name{n}." if index == 0 else "No.", "isgold": index == 0}
                for index in range(3)
            ],
        }
        for n in range(12)
    ]
    path = tmp_path_factory.mktemp("questions") / "mdqa.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MMLU folder with one subject of eight questions and two solved ones."""
    folder = tmp_path_factory.mktemp("mmlu")
    for part, count in (("dev", 2), ("test", 8)):
        (folder / part).mkdir()
        with (folder / part / f"sums_{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([f"{part} {n} + {n}?", n, n + 1, 2 * n, 9, "ABCD"[n % 4]] for n in range(count))
    return folder


def run(verb: Any, *arguments: object) -> Path:
    """Run a verb that must succeed; its folder."""
    assert verb([str(argument) for argument in arguments]) == 0
    return Path(str(arguments[list(arguments).index("--output-path") + 1]))


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("batch_size", mostly_long([1, 4], 1))
def test_mdqa_scores_are_those_of_the_outputs(tmp_path, model_folder, questions, batch_size):
    flags = ["--model", model_folder, "--task", "mdqa", "--data", questions, "--num-documents", 3, "--split", "all"]
    flags += ["--limit", 3, "--positions", 0, 100, "--max-new-tokens", 8, "--dtype", "float32"]
    folder = run(evaluate, *flags, "--batch-size", batch_size, "--output-path", tmp_path / "out")
    one = run(evaluate, *flags, "--batch-size", 6, "--output-path", tmp_path / "other")
    assert samples(folder) == samples(one)
    task = make_task("mdqa", data=questions, num_documents=3)
    prompts = {(e.id, s): task.prompt(e, s) for e in task.examples("all", 3, 0) for s in (0, 2)}
    assert len(samples(folder)) == len(prompts)
    tokenizer = lj.load_tokenizer(str(model_folder))
    for sample in samples(folder):
        prompt = prompts[sample["example"], sample["slot"]]
        assert sample["prompt_tokens"] == len(tokenizer(prompt.text)["input_ids"])
        assert sample["empty"] == (not sample["output"].strip())
        for metric, value in task.score(sample["output"], prompt).items():
            assert sample[metric] == value
    figures = results(folder)["methods"]["baseline"]
    mean = np.mean([sample["best_subspan_em"] for sample in samples(folder)])
    assert figures["metric"] == "best_subspan_em" and figures["acc,none"] == pytest.approx(mean)
    assert figures["outputs_ended_by_length"] == sum(sample["output_tokens"] == 8 for sample in samples(folder))


def test_options_are_decided_by_likelihood(tmp_path, model_folder, choices):
    flags = ["--model", model_folder, "--task", "mmlu", "--data", choices, "--num-shots", 1, "--split", "all", "--limit", 8]
    folder = run(evaluate, *flags, "--dtype", "float32", "--output-path", tmp_path / "out")
    model, tokenizer = lj.load_model(str(model_folder), "float32"), lj.load_tokenizer(str(model_folder))
    task = make_task("mmlu", data=choices, num_shots=1)
    right = []
    for example in task.examples("all", 8, 0):
        prompt = task.prompt(example, 0)
        ids = [tokenizer(prompt.text + option)["input_ids"] for option in prompt.options]
        logits = np.asarray(lj.logits(model, jnp.array(ids)), np.float64)
        log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        space, letter = ids[0][-2], [row[-1] for row in ids]  # options are a space and a letter, a byte each
        likely = [log_p[number, -3, space] + log_p[number, -2, letter[number]] for number in range(4)]
        right.append("ABCD"[int(np.argmax(likely))] == example.row.answer)
    figures = results(folder)["results"]["mmlu"]
    assert figures["acc,none"] == pytest.approx(np.mean(right))
    assert [sample["acc"] for sample in samples(folder)] == right


def test_perplexity_is_that_of_the_logits(tmp_path, model_folder):
    started = datetime.now(UTC).replace(microsecond=0)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    flags = ["--model", model_folder, "--task", "perplexity", "--data", text, "--window", 64, "--stride", 32, "--split", "all"]
    folder = run(evaluate, *flags, "--limit", 3, "--batch-size", 2, "--dtype", "float32", "--output-path", tmp_path / "out")
    model, tokenizer = lj.load_model(str(model_folder), "float32"), lj.load_tokenizer(str(model_folder))
    nlls = []
    for number, window in enumerate(make_task("perplexity", data=text, window=64, stride=32).windows(tokenizer, "all")[:3]):
        logits = np.asarray(lj.logits(model, jnp.array([window.ids])), np.float64)[0]
        log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        first = 1 if number == 0 else 32
        nlls += [-log_p[index - 1, window.ids[index]] for index in range(first, 64)]
    check_folder(folder, "results.json")
    figures = results(folder)
    assert datetime.fromisoformat(figures["date"]) >= started and figures["config"]["window"] == 64
    assert figures["data_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert figures["results"]["perplexity"]["perplexity,none"] == pytest.approx(math.exp(np.mean(nlls)), rel=1e-5)
    assert figures["scored_tokens"] == len(nlls) and len(figures["methods"]["baseline"]["perplexity_by_position"]) == 8


@pytest.mark.pictures
def test_needle_by_depth_and_length(tmp_path):
    flags = ["--model", "tiny-retriever", "--task", "needle", "--lengths", 500, 450, "--limit", 1, "--positions", 0, 100]
    folder = run(evaluate, *flags, "--max-new-tokens", 10, "--output-path", tmp_path / "out")
    record = results(folder)
    by_length = {length: figures["baseline"]["acc,none"] for length, figures in record["by_length"].items()}
    assert list(by_length) == ["450", "500"]
    assert record["effective_length"]["baseline"] == effective_length([450, 500], list(by_length.values()))
    table = list(csv.reader((folder / "depth_by_length_baseline.csv").read_text().splitlines()))
    assert table[0] == ["depth", "450", "500"] and [row[0] for row in table[1:]] == ["0", "100"]
    assert (folder / "depth_by_length_baseline.png").stat().st_size > 5000


def test_questions_that_are_too_long_are_left_out_everywhere_or_refused(tmp_path, model_folder, questions, capsys):
    rows = questions.read_text().splitlines()
    long = json.loads(rows[1])
    long["ctxs"][1]["text"] = "word " * 100
    data = tmp_path / "long.jsonl"
    data.write_text("\n".join([rows[0], json.dumps(long), rows[2]]))
    flags = ["--model", model_folder, "--task", "mdqa", "--data", data, "--num-documents", 3, "--split", "all", "--limit", 3]
    flags += ["--positions", 0, 100, "--max-new-tokens", 8, "--output-path", tmp_path / "out"]
    assert evaluate([str(flag) for flag in flags]) == 2
    assert "--overlength skip" in capsys.readouterr().err and not (tmp_path / "out").exists()
    run(evaluate, *flags, "--overlength", "skip")
    record = results(tmp_path / "out")
    assert record["n-samples"]["mdqa"] == {"original": 3, "effective": 2}
    assert len({sample["example"] for sample in samples(tmp_path / "out")}) == 2 and len(samples(tmp_path / "out")) == 4


@pytest.mark.parametrize("fitness", mostly_long(["accuracy", "metric"], "metric"))
def test_search_on_needles(tmp_path, model_folder, fitness):
    flags = ["--model", model_folder, "--task", "needle", "--num-sentences", 1, "--limit", 1, "--test-limit", 1]
    flags += ["--positions", 0, 100, "--max-new-tokens", 9, "--fitness", fitness, *SMALL]
    folder = run(search, *flags, "--output-path", tmp_path / "run")
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert len(history) == 3 + 3 and all(line["fitness"] is not None for line in history)
    assert set(history[0]["accuracy"]) == {"0", "50", "100"}
    if fitness == "metric":  # nothing was teacher-forced: no likelihood is claimed, and none breaks ties
        assert history[0]["log_likelihood"] == dict.fromkeys(("0", "50", "100"))
        weights = {"0": 0.2, "50": 0.3, "100": 0.5}
        assert all(line["fitness"] == pytest.approx(sum(weights[p] * line["accuracy"][p] for p in weights)) for line in history)
    assert list(results(folder)["methods"]) == ["baseline", "uniform", "pi", "lpes"]


@pytest.mark.long
def test_search_on_options_has_one_position(tmp_path, model_folder, choices):
    flags = ["--model", model_folder, "--task", "mmlu", "--data", choices, "--num-shots", 0, "--limit", 2, "--test-limit", 2]
    folder = run(search, *flags, *SMALL, "--output-path", tmp_path / "run")
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert set(history[0]["accuracy"]) == {"0"}
    # Accuracy, and below half a question a likelihood in (0, 1] that breaks ties.
    assert all(0 < line["fitness"] - line["accuracy"]["0"] <= 0.25 for line in history)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--task", "mdqa"], "--data"),
        (["--task", "needle", "--num-pairs", "3"], "--num-pairs"),
        (["--task", "kv", "--lengths", "100"], "--lengths"),
        (["--task", "kv", "--num-pairs", "3", "--metrics", "f1"], "--metrics f1"),
        (["--task", "kv", "--num-pairs", "3", "--stop", r"\n"], "--stop"),
    ],
)
def test_flags_of_another_task_are_refused(tmp_path, model_folder, capsys, flags, named):
    assert evaluate(["--model", str(model_folder), *flags, "--limit", "1", "--output-path", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err


def test_summaries_cannot_be_searched_by_their_first_words(tmp_path, model_folder, capsys):
    document = "It rained. " * 4
    text = f"Sum up.\n\n{document}\n\nSummary:\n"
    row = {
        "id": "1",
        "input": text,
        "output": "Rain fell.",
        "document_start_index": 9,
        "query_start_index": text.index("Summary"),
    }
    row |= {"document_end_index": 9 + len(document), "query_end_index": len(text), "truncation_seperator": "... "}
    data = tmp_path / "gov.jsonl"
    data.write_text("".join(json.dumps(row | {"id": str(n), "input": text.replace("It", f"It {n}")}) + "\n" for n in range(9)))
    flags = ["--model", model_folder, "--task", "zero_scrolls", "--data", data, "--limit", 1, "--test-limit", 1]
    flags += ["--max-new-tokens", 8, *SMALL, "--output-path", tmp_path / "run"]
    assert search([str(flag) for flag in flags]) == 2
    assert "--fitness metric" in capsys.readouterr().err
