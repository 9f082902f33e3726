"""In a venv with transformers: folders of every family against logits of lpes_jax, and the hook's. Prints JSON.

    python ask_families.py ROOT lpes_jax/torch.py

ROOT/FAMILY/source is the model as it was, and each ROOT/FAMILY/NAME beside it one with factors: its expected.json has ids and
logits, and factors.json the factors.
"""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path

import torch
import transformers

root, hook = Path(sys.argv[1]), sys.argv[2]
spec = importlib.util.spec_from_file_location("lpes_torch", hook)
lpes_torch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lpes_torch)
torch.set_num_threads(1)  # the processors may have other work


def load(folder: Path, **more):
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how, **more).eval()


def logits_of(model, ids: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(ids), use_cache=False).logits


def refusal(model_class, folder: Path) -> str | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it asks, as if somebody were there
            model_class.from_pretrained(folder)
    except Exception as error:
        return type(error).__name__
    return None


found = {}
for family in sorted(path for path in root.iterdir() if path.is_dir()):
    source = load(family / "source")
    figures = {"folders": 0, "off_most": 0.0, "from_plain_least": float("inf"), "without_trust": []}
    figures |= {"from_hook_most": 0.0, "from_hook_with_gains_relative": 0.0}
    for expected in sorted(family.glob("*/expected.json")):
        folder, wanted = expected.parent, json.loads(expected.read_text())
        coded = "auto_map" in json.loads((folder / "config.json").read_text())
        logits = logits_of(load(folder, **({"trust_remote_code": True} if coded else {})), wanted["ids"])
        off = (logits - torch.tensor(wanted["logits"])).abs().max()
        figures["folders"] += 1
        figures["off_most"] = max(figures["off_most"], float(off))
        plain = (logits - logits_of(source, wanted["ids"])).abs().max()
        figures["from_plain_least"] = min(figures["from_plain_least"], float(plain))
        if not coded:
            continue
        with lpes_torch.apply_layer_factors(source, str(folder / "factors.json")):
            hooked = logits_of(source, wanted["ids"])
        kind = "from_hook_with_gains_relative" if wanted["has_gains"] else "from_hook_most"
        scale = float(hooked.abs().max()) if wanted["has_gains"] else 1.0
        figures[kind] = max(figures[kind], float((logits - hooked).abs().max()) / scale)
        figures["without_trust"].append([refusal(kind, folder) for kind in (transformers.AutoModelForCausalLM, type(source))])
    found[family.name] = figures
versions = {"transformers": transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
print(json.dumps({"versions": versions, "families": found}))
