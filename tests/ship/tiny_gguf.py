"""Whole tiny models in .gguf files, with query weights of any type: blocks are made by hand if the package has no writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, GROUPS, HEAD_DIM, MLP = 256, 4, 2, 8, 32
TOKENS = [*sorted(ByteLevel.alphabet()), "Ġa", "<s>", "</s>"]
Kind = gguf.GGMLQuantizationType


def block_scales(kind: Kind) -> list[int]:
    """Where the float16 numbers of a block begin."""
    return {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64]}.get(
        kind.name, [0, 2] if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    )


def random_blocks(kind: Kind, rows: int, width: int, seed: int = 0, smallest: float = 1e-3) -> np.ndarray:
    """uint8 [rows, bytes]: any bits, and scales that are normal float16 numbers of both signs."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, width // block, size), np.uint8)
    for begin in block_scales(kind):
        scales = (smallest * 10 ** rng.uniform(0, 2, data.shape[:2]) * rng.choice([-1, 1], data.shape[:2])).astype("<f2")
        data[:, :, begin : begin + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def tensors_of(
    architecture: str, layers: int = 2, queries: dict[str, Any] | None = None, hidden: int = HIDDEN
) -> dict[str, Any]:
    """Tensors by name: float arrays, or (uint8 data, type). `queries` replaces some of every layer, without `blk.0.`."""
    rng = np.random.default_rng(1)

    def weights(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 4).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    rows, key_rows = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    found: dict[str, Any] = {"token_embd.weight": weights(len(TOKENS), hidden), "output_norm.weight": norm(hidden)}
    for layer in range(layers):
        layer_tensors: dict[str, Any] = {"attn_norm.weight": norm(hidden), "ffn_norm.weight": norm(hidden)}
        if architecture == "phi3":
            layer_tensors |= {
                "attn_qkv.weight": weights(rows + 2 * key_rows, hidden),
                "ffn_up.weight": weights(2 * MLP, hidden),
            }
        else:
            for name, height in (("q", rows), ("k", key_rows), ("v", key_rows)):
                layer_tensors[f"attn_{name}.weight"] = weights(height, hidden)
                if architecture == "qwen2":
                    layer_tensors[f"attn_{name}.bias"] = weights(height)
            layer_tensors |= {"ffn_gate.weight": weights(MLP, hidden), "ffn_up.weight": weights(MLP, hidden)}
        if architecture == "qwen3":
            layer_tensors |= {"attn_q_norm.weight": norm(HEAD_DIM), "attn_k_norm.weight": norm(HEAD_DIM)}
        layer_tensors |= {"attn_output.weight": weights(hidden, rows), "ffn_down.weight": weights(hidden, MLP)} | (
            queries or {}
        )
        found |= {f"blk.{layer}.{name}": array for name, array in layer_tensors.items()}
    return found


def write_model(
    path: Path,
    architecture: str = "llama",
    *,
    tensors: dict[str, Any] | None = None,
    layers: int = 2,
    split_count: int = 0,
    **metadata: Any,
) -> Path:
    """A model whose header has all that lpes_jax reads; `metadata`, `__` for dots, replaces keys of the architecture."""
    keys = {
        "block_count": layers, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": GROUPS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5,
    }  # fmt: skip
    keys |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    if split_count:
        writer.add_uint16("split.count", split_count)
    writer.add_float64("general.odd", 0.1)
    writer.add_bool("general.flag", True)
    for name, array in (tensors or tensors_of(architecture, layers)).items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
