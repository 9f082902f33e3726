"""In a venv with transformers: how near it is to a folder's self_test.json, and what it says without trust. Prints JSON."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import torch
import transformers

folder = Path(sys.argv[1])
record = json.loads((folder / "self_test.json").read_text())
coded = "auto_map" in json.loads((folder / "config.json").read_text())
torch.set_num_threads(2)


def refusal(load) -> str | None:
    try:
        load()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120].replace(str(folder), "FOLDER")
    return None


without_trust = None
if coded:
    family = json.loads((folder / "config.json").read_text())["model_type"].removeprefix("lpes_")
    own_class = getattr(transformers, {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family])
    without_trust = {
        "AutoModelForCausalLM": refusal(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder)),
        own_class.__name__: refusal(lambda: own_class.from_pretrained(folder)),
    }
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=coded).eval()
off, plain = [], []
for prompt in record["prompts"]:
    with torch.no_grad():
        read = torch.tensor([point["tokens"] - 1 for point in prompt["points"]])
        rows = model(torch.tensor([prompt["ids"]]), logits_to_keep=read, use_cache=False).logits[0].log_softmax(-1)
    for row, point in zip(rows, prompt["points"], strict=True):
        found = row[point["ids"]]
        off.append((found - torch.tensor(point["log_probs"])).abs())
        plain.append((found - torch.tensor(point["plain_log_probs"])).abs())
said = io.StringIO()
try:
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(folder / "self_test.py"), run_name="__main__")
except SystemExit as end:
    code = end.code
off, plain = torch.cat(off), torch.cat(plain)
versions = {"transformers": transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
print(json.dumps({
    "versions": versions, "class": type(model).__name__, "without_trust": without_trust, "self_test_passes": not code,
    "log_probs": len(off), "prompts": len(record["prompts"]), "longest": max(len(it["ids"]) for it in record["prompts"]),
    "off_most": float(off.max()), "off_mean": float(off.mean()),
    "from_plain_most": float(plain.max()), "from_plain_mean": float(plain.mean()),
}))  # fmt: skip
