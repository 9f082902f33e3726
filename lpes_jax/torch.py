"""Layer factors (LPES) in models of transformers (4.57 and 5). Needs torch and transformers, but neither jax nor lpes_jax.

    sys.path.append("FOLDER")                               # an exported folder
    from lpes_torch import apply_layer_factors              # or, with lpes_jax installed: from lpes_jax.torch
    model = AutoModelForCausalLM.from_pretrained("FOLDER")  # so far without factors
    undo = apply_layer_factors(model)                       # with the factors in its config
    model.generate(...)                                     # KV cache, left padding and batches work as usual
    undo.close()                                            # the original model, bit for bit

`lpes_jax.torch` and the `lpes_torch.py` in every folder that `python -m lpes_jax.export` writes are the same file. In such a
folder,

    python lpes_torch.py

compares torch's logits and greedy ids with those that lpes_jax recorded (unless exported with --no-self-test). It exits with 0
if they agree, else with 1.

transformers computes cos and sin once, from position x inverse frequency, and passes them to all decoder layers. A hook before
each layer replaces them by those of position x inverse frequency / factor. The inverse frequencies are the model's own, of any
RoPE type, as set for the current call. Cached keys keep their rotation, which is correct because a layer's factors never
change. If KV groups have factors of their own, cos and sin get an axis of groups, and the rotating function of the model's own
file is wrapped once to accept them; other calls pass through unchanged.

Gains multiply each frequency's part of q . k. They apply to queries only, while cos and sin apply to keys too. So a second
hook, after the projection of the queries, or after their norm if they have one, multiplies the elements of each pair. Layers
without RoPE and elements that are not rotated have no gains.

Letters: L layers, K key-value heads, H heads, G = 1 or K groups with factors of their own, R rotated part of a head, B batch,
T tokens, D head dim.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

KEY, MARK_KEY = "lpes_factors", "lpes_mark"  # keys of config.json; the second marks a model that already contains factors
APPLIES_TO = "position / factor"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3")
TOLERANCE = 2e-2  # of the self-test, for float32 logits of two libraries
LEAST, MOST = 1e-20, 1e20  # positions and frequencies divided by these stay well within the range of float32
_RANK = {"layer": 1, "layer_band": 2, "layer_group": 2, "layer_group_band": 3}


def apply_layer_factors(
    model: torch.nn.Module, factors: Any = None, length: int | None = None, *, other_model: bool = False
) -> ExitStack:
    """Make each layer of `model` rotate by position / factor, and apply the factors' gains, if any.

    If it is called several times, the last factors replace earlier ones, but gains multiply.

    Args:
        model: A causal model of transformers.
        factors: The path or the contents of a factors.json, a `lpes_jax.LayerFactors`, or one number per layer. None means the
            factors in the model's config, where `lpes_jax.export` puts them.
        length: Tokens of prompt and answer together, fixed for all calls, as in lpes_jax (cached keys stay correct beyond the
            trained window). Used only by the RoPE types `dynamic` and `longrope`, whose frequencies depend on the length. None
            means transformers' own rule, by the positions of each call.
        other_model: Whether to accept factors that were found for another model.

    Returns:
        An object whose `close()` undoes the change; it is also a context manager.

    Raises:
        ValueError: The model already contains factors, the factors do not fit it, they were found for a model of other sizes or
            another RoPE base (unless `other_model`), or its type is not in `MODEL_TYPES`.
    """
    decoder = _decoder(model)
    rotary = decoder.rotary_emb
    multipliers, gains = _numbers(factors, decoder.config, rotary.inv_freq.shape[-1], other_model)
    fixed = None
    if length is not None and rotary.rope_type in ("dynamic", "longrope"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # pyright: ignore[reportMissingImports]

        fixed = ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config, rotary.inv_freq.device, seq_len=length)
    if multipliers.shape[1] > 1:
        _take_groups(sys.modules[type(decoder).__module__])
    undo = ExitStack()
    for layer, row in zip(decoder.layers, multipliers, strict=True):
        undo.callback(layer.register_forward_pre_hook(_hook(rotary, row, fixed), with_kwargs=True).remove)
    for layer, row in zip(decoder.layers, [] if gains is None else gains, strict=gains is not None):
        if getattr(layer.self_attn, "use_rope", True):
            undo.callback(_multiply_queries(layer.self_attn, decoder.config, row))
    return undo


def _decoder(model: torch.nn.Module) -> Any:
    """The module that has the layers and their rotary embedding, inside any wrappers."""
    module: Any
    for module in model.modules():
        if hasattr(module, "layers") and hasattr(module, "rotary_emb"):
            if (mark := getattr(module.config, MARK_KEY, None)) is not None:
                raise ValueError(f"the model already contains factors (sha256 {mark['factors_sha256']:.8}); it needs no others")
            if module.config.model_type in MODEL_TYPES:
                return module
            raise ValueError(f"model_type {module.config.model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    raise ValueError(f"{type(model).__name__} has no decoder with layers and a rotary_emb; give a causal model of transformers")


def _numbers(factors: Any, config: Any, half: int, other_model: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """1 / factor and gain (None: 1) of each of the R/2 frequencies: float32 [L, G, R/2].

    `lpes_jax.rope` multiplies by the reciprocal too.
    """
    if factors is None and (factors := getattr(config, KEY, None)) is None:
        raise ValueError(f"the model's config has no {KEY}; give a factors.json, its contents, or one number per layer")
    if isinstance(factors, str | os.PathLike):
        factors = json.loads(Path(factors).read_text(encoding="utf-8"))
    record = factors if isinstance(factors, Mapping) else getattr(factors, "__dict__", {})
    if (applies_to := record.get("applies_to", APPLIES_TO)) != APPLIES_TO:
        raise ValueError(f"applies_to {applies_to!r} is not supported; factors apply to {APPLIES_TO!r} here")
    gains, gains_granularity = record.get("gains"), record.get("gains_granularity") or "layer"
    table = _expanded("factors", record.get("factors", factors), record.get("granularity", "layer"), config, half)
    if not other_model and (differs := _differences(record, config, half)):
        raise ValueError(f"these factors were found for another model ({'; '.join(differs)}); other_model=True accepts them")
    return 1 / table, None if gains is None else _expanded("gains", gains, gains_granularity, config, half)


def _expanded(what: str, numbers: Any, granularity: str, config: Any, half: int) -> torch.Tensor:
    """Expand factors (null: infinite, the frequency does not rotate) or gains to the R/2 frequencies: float32 [L, G, R/2]."""
    table = torch.as_tensor(_without_nulls(numbers), dtype=torch.float32)
    if granularity not in _RANK or table.dim() != _RANK[granularity]:
        raise ValueError(f"{what} of shape {list(table.shape)} are not of granularity {granularity!r} ({', '.join(_RANK)})")
    standing = table == (0 if what == "gains" else float("inf"))  # a gain of 0, or a frequency that does not rotate
    if not (standing | ((table >= LEAST) & (table <= MOST))).all():
        bounds = "not below 0" if what == "gains" else "above 0"
        raise ValueError(f"{what} must be finite and {bounds}, from {LEAST:g} to {MOST:g}")
    if len(table) != config.num_hidden_layers:
        raise ValueError(f"{len(table)} layers of {what}, but the model has {config.num_hidden_layers}")
    if "group" in granularity and table.shape[1] != config.num_key_value_heads:
        raise ValueError(f"{table.shape[1]} KV groups of {what}, but the model has {config.num_key_value_heads}")
    bands = table.shape[-1] if "band" in granularity else 1
    if half % bands:
        raise ValueError(f"{bands} bands of {what} do not divide the model's {half} frequencies per head")
    return table.reshape(len(table), -1, bands).repeat_interleave(half // bands, dim=-1)


def _without_nulls(numbers: Any) -> Any:
    """Nested lists of JSON with infinity in place of null."""
    if isinstance(numbers, list):
        return [_without_nulls(number) for number in numbers]
    return float("inf") if numbers is None else numbers


def _multiply_queries(attention: Any, config: Any, gains: torch.Tensor) -> Callable[[], None]:
    """Multiply an attention's queries by `gains` [G, R/2], for elements i and i + R/2 of a head. Returns the undo function."""
    heads, dim = config.num_attention_heads, attention.head_dim
    rest = torch.ones(len(gains), dim - 2 * gains.shape[1])
    heads_gains = torch.cat((gains, gains, rest), dim=1).repeat_interleave(heads // len(gains), dim=0)  # [H, D]
    if hasattr(attention, "q_norm"):  # its output is [B, T, H, D]
        module, row = attention.q_norm, heads_gains
    elif hasattr(attention, "q_proj"):
        module, row = attention.q_proj, heads_gains.flatten()
    else:  # keys and values come after the queries
        module = attention.qkv_proj
        row = torch.cat((heads_gains.flatten(), torch.ones(2 * config.num_key_value_heads * dim)))

    def multiply(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return (output * row.to(output.device)).to(output.dtype)

    return module.register_forward_hook(multiply).remove


def _differences(record: Mapping[str, Any], config: Any, half: int) -> list[str]:
    """Differences between the model of a factors.json and this one: sizes and RoPE base. Missing entries are not checked."""
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", getattr(config, "rope_theta", None))
    heads = config.num_attention_heads
    here = {
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rotary_dim": 2 * half,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "rope_theta": theta,
    }
    then = {**(record.get("rope") or {}), **(record.get("model") or {})}
    return [f"{name} {then[name]}, here {now}" for name, now in here.items() if then.get(name, now) != now]


def _hook(
    rotary: Any, multipliers: torch.Tensor, fixed: tuple[torch.Tensor, float] | None
) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """The hook that replaces a layer's cos and sin: [B, T, R] each, or [B, K, T, R] if KV groups have their own.

    `multipliers` is [G, R/2]. `fixed` has the inverse frequencies and the multiplier of cos and sin; None: those of `rotary`.
    """

    def replace(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions, plain = kwargs.get("position_ids"), kwargs.get("position_embeddings")
        if positions is None or plain is None:
            raise RuntimeError("this transformers hands its layers no position_ids and position_embeddings; use 4.57 or 5")
        inv_freq, scaling = (rotary.inv_freq, rotary.attention_scaling) if fixed is None else fixed
        if inv_freq.dtype != torch.float32:
            raise RuntimeError(f"inverse frequencies in {inv_freq.dtype}: load with dtype=..., model.to(dtype) rounds them")
        inv_freq = inv_freq.to(positions.device) * multipliers.to(positions.device)
        angles = positions[:, None, :, None].float() * inv_freq[:, None, :]
        angles = angles if len(multipliers) > 1 else angles[:, 0]
        cos, sin = (torch.cat((half, half), dim=-1) * scaling for half in (angles.cos(), angles.sin()))
        return args, {**kwargs, "position_embeddings": (cos.to(plain[0].dtype), sin.to(plain[1].dtype))}

    return replace


def _take_groups(modeling: Any) -> None:
    """Make `apply_rotary_pos_emb` of a modeling file accept cos and sin of [B, K, T, R] too.

    This is permanent. With three axes, the wrapper calls the original function.
    """
    plain = modeling.apply_rotary_pos_emb
    if getattr(plain, "takes_groups", False):
        return

    @wraps(plain)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cos.dim() == 3:
            return plain(q, k, cos, sin, *more, **kwargs)
        # q [B, H, T, D]: the heads of a group are adjacent. As [B, H/K, K, T, D], they broadcast with cos [B, 1, K, T, R].
        q, k = plain(q.unflatten(1, (cos.shape[1], -1)).transpose(1, 2), k[:, None], cos, sin)
        return q.transpose(1, 2).flatten(1, 2), k[:, 0]

    apply_rotary_pos_emb.takes_groups = True  # pyright: ignore[reportAttributeAccessIssue]
    modeling.apply_rotary_pos_emb = apply_rotary_pos_emb


def self_test(folder: Path) -> bool:
    """Whether torch, in float32, agrees with what lpes_jax recorded in the folder. Prints the differences."""
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        PreTrainedTokenizerFast,
        __version__,
    )

    if not (folder / "self_test.json").exists():
        sys.exit(f"{folder}: nothing was recorded; export it without --no-self-test")
    record = json.loads((folder / "self_test.json").read_text(encoding="utf-8"))
    ids, new = record["ids"], record["new_ids"]
    readers = (AutoTokenizer, PreTrainedTokenizerFast)  # the first may replace tokenizer.json's pipeline by its own
    same = [cls.__name__ for cls in readers if cls.from_pretrained(folder)(record["text"])["input_ids"][: len(ids)] == ids]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # greedy, without an end of text
    # The prompt, and its first half padded on the left: the same tokens must have the same logits.
    shorter = len(ids) // 2
    tokens = torch.tensor([ids, [0] * (len(ids) - shorter) + ids[:shorter]])
    mask = torch.tensor([[1] * len(ids), [0] * (len(ids) - shorter) + [1] * shorter])
    best, wanted = torch.tensor(record["best_ids"]), torch.tensor(record["best_logits"])

    def off() -> float:
        logits = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        rows = logits[0].gather(-1, best) - wanted, logits[1, -shorter:].gather(-1, best[:shorter]) - wanted[:shorter]
        return max(float(row.abs().max()) for row in rows)

    with torch.no_grad():
        plain = off()
        with apply_layer_factors(model):
            found = off()
            generated = model.generate(tokens, attention_mask=mask, max_new_tokens=len(new), do_sample=False, pad_token_id=0)[
                0, len(ids) :
            ].tolist()
    print(f"torch {torch.__version__}, transformers {__version__}")
    print(f"tokenizer: {f'the same ids ({same[0]}.from_pretrained)' if same else 'OTHER IDS'}")
    print(f"logits: off by at most {found:.1e}, {TOLERANCE:g} allowed (without the factors by {plain:.1e})")
    print(f"greedy ids with a KV cache: {'equal' if generated == new else f'{generated}, NOT {new}'}")
    return bool(same) and found <= TOLERANCE and generated == new


if __name__ == "__main__":
    sys.exit(not self_test(Path(__file__).resolve().parent))
