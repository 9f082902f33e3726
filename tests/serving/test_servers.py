"""Folders of `export --to hf` in servers, each in a venv of its own: `make serve-test` (not part of `make test`).

The folders are of the bundled model, and of SmolLM2 where that can be had; what is compared is their self_test.json. Each run
leaves a record in runs/serving, or in the folder that SERVE_RECORDS names.
"""

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import venvs

import lpes_jax as lj
from lpes_jax.export import ExportSettings, run_export

pytestmark = pytest.mark.serving
HERE = Path(__file__).parent
RECORDS = Path(os.environ.get("SERVE_RECORDS", venvs.ROOT / "runs" / "serving"))
FORMS = ("tiny-retriever, gains", "tiny-retriever, factors by layer", "smollm2, gains", "smollm2, factors by frequency")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported once for all servers."""
    root, rng = tmp_path_factory.mktemp("served"), np.random.default_rng(0)
    search = {"num_pairs": 12}
    gains = rng.uniform(0.7, 1.5, (10, 16))
    lj.LayerFactors(np.ones(10), gains=gains, gains_granularity="layer_band", search=search).save(root / "gains.json")
    lj.LayerFactors(rng.uniform(0.8, 1.3, 10), gains=gains, gains_granularity="layer_band", search=search).save(
        root / "layers.json"
    )
    asked = {
        FORMS[0]: ("tiny-retriever", root / "gains.json"),
        FORMS[1]: ("tiny-retriever", root / "layers.json"),
        FORMS[2]: ("smollm2-135m-instruct", Path("smollm2-135m-instruct/gains-mixture")),
        FORMS[3]: ("smollm2-135m-instruct", Path("smollm2-135m-instruct/best-kv-5-10-20")),
    }
    found = {}
    for at, (form, (model, factors)) in enumerate(asked.items()):
        try:
            found[form] = run_export(ExportSettings.of(model=model, factors=factors, output_path=root / str(at)))
        except lj.UserError as error:
            if "smollm2" not in model:
                raise
            found[form] = Path(str(error))
    return found


def folder_of(folders: dict[str, Path], form: str) -> Path:
    if not folders[form].is_dir():
        pytest.skip(f"no model: {folders[form]}"[:200])
    return folders[form]


def keep(server: str, form: str, answer: dict[str, Any]) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{server}.json"
    record = json.loads(path.read_text()) if path.exists() else {"forms": {}}
    record |= {"date": date.today().isoformat(), "versions": answer["versions"]}
    record["forms"][form] = {name: value for name, value in answer.items() if name != "versions"}
    path.write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("server", ["transformers4", "transformers5"])
def test_transformers(folders, server, form):
    answer = venvs.run(server, HERE / "ask_transformers.py", folder_of(folders, form))
    keep(server, form, answer)
    assert answer["off_most"] < 1e-3 and answer["self_test_passes"] and answer["from_plain_most"] > 1
    if "factors" in form:
        said = answer["without_trust"]
        assert answer["class"] == "LpesForCausalLM" and said["AutoModelForCausalLM"].startswith("ValueError")
        assert said["LlamaForCausalLM"] == "KeyError: 'lpes'"


@pytest.mark.parametrize("form", FORMS)
def test_vllm(folders, form):
    answer = venvs.run("vllm", HERE / "ask_vllm.py", folder_of(folders, form))
    keep("vllm", form, answer)
    assert answer["off_most"] < 1e-3 and answer["from_plain_most"] > 1
    assert answer["without_trust"] == ("ValidationError" if "factors" in form else None)
