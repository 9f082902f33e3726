"""What a server answered, kept as JSON: RECORDS/SERVER.json, a form of the model's files at a time.

RECORDS is runs/serving, or the folder that SERVE_RECORDS names. `experiments/page_figures.py` makes the tables of
docs/serving from the records in experiments/results/serving.
"""

import functools
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.venvs import ROOT

from lpes_jax.json_files import read_json
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment

RECORDS = Path(os.environ.get("SERVE_RECORDS", ROOT / "runs" / "serving"))
_ours = functools.cache(environment)  # once: the first record makes the working tree dirty


def keep(server: str, form: str, asked: str, answer: dict[str, Any]) -> None:
    """Put a form's figures into the server's record; `answer["versions"]` are those of its venv."""
    path = RECORDS / f"{server}.json"
    RECORDS.mkdir(parents=True, exist_ok=True)
    forms = read_json(path, dict)["forms"] if path.exists() else {}
    figures = {name: value for name, value in answer.items() if name != "versions"}
    ours = _ours()
    record = {"versions": answer["versions"], "devices": ours["devices"], "lpes_jax": ours["versions"]}
    record |= {"git_commit": ours["git_commit"], "date": f"{datetime.now(UTC):%Y-%m-%d}", "asked": asked}
    write_json(path, {"server": server, "forms": forms | {form: record | figures}})
