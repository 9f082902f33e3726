"""Tokens per second of greedy generation: ours and transformers' `generate` (torch) on the same GPU, prompts and weights.

    python experiments/bench_generation.py --model smollm2-135m-instruct --batch-size 16 --new-tokens 100

The key-value prompts have one length, so neither side pads, and nothing stops early. The result is the median of the rounds,
including prefill, after a first run of each for compilation and kernels.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same card
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from grid import run_script  # noqa: E402

from lpes_jax.generation import generate_ids  # noqa: E402
from lpes_jax.models.llama import load  # noqa: E402
from lpes_jax.models.llama.checkpoint import save_llama  # noqa: E402
from lpes_jax.tasks.key_value import KeyValue  # noqa: E402
from lpes_jax.tasks.prompts import token_ids  # noqa: E402


@dataclass(frozen=True)
class Settings:
    """What to time."""

    model: str = "smollm2-135m-instruct"
    batch_size: int = 16
    prompt_tokens: int = 420
    new_tokens: int = 100
    rounds: int = 5


def main(settings: Settings) -> None:
    s = settings
    loaded = load(s.model)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    task = KeyValue(8)
    texts = [task.prompt(example, 0).text for example in task.examples("test", s.batch_size, 0)]
    prompts = [(row * (1 + s.prompt_tokens // len(row)))[: s.prompt_tokens] for row in token_ids(loaded.tokenizer, texts)]
    with tempfile.TemporaryDirectory() as folder:
        save_llama(loaded.model, Path(folder))
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        theirs = theirs.to(device).eval()
    ids = torch.tensor(prompts, device=device)
    mask = torch.ones_like(ids)

    def hugging_face() -> None:
        with torch.inference_mode():
            theirs.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=s.new_tokens,
                min_new_tokens=s.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        if device == "cuda":
            torch.cuda.synchronize()

    def ours() -> None:
        generate_ids(loaded.model, prompts, max_new_tokens=s.new_tokens, batch_size=s.batch_size)

    contestants: dict[str, Callable[[], None]] = {"lpes_jax": ours, "transformers generate": hugging_face}
    for run in contestants.values():
        run()
    rounds = [{name: _timed(run) for name, run in contestants.items()} for _ in range(s.rounds)]
    seconds = {name: statistics.median(times[name] for times in rounds) for name in contestants}
    versions = f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{s.model}, {jax.devices()[0].device_kind}, {loaded.identity['dtype']}, {versions}")
    print(f"{s.batch_size} prompts of {s.prompt_tokens} tokens, {s.new_tokens} new ones each")
    for name, value in seconds.items():
        print(f"{name:24} {s.batch_size * s.new_tokens / value:9.0f} tokens/s   {value / seconds['lpes_jax']:.2f} x")


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
