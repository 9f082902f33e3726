"""Output folders: an unwritable folder is refused before anything is computed, and no run overwrites another."""

import os
from pathlib import Path

import pytest

from lpes_jax.cli import main
from lpes_jax.errors import UserError
from lpes_jax.factors import read_json
from lpes_jax.store import output
from lpes_jax.store.files import write_json

VERBS = ("search", "evaluate", "compare", "export")
FOLDERS = {
    "search": "history.jsonl",
    "evaluate": "results.json",
    "compare": "results.json",
    "export": "lpes_torch.py",
}


def refused(arguments: list[object], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    assert main([str(argument) for argument in arguments]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and len(line) < 1500
    return line


@pytest.mark.promotes
@pytest.mark.parametrize("verb", VERBS)
def test_an_impossible_folder_is_one_line(verb, tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    factors = ["--factors", "nowhere.json"] if verb == "export" else []
    impossible = {
        tmp_path / "file": "is a file, not a folder",
        tmp_path / "file" / "x" / "y": "is a file, not a folder",
        tmp_path / "dangling": "is a broken link",
        tmp_path / ("b" * 300): "File name too long",
        Path("/dev/null"): "is a file, not a folder",
        "": "give a path, not an empty text",
    }
    for folder, reason in impossible.items():
        assert reason in refused([verb, *factors, "--output-path", folder], capfd)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.promotes
def test_names_without_end_are_one_line(tmp_path, capfd):
    for flags in (["--model", "m" * 5000], ["--data", "d" * 5000], ["--factors", "f" * 5000], ["--model", ""], ["--data", ""]):
        refused(["evaluate", *flags, "--output-path", tmp_path / "out"], capfd)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="cannot be written \\(Permission denied\\)"):
            output.check(tmp_path / "out", "evaluate")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("earlier", VERBS)
def test_a_run_is_replaced_only_by_its_kind_and_when_told(verb, earlier, tmp_path):
    (tmp_path / FOLDERS[earlier]).write_text("{}")
    with pytest.raises(UserError, match="contains"):
        output.check(tmp_path, verb)
    if FOLDERS[verb] == FOLDERS[earlier]:
        output.check(tmp_path, verb, overwrite=True)
    else:
        with pytest.raises(UserError, match="contains .*; give another folder"):
            output.check(tmp_path, verb, overwrite=True)
    with pytest.raises(UserError, match="--resume .* --overwrite"):
        output.check(tmp_path, verb, overwrite=True, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDERS[earlier]]


def test_a_search_writes_over_no_model_and_nobody_over_a_comparison(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="config.json that is not a search's"):
            output.check(tmp_path, "search", overwrite=overwrite)
    output.check(tmp_path, "evaluate")
    (tmp_path / "out" / "unfinished").mkdir(parents=True)
    for verb in VERBS:
        with pytest.raises(UserError, match="contains an interrupted comparison"):
            output.check(tmp_path / "out", verb)
    output.check(tmp_path / "out", "compare", resume=True)


def test_checking_leaves_nothing(tmp_path):
    output.check(tmp_path / "a" / "b" / "c", "evaluate")
    assert not list(tmp_path.iterdir())


def test_default_folders_get_new_names(tmp_path):
    first = tmp_path / "runs" / "evaluate"
    with output.reserved(first) as folder, output.reserved(first) as other:
        assert folder == first and other == tmp_path / "runs" / "evaluate-2"
        (other / "results.json").write_text("{}")
    assert not first.exists() and other.exists()  # the first one stayed empty
    assert output.latest(first) == other
    assert output.latest(tmp_path / "runs" / "search") == tmp_path / "runs" / "search"


def test_staged_files_come_together_or_not_at_all(tmp_path):
    folder = tmp_path / "new" / "out"
    with pytest.raises(ZeroDivisionError), output.staged(folder) as part:
        write_json(part / "results.json", 1)
        raise ZeroDivisionError
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    for name in ("results.json", "samples.jsonl", "depth_by_length_factors.png", "mine.txt"):
        (folder / name).write_text("old")
    with pytest.raises(KeyboardInterrupt), output.staged(folder) as part:
        write_json(part / "results.json", 1)
        raise KeyboardInterrupt
    assert (folder / "results.json").read_text() == "old"
    with output.staged(folder) as part:
        write_json(part / "results.json", 1)
    assert sorted(os.listdir(folder)) == ["mine.txt", "results.json"] and read_json(folder / "results.json") == 1
    with pytest.raises(UserError, match="cannot be written \\(No space left"), output.staged(folder):
        raise OSError(28, "No space left on device")


def test_bytes_that_are_no_text_can_be_written(tmp_path):
    write_json(tmp_path / "a.json", {"path": "by\udcff"})
    assert read_json(tmp_path / "a.json") == {"path": "by\udcff"}


@pytest.mark.promotes
def test_evaluate_twice(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["evaluate", "--model", str(model_folder), "--num-pairs", "2", "--key-length", "1", "--limit", "1"]
    flags += ["--positions", "0", "--metrics", "prefix"]
    assert main(flags) == main(flags) == 0
    assert sorted(os.listdir("runs")) == ["evaluate", "evaluate-2"]
    assert "results: runs/evaluate-2" in capsys.readouterr().out
    before = Path("runs/evaluate/results.json").read_bytes()
    assert main([*flags, "--output-path", "runs/evaluate"]) == 2
    assert Path("runs/evaluate/results.json").read_bytes() == before
    assert main([*flags, "--output-path", "runs/evaluate", "--overwrite"]) == 0
    assert Path("runs/evaluate/results.json").read_bytes() != before
