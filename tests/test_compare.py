"""The verb compare, on a tiny random model: everything is measured, nothing is claimed of its accuracy."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from nursery import VERB
from schemas import check_folder

from lpes_jax.compare import METHODS, NAMES, CompareSettings, main, run_comparison
from lpes_jax.compare.learnt import Learnt, arrays_of
from lpes_jax.errors import UserError
from lpes_jax.evaluate import EvaluateSettings, run_evaluation
from lpes_jax.factors import LayerFactors, read_json
from lpes_jax.methods import Choice, Tuning
from lpes_jax.methods.moice import Router
from lpes_jax.methods.tables import yarn_choices
from lpes_jax.models.llama import LlamaConfig
from lpes_jax.models.llama.method import Method
from lpes_jax.statistics import holm
from lpes_jax.store.files import write_json
from lpes_jax.store.parts import Parts

SMALL = {"num_pairs": 3, "key_length": 1, "limit": 2, "test_limit": 2, "budget": 2, "repeats": 1, "channel_strings": 4}
TUNED = ("uniform", "ntk_by_base", "yarn", "attention_buckets", "self_extend", "hidden_channel", "zero_tuning")


@pytest.fixture(scope="module")
def compared(model_folder: Path, tiny_config: LlamaConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("compare")
    LayerFactors(np.array([1.0, 1.5, 0.7])).save(folder / "factors.json")
    Router.init(jax.random.key(0), tiny_config).save(folder / "router.safetensors")
    settings = CompareSettings.of(
        **SMALL, model=str(model_folder), factors=folder / "factors.json", router=folder / "router.safetensors",
        positions=(0, 100), output_path=folder / "out",
    )  # fmt: skip
    return folder, run_comparison(settings)


def test_all_methods_are_measured_on_the_same_prompts(compared):
    folder, record = compared
    assert list(record["methods"]) == list(NAMES) and record["refused"] == {}
    samples = [json.loads(line) for line in (folder / "out/samples.jsonl").read_text().splitlines()]
    prompts = {name: [entry["prompt_hash"] for entry in samples if entry["method"] == name] for name in NAMES}
    assert len(prompts["baseline"]) == 4 and all(hashes == prompts["baseline"] for hashes in prompts.values())
    assert {path.name for path in (folder / "out").iterdir()} == {
        *("results.json", "results.md", "samples.jsonl", "positions.png", "positions.svg", "report.html"),
    }
    check_folder(folder / "out", "results.json", "samples.jsonl")
    text = (folder / "out/results.md").read_text()
    assert all(f"| {name} |" in text for name in NAMES) and "against baseline" in text


def test_costs_and_tuning_are_recorded(compared):
    methods = compared[1]["methods"]
    assert [methods[name]["passes_per_token"] for name in ("baseline", "lpes", "attention_buckets")] == [1, 1, 7]
    assert methods["baseline"]["seconds_against_baseline"] == 1
    for name, entry in methods.items():
        assert entry["seconds_per_prompt"] > 0 and entry["program_memory_bytes"] > 0
        tried = entry["tuning"]["tried"]
        if name in TUNED:
            assert len(tried) == 2  # the budget
            best = max(tried, key=lambda one: (one["accuracy"], one["log_likelihood"]))
            assert entry["setting"] == best["setting"]
        else:
            assert len(tried) in (0, 2)
    # The log-likelihood tells methods apart where accuracy does not: none is the plain model under another name. (SEAL may be:
    # from one question it learns nothing that makes the other likelier, and its start is kept.)
    plain = methods["baseline"]["log_likelihood_by_position"]
    others = ("pi", "attention_buckets", "moice", "hidden_channel", "zero_tuning", "lpes")
    assert all(methods[name]["log_likelihood_by_position"] != plain for name in others)
    first, second = (entry["setting"].split(", ") for entry in methods["hidden_channel"]["tuning"]["tried"])
    assert first[0] == second[0] and (first[1], second[1]) == ("factor 0", "factor 0.5")


def test_what_cannot_be_had_is_named(model_folder, tmp_path):
    def settings(**changes) -> CompareSettings:
        return CompareSettings.of(**SMALL | {"model": str(model_folder), "output_path": tmp_path / "out"} | changes)

    with pytest.raises(UserError, match="--methods 'lpse' is not known; the methods are: all, baseline"):
        run_comparison(settings(methods=("lpse",)))
    with pytest.raises(UserError, match="--methods lpes needs --factors"):
        run_comparison(settings(methods=("lpes",)))
    with pytest.raises(UserError, match="--budget must be at least 1"):
        run_comparison(settings(budget=0))
    with pytest.raises(UserError, match="--metrics substrng: --task kv has"):  # before any tuning
        run_comparison(settings(metrics=("substrng",), methods=("uniform",)))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_comparison_that_is_killed_goes_on(compared, nursery, model_folder, tmp_path):
    folder, whole = compared
    names = ("baseline", "uniform", "self_extend", "lpes")
    out, flags = tmp_path / "out", ["--positions", "0", "100", "--model", str(model_folder)]
    for name, value in SMALL.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    flags += ["--factors", str(folder / "factors.json")]
    measured, log, end = out / "unfinished/uniform.measured.json", tmp_path / "log.txt", time.monotonic() + 600
    pid = nursery.run(VERB, log, "compare", *flags, "--output-path", out, "--methods", *names)
    while not measured.exists():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait(pid) == 143 and log.read_text().strip().splitlines()[-1].endswith("--resume to continue")
    assert not (out / "results.json").exists()

    settings = CompareSettings.of(
        **SMALL, model=str(model_folder), factors=folder / "factors.json", positions=(0, 100), output_path=out, methods=names,
    )  # fmt: skip
    with pytest.raises(
        UserError, match="contains an interrupted comparison; pass --resume to continue, give another folder, or"
    ):
        run_comparison(settings)
    with pytest.raises(UserError, match=r"was run with --test-limit 2 \(now 3\); use the same settings or another"):
        run_comparison(settings.replace(test_limit=3, resume=True))
    # What stands there is taken as it is: a figure that no run gives comes out again.
    record, tuned = read_json(measured), read_json(out / "unfinished/uniform.tuned.json")
    write_json(measured, record | {"scores": {"prefix": [[0.25, 0.25], [0.25, 0.25]]}})
    write_json(out / "unfinished/uniform.tuned.json", tuned | {"tried": [tuned["tried"][0] | {"accuracy": 0.125}]})
    resumed = run_comparison(settings.replace(resume=True))
    assert resumed["resumed"] and resumed["methods"]["uniform"]["acc,none"] == 0.25
    assert [entry["accuracy"] for entry in resumed["methods"]["uniform"]["tuning"]["tried"]] == [0.125]
    assert list(resumed["methods"]) == list(names) and not (out / "unfinished").exists()
    for name in ("baseline", "self_extend", "lpes"):
        now, before = resumed["methods"][name], whole["methods"][name]
        assert now["setting"] == before["setting"] and now["acc_by_position"] == before["acc_by_position"]
        likelihoods = before["log_likelihood_by_position"]
        assert now["log_likelihood_by_position"] == pytest.approx(likelihoods, abs=1e-3)
    # Where nothing says what the figures are of, they are not taken.
    (out / "unfinished").mkdir()
    write_json(out / "unfinished/uniform.measured.json", record | {"scores": {"prefix": [[0.25, 0.25], [0.25, 0.25]]}})
    again = run_comparison(settings.replace(resume=True, methods=("baseline", "uniform")))
    assert again["methods"]["uniform"]["acc,none"] == whole["methods"]["uniform"]["acc,none"] != 0.25
    with pytest.raises(UserError, match="contains no interrupted comparison; remove --resume to start one"):
        run_comparison(settings.replace(resume=True))


OTHERS = """
[[task]]
task = "kv"
num_pairs = 4
key_length = 1
test_limit = 3

[[task]]
task = "niah"
subset = "multikey_2"
num_lines = 2
"""
TITLES = ["3 key-value pairs, key length 1", "4 key-value pairs, key length 1", "niah multikey_2, num lines 2"]


def short_only(tuning: Tuning) -> list[Choice]:
    """YaRN that refuses texts of more than 300 tokens, but not the model's window, for which every setting is tried."""

    def limited(choice: Choice) -> Choice:
        def make(config: LlamaConfig, length: int) -> Method:
            assert choice.maker is not None
            if 300 < length < config.max_position_embeddings:
                raise UserError("YaRN: too many tokens")
            return choice.maker(config, length)

        return replace(choice, maker=make)

    return [limited(choice) for choice in yarn_choices(tuning)]


def no_more(*_: object) -> None:
    raise AssertionError("measured or learnt again")


@pytest.fixture(scope="module")
def elsewhere(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CompareSettings, dict]:
    """A comparison with other tasks that ended when everything was measured, and was resumed; nothing may be done again."""
    folder = tmp_path_factory.mktemp("elsewhere")
    LayerFactors(np.array([1.0, 1.5, 0.7])).save(folder / "factors.json")
    (folder / "others.toml").write_text(OTHERS)
    settings = CompareSettings.of(
        **SMALL, model=str(model_folder), factors=folder / "factors.json", positions=(0, 100), output_path=folder / "out",
        methods=("yarn", "seal", "lpes"), other_tasks=folder / "others.toml", max_new_tokens=20,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "yarn", short_only)
        with pytest.MonkeyPatch.context() as stop:
            stop.setattr("lpes_jax.compare.run._costs", no_more)
            with pytest.raises(AssertionError):
                run_comparison(settings)
        with pytest.raises(UserError, match=r"--resume: .* was run with --other-tasks, task 1: num_pairs 4 \(now 5\)"):
            (folder / "changed.toml").write_text(OTHERS.replace("num_pairs = 4", "num_pairs = 5"))
            run_comparison(settings.replace(other_tasks=folder / "changed.toml", resume=True))
        patch.setattr(Parts, "keep", no_more)
        return settings, run_comparison(settings.replace(resume=True))


def test_tuned_methods_are_measured_on_other_tasks(elsewhere):
    settings, record = elsewhere
    out = settings.run.output_path
    check_folder(out, "results.json", "samples.jsonl")
    assert read_json(out / "results.json") == json.loads(json.dumps(record)) and record["resumed"]
    tasks = record["other_tasks"]
    assert [record["tuned_task"], *(task["title"] for task in tasks)] == TITLES
    assert [task["questions"] for task in tasks] == [3, 2] and record["n-samples"]["kv"]["effective"] == 2
    assert [task["methods"]["baseline"]["metric"] for task in tasks] == ["prefix", "recall"]


@pytest.mark.long
def test_other_tasks_are_measured_as_evaluate_does(elsewhere, model_folder, tmp_path):
    settings, record = elsewhere
    out, tasks = settings.run.output_path, record["other_tasks"]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for number, flags in enumerate(({"num_pairs": 4, "key_length": 1, "limit": 3}, {"subset": "multikey_2", "num_lines": 2})):
        shared = {"model": str(model_folder), "positions": (0, 100), "factors": settings.factors.factors, "max_new_tokens": 20}
        own = {
            "task": ("kv", "niah")[number],
            "output_path": tmp_path / str(number),
            "metrics": (("prefix", "recall")[number],),
        }
        run_evaluation(EvaluateSettings.of(**{"limit": 2, "split": "test"} | shared | own | flags))
        evaluated = read_json(tmp_path / str(number) / "results.json")["methods"]
        lines = [json.loads(line) for line in (tmp_path / str(number) / "samples.jsonl").read_text().splitlines()]
        for ours, theirs in (("baseline", "baseline"), ("lpes", "factors")):
            figures = tasks[number]["methods"][ours]
            for key in ("acc,none", "acc_by_position", "acc_stderr,none"):
                assert figures[key] == evaluated[theirs][key]
            assert figures.get("log_likelihood_by_position") == evaluated[theirs].get("log_likelihood_by_position")
            title = TITLES[number + 1]
            mine = [sample for sample in samples if (sample["task"], sample["method"]) == (title, ours)]
            assert [sample["prompt_hash"] for sample in mine] == [
                line["prompt_hash"] for line in lines if line["method"] == theirs
            ]
            outputs = [line.get("output") for line in lines if line["method"] == theirs]
            assert [sample.get("output") for sample in mine] == outputs and len({*outputs}) > number


def test_a_method_that_a_task_refuses_is_named_there_and_measured_elsewhere(elsewhere):
    settings, record = elsewhere
    short, long = record["other_tasks"]
    assert list(short["methods"]) == list(record["methods"]) and short["refused"] == {}
    assert "yarn" not in long["methods"] and long["refused"] == {"yarn": "YaRN: too many tokens"}
    for task in (short, long):  # over the methods that were measured on this task
        compared = [figures["against_baseline"] for name, figures in task["methods"].items() if name != "baseline"]
        assert [one["p_holm"] for one in compared] == holm([one["p"] for one in compared])
    text = (settings.run.output_path / "results.md").read_text()
    header = f"| accuracy on | {TITLES[0]} (tuned) | {TITLES[1]} | {TITLES[2]} |"
    lines = text[text.index(header) :].splitlines()
    row = next(line for line in lines if line.startswith("| yarn |")).split(" | ")
    own, difference = record["methods"]["yarn"], record["methods"]["yarn"]["against_baseline"]
    accuracy = f"{100 * own['acc,none']:.1f} ± {100 * own['acc_stderr,none']:.1f}"
    assert row[1] == f"{accuracy} ({100 * difference['difference']:+.1f}, p {difference['p_holm']:.3f})"
    assert row[3] == "refused |" and "yarn: refused on niah multikey_2, num lines 2. YaRN: too many tokens" in lines
    assert TITLES[2] in (settings.run.output_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[task]]\ntask = "needle"\nlimit = 3',
            "block 1 (needle): limit is for a search, and nothing is tuned on other tasks",
        ),
        ('[[task]]\ntask = "needle"\nweight = 2', "block 1 (needle): weight is for a search"),
        ('[[task]]\ntask = "needle"\nnum_pairs = 2', "num_pairs is not one of its keys: task, test_limit, "),
        ('[[task]]\ntask = "needle"\ntest_limit = 0', "test_limit must be at least 1"),
        ('[[task]]\ntask = "kv"\nnum_pairs = [4, 3]', "block 1 (kv): the task '3 key-value pairs' is repeated; the tuned task"),
        ('[[task]]\ntask = "mdqa"\ndata = "gone.jsonl"', "gone.jsonl: no such file"),
        ('[[task]]\ntask = "perplexity"', "block 1 (perplexity): perplexity has no positions to compare; use evaluate"),
        ("tasks = 1", "tasks is not allowed; the file has only [[task]] blocks"),
    ],
)
def test_bad_files_of_other_tasks_are_one_line(text, message, tmp_path, capfd):
    (tmp_path / "others.toml").write_text(text)
    flags = ["--num-pairs", "3", "--other-tasks", str(tmp_path / "others.toml"), "--output-path", str(tmp_path / "out")]
    assert main(flags) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: --other-tasks {tmp_path}/others.toml") and message in line
    assert not (tmp_path / "out").exists()


def test_data_folder_needs_other_tasks(capfd):
    assert main(["--num-pairs", "3", "--data-folder", "."]) == 2
    assert "--data-folder is the folder of relative paths in --other-tasks" in capfd.readouterr().err


def test_what_cannot_be_measured_on_other_tasks_is_told_before_tuning(model_folder, tmp_path):
    (tmp_path / "others.toml").write_text('[[task]]\ntask = "kv"\nnum_pairs = 30')
    settings = CompareSettings.of(
        **SMALL,
        model=str(model_folder),
        methods=("uniform",),
        other_tasks=tmp_path / "others.toml",
        output_path=tmp_path / "out",
    )
    with pytest.raises(UserError, match=r"--other-tasks .*others.toml, block 1 \(kv\): 2 questions are too long"):
        run_comparison(settings)
    assert not (tmp_path / "out").exists()


def test_what_was_learnt_is_kept_with_its_bits(tmp_path):
    arrays = [np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32), np.array([3, 1], np.int32)]
    kinds, config = {"learnt": arrays_of}, {"a": 1}
    with Parts(tmp_path / "out", config, kinds, resume=False) as kept:
        once = Learnt(kept)
        assert once("seal", lambda: arrays) is arrays and once("seal", lambda: arrays[:1]) == arrays[:1]
        once("moice", lambda: [np.array([np.nan])])  # is not kept
    with Parts(tmp_path / "out", config, kinds, resume=True) as kept:
        once, found = Learnt(kept), []
        for count in (2, 1):
            found = once("seal", list)
            assert len(found) == count and all(np.array_equal(a, b) for a, b in zip(found, arrays, strict=False))
            assert [a.dtype for a in found] == [a.dtype for a in arrays[:count]]
        assert once("moice", list) == []


def test_holm_by_hand():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
