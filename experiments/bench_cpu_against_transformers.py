"""Prompts per second on the CPU, float32: our scoring pass and transformers (torch, eager) on the same prompts and weights.

    python experiments/bench_cpu_against_transformers.py

Eight key-value prompts of 420 tokens, two threads. transformers is timed twice: by default (logits at every position) and with
`logits_to_keep`, which like ours computes logits only at the answer. The best of five rounds.
"""

import os

THREADS = 2
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # both libraries take their thread counts from this
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from lpes_jax.models.llama import load  # noqa: E402
from lpes_jax.models.llama.checkpoint import save_llama  # noqa: E402
from lpes_jax.scoring import Batch, population_scores  # noqa: E402
from lpes_jax.tasks.key_value import KeyValue  # noqa: E402

PROMPTS, LENGTH, REPEATS = 8, 420, 5


def main() -> None:
    torch.set_num_threads(THREADS)
    loaded = load("smollm2-135m-instruct", "float32")
    task = KeyValue(4)
    texts = [task.prompt(example, 2).text + example.value for example in task.examples("test", PROMPTS, 0)]
    rows = [loaded.tokenizer(text)["input_ids"] for text in texts]
    tokens = np.array([(row * 2)[:LENGTH] for row in rows], np.int32)
    answer = 28
    batch = Batch(
        tokens=jnp.asarray(tokens),
        first=jnp.full(PROMPTS, LENGTH - answer - 1),
        answers=jnp.asarray(tokens[:, -answer:]),
        is_answer=jnp.ones((PROMPTS, answer), bool),
    )
    score = jax.jit(population_scores)
    factors = jnp.ones((1, loaded.model.config.num_layers))
    with tempfile.TemporaryDirectory() as folder:
        save_llama(loaded.model, Path(folder))
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.from_numpy(tokens.astype(np.int64))

    def hugging_face(**keywords: int) -> None:
        with torch.inference_mode():
            theirs(ids, use_cache=False, **keywords)

    contestants: dict[str, Callable[[], object]] = {
        "lpes_jax": lambda: jax.block_until_ready(score(loaded.model, batch, factors)),
        "transformers eager": hugging_face,
        "transformers eager, logits_to_keep": lambda: hugging_face(logits_to_keep=answer + 1),
    }
    for run in contestants.values():
        run()
    rounds = [{name: _timed(run) for name, run in contestants.items()} for _ in range(REPEATS)]
    seconds = {name: min(times[name] for times in rounds) for name in contestants}
    print(
        f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, {THREADS} threads, float32"
    )
    for name, value in seconds.items():
        print(f"{name:36} {PROMPTS / value:6.2f} prompts/s   lpes_jax is {value / seconds['lpes_jax']:.2f} x")


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
