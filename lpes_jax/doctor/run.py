"""The verb doctor: the config that the loader parsed from a model's files, and checks of the model on this machine."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lpes_jax import compilation, process
from lpes_jax.api import logits
from lpes_jax.doctor.checks import check as check_flags
from lpes_jax.doctor.plan import plan, plan_table, usable_memory
from lpes_jax.finite import NotFinite
from lpes_jax.models.llama import Loaded, load
from lpes_jax.models.llama.attention import runs_on_cudnn
from lpes_jax.models.llama.checkpoint import (
    Checkpoint,
    checked_dtype,
    open_checkpoint,
    packed_layouts,
    save_llama,
    weight_bytes,
)
from lpes_jax.models.llama.generate import greedy
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.hard_texts import hard_texts
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import Llama, with_full_weights
from lpes_jax.models.llama.tokenizer import added_by_settings, embedded_tokenizer, own_tokenizer
from lpes_jax.models.zoo import resolve
from lpes_jax.report.tables import ScreenTable, show
from lpes_jax.rope import cos_sin
from lpes_jax.settings.doctor import DoctorSettings
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import token_ids

NEW_TOKENS = 16
NEAR_TIE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}  # two best logits this close may be swapped by rounding
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Check:
    """A self-check and its verdict."""

    name: str
    passed: bool
    measured: str


def run_doctor(settings: DoctorSettings) -> list[Check]:
    """Print the plan of the memory, the parsed config and the verdict of each check; return the checks.

    With `memory_gb`, only the plan is printed, and nothing is loaded.

    Raises UserError if the model cannot be loaded, if its logits are not finite (no other check is meaningful then), or if
    torch is requested and missing.
    """
    check_flags(settings)
    checkpoint = open_checkpoint(resolve(settings.run.model))
    show(memory_plan(checkpoint, settings))
    if settings.checks.memory_gb is not None:
        return []
    loaded = load(settings.run.model, settings.checks.dtype, weight_format=settings.checks.weight_format)
    show(ScreenTable(f"{settings.run.model}: parsed config", None, list(parsed_config(checkpoint, loaded)), right=False))
    checks: list[Check] = []
    verdicts: list[tuple[str, str, str]] = []
    styles = {"ok": "green", "FAILED": "red"}
    try:
        for check in self_checks(loaded, settings):
            checks.append(check)
            verdicts.append((check.name, "ok" if check.passed else "FAILED", check.measured))
    except NotFinite:
        verdicts.append(("logits are finite", "FAILED", "see the error"))
        raise
    finally:
        show(ScreenTable("self-checks", ("check", "verdict", "measured"), verdicts, right=False, styles=styles))
    return checks


def memory_plan(checkpoint: Checkpoint, settings: DoctorSettings) -> ScreenTable:
    """The memory that verbs will need, from the model's headers."""
    checks, config = settings.checks, checkpoint.config
    card = checks.memory_gb is not None
    backend = "cpu" if jax.default_backend() == "cpu" and not card else "gpu"
    dtype = np.dtype("bfloat16") if card and checks.dtype == "auto" else checked_dtype(checks.dtype)
    layouts = packed_layouts(checkpoint, checks.weight_format)
    weights, usable = weight_bytes(config, dtype.itemsize, layouts), usable_memory(checks.memory_gb)
    length = min(checks.prompt_tokens, config.max_position_embeddings)
    device = f"a card of {checks.memory_gb:g} GiB" if card else f"this {'host' if backend == 'cpu' else 'device'}"
    title = (
        f"memory on {device}: {_mib(usable)} usable, {_mib(weights)} of weights ({checks.weight_format}, {dtype.name}), "
        f"prompts of {length:,} tokens"
    )
    needs = plan(config, weights, dtype.itemsize, usable, length, packed=bool(layouts), backend=backend)
    return plan_table(title, needs)


def parsed_config(checkpoint: Checkpoint, loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Names and values of the config that the loader parsed from the files."""
    config, tokenizer = loaded.model.config, loaded.tokenizer
    weights = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(with_full_weights, loaded.model)))
    yield "files", f"{checkpoint.path} ({len(checkpoint.weight_files())} with weights)"
    yield "family", config.model_type
    yield "layers", str(config.num_layers)
    yield "heads", f"{config.num_heads}, {config.num_kv_heads} key-value heads, head dim {config.head_dim}"
    yield (
        "sizes",
        f"embedding {config.hidden_size:,}, feed-forward {config.intermediate_size:,}, vocabulary {config.vocab_size:,}",
    )
    extras = {"bias on q, k, v": config.qkv_bias, "bias in the MLP": config.mlp_bias, "q/k norm": config.qk_norm}
    extras |= {"fused projections": config.fused, "tied head": loaded.model.head is None}
    yield "particular", ", ".join(name for name, present in extras.items() if present) or "nothing"
    rope = config.rope.to_hf()
    kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    described = ", ".join(f"{name} {value}" for name, value in rope.items() if not isinstance(value, list))
    yield "RoPE", f"{kind}, theta {theta:,.0f}" + (f", {described}" if described else "")
    if config.mark is not None:
        yield "factors", f"in the files: {config.mark}"
    if config.nope_layers:
        yield "layers without RoPE", ", ".join(map(str, config.nope_layers))
    window = "none" if not config.sliding_layers else f"{config.sliding_window} tokens in {len(config.sliding_layers)} layers"
    yield "context", f"{config.max_position_embeddings:,} tokens, sliding window: {window}"
    names = checkpoint.names()
    ignored = sum(name.endswith(".rotary_emb.inv_freq") for name in names)
    yield (
        "tensors",
        f"{len(names) - ignored} read"
        + (f", {ignored} ignored (RoPE frequencies, which follow from the config)" if ignored else ""),
    )
    memory = ", ".join(f"{name} {_mib(weights * size)}" for name, size in DTYPE_BYTES.items())
    yield "weights", f"{weights:,}: {memory}"
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE_BYTES[loaded.identity["dtype"]]
    yield "KV cache", f"{per_token:,} bytes per token"
    device, dtype = jax.devices()[0], loaded.identity["dtype"]
    attention = "cuDNN's fused attention" if runs_on_cudnn(config.head_dim, dtype) else "exact blocked softmax (XLA)"
    yield "runs on", f"{jax.device_count()} x {device.device_kind}, {dtype}, {attention}"
    yield "compiled programs", compilation.described()
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    yield "BOS", f"{tokenizer.bos_token!r}, put before a prompt" if begins else "none before a prompt"
    yield (
        "ends a text",
        ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in loaded.stop_ids) or "nothing",
    )
    yield "chat template", "yes" if tokenizer.chat_template else "none (--prompt-form names one)"
    yield "tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens"


def self_checks(loaded: Loaded, settings: DoctorSettings) -> Iterator[Check]:
    """Run the checks one by one."""
    model, dtype = loaded.model, loaded.identity["dtype"]
    tokens = example_tokens(loaded, settings.checks.num_tokens)
    yield _tokens_fit(loaded)
    yield _rope_in_float32(model)
    yield _cached_is_full(model, tokens, dtype)
    yield _factor_1_changes_nothing(model, tokens)
    yield _padded_is_single(model, tokens, dtype)
    yield from _tokens_are_the_files(loaded, resolve(settings.run.model))
    if settings.checks.compare_with_transformers:
        yield from _transformers_agrees(loaded, tokens, settings)


def example_tokens(loaded: Loaded, count: int) -> list[int]:
    """`count` ids (fewer if the window is smaller) of key-value prompts, which any tokenizer can encode."""
    window = loaded.model.config.max_position_embeddings
    count = max(1, min(count, window - new_tokens(window)))
    pairs, ids = 4, list[int]()
    while len(ids) < count:
        task = KeyValue(pairs, key_length=8)
        ids = token_ids(loaded.tokenizer, [task.prompt(task.examples("search", 1, 0)[0], 0).text])[0]
        pairs *= 2
    return ids[:count]


def new_tokens(window: int) -> int:
    """The number of tokens to generate: half of the window if it is short."""
    return max(1, min(NEW_TOKENS, window // 2))


def _rope_in_float32(model: Llama) -> Check:
    # Compare cos and sin of float32 angles with float64. The rounding error of an angle is position x 2^-24; an intermediate
    # bfloat16 would have an error of 2^-9 of the angle. Positions must also stay distinguishable.
    config = model.config
    last = config.max_position_embeddings - 1
    table = config.rope_table(last + 1)
    row = next(layer for layer in range(config.num_layers) if layer not in config.nope_layers)
    inv_freq = table.inv_freq[row]
    positions = np.unique(np.linspace(0, last, 4096, dtype=np.int32))
    cos, sin = jax.jit(cos_sin)(inv_freq, table.attention_scaling, jnp.asarray(positions))
    angles = positions[:, None, None] * np.asarray(inv_freq, np.float64)
    scaling = float(table.attention_scaling)
    error = max(np.abs(cos - scaling * np.cos(angles)).max(), np.abs(sin - scaling * np.sin(angles)).max())
    distinct = len(np.unique(np.concatenate([cos, sin], axis=-1).reshape(len(positions), -1), axis=0))
    passed = bool(error <= scaling * (1e-6 + last * 2**-23) and distinct == len(positions))
    measured = f"off by {error:.1e} up to position {last:,}, {distinct:,} of {len(positions):,} positions distinct"
    return Check("RoPE table is float32-exact", passed, measured)


def _cached_is_full(model: Llama, tokens: list[int], dtype: str) -> Check:
    count = new_tokens(model.config.max_position_embeddings)
    table = model.config.rope_table(len(tokens) + count)
    prompt, length = jnp.array([tokens], jnp.int32), jnp.array([len(tokens)], jnp.int32)
    new = np.asarray(greedy(model, prompt, length, table_method(table), jnp.array([], jnp.int32), count))[0]
    whole = np.asarray(logits(model, jnp.array([[*tokens, *new.tolist()]], jnp.int32)))[0]
    predicting = whole[len(tokens) - 1 : -1]
    gaps = predicting.max(axis=-1) - predicting[np.arange(count), new]
    different = int((gaps > NEAR_TIE[dtype]).sum())
    measured = f"{count - different} of {count} greedy tokens equal (two best logits within {NEAR_TIE[dtype]} count)"
    return Check("cached decoding equals full recomputation", different == 0, measured)


def _factor_1_changes_nothing(model: Llama, tokens: list[int]) -> Check:
    batch = jnp.array([tokens], jnp.int32)
    plain, ones = logits(model, batch), logits(model, batch, jnp.ones(model.config.num_layers, jnp.float32))
    different = int((np.asarray(plain) != np.asarray(ones)).sum())
    return Check("factors of 1 change no bit", different == 0, f"{different} of {plain.size:,} logits differ")


def _padded_is_single(model: Llama, tokens: list[int], dtype: str) -> Check:
    short = tokens[: len(tokens) // 2 + 1]
    padded = jnp.array([tokens, short + [0] * (len(tokens) - len(short))], jnp.int32)
    batched, single = logits(model, padded)[1, : len(short)], logits(model, jnp.array([short], jnp.int32))[0]
    return _agreement("a padded row equals the single prompt", np.asarray(batched), np.asarray(single), dtype)


def _tokens_fit(loaded: Loaded) -> Check:
    tokens, rows = len(loaded.tokenizer), loaded.model.config.vocab_size
    unused = f", {rows - tokens:,} rows without a token" if rows > tokens else ""
    return Check("every token has an embedding", tokens <= rows, f"{tokens:,} tokens, {rows:,} rows{unused}")


def _tokens_are_the_files(loaded: Loaded, path: Path) -> Iterator[Check]:
    """Compare the ids of hard texts from the loaded tokenizer, from tokenizer.json, and from a .gguf file's vocabulary."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "tokenizer.json").exists():
        return
    own, tokenizer = own_tokenizer(folder), loaded.tokenizer
    own.encode_special_tokens = tokenizer.split_special_tokens
    added = [token.content for token in added_by_settings(own, tokenizer)]  # only the loaded one finds these in a text
    texts = [(kind, text) for kind, text in hard_texts() if not any(token in text for token in added)]
    yield _same_ids(
        "tokens are those of tokenizer.json", tokenizer, texts, lambda text: own.encode(text, add_special_tokens=False).ids
    )
    if path.suffix != ".gguf" or (embedded := embedded_tokenizer(path)) is None:
        return
    if GgufFile.open(path).metadata["tokenizer.ggml.model"] == "llama":  # SentencePiece: see tokenizer.py on spaces
        special = (" ", "▁", *tokenizer.added_tokens_encoder)
        texts = [
            (kind, text) for kind, text in texts if not text.startswith(special) and not any(t in text for t in special[2:])
        ]
    yield _same_ids(
        "tokens are those of the .gguf file", tokenizer, texts, lambda text: embedded.encode(text, add_special_tokens=False)
    )


def _same_ids(name: str, tokenizer: Any, texts: list[tuple[str, str]], other: Callable[[str], list[int]]) -> Check:
    """Whether `tokenizer` and `other` give the same ids, without BOS, for each (kind, text)."""
    different = [(kind, text) for kind, text in texts if tokenizer.encode(text, add_special_tokens=False) != other(text)]
    measured = f"{len(texts) - len(different)} of {len(texts)} hard texts have the same ids"
    if different:
        measured += f", not some with {', '.join(sorted({kind for kind, _ in different}))}"
    return Check(name, not different, measured)


def _transformers_agrees(loaded: Loaded, tokens: list[int], settings: DoctorSettings) -> Iterator[Check]:
    import torch
    from transformers import AutoModelForCausalLM

    model = loaded.model if loaded.identity["dtype"] == "float32" else load(settings.run.model, "float32").model
    count = new_tokens(model.config.max_position_embeddings)
    with tempfile.TemporaryDirectory() as folder, process.cleaning(lambda: shutil.rmtree(folder)):
        save_llama(model, Path(folder))
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0].float().numpy()
        ids = theirs.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens)),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(tokens) :].tolist()
    cpu = jax.devices("cpu")[0]
    ours_model = jax.device_put(model, cpu)
    with jax.default_device(cpu):
        ours = np.asarray(logits(ours_model, jnp.array([tokens], jnp.int32)))[0]
        table = ours_model.config.rope_table(len(tokens) + count)
        prompt, length = jnp.array([tokens], jnp.int32), jnp.array([len(tokens)], jnp.int32)
        new = np.asarray(greedy(ours_model, prompt, length, table_method(table), jnp.array([], jnp.int32), count))[0].tolist()
    yield _agreement("logits equal transformers' (float32)", ours, wanted, "float32")
    yield Check(
        "greedy ids equal transformers'", new == ids, f"{sum(a == b for a, b in zip(new, ids, strict=True))} of {count}"
    )


def _agreement(name: str, ours: Float[np.ndarray, "T V"], theirs: Float[np.ndarray, "T V"], dtype: str) -> Check:
    """Whether two computations of logits agree: within 0.001 of their size in float32, and in best tokens except near ties."""
    difference, size = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
    chosen = ours.argmax(axis=-1)
    gap = theirs.max(axis=-1) - np.take_along_axis(theirs, chosen[:, None], axis=-1)[:, 0]
    other = int((gap > NEAR_TIE[dtype]).sum())
    passed = other == 0 and (dtype != "float32" or difference <= 1e-4 * max(size, 1.0))
    return Check(
        name, passed, f"off by {difference:.1e} (largest {size:.3g}), best token equal at {len(ours) - other} of {len(ours)}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"
