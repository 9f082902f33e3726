"""Searches on several tasks together: the file of a mixture, the search on it, and the report of each task."""

import csv
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formula import held_out_left_out
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.evaluation import slots_of
from lpes_jax.factors import read_json
from lpes_jax.models.llama import Llama
from lpes_jax.models.llama.tokenizer import load_tokenizer
from lpes_jax.scoring import Scorer
from lpes_jax.search import run_search
from lpes_jax.search.algorithms import shortest_gold
from lpes_jax.search.checks import check
from lpes_jax.search.loop import SearchResult, search
from lpes_jax.search.minibatches import by_length
from lpes_jax.search.mixture import Mixture, mixture_of
from lpes_jax.settings.groups import TaskSettings
from lpes_jax.settings.search import SearchSettings, preset
from lpes_jax.tasks.flags import task_of, tasks_of, title_of
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.mdqa import MultiDocumentQA
from lpes_jax.tasks.needle import Needle
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, encode, slot
from lpes_jax.tasks.ranged import Ranged

pytestmark = pytest.mark.promotes
IDENTITY = {"name": "tiny", "num_layers": 3, "sha256": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a mixture's files: questions about documents, and questions with options."""
    folder = tmp_path_factory.mktemp("mixture")
    rows = []
    for number in range(40):
        gold = {"title": "T", "text": f"x{number:x} is y.", "isgold": True}
        answers = [f"answer {number:x} in words", f"y{number:x}"]
        rows.append({"question": f"what is {number:x}", "answers": answers, "ctxs": [gold]})
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mmlu" / "test").mkdir(parents=True)
    with (folder / "mmlu" / "test" / "sums_test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([f"{number} + 1?", "a", "b", "c", "d", "ABCD"[number % 4]] for number in range(20))
    return folder


def write(folder: Path, text: str) -> Path:
    path = folder / "tasks.toml"
    path.write_text(text)
    return path


KV = '[[task]]\ntask = "kv"\nkey_length = 1\nnum-pairs = '
ORACLE = '[[task]]\ntask = "mdqa"\ndata = "documents.jsonl"\nmode = "oracle"\n'
MMLU = '[[task]]\ntask = "mmlu"\ndata = "mmlu"\nnum_shots = 0\n'
RANDOM = '[[task]]\ntask = "mdqa"\ndata = "documents.jsonl"\ndistractors = "random"\nnum_documents = 2\n'


def test_a_file_gives_a_task_for_each_block_and_length(folder):
    text = f'{KV}[3, "4:6"]\nweight = 3\nlimit = 7\n{RANDOM}{ORACLE}test_limit = 2\n{MMLU}weight = 0.5\n'
    mixture = mixture_of(TaskSettings(mixture=write(folder, text)), 10, 20)
    assert mixture is not None and mixture.titles == [
        "3 key-value pairs, key length 1",
        "4 to 6 key-value pairs, key length 1",
        "2 documents of documents, distractors random",
        "mdqa of documents, mode oracle",
        "mmlu of mmlu, num shots 0",
    ]
    assert [part.limit for part in mixture.parts] == [7, 7, 10, 10, 10]
    assert [part.test_limit for part in mixture.parts] == [20, 20, 20, 2, 20]
    assert mixture.weights == pytest.approx([3 / 8.5, 3 / 8.5, 1 / 8.5, 1 / 8.5, 0.5 / 8.5])
    assert mixture.tasks[0] == KeyValue(3, 1) and mixture.tasks[1] == Ranged(KeyValue(6, 1), "num_pairs", 4)
    record = mixture.record()
    assert record["4 to 6 key-value pairs, key length 1"]["num_pairs"] == "4:6"
    assert record[mixture.titles[2]]["data"] == "documents.jsonl" and len(record[mixture.titles[2]]["data_sha256"]) == 64
    # The same file under another folder is another task of the same name, told apart.
    (folder / "other").mkdir()
    (folder / "other" / "documents.jsonl").write_bytes((folder / "documents.jsonl").read_bytes())
    twice = mixture_of(
        TaskSettings(mixture=write(folder, ORACLE + ORACLE.replace("documents.js", "other/documents.js"))), 10, 20
    )
    assert twice is not None
    assert twice.titles == ["mdqa of documents, mode oracle", "mdqa of documents, mode oracle #2"]
    elsewhere = mixture_of(TaskSettings(mixture=write(folder / "other", MMLU), data_folder=folder), 10, 20)
    assert elsewhere is not None and elsewhere.tasks[0].data == folder / "mmlu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", ": x is not allowed"),
        ("[[task]", ": not TOML"),
        ("task = 3", ": has no [[task]] block"),
        ("", ": has no [[task]] block"),
        ("[[task]]\nweight = 2", ", block 1: has no key task; the tasks are: kv, mdqa"),
        ('[[task]]\ntask = "kw"', ", block 1: task = 'kw' is not known"),
        (KV + "3\n[[task]]\ntask = []", ", block 2: task = [] is not known"),
        (KV + "3\nnum_documents = 3", ", block 1 (kv): num_documents is not one of its keys: task, limit"),
        (KV + "3\nnum_pairs = 4", ", block 1 (kv): num_pairs is repeated"),
        (KV + "1.5", ", block 1 (kv): num-pairs = 1.5 must be a whole number or text"),
        (KV + "true", ", block 1 (kv): num-pairs = True must be"),
        (KV + '"6:4"', ", block 1 (kv): --num-pairs '6:4' is neither a number nor a range"),
        (KV + '"four"', "'four' is neither a number nor a range"),
        ('[[task]]\ntask = "kv"\nnum_pairs = "4:6"\nqueries_per_haystack = 2', "questions about one haystack have one length"),
        (KV + "[3, 3]", "--num-pairs 3 3: a length is repeated"),
        (KV + "3\n" + KV + "[2, 3]", ", block 2 (kv): the task '3 key-value pairs, key length 1' is repeated"),
        (KV + "0", ", block 1 (kv): --num-pairs must be at least 1"),
        (KV + "3\nlimit = 0", ", block 1 (kv): limit must be at least 1, got 0"),
        (KV + '3\nweight = "2"', "weight = '2' must be a number"),
        (KV + "3\nweight = inf", "weight must be at most 1e+09 (beside the other tasks' weights), got inf"),
        (KV + "3\nquery_aware = 1", "query_aware = 1 must be true or false"),
        (KV + "3\nweight = nan", "weight must be a number from"),
        (KV + "3\nweight = -1", "weight must be above 0, got -1"),
        (KV + "9" * 5000, ": cannot be read (Exceeds the limit"),
        ("x = " + "[" * 3000, ": "),
        (KV + '"5:999999999"', "--num-pairs must be at most"),
        ('[[task]]\ntask = "mdqa"\ndata = "a\\u0000b"', "data = "),
        ('[[task]]\ntask = "mdqa"\ndata = "gone.jsonl"', "gone.jsonl: no such file"),
        (ORACLE.replace("oracle", "none"), "mode = 'none' must be one of 'documents', 'oracle', 'closed_book'"),
        ('[[task]]\ntask = "perplexity"\ndata = "documents.jsonl"', ", block 1 (perplexity): perplexity has no questions"),
    ],
)
def test_mistakes_in_a_file_are_one_line_with_block_and_key(folder, text, message):
    path = write(folder, text)
    with pytest.raises(UserError) as error:
        mixture_of(TaskSettings(mixture=path), 10, 20)
    assert str(error.value).startswith(f"--mixture {path}") and message in str(error.value) and "\n" not in str(error.value)


def test_a_mixture_is_the_only_task_flag_and_only_in_a_search(folder):
    path = write(folder, KV + "3")
    for changes, message in (
        ({"num_pairs": 3}, "so --num-pairs cannot be a flag"),
        ({"task": "needle"}, "so --task cannot be a flag"),
        ({"mixture": folder / "gone.toml"}, "gone.toml: cannot be read .No such file"),
        ({"data_folder": folder / "gone"}, "--data-folder .*gone: no such folder"),
        ({"mixture": None, "data_folder": folder}, "--data-folder is the folder of relative paths in --mixture"),
        ({"mixture": None, "task": ("kv", "needle"), "subset": "x"}, "none of these tasks has --subset"),
        ({"mixture": None, "task": ("kv", "kv")}, "a task is repeated"),
        (
            {"mixture": None, "task": ("mdqa", "mmlu"), "data": folder / "documents.jsonl"},
            "one --data cannot serve mdqa and mmlu",
        ),
    ):
        flags = replace(TaskSettings(mixture=path), **changes)
        with pytest.raises(UserError, match=message):
            mixture_of(flags, 10, 20)
    for changes, message in (
        ({"mixture": path}, "--mixture is for a search"),
        ({"task": ("kv", "needle")}, "several tasks are for a search"),
        ({"num_pairs": "3:5"}, "one length at a time; give --num-pairs one number"),
        ({"task": "needle", "num_sentences": (3, 4)}, "give --num-sentences one number"),
    ):
        with pytest.raises(UserError, match=message):
            task_of(TaskSettings(**changes))
    for changes in ({"race": True}, {"fitness": "metric"}):
        with pytest.raises(UserError, match="remove it|use accuracy"):
            check(SearchSettings.of(mixture=path, **changes))
    # What a preset says of its own task is no flag that was given.
    assert preset("quick", mixture=path).task.num_pairs is None and preset("quick").task.num_pairs == 36


def test_names_of_several_tasks_take_each_their_own_flags(folder):
    flags = TaskSettings(task=("kv", "needle", "mdqa"), num_pairs=(2, 3), num_sentences=4, data=folder / "documents.jsonl")
    mixture = mixture_of(flags, 10, 20)
    assert mixture is not None
    assert mixture.tasks == [
        KeyValue(2), KeyValue(3), Needle(4), MultiDocumentQA(folder / "documents.jsonl"),
    ]  # fmt: skip
    assert mixture_of(TaskSettings(task=("kv",), num_pairs=2), 10, 20) is None
    assert tasks_of(TaskSettings(task=("kv",), num_pairs=2)) == [KeyValue(2)]


@pytest.mark.parametrize("name", mostly_long(["kv", "needle", "mdqa"], "kv", "mdqa"))
def test_lengths_of_a_range_are_log_uniform_and_their_own(folder, name):
    given = {"kv": {"num_pairs": "4:15"}, "needle": {"num_sentences": "4:15"}}
    given["mdqa"] = {"num_documents": "2:6", "distractors": "random", "data": folder / "documents.jsonl"}
    [task] = tasks_of(TaskSettings(task=name, **given[name]))
    assert title_of(TaskSettings(task=name), task).split(" ")[:3] == [
        *("2" if name == "mdqa" else "4"),
        "to",
        str(task.num_items),
    ]
    count = None if name == "mdqa" else 60
    examples, longest = task.examples("search", count, 3), task.longest.examples("search", count, 3)
    for example, longest_example in zip(examples[:10], longest, strict=False):
        exact_task = task.of(example.length)
        for position in (0, 50, 100):
            prompt = task.prompt(example, slot(position, task.num_items), position)
            own = exact_task.prompt(example.example, slot(position, exact_task.num_items), position)
            assert prompt == own and prompt.num_items == exact_task.num_items
            assert prompt.answers == task.longest.prompt(longest_example, 0).answers  # the question is that of the longest
    if name != "mdqa":
        assert examples[:20] == task.examples("search", 20, 3) and examples != task.examples("search", 60, 4)
        lengths = Counter(example.length for example in task.examples("search", 1000, 0))
        assert set(lengths) == set(range(4, 16))
        for low, high in ((4, 7), (8, 15)):  # each doubling has as many
            assert sum(lengths[n] for n in range(low, high + 1)) == pytest.approx(500, abs=60)


def test_prompts_of_many_lengths_have_few_shapes():
    lengths = [5, 20, 7, 7, 6, 19, 5, 12, 7]
    groups = by_length(lengths, 3)
    assert len(groups) <= 3 and sorted(index for group in groups for index in group) == list(range(9))
    spans = sorted((min(lengths[index] for index in group), max(lengths[index] for index in group)) for group in groups)
    assert all(first[1] < second[0] for first, second in zip(spans[:-1], spans[1:], strict=True))
    assert by_length([4, 4, 4]) == [[0, 1, 2]]


def test_a_document_is_taught_by_its_shortest_gold():
    prompt = Prompt("q", (" a b c", " a"), "a b c", "0", 0, 0, 1, golds=("a b c", "a"))
    assert shortest_gold(prompt, EncodedPrompt([1], [[2, 3, 4], [2], [5]])).answers == [[2]]
    forms = replace(prompt, golds=())  # two forms of one gold stay together
    assert shortest_gold(forms, EncodedPrompt([1], [[2, 3], [2]])).answers == [[2, 3], [2]]


SMALL = {"limit": 4, "test_limit": 2, "uniform_candidates": 2, "max_new_tokens": 30, "weights": (0.5, 0.25, 0.25)}
GRADIENT = {"algorithm": "gradient", "curve": "free", "steps": 4, "look_every": 2, "minibatch_size": 4}


def run(settings: SearchSettings, model: Llama, tokenizer) -> tuple[list[dict], SearchResult, Mixture]:
    check(settings)
    mixture = mixture_of(settings.task, settings.questions.limit, settings.questions.test_limit)
    assert mixture is not None
    result = search(settings, model, tokenizer, mixture, IDENTITY)
    lines = (settings.run.output_path / "history.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines], result, mixture


# Blocks of a mixture, and the metric and the number of positions of each task.
BLOCKS = {
    "two": (f'{KV}"3:6"\nweight = 2\n{ORACLE}', [("prefix", 5), ("best_subspan_em", 1)]),
    "four": (f'{KV}[2, "3:6"]\nweight = 2\n{ORACLE}{MMLU}', [("prefix", 5), ("prefix", 5), ("best_subspan_em", 1), ("acc", 1)]),
}


@pytest.mark.long
@pytest.mark.parametrize("blocks", BLOCKS)
def test_gradient_search_on_a_mixture(folder, guesser, tokenizer, tmp_path, blocks):
    text, measured = BLOCKS[blocks]
    path = write(folder, text)
    settings = SearchSettings.of(**SMALL, **GRADIENT, mixture=path, output_path=tmp_path / "run")
    history, result, mixture = run(settings, guesser, tokenizer)
    assert [line["step"] for line in history] == [0, 2, 4]
    # Of each task: nats an answer on the last question, by the weights of its positions, of the shortest gold.
    losses = []
    for task in mixture.tasks:
        moved = task.num_items > 1
        slots = [(slot(position, task.num_items), position) for position in ((0, 50, 100) if moved else (0,))]
        prompts = [task.prompt(example, *task_slot) for example in task.examples("search", 4, 0) for task_slot in slots]
        encoded = encode(prompts, tokenizer, 512)
        taught = [replace(prompt, answers=[min(prompt.answers, key=len)]) for prompt in encoded[-len(slots) :]]
        [likelihood] = Scorer(guesser, taught)(np.ones((1, 3), np.float32)).log_likelihood
        losses.append(-float(np.dot(settings.objective.weights if moved else (1.0,), likelihood)))
    assert history[0]["task_losses"] == pytest.approx(losses, rel=1e-4)
    for line in history:
        assert line["fitness"] == pytest.approx(-np.dot(mixture.weights, line["task_losses"]), rel=1e-5)
    assert history[-1]["train_loss"] != pytest.approx(history[1]["train_loss"])
    assert [report.title for report in result.reports] == mixture.titles
    found = [(report.outcomes[0].metric, len(report.slots)) for report in result.reports]
    assert found == measured
    [asked] = [report for report in result.reports if report.outcomes[0].metric == "best_subspan_em"]
    assert list(asked.outcomes[0].scores) == ["best_subspan_em", "f1"]
    best = max(history, key=lambda line: line["fitness"])
    tasks = result.selection["tasks"]
    assert [entry["loss"] for entry in tasks.values()] == best["task_losses"] and list(tasks) == mixture.titles
    chosen = np.dot(mixture.weights, [entry["accuracy"] for entry in tasks.values()])
    assert result.selection["accuracy_where_chosen"] == pytest.approx(chosen)
    # Cut off and gone on with: the same history. Another weight is another search, and a file elsewhere is the same.
    for name in ("results.json", "factors.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    lines = (tmp_path / "run/history.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/history.jsonl").write_text("".join(lines[:2]))
    moved = settings.replace(mixture=tmp_path / "moved.toml", data_folder=folder, resume=True)
    moved.task.mixture.write_text(path.read_text())
    assert run(moved, guesser, tokenizer)[0] == history
    moved.task.mixture.write_text(path.read_text().replace("weight = 2", "weight = 3"))
    with pytest.raises(UserError, match=r"--resume: .*mixture\..* key-value pairs, key length 1\.weight 2\.0 \(now 3\.0\)"):
        run(moved, guesser, tokenizer)


@pytest.mark.parametrize("fitness", mostly_long(["accuracy", "log_likelihood"], "log_likelihood"))
def test_genetic_search_on_a_mixture(folder, guesser, tokenizer, tmp_path, fitness):
    options = f"{MMLU}limit = 6\n" if fitness == "accuracy" else ""
    path = write(folder, f"{KV}2\nweight = 3\n{options}{ORACLE}limit = 5\n")
    sizes = {"population_size": 4, "parents": 2, "mutations": 2, "crossovers": 1, "generations": 1, "control_points": 2}
    settings = SearchSettings.of(**SMALL, **sizes, fitness=fitness, mixture=path, output_path=tmp_path / "run")
    with held_out_left_out():
        history, result, mixture = run(settings, guesser, tokenizer)
    assert len({line["fitness"] for line in history}) > 1
    for line in history:
        assert list(line["accuracy"]) == list(line["log_likelihood"]) == mixture.titles
        weights = [settings.objective.weights, *[(1.0,)] * (len(mixture.tasks) - 1)]
        if fitness == "accuracy":
            values = [np.dot(w, list(scores.values())) for w, scores in zip(weights, line["accuracy"].values(), strict=True)]
            assert 0 <= line["fitness"] - np.dot(mixture.weights, values) < 0.2 * 0.2 / 6
        else:
            likelihoods = line["log_likelihood"].values()
            values = [np.dot(w, list(scores.values())) for w, scores in zip(weights, likelihoods, strict=True)]
            assert line["fitness"] == pytest.approx(np.dot(mixture.weights, values), abs=1e-3)
    assert result.selection["tasks"].keys() == set(mixture.titles)
    if fitness == "accuracy":  # resumed, it has the same history
        (tmp_path / "run/results.json").unlink(missing_ok=True)
        lines = (tmp_path / "run/history.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "run/history.jsonl").write_text("".join(lines[:-2]))
        with held_out_left_out():
            assert run(settings.replace(resume=True), guesser, tokenizer)[0] == history


def test_every_task_has_its_own_results(folder, model_folder, tmp_path):
    path = write(folder, f"{KV}2\n{ORACLE}")
    changes = GRADIENT | {"steps": 2}
    settings = SearchSettings.of(**SMALL, **changes, model=str(model_folder), mixture=path, output_path=tmp_path / "run")
    result = run_search(settings)
    titles = [report.title for report in result.reports]
    results = read_json(tmp_path / "run/results.json")
    assert list(results["results"]) == list(results["methods"]) == list(results["n-samples"]) == titles
    for title in titles[1:]:
        figures = results["methods"][title]["lpes"]
        assert figures["metric"] == "best_subspan_em" and 0 <= figures["f1,none"] <= 1
    search = read_json(tmp_path / "run/factors.json")["search"]
    assert results["config"]["mixture"] == search["mixture"]
    asked = [
        report.task.prompt(example, *task_slot)
        for report in result.reports
        for example in report.task.examples("search", settings.questions.limit, 0)
        for task_slot in slots_of(report.task, settings.objective.search_positions if report.task.num_items > 1 else (0,))
    ]
    encoded = encode(asked, load_tokenizer(model_folder), 10_000)
    assert search["longest_tokens"] == max(len(prompt.ids) + max(map(len, prompt.answers)) for prompt in encoded)
    assert set(results["data_sha256"]) == set(titles[1:])
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert {sample["task"] for sample in samples} == set(titles)
    text, page = (tmp_path / "run/results.md").read_text(), (tmp_path / "run/report.html").read_text()
    for title in titles:
        assert f"{title}\n" in text and text.count(title) == 2 and page.count(title) >= 3
        assert math.isfinite(results["selection"]["tasks"][title]["loss"])
    assert "\nf1\n" in text and "--mixture" in page
    assert len(list((tmp_path / "run").glob("positions_*.svg"))) == 2
