"""Checks that transformers (4.57 or 5) runs this folder as lpes_jax does, with its factors. Needs only torch and transformers.

    python self_test.py

compares log-probabilities with self_test.json, in float32, along prompts up to the longest of the search, and greedy ids with a
KV cache and left padding. The exit code is 0 if they agree, else 1.
"""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, __version__


def run(folder: Path) -> bool:
    if not (folder / "self_test.json").exists():
        sys.exit(f"{folder}: nothing was recorded; export it without --no-self-test")
    record = json.loads((folder / "self_test.json").read_text(encoding="utf-8"))
    prompts, greedy, tolerance = record["prompts"], record["greedy"], record["tolerance"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own_code: Any = {"trust_remote_code": True} if "auto_map" in config else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own_code).eval()
    model.generation_config = GenerationConfig()  # greedy, without an end of text
    off, plain = [], []
    with torch.no_grad():
        for prompt in prompts:
            read = torch.tensor([point["tokens"] - 1 for point in prompt["points"]])
            logits = model(torch.tensor([prompt["ids"]]), logits_to_keep=read, use_cache=False).logits[0]
            best, wanted, wanted_plain = (
                torch.tensor([point[key] for point in prompt["points"]]) for key in ("ids", "log_probs", "plain_log_probs")
            )
            found = logits.log_softmax(-1).gather(-1, best)
            off.append((found - wanted).abs().flatten())
            plain.append((found - wanted_plain).abs().flatten())
        second = prompts[-2]["ids"]
        width = max(len(greedy["ids"]), len(second))
        rows = [[0] * (width - len(ids)) + ids for ids in (greedy["ids"], second)]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in (greedy["ids"], second)]
        settings = {"max_new_tokens": len(greedy["new_ids"]), "do_sample": False, "pad_token_id": 0}
        new = model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **settings)[0, width:].tolist()
    readers = (AutoTokenizer, PreTrainedTokenizerFast)  # the first may replace tokenizer.json's pipeline by its own
    text, ids = prompts[0]["text"], prompts[0]["ids"]
    same = []
    for reader in readers:
        text_ids = reader.from_pretrained(folder, **own_code)(text)["input_ids"]
        shared = min(len(text_ids), len(ids))
        same += [reader.__name__] if shared and text_ids[:shared] == ids[:shared] else []
    off, plain = torch.cat(off), torch.cat(plain)
    lengths = [len(prompt["ids"]) for prompt in prompts]
    agrees = bool(off.max() <= tolerance)
    print(f"torch {torch.__version__}, transformers {__version__}, {type(model).__name__}")
    print(f"tokenizer: {f'the same ids ({same[0]}.from_pretrained)' if same else 'OTHER IDS'}")
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, log-probabilities of {len(off)} next tokens:")
    print(f"  off by at most {off.max():.1e} nats ({off.mean():.1e} on average), {tolerance:g} allowed")
    print(f"  from the model without the factors by {plain.max():.1e} ({plain.mean():.1e})")
    if not agrees and plain.mean() < off.mean():
        print("  THE MODEL WITHOUT THE FACTORS IS NEARER: they were not loaded")
    wanted = greedy["new_ids"]
    print(f"greedy ids, left-padded, with a KV cache: {'equal' if new == wanted else f'{new}, NOT {wanted}'}")
    if not record["notices_a_plain_model"]:
        print("note: these factors change so little that this test cannot tell the model from one without them")
    return bool(same) and agrees and new == wanted


if __name__ == "__main__":
    sys.exit(not run(Path(__file__).resolve().parent))
