"""Impossible sizes: every number of every verb has bounds, and a number out of bounds is one line before any model opens."""

import math
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import drawn

from lpes_jax import cli, compare, evaluate
from lpes_jax.compare import CompareSettings
from lpes_jax.errors import UserError
from lpes_jax.evaluate import EvaluateSettings
from lpes_jax.limits import BOUNDS, check_bounds, check_path, flag_of, numbers_of
from lpes_jax.models.zoo import resolve
from lpes_jax.search.checks import check
from lpes_jax.search.lattice import Lattice, max_changes
from lpes_jax.settings.groups import HostSettings, TaskSettings, check_hosts
from lpes_jax.settings.search import PRESETS, SearchSettings, preset
from lpes_jax.tasks import CLASSES
from lpes_jax.tasks.flags import task_of
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.needle import Needle

BY_THEIR_SUM = {"weights"}


def verbs() -> dict[str, Any]:
    """The settings that each verb begins with, as its `main` gives them to the parser."""
    found: dict[str, Any] = {}
    for verb, name in cli.VERBS.items():
        module = import_module(name)

        def keep(defaults: Any, *arguments: Any, verb: str = verb, **options: Any) -> int:
            found[verb] = defaults
            return 0

        before = module.run_verb
        module.run_verb = keep
        try:
            module.main([])
        finally:
            module.run_verb = before
    return found


VERB_SETTINGS = verbs()


def numeric(settings_class: Any) -> list[tuple[str, type]]:
    return [(name, kind) for name, kind in numbers_of(settings_class).items() if name not in BY_THEIR_SUM]


def test_every_number_of_every_verb_and_of_the_settings_in_python_has_bounds():
    assert VERB_SETTINGS.keys() == cli.VERBS.keys()
    classes = [*map(type, VERB_SETTINGS.values()), HostSettings, Lattice, *CLASSES.values()]
    named = {name for settings_class in classes for name, _ in numeric(settings_class)}
    assert named == BOUNDS.keys(), "a field without bounds, or bounds without a field"
    assert all(bound.least < bound.most < math.inf for bound in BOUNDS.values())


@pytest.mark.parametrize("verb", [*VERB_SETTINGS, "several processes"])
def test_numbers_out_of_their_bounds_are_named_with_their_flag(verb):
    defaults = VERB_SETTINGS.get(verb, HostSettings())
    check_bounds(defaults)
    values = defaults.flat()
    for name, kind in numeric(type(defaults)):
        bound, is_tuple = BOUNDS[name], isinstance(values[name], tuple)
        wrong = [bound.least - 1, bound.most + 1, 10**30, -(10**30)] + [bound.least] * bound.above + [bound.most] * bound.below
        wrong = [kind(value) for value in wrong] + ([math.nan, math.inf, -math.inf] if kind is float else [])
        right = [bound.most] * (not bound.below) + [bound.least] * (not bound.above)
        for value in wrong:
            with pytest.raises(UserError) as refused:
                check_bounds(defaults.replace(**{name: (value,) if is_tuple else value}))
            said = str(refused.value)
            assert said.startswith(f"{flag_of(name)} must be ") and f"got {value}" in said and "\n" not in said
        for value in map(kind, right):
            check_bounds(defaults.replace(**{name: (value,) if is_tuple else value}))


COMMANDS = [
    "search --batch-size 0",
    "search --batch-size 1000000000",
    "search --population-chunk 0",
    "search --key-length 10000000",
    "search --num-pairs 1000000000",
    "search --num-pairs 5 1000000000",
    "search --population-size 10000000",
    "search --generations 1000000000",
    "search --generations -1",
    "search --limit 100000000000",
    "search --test-limit 0",
    "search --bands 1000000 --granularity layer_band",
    "search --control-points 0",
    "search --control-points 100000",
    "search --text-window 1000000000 --algorithm gradient",
    "search --text-minibatch 0 --algorithm gradient",
    "search --steps 100000000000 --algorithm gradient",
    "search --learning-rate nan --algorithm gradient",
    "search --learning-rate inf --algorithm gradient",
    "search --text-weight nan --algorithm gradient",
    "search --stay-close -1 --algorithm gradient",
    "search --min-factor 0",
    "search --max-factor inf",
    "search --initial-factor nan",
    "search --max-change-y nan",
    "search --y-step inf",
    "search --seed -1",
    "search --seed 4294967296",
    "search --max-new-tokens 0",
    "search --model-axis 0",
    "search --num-processes 1000000000 --process-id 0 --coordinator-address localhost:9999",
    "search --process-id 1000000000 --num-processes 2 --coordinator-address localhost:9999",
    "search --start-timeout 100000000000",
    "evaluate --max-new-tokens 0",
    "evaluate --batch-size 1000000000",
    "evaluate --task needle --num-sentences 1000000",
    "evaluate --task needle --lengths 1000000000",
    "evaluate --task mdqa --num-documents 10000000",
    "evaluate --seed -7",
    "evaluate --slots -1",
    "evaluate --positions 200",
    "compare --batch-size 0",
    "compare --router-batch 0",
    "compare --router-steps 100000000",
    "compare --repeats 0",
    "compare --budget 100000000",
    "doctor --num-tokens 7",
    "doctor --num-tokens 100000000",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_size_that_cannot_be_is_one_line_before_the_model_is_looked_for(command, tmp_path, capfd):
    verb, flag, value, *more = command.split()
    if "--task" in command:
        flag, value = more[-2:]
    elif command.startswith("search --num-pairs 5"):
        value = more[0]
    out = tmp_path / "out"
    to = [] if verb == "doctor" else ["--output-path", str(out)]
    assert cli.main([*command.split(), "--model", str(tmp_path / "nowhere"), *to]) == 2
    said = capfd.readouterr()
    [line] = said.err.splitlines()
    assert line.startswith(f"error: {flag} must be ") and value in line and said.out == ""
    assert not out.exists() and "nvidia" not in line


@pytest.mark.parametrize(
    ("task", "count", "named"),
    [
        (KeyValue(100_000), 500, "--num-pairs 100000"),
        (KeyValue(2, key_length=1024), 1_000_000, "--num-pairs 2"),
        (KeyValue(50, queries_per_haystack=10), 1_000_000, "--num-pairs 50"),
        (Needle(200_000), 1000, "--num-sentences 200000"),
    ],
)
def test_sizes_that_are_too_much_together_are_refused_before_anything_is_generated(task, count, named):
    with pytest.raises(UserError, match=f"{count} examples of {named} are .* characters, more than .* lower --limit"):
        task.examples("search", count, 0)


def test_more_individuals_than_a_history_holds_are_refused():
    with pytest.raises(UserError, match="--generations makes 2,400,032 .*|.*more than 10,000,000"):
        check(SearchSettings.of(generations=100_000, mutations=1000))
    check(SearchSettings.of(generations=100_000, mutations=1000, max_evaluations=1000))
    check(SearchSettings.of(generations=100_000, mutations=10_000, algorithm="gradient"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_within_bounds(name):
    check(preset(name))


def test_values_of_another_kind_are_refused():
    for group, name, value in (
        (SearchSettings().questions, "limit", "5"),
        (SearchSettings().questions, "limit", 2.5),
        (SearchSettings().questions, "limit", True),
        (SearchSettings().gradient, "learning_rate", "0.1"),
        (SearchSettings().questions, "limit", 10**5000),
        (EvaluateSettings().questions, "positions", (0, "50")),
    ):
        group = copy(group)  # groups of the defaults are shared
        object.__setattr__(group, name, value)  # past the types that the tests check
        with pytest.raises(UserError, match=f"{flag_of(name)} must be a") as refused:
            check_bounds(group)
        assert len(str(refused.value)) < 150


LONG = "a" * 5000


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (f"evaluate --model {LONG}", "--model"),
        (f"evaluate --model {'a/' * 3000}b", "--model"),
        (f"search --model x --output-path {LONG}", "--output-path"),
        (f"compare --model x --text {LONG}", "--text"),
        (f"export --model x --factors {LONG}", "--factors"),
        (f"doctor --model {'b' * 300}", "--model"),
        ("evaluate --model x --data caf\udce9.jsonl", "--data"),
        ("evaluate --model x --apply-chat-template --system-prompt \udcff", "--system-prompt"),
    ],
)
def test_names_that_no_file_can_have_are_one_line(command, flag, capfd):
    assert cli.main(command.split()) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {flag} ") and len(line) < 200


def test_names_that_no_file_can_have_are_one_line_in_python():
    for name in (LONG, "a\0b", "~nobody-of-this-name/x"):
        with pytest.raises(UserError) as refused:
            resolve(name)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    check_path("--data ", Path("not there"))


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
INTEGERS = st.integers(-(10**25), 10**25) | st.integers(-3, 300)


def changed(flags: Any, data: st.DataObject) -> Any:
    """Settings with some numbers drawn at random, those of tuples too."""
    names = list(numbers_of(type(flags)).items())
    for name, kind in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)):
        value = data.draw(FLOATS if kind is float else INTEGERS, label=name)
        flags = flags.replace(**{name: (value,) if isinstance(flags.flat()[name], tuple) else value})
    return flags


@settings(max_examples=drawn(150), deadline=None)
@given(st.data())
def test_random_numbers_pass_each_check_or_are_refused_in_one_line(data):
    drawn, checked = data.draw(
        st.sampled_from(
            [
                (SearchSettings(), check),
                (SearchSettings.of(algorithm="gradient"), check),
                (EvaluateSettings(), evaluate.check),
                (CompareSettings(), compare.check),
                (HostSettings("localhost:9", 2, 1), check_hosts),
                (
                    SearchSettings(),
                    lambda settings: max_changes(settings.ga, Lattice(32, settings.space.control_points or 4, settings.space)),
                ),
                (TaskSettings(task="kv"), task_of),
                (TaskSettings(task="needle"), task_of),
            ]
        )
    )
    try:
        checked(changed(drawn, data))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
