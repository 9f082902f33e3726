"""Compare llama.cpp on a patched .gguf file with lpes_jax, which has the gains in its table.

    python -m venv VENV && VENV/bin/pip install xllamacpp
    python experiments/serve_llama_cpp.py --python VENV/bin/python --model smollm2-135m-instruct --factors gains-mixture
    python experiments/serve_llama_cpp.py --python VENV/bin/python --model FILE.gguf --random-gains 0 --num-examples 4 0

The script writes the patch of `export --to gguf` into a temporary folder and compares it with its source, byte by byte and row
by row (with the `gguf` package's reader, not ours). Then it runs the same held-out key-value prompts through the unchanged and
the patched file in llama.cpp, and in lpes_jax through the unchanged file without and with the factors, and the patched file.

It compares the log-probabilities of all tokens after a prompt (KL divergence from lpes_jax's), those of the answers, and
whether each token of an answer is the most likely one (accuracy, `prefix` of `evaluate`). llama.cpp multiplies in its own
precision; its difference on the unchanged file is the backend's own noise. The record goes to --output, under --name.

Letters: N prompts, V vocabulary, A answer tokens.
"""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from grid import run_script
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.evaluation import slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import gains_of_tensors
from lpes_jax.json_files import read_json
from lpes_jax.models.llama import load
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.gguf_model import permute
from lpes_jax.models.llama.model import Llama, hidden_states, output_logits
from lpes_jax.models.zoo import resolve
from lpes_jax.rope import RopeTable
from lpes_jax.ship.gguf_patch import patch_gguf
from lpes_jax.store.content import content_sha256
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import make_task
from lpes_jax.tasks.prompts import EncodedPrompt, encode

WORKER = Path(__file__).parent / "llama_cpp_worker.py"
_WIDTH = 256  # prompts are padded to a multiple: one compilation for several lengths


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which model, gains and prompts."""

    python: Path
    """The Python of an environment with xllamacpp."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo or a .gguf file."""
    factors: Path | None = None
    """factors.json, or the zoo's by name; none: random gains."""
    random_gains: int = 0
    """Seed of gains from 0.7 to 1.4, one per layer and frequency, if there are no --factors."""
    num_pairs: tuple[int, ...] = (5, 10)
    """Key-value pairs in a prompt."""
    num_examples: tuple[int, ...] = (12, 8)
    """Held-out examples of each of these lengths; each is asked at five positions."""
    threads: int = 1
    """Threads of llama.cpp. (On shared processors, several threads wait for each other at every product.)"""
    name: str = ""
    """Name of the record (default: the model's)."""
    output: Path = Path("runs/serving/llama_cpp.json")
    """The file of the records; other names in it stay."""


class Answers(NamedTuple):
    """Log-probabilities of the next token, those of each answer's tokens, and which of these tokens are the most likely."""

    next: Float[np.ndarray, "N V"]
    answers: list[Float[np.ndarray, "A"]]
    is_best: list[Bool[np.ndarray, "A"]]

    @property
    def correct(self) -> Bool[np.ndarray, "N"]:
        return np.array([best.all() for best in self.is_best])

    @property
    def log_likelihood(self) -> Float[np.ndarray, "N"]:
        return np.array([answer.sum() for answer in self.answers])


def main(s: Settings) -> None:
    """Measure, print and write the record."""
    if len(s.num_pairs) != len(s.num_examples):
        raise UserError("--num-examples: give one for each of --num-pairs")
    source = resolve(s.model)
    loaded = load(str(source), "float32")
    config = loaded.model.config
    factors = LayerFactors.load(s.factors) if s.factors else random_gains(config, s.random_gains)
    prompts = prompts_of(s.num_pairs, s.num_examples, loaded.tokenizer, config.max_position_embeddings)
    before = content_sha256(source)
    record: dict[str, Any] = {
        "model": {"name": Path(s.model).name, "sha256": before},
        "factors": str(s.factors) if s.factors else f"random gains in [0.7, 1.4], seed {s.random_gains}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **environment(),
    }
    with tempfile.TemporaryDirectory() as folder:
        patched = Path(folder) / "patched.gguf"
        rounding = patch_gguf(source, patched, factors)
        record["patch"] = compare_files(source, patched, config, factors) | {"as_told": rounding.lines()}
        if content_sha256(source) != before:
            raise UserError(f"{source}: has changed")
        print(json.dumps(record["patch"], indent=1), flush=True)
        if prompts:
            with llama_cpp(s.python, source, prompts, s.threads) as (version, ask):
                plain = ask("llama.cpp, as it is")
            with llama_cpp(s.python, patched, prompts, s.threads) as (_, ask):
                ours = ask("llama.cpp, patched")
            jax_plain, jax_gains = (answers_of_lpes(loaded.model, prompts, given) for given in (None, factors))
            del loaded
            jax_patched = answers_of_lpes(load(str(patched), "float32").model, prompts, None)
            record["versions"] |= version
            record |= compared(s, prompts, plain, ours, jax_plain, jax_gains, jax_patched)
            print(json.dumps({key: value for key, value in record.items() if key != "log_likelihoods"}, indent=1))
    records = read_json(s.output, dict) if s.output.exists() else {}
    s.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(s.output, records | {s.name or Path(s.model).stem: record})


def random_gains(config: LlamaConfig, seed: int) -> LayerFactors:
    """Gains for tests: one for each layer and frequency."""
    gains = np.random.default_rng(seed).uniform(0.7, 1.4, (config.num_layers, config.rotary_dim // 2))
    return LayerFactors(np.ones(config.num_layers), gains=gains, gains_granularity="layer_band")


def prompts_of(num_pairs: Sequence[int], num_examples: Sequence[int], tokenizer: Any, window: int) -> list[EncodedPrompt]:
    """Held-out questions as `evaluate --task kv` asks them, each at five positions."""
    prompts = []
    for pairs, examples in zip(num_pairs, num_examples, strict=True):
        task = make_task("kv", num_pairs=pairs)
        slots = slots_of(task, (0, 25, 50, 75, 100))
        prompts += [task.prompt(example, *slot) for example in task.examples("test", examples, 0) for slot in slots]
    return encode(prompts, tokenizer, window)


def compare_files(source: Path, patched: Path, config: LlamaConfig, factors: LayerFactors) -> dict[str, Any]:
    """The differences of the two files, and the error of query rows against row x gain. UserError if anything else differs."""
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(patched)
    parts = [
        {
            name: [part.tobytes() for part in field.parts]
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        for reader in (old, new)
    ]
    if list(parts[1])[: len(parts[0])] != list(parts[0]) or any(parts[1][name] != parts[0][name] for name in parts[0]):
        raise UserError(f"{patched}: other metadata than that of {source}")
    permuted = old.fields["general.architecture"].contents() == "llama"
    layer_gains = next(iter(gains_of_tensors(factors, config).values()))
    names = ("attn_q_norm.weight",) if config.qk_norm else ("attn_q.weight", "attn_q.bias", "attn_qkv.weight")
    changed, elements, rows, worst, types = 0, 0, [], 0.0, {}
    for old_tensor, new_tensor in zip(old.tensors, new.tensors[: len(old.tensors)], strict=True):
        if (old_tensor.name, old_tensor.tensor_type, old_tensor.shape.tolist()) != (
            new_tensor.name,
            new_tensor.tensor_type,
            new_tensor.shape.tolist(),
        ):
            raise UserError(f"{patched}: tensor {new_tensor.name} where {source} has {old_tensor.name}")
        different = int((old_tensor.data.view(np.uint8) != new_tensor.data.view(np.uint8)).sum())
        layer, name = old_tensor.name.split(".")[1:2], old_tensor.name.split(".", 2)[-1]
        if not old_tensor.name.startswith("blk.") or name not in names:
            if different:
                raise UserError(f"{patched}: tensor {old_tensor.name} differs from that of {source}")
            continue
        gains = layer_gains[int(layer[0])]
        gains = permute(gains, config.num_heads) if permuted else gains
        pair = [gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in (old_tensor, new_tensor)]
        wanted, found = (values.reshape(values.shape[0], -1) for values in pair)
        wanted[: len(gains)] *= gains[:, None]
        error = np.abs(found - wanted)
        rows.append(np.linalg.norm(error, axis=1) / np.maximum(np.linalg.norm(wanted, axis=1), 1e-30))
        worst = max(worst, float(error.max() / np.abs(wanted).max()))
        changed, elements = changed + different, elements + found.size
        types[f"{name}: {old_tensor.tensor_type.name}"] = types.get(f"{name}: {old_tensor.tensor_type.name}", 0) + 1
    relative = np.concatenate(rows)
    return {
        "tensors": types,
        "bytes": source.stat().st_size,
        "bytes_changed_in_percent": 100 * changed / source.stat().st_size,
        "bytes_changed_elsewhere": 0,
        "largest_error_by_largest_weight_of_its_tensor": worst,
        "relative_error_of_a_row": {"mean": float(relative.mean()), "largest": float(relative.max())},
    }


@contextmanager
def llama_cpp(python: Path, path: Path, prompts: Sequence[EncodedPrompt], threads: int) -> Iterator[tuple[dict[str, str], Any]]:
    """llama.cpp's version, and a function that runs all prompts."""
    vocabulary = len(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].data)
    longest = max(len(prompt.ids) + len(prompt.answers[0]) for prompt in prompts)
    command = [str(python), str(WORKER), str(path), str(-(-(longest + 16) // 256) * 256), str(threads)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=log) as process,
    ):
        assert process.stdin and process.stdout

        def reply() -> dict[str, Any]:
            assert process.stdout
            if not (line := process.stdout.readline()):
                log.seek(0)
                raise UserError(f"llama.cpp ended: {' '.join(log.read()[-300:].split())}")
            return json.loads(line)

        def ask(title: str) -> Answers:
            assert process.stdin
            replies = []
            for number, prompt in enumerate(prompts):
                request = {"ids": prompt.ids, "answer": prompt.answers[0], "vocabulary": vocabulary}
                print(json.dumps(request), file=process.stdin, flush=True)
                replies.append(reply())
                if number % 10 == 9:
                    print(f"{title}: {number + 1} of {len(prompts)}", flush=True)
            following, answers, best = (
                [np.array(answer_record[name]) for answer_record in replies] for name in ("next", "answer", "is_best")
            )
            return Answers(np.stack(following), answers, best)

        try:
            yield reply(), ask
        finally:
            process.stdin.close()
            process.wait(60)


def answers_of_lpes(model: Llama, prompts: Sequence[EncodedPrompt], factors: LayerFactors | None) -> Answers:
    """The answers of lpes_jax: one pass over prompt and answer together."""
    following, answers, best = [], [], []
    for prompt in prompts:
        ids, answer = prompt.ids, prompt.answers[0]
        length = len(ids) + len(answer)
        tokens = np.zeros((1, -(-length // _WIDTH) * _WIDTH), np.int32)
        tokens[0, :length] = [*ids, *answer]
        table = model.config.rope_table(length, factors)
        read = jnp.arange(len(ids) - 1, len(ids) - 1 + 64)
        log_probs = np.asarray(_log_probs(model, jnp.asarray(tokens), read, table))[: len(answer)]
        following.append(log_probs[0].astype(np.float64))
        answers.append(log_probs[np.arange(len(answer)), answer].astype(np.float64))
        best.append(log_probs.argmax(axis=1) == answer)
    return Answers(np.stack(following), answers, best)


@jax.jit
def _log_probs(model: Llama, tokens: Int[Array, "1 T"], read: Int[Array, "A"], table: RopeTable) -> Float[Array, "A V"]:
    return jax.nn.log_softmax(output_logits(model, hidden_states(model, tokens, table)[:, read])[0])


def compared(
    s: Settings,
    prompts: Sequence[EncodedPrompt],
    plain: Answers,
    ours: Answers,
    jax_plain: Answers,
    jax_gains: Answers,
    jax_patched: Answers,
) -> dict[str, Any]:
    """The figures. `change` is the effect of the gains; `standard_error`, over prompts, of their difference."""
    change_cpp, change_jax = (
        1.0 * changed.correct - unchanged.correct for changed, unchanged in ((ours, plain), (jax_gains, jax_plain))
    )
    differences = change_cpp - change_jax
    error = float(differences.std(ddof=1) / len(differences) ** 0.5) if len(differences) > 1 else 0.0
    return {
        "prompts": {
            "number": len(prompts),
            "num_pairs": s.num_pairs,
            "num_examples": s.num_examples,
            "tokens": [min(len(prompt.ids) for prompt in prompts), max(len(prompt.ids) for prompt in prompts)],
            "sha256": hashlib.sha256(json.dumps([[prompt.ids, prompt.answers] for prompt in prompts]).encode()).hexdigest(),
        },
        "accuracy": {
            "llama.cpp, as it is": float(plain.correct.mean()),
            "llama.cpp, patched": float(ours.correct.mean()),
            "lpes_jax, as it is": float(jax_plain.correct.mean()),
            "lpes_jax, gains": float(jax_gains.correct.mean()),
            "lpes_jax, patched": float(jax_patched.correct.mean()),
            "change": {"llama.cpp": float(change_cpp.mean()), "lpes_jax": float(change_jax.mean())},
            "difference_of_changes": float(differences.mean()),
            "standard_error": error,
        },
        "next_token": {
            "llama.cpp, as it is (its own noise)": _next(jax_plain, plain),
            "llama.cpp, patched": _next(jax_gains, ours),
            "lpes_jax, patched": _next(jax_gains, jax_patched),
            "llama.cpp, as it is, against gains (must differ)": _next(jax_gains, plain),
        },
        "answers": {
            "llama.cpp, as it is (its own noise)": _answer_figures(jax_plain, plain),
            "llama.cpp, patched": _answer_figures(jax_gains, ours),
            "lpes_jax, patched": _answer_figures(jax_gains, jax_patched),
        },
        "log_likelihoods": {
            "of": ["llama.cpp, as it is", "lpes_jax, as it is", "llama.cpp, patched", "lpes_jax, gains"],
            "by_prompt": np.stack([answers.log_likelihood for answers in (plain, jax_plain, ours, jax_gains)], 1)
            .round(4)
            .tolist(),
        },
    }


def _next(true: Answers, found: Answers) -> dict[str, float]:
    divergence = (np.exp(true.next) * (true.next - found.next)).sum(axis=1)
    best = true.next.argsort(axis=1)[:, ::-1]
    apart = [np.abs(np.take_along_axis(true.next - found.next, best[:, :count], 1)).max() for count in (1, 5, 10)]
    return {
        "mean_kl": float(divergence.mean()),
        "largest_kl": float(divergence.max()),
        "same_best_token": float((best[:, 0] == found.next.argmax(axis=1)).mean()),
        **{f"largest_difference_of_the_{count}_best": float(value) for count, value in zip((1, 5, 10), apart, strict=True)},
    }


def _answer_figures(true: Answers, found: Answers) -> dict[str, float]:
    difference = found.log_likelihood - true.log_likelihood
    tokens = np.concatenate(found.answers) - np.concatenate(true.answers)
    return {
        "mean_log_likelihood": float(found.log_likelihood.mean()),
        "mean_log_likelihood_of_lpes_jax": float(true.log_likelihood.mean()),
        "mean_difference": float(difference.mean()),
        "standard_error": float(difference.std(ddof=1) / len(difference) ** 0.5),
        "mean_absolute_difference_of_a_token": float(np.abs(tokens).mean()),
        "same_verdict": float((true.correct == found.correct).mean()),
    }


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
