"""ZeroTuning against NumPy, what it must not change, and the heads that a profile chooses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from straight_line import (
    LENGTH,
    LENGTHS,
    PROMPTS,
    assert_decode_is_prefill,
    causal,
    correlation_in_bfloat16,
    generated_and_recomputed,
    logits_of,
    method_logits_of,
    numpy_logits,
    padded,
    random_model,
    turned,
)
from tunings import tuning

from lpes_jax.errors import UserError
from lpes_jax.methods import Maker
from lpes_jax.methods.zero_tuning import choices, reweighted, zero_tuning
from lpes_jax.models.llama.method import AttentionMethod, TableMethod
from lpes_jax.models.llama.model import with_weights
from lpes_jax.prefixes import pack_rows
from lpes_jax.scores import batch_scores


def reference(gammas: np.ndarray):
    """As in the released code: the weights of the first token are multiplied, then all are normalised."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out, shared, positions = np.empty_like(q), q.shape[1] // k.shape[1], np.arange(len(q))
        for head in range(q.shape[1]):
            scores = turned(q[:, head], positions) @ turned(k[:, head // shared], positions).T / np.sqrt(q.shape[-1])
            weights = causal(scores)
            weights[:, 0] *= gammas[layer, head]
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // shared]
        return out

    return attend


def with_gammas(gammas: np.ndarray, kv_heads: int) -> AttentionMethod:
    method = zero_tuning(0.5)(random_model(kv_heads).config, LENGTH)
    assert isinstance(method, AttentionMethod)
    return replace(method, replacement=replace(method.replacement, parameters=jnp.asarray(gammas, jnp.float32)))


@pytest.mark.parametrize(
    "gamma, heads, layers, kv_heads", [(0.25, None, None, 2), (3.0, [1, 2], None, 4), (0.4, [3], [0, 2], 2)]
)
def test_equals_numpy_prompt_by_prompt(gamma, heads, layers, kv_heads):
    """Also: a batch of prompts is the prompts one by one, and the padding is not seen."""
    model, gammas = random_model(kv_heads), np.ones((3, 4))
    gammas[np.ix_(layers or range(3), heads or range(4))] = gamma
    logits, plain = logits_of(model, zero_tuning(gamma, heads, layers)(model.config, LENGTH)), logits_of(model)
    for row, unchanged, ids in zip(logits, plain, PROMPTS, strict=True):
        np.testing.assert_allclose(row[: len(ids)], numpy_logits(model, ids, reference(gammas)), atol=3e-4)
        assert np.abs(row - unchanged)[1 : len(ids)].max() > 1e-2


def test_gamma_1_is_the_plain_model_bit_for_bit():
    """Both where it is the table alone, and where other heads or layers are scaled; the first token sees only itself."""
    model = random_model(2)
    assert isinstance(zero_tuning(1.0)(model.config, LENGTH), TableMethod)
    np.testing.assert_array_equal(logits_of(model, with_gammas(np.ones((3, 4)), 2)), logits_of(model))
    np.testing.assert_allclose(logits_of(model, with_gammas(np.full((3, 4), 9.0), 2))[:, 0], logits_of(model)[:, 0], atol=1e-5)


def test_weights_by_hand():
    """Weights 0.8, 0.2 of values 10 and 20: o = 12. Doubled: 1.6/1.8 and 0.2/1.8; a quarter: 0.5 and 0.5."""
    out, others, first = (jnp.full((1, 1, heads, 1), value) for heads, value in ((2, 12.0), (2, 0.2), (1, 10.0)))
    new = reweighted(jnp.array([2.0, 0.25]), out, others, first)[0, 0, :, 0]
    np.testing.assert_allclose(new, [(1.6 * 10 + 0.2 * 20) / 1.8, 15.0], rtol=1e-6)


@pytest.mark.parametrize("gamma, kv_heads", [(0.3, 2), (4.0, 4)])
def test_cache_equals_full_recompute(gamma, kv_heads):
    model, maker = random_model(kv_heads), zero_tuning(gamma, [0, 3])
    assert_decode_is_prefill(model, maker)
    with_cache, without = generated_and_recomputed(model, maker)
    assert with_cache == without


def test_gammas_can_be_vmapped():
    model = random_model(2)
    gammas = np.random.default_rng(0).uniform(0.2, 3, (2, 3, 4))
    methods = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(with_gammas(values, 2) for values in gammas))
    both = jax.vmap(method_logits_of, in_axes=(None, None, None, 0))(model, padded(PROMPTS), LENGTHS, methods)
    for row, values in zip(both, gammas, strict=True):
        np.testing.assert_allclose(row, logits_of(model, with_gammas(values, 2)), atol=1e-4)


def test_a_teacher_forced_answer_is_scored_like_a_text():
    model, prompt = random_model(2), PROMPTS[0]
    method = zero_tuning(0.3)(model.config, LENGTH)
    answers = [[3, 5, 7], [3, 11, 7], [1, 2, 3], [7, 7, 7]]
    _, scored = jax.jit(batch_scores)(model, pack_rows([(prompt, answer) for answer in answers]), method)
    logits = method_logits_of(model, padded([prompt + answer for answer in answers]), jnp.full(4, 40, jnp.int32), method)
    log_p = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for row, answer, value in zip(log_p, answers, np.asarray(scored), strict=True):
        assert np.isclose(sum(row[39 + offset, token] for offset, token in enumerate(answer)), value, atol=1e-4)


def test_bfloat16_goes_through():
    model = random_model(2)
    assert correlation_in_bfloat16(model, zero_tuning(0.3)(model.config, LENGTH)) > 0.99


def test_what_is_refused():
    for gamma in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="gamma must be a number above 0"):
            zero_tuning(gamma)
    config = random_model(2).config
    with pytest.raises(UserError, match=r"the model's heads are 0 to 3, got \[4\]"):
        zero_tuning(0.5, heads=[4])(config, 16)
    with pytest.raises(UserError, match=r"the model's layers are 0 to 2, got \[\]"):
        zero_tuning(0.5, layers=[])(config, 16)
    sliding = replace(config, sliding_window=16, sliding_layers=(1,))
    zero_tuning(0.5)(sliding, 16)
    with pytest.raises(UserError, match="ZeroTuning .*last 16 tokens"):
        zero_tuning(0.5)(sliding, 17)


class Trials:
    """Scores of a model whose likelihood rises by each head's own amount per unit of its gamma."""

    def __init__(self, effects: list[float]):
        self.effects, self.count = np.array(effects), 0

    def __call__(self, maker: Maker) -> tuple[float, float]:
        self.count += 1
        method = maker(random_model(2).config, 16)
        gammas = np.ones(4) if method.replacement is None else np.asarray(method.replacement.parameters)[0]
        return 0.5, float(self.effects @ gammas)


@pytest.mark.parametrize(
    "effects, heads, up",
    [
        ([1.0, -2.0, 3.0, 2.0], [2, 3], True),  # 40 % of four heads: the two strongest
        ([-1.0, 9.0, -3.0, -0.5], [0, 2], False),
        ([0.0, 0.0, 0.0, -5.0], [3], False),
    ],
)
def test_a_profile_chooses_the_strongest_heads_of_the_commoner_kind(effects, heads, up):
    trials = Trials(effects)
    found = choices(tuning(random_model(2), budget=11, score=trials))
    assert trials.count == 5 and len(found) == 6  # the plain model, four heads, and the rest of the budget
    gammas = []
    for choice in found:
        assert choice.setting.endswith(f"heads {' '.join(map(str, heads))}") and choice.maker is not None
        method = choice.maker(random_model(2).config, 16)
        assert method.replacement is not None
        values = np.asarray(method.replacement.parameters)
        assert np.flatnonzero((values != 1).all(axis=0)).tolist() == heads and (np.delete(values, heads, axis=1) == 1).all()
        gammas.append(values[0, heads[0]])
    end = 4.0 if up else 0.25
    np.testing.assert_allclose(gammas, [end ** (step / 6) for step in range(1, 7)], atol=1e-4)


def test_heads_share_a_trial_if_the_budget_is_small():
    trials = Trials([1.0, 2.0, 3.0, 4.0])
    model = random_model(2)
    assert len(choices(tuning(model, budget=8, score=trials))) == 3 and trials.count == 5
    wide = replace(model.config, num_heads=32, num_kv_heads=8)
    seen = []

    def score(maker: Maker) -> tuple[float, float]:
        method = maker(wide, 16)
        seen.append([] if method.replacement is None else np.flatnonzero(method.replacement.parameters[0] != 1).tolist())
        return 0.0, -float(len(seen))

    larger = with_weights(model)  # a copy, of which only the config is asked
    larger.config = wide
    assert len(choices(tuning(larger, budget=16, score=score))) == 7
    assert seen == [[], *([4 * group + head for head in range(4)] for group in range(8))]


def test_without_a_profile_all_heads_are_scaled():
    """With a small budget, for a task without short answers, and if no head has an effect."""
    for budget, score in ((7, lambda maker: (0.0, -1.0)), (20, lambda maker: None), (20, lambda maker: (0.0, -1.0))):
        found = choices(tuning(random_model(2), budget=budget, score=score))
        assert len(found) == budget and all(choice.setting.endswith("all heads") for choice in found)
