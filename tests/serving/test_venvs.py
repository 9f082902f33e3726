"""A venv that cannot be made is a skipped test with pip's own reason; an existing one is used as it is."""

import subprocess

import pytest
from serving import venvs

pytestmark = pytest.mark.serving


def test_a_requirement_that_cannot_be_met_is_a_skip_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(venvs, "PLACE", tmp_path)
    monkeypatch.setitem(venvs.PACKAGES, "other", (["./no_such_server-1.0-py3-none-any.whl"], []))
    with pytest.raises(pytest.skip.Exception) as skipped:
        venvs.python("other")
    reason = str(skipped.value)
    assert reason.startswith("no venv for other: ERROR: ") and "no_such_server-1.0-py3-none-any.whl" in reason
    assert "\n" not in reason and not (tmp_path / "other" / "made").exists()
    monkeypatch.setattr(venvs, "PLACE", tmp_path / "other" / "bin" / "python")  # a file: no folder can be made there
    with pytest.raises(pytest.skip.Exception, match="no venv for other: "):
        venvs.python("other")


def test_a_venv_is_made_once_and_anew_for_other_requirements(tmp_path, monkeypatch):
    monkeypatch.setattr(venvs, "PLACE", tmp_path)
    monkeypatch.setitem(venvs.PACKAGES, "empty", (["pip"], []))  # is there: pip needs no network for it
    interpreter = venvs.python("empty")
    assert subprocess.run([interpreter, "-c", "import pip"], check=False).returncode == 0
    kept = tmp_path / "empty" / "kept"
    kept.touch()
    assert venvs.python("empty") == interpreter and kept.exists()
    (tmp_path / "script.py").write_text('print("loading")\nprint(\'{"found": 1}\')\n')
    assert venvs.run("empty", tmp_path / "script.py") == {"found": 1}
    (tmp_path / "script.py").write_text('raise SystemExit("what went wrong")\n')
    with pytest.raises(pytest.fail.Exception, match="(?s)empty ended with 1: .*what went wrong"):
        venvs.run("empty", tmp_path / "script.py")
    monkeypatch.setitem(venvs.PACKAGES, "empty", (["pip", "pip"], []))
    assert venvs.python("empty") == interpreter and not kept.exists()


@pytest.mark.parametrize("server", venvs.UNTESTED)
def test_servers_that_are_not_tested(server):
    pytest.skip(f"{server}: {venvs.UNTESTED[server]}")
