"""The short `--help`, `--help-all`, presets as flags like others, and that none of it, and no early refusal, imports JAX."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lpes_jax
from lpes_jax import choices, cli
from lpes_jax.flags import Parser
from lpes_jax.help import documented, sections
from lpes_jax.settings import Settings
from lpes_jax.settings.compare import CompareSettings
from lpes_jax.settings.doctor import DoctorSettings
from lpes_jax.settings.evaluate import EvaluateSettings
from lpes_jax.settings.export import ExportSettings
from lpes_jax.settings.groups import HostSettings, TaskSettings
from lpes_jax.settings.profile import ProfileSettings
from lpes_jax.settings.search import PRESETS, SearchSettings, preset
from lpes_jax.settings.tree import WHEN

TREES: dict[str, type[Settings]] = {
    "search": SearchSettings,
    "evaluate": EvaluateSettings,
    "compare": CompareSettings,
    "export": ExportSettings,
    "profile": ProfileSettings,
    "doctor": DoctorSettings,
}
MANY_HOSTS = ("search", "evaluate")
HEAVY = ("jax", "jaxlib", "flax", "transformers", "torch", "evosax", "optax", "scipy")
PARSER = Parser(SearchSettings(), "python -m lpes_jax.search", "", many_hosts=True)


def manual(verb: str) -> str:
    return importlib.import_module(cli.VERBS[verb]).__doc__ or ""


def page(verb: str, *arguments: str, columns: int = 100) -> str:
    parser = Parser(TREES[verb](), f"python -m lpes_jax.{verb}", manual(verb), many_hosts=verb in MANY_HOSTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        text = parser.help(arguments)
    assert text is not None
    return text


def flags_of(text: str) -> list[str]:
    """The flags that begin a line of the short help."""
    return [match[1] for line in text.splitlines() if (match := re.match(r"  (--[a-z-]+)", line))]


def spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def heavy_modules(importtime: str) -> set[str]:
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in importtime.splitlines()} & {*HEAVY, "numpy"}


def test_a_cold_help_imports_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "lpes_jax.search", "--task", "kv", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--num-pairs" in done.stdout
    assert "lpes_jax.help" in done.stderr and not heavy_modules(done.stderr)


REFUSED = {
    "search --help-all": "",
    "evaluate --help": "",
    "search --nope 3": "--nope",
    "search --preset papper": "papper",
    "search --num-pairs many": "--num-pairs",
    "search --parents 0": "--parents",
    "search --race --algorithm gradient": "--race",
    "search --algorithm cmaes": "cma_es",
    "search --task needle --num-pairs 3": "--num-pairs",
    "search --mixture no.toml": "no.toml",
    "search --preset best --text no.txt": "no.txt",
    "search --num-pairs 3 --initial-factors no.json": "no.json",
    "search --num-processes 2": "--coordinator-address",
    "evaluate --factors no.json": "no.json",
    "evaluate --task mdqa --data no.jsonl": "no.jsonl",
    "evaluate --only-factors": "--only-factors",
    "evaluate --system-prompt a": "--system-prompt",
    "compare --methods nope": "'nope'",
    "compare --router no.safetensors": "no.safetensors",
    "profile --text no.txt": "no.txt",
    "export --factors": "--factors",
    "export --model tiny-retriever": "--factors",
    "doctor --model ./nowhere": "./nowhere",
    "evaluate --output-path OUT": "--output-path OUT",
}


def test_what_needs_no_model_is_refused_before_jax_is_imported(tmp_path):
    (tmp_path / "OUT").mkdir()
    (tmp_path / "OUT" / "results.json").write_text("{}")
    commands = list(REFUSED)
    code = f"""
import json, sys
from lpes_jax import cli
for command in {commands!r}:
    code = cli.main(command.split())
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print("END", code, *heavy, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.split(r"^END (.*)\n", done.stderr, flags=re.M)
    for command, line, end in zip(commands, said[::2], said[1::2], strict=False):
        expected = "2" if REFUSED[command] else "0"
        assert end == expected, (command, end, line)
        assert line.count("\n") == (expected == "2") and REFUSED[command] in line, (command, line)
    assert [path.name for path in tmp_path.iterdir()] == ["OUT"]


@pytest.mark.parametrize("verb", TREES)
def test_the_short_help_shows_flags_of_the_verb_within_its_lines(verb):
    text, names = page(verb, "--help"), [spelled(name) for name in TREES[verb]().flat()]
    shown = flags_of(text)
    assert len(set(shown)) == len(shown) and {*shown} <= {*names}
    lines = text.splitlines()
    assert len(lines) <= 66 and "Examples:" in lines and lines[0].startswith(f"usage: python -m lpes_jax.{verb} ")
    groups = text.index("\n\n", text.index("Examples:"))  # examples are as they are, to be copied
    assert all(len(line) <= 100 for line in text[groups:].splitlines())
    for heading, flags in sections(TREES[verb](), TREES[verb]()):
        assert f"\n\n{heading}:\n  {flags[0].flag}" in text
    others = len(names) + len(HostSettings().flat()) * (verb in MANY_HOSTS) - len(shown)
    assert (f"--help-all shows the other {others} flag" in text) == (others > 0)


@pytest.mark.parametrize("verb", TREES)
def test_help_all_has_every_flag(verb):
    text = page(verb, "--help-all")
    names = [*TREES[verb]().flat(), *(HostSettings().flat() if verb in MANY_HOSTS else ())]
    assert {spelled(name) for name in names} <= {flag.replace("--no-tie", "--tie") for flag in re.findall(r"--[a-z-]+", text)}


def test_help_begins_with_the_task_and_the_algorithm():
    text = page("search", "--task", "kv", "--help")
    headings = re.findall(r"^(\S.*):$", text, flags=re.M)
    assert headings[:3] == ["Examples", "The task", "The algorithm and its budget"]
    assert {"--num-pairs", "--key-length", "--parents", "--limit", "--output-path"} <= {*flags_of(text)}
    assert "--num-documents" not in text and "--learning-rate" not in text and "--min-gain" not in text


def test_what_is_given_decides_what_help_shows():
    mdqa = flags_of(page("search", "--help", "--task=mdqa", "--algorithm", "gradient", "--learn", "gains"))
    assert {"--num-documents", "--learning-rate", "--text", "--min-gain"} <= {*mdqa}
    assert not {"--num-pairs", "--parents", "--population-size", "--min-factor"} & {*mdqa}
    assert {"--num-pairs", "--num-documents"} <= {*flags_of(page("search", "--task", "kv", "mdqa", "-h"))}
    assert "--num-pairs" not in flags_of(page("search", "--mixture", "tasks.toml", "--help"))
    switched = page("search", "--query-aware", "--task", "mdqa", "--help")
    assert "  --query-aware " in switched and "perplexity. [kv]" in switched  # defaults, not what is given
    best = page("search", "--preset", "best", "--help")
    assert "--steps" in flags_of(best) and "Steps of Adam. [125]" in best and "[layer_band]" in best
    cma_es = flags_of(page("search", "--algorithm", "cma_es", "--help"))
    assert "--population-size" in cma_es and "--max-evaluations" in cma_es and "--parents" not in cma_es
    assert "--router" in flags_of(page("compare", "--help"))
    assert "--router" not in flags_of(page("compare", "--methods", "yarn", "--help"))


def test_help_after_a_flag_without_its_value_is_that_of_the_flags_before():
    assert "--num-documents" in flags_of(page("evaluate", "--task", "mdqa", "--num-documents", "--help"))
    assert "--num-pairs" in flags_of(page("evaluate", "--task", "nope", "--limit", "3", "--help"))


def test_a_narrow_terminal_has_help_too():
    assert "--population-size" in page("search", "--help", columns=20)


@pytest.mark.parametrize("task", choices.TaskName.__args__)
def test_help_shows_the_flags_that_a_task_has(task):
    from lpes_jax.tasks import settings_of

    own = {
        name
        for name, field in TaskSettings.__dataclass_fields__.items()
        if task in field.metadata.get(WHEN, {}).get("task", ())
    }
    assert own == {*settings_of(task)} & {*TaskSettings().flat()}


def test_conditions_are_of_flags_and_of_their_values():
    for tree in TREES.values():
        names = tree().flat()
        for group in [tree(), *(getattr(tree(), name) for name in tree.__dataclass_fields__)]:
            for field in getattr(group, "__dataclass_fields__", {}).values():
                for name, values in field.metadata.get(WHEN, {}).items():
                    if name in names:  # a group may be of a verb that lacks the flag
                        assert values and all(isinstance(value, str) for value in values)
                    else:
                        raise AssertionError(f"{field.name} of {tree.__name__} is shown by --{name}, which it lacks")


@pytest.mark.parametrize("verb", TREES)
def test_every_flag_has_a_first_line_that_is_a_sentence(verb):
    tree = TREES[verb]()
    for group in [tree, *(getattr(tree, name) for name in tree.__dataclass_fields__)]:
        if not isinstance(group, Settings):
            continue
        texts = documented(type(group))
        for name in group.__dataclass_fields__:
            if not isinstance(getattr(group, name), Settings):
                first = texts[name].partition("\n")[0]
                assert first.endswith(".") and len(first) <= 100, (name, first)


ORDERS = st.permutations([("preset", "best"), ("algorithm", "gradient"), ("limit", "7"), ("preset", "paper")])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ORDERS, st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_a_preset_is_a_flag_like_others(order, joined, underscores):
    arguments: list[str] = []
    for (name, value), with_equals in zip(order, joined, strict=True):
        arguments += [f"--{name}={value}"] if with_equals else [f"--{name}", value]
    if underscores:
        arguments += ["--output_path", "runs/search"]
    last = [value for name, value in order if name == "preset"][-1]
    parsed = PARSER.parse(arguments)
    assert parsed.flags == preset(last, algorithm="gradient", limit=7)
    assert parsed.has("output_path") == underscores


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_alone_is_that_of_python(name):
    assert PARSER.parse(["--preset", name]).flags == preset(name)
    with_mixture = PARSER.parse(["--mixture=tasks.toml", "--preset", name]).flags
    assert with_mixture == preset(name, mixture=Path("tasks.toml")) and with_mixture.task.num_pairs is None


def test_an_empty_path_is_not_the_working_directory():
    for arguments in (["--data", ""], ["--data="]):
        with pytest.raises(lpes_jax.UserError, match="--data: give a path, not an empty text"):
            PARSER.parse(arguments)
    assert PARSER.parse(["--data", "."]).flags.task.data == Path()


PACKAGES = ("lpes_jax", *(f"lpes_jax.{verb}" for verb in TREES))


@pytest.mark.parametrize("package", PACKAGES)
def test_lazy_names_are_those_of_all_and_of_the_type_checker(package):
    module = importlib.import_module(package)
    source = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    [branch] = [node for node in source.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    [lazily] = [node for node in ast.walk(branch) if isinstance(node, ast.Dict)]
    assert ast.literal_eval(lazily) == typed
    assert sorted(module.__all__) == sorted(typed) and {*module.__all__} <= {*dir(module)}
    for name, where in typed.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(where)), name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_importing_the_library_imports_no_jax():
    code = f"import json, sys, lpes_jax; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == []


def test_names_that_flags_know_without_jax_are_those_of_the_modules():
    from lpes_jax.compare import METHODS
    from lpes_jax.search.strategies import NAMES

    assert {*choices.ALGORITHMS} == {"ga", "gradient", *NAMES} and tuple(METHODS) == choices.METHODS
