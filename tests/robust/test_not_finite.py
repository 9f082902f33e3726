"""NaN and infinity never become a score: whatever is damaged, each way through the model says so and names the layer."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lpes_jax as lj
from lpes_jax.evaluate.perplexity import text_nlls
from lpes_jax.evaluation import BASELINE, Candidate, Conditions, evaluate
from lpes_jax.finite import NotFinite, first_bad_layer
from lpes_jax.generation import GeneratedScorer, generate_ids
from lpes_jax.methods.moice import train_router
from lpes_jax.models.llama import Llama
from lpes_jax.rope import RopeParameters
from lpes_jax.scoring import OptionScorer, Scorer
from lpes_jax.search.plain_text import text_windows
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.perplexity import Window
from lpes_jax.tasks.prompts import Prompt, encode

IDS = [40, 65, 66, 67, 12]
ONES = np.ones((1, 3))


def changed(model: Llama, change: Callable[[Llama], None]) -> Llama:
    copy = nnx.clone(model)
    change(copy)
    return copy


def layer_weight(name: str, layer: int, value: float) -> Callable[[Llama], None]:
    def change(model: Llama) -> None:
        weights = getattr(model.layers, name)
        weights[...] = weights[...].at[layer, 0, 0].set(value)

    return change


def rows(name: str, index: tuple, value: float) -> Callable[[Llama], None]:
    def change(model: Llama) -> None:
        weights = getattr(model, name)
        weights[...] = weights[...].at[index].set(value)

    return change


# What is damaged, and where that shows first. 299 is no token of the tokenizer: no prompt and no answer has it.
DAMAGED = {
    "NaN in a query": (layer_weight("query", 1, np.nan), "in layer 1"),
    "infinity in a feed-forward": (layer_weight("down", 2, np.inf), "in layer 2"),
    "NaN in the output of a token that is not asked for": (rows("head", (slice(None), 299), np.nan), "in the logits"),
    "NaN in the embedding of a token": (rows("embed", (65,), np.nan), "in the embedding"),
}


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return lj.load_tokenizer(str(model_folder))


def prompt(text: str, **more: object) -> Prompt:
    fields = {"answers": ("ab",), "gold": "ab", "example": text, "position": 0, "slot": 0, "num_items": 1}
    return Prompt(text=text, **fields | more)


@pytest.mark.parametrize("damage", DAMAGED)
def test_each_way_through_the_model_names_the_layer(tiny_model, tokenizer, damage):
    change, where = DAMAGED[damage]
    broken, said = changed(tiny_model, change), f"the model's logits are not finite: first {where}; try --dtype float32"
    with pytest.raises(NotFinite, match=said):
        lj.logits(broken, jnp.array([IDS]))
    with pytest.raises(NotFinite, match=said):
        generate_ids(broken, [IDS], factors=np.full(3, 1.5), max_new_tokens=2)  # and no factors are blamed
    with pytest.raises(NotFinite, match=said):
        text_nlls(broken, [Window(IDS, 1)], Candidate(BASELINE))
    encoded = encode([prompt(tokenizer.decode(IDS))], tokenizer, 512)
    correct, log_likelihood = Scorer(broken, encoded)(ONES)
    assert not correct.any() and np.isnan(log_likelihood).all()


def test_a_prompt_that_is_finite_keeps_its_score_beside_one_that_is_not(tiny_model, tokenizer):
    broken = changed(tiny_model, DAMAGED["NaN in the embedding of a token"][0])
    well, bad = "hello there", tokenizer.decode([40, 65, 41])
    encoded = encode([prompt(well), prompt(bad)], tokenizer, 512)
    correct, log_likelihood = Scorer(broken, encoded)(ONES)
    assert np.isfinite(log_likelihood[0]).tolist() == [True, False] and not correct[0, 1]
    generated = GeneratedScorer(
        broken, tokenizer, [prompt(well), prompt(bad)], lambda output, prompt: 1.0, max_new_tokens=2, stop_ids=()
    )
    scores, likelihood = generated(ONES)
    assert scores.tolist() == [[1, 0]] and np.isfinite(likelihood[0]).tolist() == [True, False]


def test_an_option_that_is_not_finite_decides_nothing(tiny_model, tokenizer):
    broken = changed(tiny_model, rows("embed", (tokenizer.convert_tokens_to_ids("B"),), np.nan))
    # The last token of an option is only predicted: B must be read for its embedding to matter.
    asked = [prompt("Which?", answers=("AA",), gold="A", options=("AA", "BB"))]
    correct, log_likelihood = OptionScorer(broken, tokenizer, asked)(ONES)
    assert not correct.any() and np.isnan(log_likelihood).all()


@pytest.mark.parametrize("metric", ["prefix", "substring"])
def test_an_evaluation_is_an_error_and_no_percentage(tiny_model, tokenizer, metric):
    task, broken = KeyValue(2, key_length=1), changed(tiny_model, DAMAGED["NaN in a query"][0])
    examples, candidates = task.examples("test", 2, 0), [Candidate("factors", lj.LayerFactors.uniform(1.3, 3))]
    with pytest.raises(NotFinite, match="the model's logits are not finite: first in layer 1"):
        evaluate(broken, tokenizer, task, examples, [(0, 0)], candidates, Conditions((metric,), max_new_tokens=8))


def test_factors_are_blamed_only_where_the_model_is_sound(tiny_model, tokenizer):
    # Frequencies of up to 3e22: finite as they are, beyond float32 where positions are divided by 1e-20.
    config = replace(tiny_model.config, rope=RopeParameters(rope_theta=1e-30))
    fast = changed(tiny_model, lambda model: setattr(model, "config", config))
    factors = lj.LayerFactors.uniform(1e-20, 3)
    said = r"the logits are not finite with these factors \(.*1e-20 1e-20 1e-20\): first in layer 0; use factors nearer to 1"
    assert first_bad_layer(fast, IDS) is None and np.isfinite(lj.logits(fast, [IDS])).all()
    with pytest.raises(NotFinite, match=said):
        lj.logits(fast, [IDS], factors)
    with pytest.raises(NotFinite, match=said):
        lj.generate(fast, tokenizer, "hello", factors, max_new_tokens=2)
    task = KeyValue(2, key_length=1)
    with pytest.raises(NotFinite, match=said.replace(".*", "mine: ")):
        evaluate(fast, tokenizer, task, task.examples("test", 1, 0), [(0, 0)], [Candidate("mine", factors)])


@pytest.mark.long
@pytest.mark.promotes  # optax
def test_what_learns_from_text_names_the_model(tiny_model, tokenizer):
    broken = changed(tiny_model, DAMAGED["NaN in a query"][0])
    with pytest.raises(NotFinite, match="the model's logits are not finite: first in layer 1"):
        train_router(broken, np.array([IDS], np.int32), steps=1, batch=1, microbatch=1)
    with pytest.raises(NotFinite, match="the model's logits are not finite: first in layer 1"):
        text_windows(None, broken, tokenizer, seed=0, length=4)


def test_logits_inside_a_program_are_not_looked_at(tiny_model):
    broken = changed(tiny_model, DAMAGED["NaN in a query"][0])
    assert np.isnan(jax.jit(lj.logits)(broken, jnp.array([IDS]), jnp.ones(3))).any()
    gradient = jax.grad(lambda factors: lj.logits(tiny_model, jnp.array([IDS]), factors).sum())(jnp.ones(3))
    assert np.isfinite(gradient).all()
