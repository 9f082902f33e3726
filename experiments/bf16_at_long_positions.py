"""Does bfloat16 stay as accurate as float32 far into a text? Argmax agreement by position.

    python experiments/bf16_at_long_positions.py --model smollm2-135m-instruct --num-tokens 8000

The text is the package's own source code, or a file (`--text`). A prediction counts if float32 prefers its best token by more
than `--margin` (logits); below that, either token is right. Rotation in 16 bits would show as agreement that falls with the
position.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grid import run_script

import lpes_jax
from lpes_jax.errors import UserError
from lpes_jax.models.llama import Llama, load_model, load_tokenizer
from lpes_jax.models.llama.model import hidden_states, output_logits
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.prompts import token_ids
from lpes_jax.text_files import read_text


@dataclass(frozen=True)
class Settings:
    """What to compare, on what."""

    model: str = "smollm2-135m-instruct"
    num_tokens: int = 8000
    bin_tokens: int = 1000
    """Positions of one line of the table."""
    margin: float = 0.1
    text: Path | None = None
    output: Path | None = None
    """A JSON file for the result."""


def best_two(model: Llama, tokens: list[int], chunk: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """The most likely token at each position, and the margin of its logit over the second's."""
    table = model.config.rope_table(len(tokens))
    hidden = jax.jit(hidden_states)(model, jnp.array([tokens], jnp.int32), table)[0]
    top = jax.jit(lambda model, hidden: jax.lax.top_k(output_logits(model, hidden), 2))
    values, ids = zip(*(top(model, hidden[start : start + chunk]) for start in range(0, len(tokens), chunk)), strict=True)
    values, ids = np.concatenate(values), np.concatenate(ids)
    return ids[:, 0], values[:, 0] - values[:, 1]


def compare(settings: Settings) -> dict[str, Any]:
    """Agreement in each bin, in percent."""
    tokenizer = load_tokenizer(settings.model)
    files = [settings.text] if settings.text else sorted(Path(lpes_jax.__file__).parent.rglob("*.py"))
    text = "\n".join(read_text(file) for file in files)
    tokens = token_ids(tokenizer, [text])[0][: settings.num_tokens]
    if len(tokens) < settings.num_tokens:
        raise UserError(f"--num-tokens {settings.num_tokens}: the text has only {len(tokens)} tokens; give a longer --text")
    wanted, margin = best_two(load_model(settings.model, "float32"), tokens)
    got, _ = best_two(load_model(settings.model, "bfloat16"), tokens)
    clear, bins = margin > settings.margin, []
    for start in range(0, len(tokens), settings.bin_tokens):
        part = slice(start, start + settings.bin_tokens)
        equal, counted = (got == wanted)[part], clear[part]
        share = {"clear": 100 * float(equal[counted].mean()), "all": 100 * float(equal.mean()), "counted": int(counted.sum())}
        bins.append({"from": start} | share)
        print(
            f"{start:6,} to {start + len(equal):6,}: {share['clear']:6.2f} % of {share['counted']}, {share['all']:6.2f} % all"
        )
    total = 100 * float((got == wanted)[clear].mean())
    print(f"together: {total:.2f} % of {clear.sum()}")
    return {"model": settings.model, "margin": settings.margin, "agreement": total, "bins": bins, **environment()}


def main(settings: Settings) -> None:
    """Compare, and write the figures."""
    result = compare(settings)
    if settings.output:
        settings.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
