"""The same numbers as transformers' torch Llama, from weights that transformers' own readers read.

Live where torch is there; elsewhere against values recorded from it in tests/golden/parity.json. To record them again:

    python tests/models/test_parity.py
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lpes_jax as lj
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.rope import RopeParameters

GOLDEN = Path(__file__).parent.parent / "golden" / "parity.json"
CLOSE = 2e-2  # of logits whose spread is about 4; both sides are float32 and sum in their own order
NEW = 40
FACTORS = {"plain": None, "factors": [round(1 + 0.8 * (layer * 7 % 30) / 29, 3) for layer in range(30)]}
POSITIONS, TOKENS = [0, 1, 7, 50, 128, 300, 419], [0, 1, 2, 17, 198, 260, 503, 1096, 5000, 12_345, 24_000, 33_333, 49_151]


class Run(NamedTuple):
    """What our side makes of the prompt: its logits and its greedy continuation."""

    logits: np.ndarray
    new_ids: list[int]


def scale_layers_of_torch(model: Any, factors: list[float]) -> list[Any]:
    """The factors on a transformers model: each decoder layer gets cos and sin of its own positions. Handles to remove them."""
    base, handles = model.model, []
    for layer, factor in zip(base.layers, factors, strict=True):

        def hook(module, args, kwargs, factor=factor):
            hidden = args[0] if args else kwargs["hidden_states"]
            kwargs["position_embeddings"] = base.rotary_emb(hidden, kwargs["position_ids"].float() / factor)
            return args, kwargs

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def logits_of_torch(model: Any, ids: list[int], factors: list[float] | None) -> np.ndarray:
    import torch

    handles = scale_layers_of_torch(model, factors) if factors else []
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return logits


def smollm2_of_transformers(path: Path) -> Any:
    """From the GGUF file by transformers' own reader, which knows nothing of ours."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(1)  # several spin against each other and whatever else runs: four times slower on two busy cores
    config = LlamaConfig(**load_gguf_checkpoint(path)["config"])
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)["tensors"]
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.generation_config.eos_token_id = None  # all the new tokens, whatever they are
    return model


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def model(smollm2_path) -> lj.Llama:
    return lj.load_model(str(smollm2_path), "float32")


@pytest.fixture(scope="module")
def ours(model, golden) -> Callable[[str], Run]:
    tokens = jnp.array([golden["prompt_ids"]], jnp.int32)

    @cache
    def run(name: str) -> Run:
        values = FACTORS[name]
        factors = None if values is None else lj.LayerFactors(np.array(values))
        new = generate_ids(model, [golden["prompt_ids"]], factors=factors and factors.factors, max_new_tokens=NEW, batch_size=1)
        return Run(np.asarray(lj.logits(model, tokens, factors))[0], new[0])

    return run


@pytest.fixture(scope="module")
def reference(smollm2_path) -> Any:
    pytest.importorskip("torch")
    return smollm2_of_transformers(smollm2_path)


def assert_same_argmax(logits: np.ndarray, wanted: np.ndarray) -> None:
    """At every position; if the two largest logits are nearer than rounding, either will do (once or twice)."""
    found = logits.argmax(-1)
    assert (found != wanted).sum() <= 2
    assert (logits.max(-1) - np.take_along_axis(logits, np.asarray(wanted)[:, None], -1)[:, 0]).max() < 1e-3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_smollm2_equals_transformers(ours, reference, golden, name):
    """One pass over prompt and continuation: each new token is theirs if it is the argmax after those before it."""
    prompt, (logits, new_ids) = golden["prompt_ids"], ours(name)
    wanted = logits_of_torch(reference, prompt + new_ids, FACTORS[name])
    assert logits.shape == (len(prompt), 49_152) and len(prompt) == 422
    assert np.abs(logits - wanted[:422]).max() < CLOSE
    assert_same_argmax(logits, wanted[:422].argmax(-1))
    assert new_ids == wanted[421:-1].argmax(-1).tolist()


@pytest.mark.slow
def test_smollm2_in_one_pass_equals_what_transformers_gave(model, golden):
    """Over prompt and recorded continuation, with factors: each new token is the argmax after those before it."""
    recorded, prompt = golden["factors"], golden["prompt_ids"]
    ids = jnp.array([prompt + recorded["new_ids"][:-1]], jnp.int32)
    logits = np.asarray(lj.logits(model, ids, lj.LayerFactors(np.array(FACTORS["factors"]))))[0]
    assert recorded["factors"] == FACTORS["factors"]
    assert_same_argmax(logits[: len(prompt)], np.array(recorded["argmax"]))
    np.testing.assert_allclose(logits[np.ix_(POSITIONS, TOKENS)], recorded["logits"], rtol=0, atol=CLOSE)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == recorded["new_ids"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_smollm2_equals_what_transformers_gave(ours, golden, name):
    recorded, found = golden[name], ours(name)
    assert golden["positions"] == POSITIONS and golden["tokens"] == TOKENS and recorded["factors"] == FACTORS[name]
    assert_same_argmax(found.logits, np.array(recorded["argmax"]))
    np.testing.assert_allclose(found.logits[np.ix_(POSITIONS, TOKENS)], recorded["logits"], rtol=0, atol=CLOSE)
    assert found.new_ids == recorded["new_ids"]


def test_the_recorded_factors_matter(golden):
    """Else a port that ignores its factors would pass."""
    plain, scaled = (np.array(golden[name]["logits"]) for name in FACTORS)
    assert np.abs(plain - scaled)[0].max() == 0  # the first token has no distances
    assert np.abs(plain - scaled)[1:].max() > 10 * CLOSE
    assert golden["plain"]["new_ids"] != golden["factors"]["new_ids"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "rope": RopeParameters(5e5)},
        {"head_dim": 16, "num_kv_heads": 3, "rope": RopeParameters(1e4, "linear", 2.5)},
    ],
    ids=["plain", "tied", "wide-heads-linear"],
)
def test_tiny_models_equal_transformers(tiny_config, changes, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    model = lj.Llama(replace(tiny_config, **changes), rngs=nnx.Rngs(3), dtype=jnp.float32)
    graph, state = nnx.split(model)
    rng = np.random.default_rng(0)
    noisy = [leaf * 5 + 0.1 * rng.standard_normal(leaf.shape, np.float32) for leaf in nnx.to_flat_state(state).leaves]
    model = nnx.merge(graph, nnx.from_flat_state(zip(nnx.to_flat_state(state).paths, noisy, strict=True)))
    save_llama(model, tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = rng.integers(0, 300, (2, 50))
    for factors in (None, [1.0, 2.0, 1.3]):
        handles = scale_layers_of_torch(reference, factors) if factors else []
        with torch.no_grad():
            wanted = reference(torch.tensor(tokens)).logits.numpy()
        for handle in handles:
            handle.remove()
        found = lj.logits(model, jnp.asarray(tokens, jnp.int32), factors and lj.LayerFactors(np.array(factors)))
        assert wanted.std() > 1
        np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-4 * wanted.std())  # up to 2.1e-4 was seen, by CPU


def record() -> None:
    """Write GOLDEN from torch: logits, and the output of its own `generate`."""
    import torch

    from lpes_jax.models import zoo
    from lpes_jax.tasks.key_value import KeyValue

    path = zoo.resolve("smollm2-135m-instruct")
    tokenizer = lj.load_tokenizer(str(path))
    task = KeyValue(num_pairs=5)  # about 420 tokens
    ids = tokenizer([task.prompt(task.examples("test", 1, seed=2)[0], 1).text])["input_ids"][0]
    model = smollm2_of_transformers(path)
    golden: dict[str, Any] = {"prompt_ids": ids, "positions": POSITIONS, "tokens": TOKENS}
    for name, factors in FACTORS.items():
        logits = logits_of_torch(model, ids, factors)
        top = np.sort(logits, axis=-1)
        print(f"{name}: the smallest distance between the two largest logits is {(top[:, -1] - top[:, -2]).min():.4f}")
        handles = scale_layers_of_torch(model, factors) if factors else []
        tokens = torch.tensor([ids])
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW)
        for handle in handles:
            handle.remove()
        golden[name] = {
            "factors": factors,
            "argmax": logits.argmax(-1).tolist(),
            "logits": logits[np.ix_(POSITIONS, TOKENS)].astype(float).round(4).tolist(),
            "new_ids": new[0, len(ids) :].tolist(),
        }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    sys.exit(record())
