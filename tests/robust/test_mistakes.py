"""Plausible mistakes at the verbs: one line that names the flag or file and the way out, exit code 2, and no folder."""

import re

import pytest

from lpes_jax.compare.__main__ import main as compare
from lpes_jax.evaluate.__main__ import main as evaluate
from lpes_jax.export.__main__ import main as export
from lpes_jax.profile.__main__ import main as profile
from lpes_jax.search.__main__ import main as search

VERBS = {"compare": compare, "evaluate": evaluate, "export": export, "profile": profile, "search": search}


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with a few files; returns its error without `error: `."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/factors.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("a few words")

    def refused(command: str) -> str:
        name, *flags = command.split()
        assert VERBS[name]([*flags, "--output-path", "out"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and not (tmp_path / "out").exists()
        assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
        return shown.err.removeprefix("error: ").strip()

    return refused


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("compare --methods --num-pairs 5", "--methods: give all, or at least one method; the methods are: baseline"),
        ("compare --methods learnt_gain", "--methods 'learnt_gain' is not known; .*learnt_gains"),
        ("compare --other-tasks folder", "--other-tasks folder: cannot be read .Is a directory.; give a TOML file"),
        ("compare --text folder", "--text folder: a folder, not a file; give a text file"),
        ("compare --router folder", "--router folder: a folder, not a file; train a router first"),
        ("compare --budget 1.5", "--budget must be a whole number, got '1.5' .see .*compare --help"),
        ("profile --minutes x", "--minutes must be a number, got 'x' .see .*profile --help"),
        ("profile --lengths 1024,2048", "--lengths does not take '1024,2048' .see .*profile --help"),
        ("profile --lengths 4 512", "--lengths 4: a profile needs prompts of at least 16 tokens; give longer ones"),
        ("search --text-window x", "--text-window does not take 'x' .see .*search --help"),
        ("search --text short.txt", "--text has no effect with --algorithm ga; remove it, or change --algorithm"),
        ("search --steps 10", "--steps has no effect with --algorithm ga; remove it, or change --algorithm"),
        ("search --algorithm gradient --generations 5", "--generations has no effect with --algorithm gradient; remove it"),
        ("search --preset best --granularity layer --bands 4", "--bands has no effect with --granularity layer; remove it"),
        ("search --learn factors --max-gain 2", "--max-gain has no effect with --learn factors; remove it"),
        ("search --curve free --control-points 5", "--control-points has no effect with --curve free; remove it"),
        ("compare --methods seal --router-steps 3", "--router-steps has no effect with --methods seal; remove it"),
        ("search --algorithm gradient --text short.txt", "--text has no effect: give --text-weight above 0 or"),
        ("search --preset best --text folder", "--text folder: a folder, not a file; give a text file"),
        ("evaluate --task perplexity --data folder", "--data folder: a folder, not a file; any text file"),
        ("search --num-pairs --key-length 8", "--num-pairs without a number: give one, or remove the flag"),
        ("evaluate --task needle --num-sentences", "--num-sentences without a number: give one, or remove the flag"),
        ("evaluate --factors run", "run: a folder; give run/factors.json"),
        ("export --factors folder", "folder: a folder; give the factors.json of a search"),
        ("evaluate --factors gone.json", "gone.json: cannot be read .*; give the factors.json that a search wrote"),
        ("evaluate --factors short.txt", "short.txt: not a JSON file .*; give the factors.json that a search wrote"),
        ("evaluate --factors qwen2.5-coder-1.5b-instruct", "no factors of the zoo, .*coder-1.5b-instruct/both-mixture"),
        ("evaluate --factors smollm2-135m-instruct/gain", "no factors of the zoo, which has .*135m-instruct/gains-mixture"),
    ],
)  # fmt: skip
def test_refused_without_a_model(refusal, command, said):
    assert re.search(said, refusal(command))


@pytest.mark.parametrize(
    "command",
    [
        "profile --text short.txt --tasks kv --lengths 256 --positions 50",
        "search --preset best --text short.txt --num-pairs 2 --key-length 8 --limit 2 --test-limit 2",
    ],
)
def test_a_text_that_is_too_short_is_refused_before_anything_is_measured(refusal, command):
    assert re.search(r"--text short.txt: 1 windows of \d+ tokens .* tokens\); give a longer text", refusal(command))
