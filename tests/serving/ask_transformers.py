"""In a venv with transformers: the distance of a folder from its self_test.json, and its error without trust. Prints JSON.

    python ask_transformers.py FOLDER [QUESTIONS.json]

QUESTIONS: {"new_tokens": n, "questions": [{"ids": prompt, "answer": ids}]}, for log-probabilities of answers and greedy ids.
"""

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
torch.set_num_threads(1)  # the processors may have other work


def refusal(load) -> str | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it asks, as if somebody were there
            load()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120].replace(str(folder), "FOLDER")
    return None


def log_probs_of(ids: list[int], read: list[int]) -> torch.Tensor:
    """Log-probabilities of the tokens after the positions `read`: [read, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), logits_to_keep=torch.tensor(read), use_cache=False).logits[0]
    return logits.log_softmax(-1)


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
    rows = log_probs_of(prompt["ids"], [point["tokens"] - 1 for point in prompt["points"]])
    for row, point in zip(rows, prompt["points"], strict=True):
        found = row[point["ids"]]
        off.append((found - torch.tensor(point["log_probs"])).abs())
        plain.append((found - torch.tensor(point["plain_log_probs"])).abs())
off, plain = torch.cat(off), torch.cat(plain)
said = io.StringIO()
code = None
try:
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(folder / "self_test.py"), run_name="__main__")
except SystemExit as end:
    code = end.code
answers = []
if sys.argv[2:]:
    asked = json.loads(Path(sys.argv[2]).read_text())
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # greedy, and no end of text
    for question in asked["questions"]:
        ids, answer = question["ids"], question["answer"]
        rows = log_probs_of(ids + answer, list(range(len(ids) - 1, len(ids) + len(answer) - 1)))
        prompt = torch.tensor([ids])
        new = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=asked["new_tokens"], do_sample=False
        )
        answers.append({"log_probs": rows[range(len(answer)), answer].tolist(), "new_ids": new[0, len(ids) :].tolist()})
versions = {"transformers": transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
print(json.dumps({
    "versions": versions, "class": type(model).__name__, "without_trust": without_trust, "self_test_passes": not code,
    "log_probs": len(off), "prompts": len(record["prompts"]),
    "shortest": min(len(prompt["ids"]) for prompt in record["prompts"]),
    "longest": max(len(prompt["ids"]) for prompt in record["prompts"]),
    "off_most": float(off.max()), "off_mean": float(off.mean()),
    "from_plain_most": float(plain.max()), "from_plain_mean": float(plain.mean()), "answers": answers,
}))  # fmt: skip
