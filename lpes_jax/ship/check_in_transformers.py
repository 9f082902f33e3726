"""Does transformers (4.57 or 5) answer with this folder as lpes_jax does, factors and all? Needs torch and transformers alone.

    python self_test.py

compares log-probabilities with self_test.json, in float32, along prompts up to the longest that the factors were searched on,
and greedy ids with a KV cache and left padding. Exit code 0 where they agree, else 1.
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
    model.generation_config = GenerationConfig()  # greedy, and no end of text
    off, plain = [], []
    with torch.no_grad():
        for prompt in prompts:
            read = torch.tensor([point["tokens"] - 1 for point in prompt["points"]])
            logits = model(torch.tensor([prompt["ids"]]), logits_to_keep=read, use_cache=False).logits[0]
            best, wanted, without = (
                torch.tensor([point[key] for point in prompt["points"]]) for key in ("ids", "log_probs", "plain_log_probs")
            )
            found = logits.log_softmax(-1).gather(-1, best)
            off.append((found - wanted).abs().flatten())
            plain.append((found - without).abs().flatten())
        beside = prompts[-2]["ids"]
        width = max(len(greedy["ids"]), len(beside))
        rows = [[0] * (width - len(ids)) + ids for ids in (greedy["ids"], beside)]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in (greedy["ids"], beside)]
        settings = {"max_new_tokens": len(greedy["new_ids"]), "do_sample": False, "pad_token_id": 0}
        new = model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **settings)[0, width:].tolist()
    readers = (AutoTokenizer, PreTrainedTokenizerFast)  # the first may put a pipeline of its own in place of tokenizer.json's
    text, ids = prompts[0]["text"], prompts[0]["ids"]
    same = []
    for reader in readers:
        of_text = reader.from_pretrained(folder, **own_code)(text)["input_ids"]
        shared = min(len(of_text), len(ids))
        same += [reader.__name__] if shared and of_text[:shared] == ids[:shared] else []
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
