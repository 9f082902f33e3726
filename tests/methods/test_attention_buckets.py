"""Attention Buckets against plain passes merged by hand, its bases, and methods through scoring and generation alike."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.generation import generate_ids
from lpes_jax.methods import Maker
from lpes_jax.methods.attention_buckets import (
    BASES,
    Merge,
    attention_buckets,
    choose_bases,
    peaks_of,
    troughs_of,
    wave,
)
from lpes_jax.methods.tables import dynamic_ntk, lpes, yarn
from lpes_jax.models.llama.method import Method, table_method
from lpes_jax.models.llama.model import hidden_states, method_logits, over_tables
from lpes_jax.prefixes import pack_rows
from lpes_jax.rope import RopeParameters, rope_table
from lpes_jax.scores import batch_scores
from lpes_jax.text_nll import token_nll

LENGTH = 512
WIDTH, NEW = 32, 7
THETAS = (10_000.0, 17_000.0, 90.0)
SETTINGS = [(weights, mix) for weights in ("max_logit", "max_probability") for mix in ("logits", "probabilities")]


@jax.jit
def logits_of(model: lj.Llama, tokens: jax.Array, method: Method) -> jax.Array:
    return method_logits(model, over_tables(partial(hidden_states, model, tokens), method.tables), method)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, 300, length).tolist() for length in lengths]


def plain_logits(model: lj.Llama, rows: Sequence[Sequence[int]], theta: float) -> np.ndarray:
    """[B, WIDTH, V] of the plain model with another theta; after a row's end is padding."""
    tokens = np.full((len(rows), WIDTH), 299, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    table = rope_table(RopeParameters(theta), model.config.head_dim, model.config.num_layers)
    return np.asarray(logits_of(model, jnp.asarray(tokens), table_method(table)), np.float64)


def merged_by_hand(runs: list[np.ndarray], weights: str, mix: str) -> np.ndarray:
    """The merge of one position's logits [V] of each run, in float64, a run at a time."""
    probabilities = [np.exp(z - z.max()) / np.exp(z - z.max()).sum() for z in runs]
    confidences = [z.max() if weights == "max_logit" else p.max() for z, p in zip(runs, probabilities, strict=True)]
    total = sum(np.exp(c - max(confidences)) for c in confidences)
    merged = np.zeros_like(runs[0])
    for z, p, c in zip(runs, probabilities, confidences, strict=True):
        merged += np.exp(c - max(confidences)) / total * (z if mix == "logits" else p)
    return merged if mix == "logits" else np.log(merged)


@pytest.fixture(scope="module")
def model(tiny_model) -> lj.Llama:
    """With smaller weights, at which a pass in another order of sums stays within 1e-5."""
    return jax.tree.map(lambda leaf: leaf * 0.4, tiny_model)


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    return prompts_of(WIDTH, WIDTH)


@pytest.fixture(scope="module")
def runs(model, rows) -> list[np.ndarray]:
    """The plain logits of each of THETAS."""
    return [plain_logits(model, rows, theta) for theta in THETAS]


@pytest.mark.parametrize("weights, mix", SETTINGS)
def test_logits_are_those_of_plain_passes_merged_by_hand(model, rows, runs, weights, mix):
    method = attention_buckets(THETAS, False, weights, mix)(model.config, LENGTH)
    found = np.asarray(logits_of(model, jnp.array(rows, jnp.int32), method))
    wanted = np.array([[merged_by_hand([z[b, t] for z in runs], weights, mix) for t in range(WIDTH)] for b in range(2)])
    assert method.passes == len(method.tables.inv_freq) == 3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    plain = runs[0] if mix == "logits" else np.asarray(jax.nn.log_softmax(jnp.asarray(runs[0], jnp.float32)))
    assert (np.abs(found - plain).max(-1)[:, 1:] > 1e-3).all()  # all but the first token, which has no distances
    if mix == "probabilities":
        np.testing.assert_allclose(np.exp(found).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("weights, mix", SETTINGS)
@pytest.mark.parametrize("bases", [(10_000.0,), (10_000.0,) * 3], ids=["one", "equal"])
def test_one_base_and_equal_bases_are_the_plain_model(model, rows, runs, bases, weights, mix):
    method = attention_buckets(bases, weights=weights, mix=mix)(model.config, LENGTH)
    found = np.asarray(logits_of(model, jnp.array(rows, jnp.int32), method))
    plain = jnp.asarray(runs[0], jnp.float32)
    if len(bases) == 1 and mix == "logits":
        np.testing.assert_array_equal(found, plain)
    else:
        wanted = plain if mix == "logits" else jax.nn.log_softmax(plain)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)  # of sums in another order


@pytest.mark.parametrize("weights, mix", SETTINGS)
def test_known_merges(runs, weights, mix):
    merge, run = Merge(weights, mix), jnp.asarray(runs[0], jnp.float32)
    single = run if mix == "logits" else jax.nn.log_softmax(run)
    np.testing.assert_allclose(merge(jnp.stack([run] * 4)), single, rtol=1e-6, atol=2e-6)
    # Raw logits that are higher by 100 say nothing else, but take over where raw logits are the confidence.
    other = jnp.asarray(runs[2], jnp.float32)
    merged, raised = merge(jnp.stack([run, other])), merge(jnp.stack([run, other + 100]))
    if weights == "max_logit":
        single_other = other + 100 if mix == "logits" else jax.nn.log_softmax(other)
        np.testing.assert_allclose(raised, single_other, rtol=1e-6, atol=2e-5)
    else:
        change = np.asarray(raised - merged)  # 100 times the other's weight, for each token of the vocabulary
        np.testing.assert_allclose(change, np.broadcast_to(change[..., :1], change.shape), rtol=0, atol=1e-4)
        assert (change[..., 0] > 20).all() and (change[..., 0] < 80).all() if mix == "logits" else np.abs(change).max() < 1e-4


@pytest.mark.parametrize("weights, mix", mostly_long([SETTINGS[0], SETTINGS[3]], SETTINGS[3], names=2))
def test_generated_tokens_are_those_of_plain_passes_merged_by_hand(model, weights, mix):
    """Each token from full passes over all tokens before it, one a base; batched and one by one."""
    prompts = prompts_of(WIDTH - NEW, 9, 1)
    wanted = [list(ids) for ids in prompts]
    for _ in range(NEW):
        runs = [plain_logits(model, wanted, theta) for theta in THETAS]
        for row, ids in enumerate(wanted):
            merged = merged_by_hand([z[row, len(ids) - 1] for z in runs], weights, mix)
            assert np.diff(np.sort(merged))[-1] > 1e-3  # no tie that rounding may decide
            ids.append(int(merged.argmax()))
    wanted = [ids[len(prompt) :] for ids, prompt in zip(wanted, prompts, strict=True)]
    make = partial(attention_buckets(THETAS, False, weights, mix), model.config)
    assert wanted != generate_ids(model, prompts, max_new_tokens=NEW)
    for batch_size in (1, 3):
        assert generate_ids(model, prompts, make_method=make, max_new_tokens=NEW, batch_size=batch_size) == wanted


AGREEING: dict[str, Maker] = {
    "dynamic": dynamic_ntk(2.0),
    "yarn": yarn(4.0, 16),
    "lpes-dynamic": lpes(lj.LayerFactors(np.array([1.0, 2.5, 1.5])), "dynamic", 2.0),
    "buckets-logits": attention_buckets(THETAS, False),
    "buckets-probabilities": attention_buckets(THETAS, False, "max_probability", "probabilities"),
}


@pytest.mark.parametrize("name", mostly_long(AGREEING, "buckets-probabilities"))
def test_scoring_generation_and_nll_agree(model, name):
    """A method scores its own generated text as right, with the sum of its tokens' log-likelihoods."""
    config, prompts = replace(model.config, max_position_embeddings=16), prompts_of(24, 11)  # beyond its window
    lengths = []

    def make(length: int) -> Method:
        lengths.append(length)
        return AGREEING[name](config, length)

    answers = generate_ids(model, prompts, make_method=make, max_new_tokens=NEW)
    assert lengths == [24 + NEW]
    method = make(24 + NEW)
    wrong = [[*answers[1][:-1], (answers[1][-1] + 1) % 300]]
    batch = pack_rows(list(zip([*prompts, prompts[1]], answers + wrong, strict=True)))
    correct, log_likelihood = jax.jit(batch_scores)(model, batch, method)
    assert correct.tolist() == [True, True, False]
    nll = np.asarray(token_nll(model, batch.tokens, method, chunk=8))
    for row, ids in enumerate([*prompts, prompts[1]]):
        np.testing.assert_allclose(log_likelihood[row], -nll[row, len(ids) : len(ids) + NEW].sum(), rtol=1e-5, atol=1e-4)
    plain = jax.jit(batch_scores)(model, batch, table_method(model.config.rope_table(LENGTH)))[1]
    assert (np.abs(np.asarray(plain) - log_likelihood) > 1e-3).all()


def test_bases_are_relative_to_the_models_theta(tiny_config):
    theta = 500_000.0
    config = replace(tiny_config, rope=RopeParameters(theta))

    def thetas(*settings) -> list[float]:
        tables = attention_buckets(*settings)(config, LENGTH).tables
        assert tables.inv_freq.shape[1:] == (3, 1, 4)
        return (np.asarray(tables.inv_freq)[:, 2, 0, 1] ** -4.0).tolist()  # the second of 4 is theta^(-1/4)

    np.testing.assert_allclose(thetas("rag"), theta * np.array([1, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8]), rtol=1e-5)
    np.testing.assert_allclose(thetas("tool"), theta * np.array([1, 1.75, 1.8, 1.9, 2, 2.5]), rtol=1e-5)
    np.testing.assert_allclose(thetas("rag", False), BASES["rag"], rtol=1e-5)
    np.testing.assert_allclose(thetas((5000.0, 20_000.0)), [theta / 2, theta * 2], rtol=1e-5)


def test_a_rope_type_of_the_models_stays(tiny_config):
    config = replace(tiny_config, rope=RopeParameters(10_000.0, "linear", 4.0), nope_layers=(1,))
    inv_freq = np.asarray(attention_buckets("tool")(config, LENGTH).tables.inv_freq)
    plain = np.asarray(attention_buckets("tool")(tiny_config, LENGTH).tables.inv_freq)
    np.testing.assert_array_equal(inv_freq[:, [0, 2]], plain[:, [0, 2]] / 4)
    assert (inv_freq[:, 1] == 0).all()


def test_other_bases_compile_nothing(model, rows):
    """As many bases, mixed in the same way, are one program."""
    traced = []

    @jax.jit
    def last(method: Method) -> jax.Array:
        traced.append(method.merge)
        return logits_of(model, jnp.array(rows, jnp.int32), method)[:, -1]

    makers = [attention_buckets((10_000.0, theta, 50.0), False) for theta in (20_000.0, 30_000.0, 30_000.0)]
    first, second, again = (np.asarray(last(maker(model.config, LENGTH))) for maker in makers)
    assert len(traced) == 1 and (first != second).any() and (second == again).all()
    last(attention_buckets((10_000.0, 20_000.0, 50.0), False, mix="probabilities")(model.config, LENGTH))
    assert traced == [Merge("max_logit", "logits"), Merge("max_logit", "probabilities")]


def test_unusable_settings_are_refused(tiny_config):
    for bad, message in (
        (lambda: attention_buckets("qa"), "bases 'qa' is not one of rag, tool, nor a list of numbers"),
        (lambda: attention_buckets(()), "one or more numbers above 1, got"),
        (lambda: attention_buckets((10_000.0, 1.0)), "one or more numbers above 1, got"),
        (lambda: attention_buckets((float("inf"),)), "one or more numbers above 1, got"),
        (
            lambda: attention_buckets((1.5,))(tiny_config.__class__(**vars(tiny_config) | {"rope": RopeParameters(100.0)}), 9),
            "1.5",
        ),
        (lambda: attention_buckets(weights="entropy"), "weights='entropy' is not one of max_logit, max_probability"),
        (lambda: attention_buckets(mix="hidden"), "mix='hidden' is not one of logits, probabilities"),
        (lambda: choose_bases(1e4, 128, distances=(300, 300)), "the search needs"),
    ):
        with pytest.raises(lj.UserError, match=message) as error:
            bad()
        assert "\n" not in str(error.value)


def test_the_wave_is_attention_between_ones():
    """Rotate a vector of ones by hand: the dot product with itself, `m` tokens apart."""
    base, dim = 10_000.0, 8
    distances = np.array([0, 1, 7, 400])
    for m, found in zip(distances, wave(base, dim, distances), strict=True):
        key, query = np.ones(dim), np.empty(dim)
        for i in range(dim // 2):
            angle = m * base ** (-2 * i / dim)
            query[i], query[i + dim // 2] = np.cos(angle) - np.sin(angle), np.cos(angle) + np.sin(angle)
        np.testing.assert_allclose(found, query @ key / np.sqrt(dim), rtol=1e-12)


def test_peaks_and_troughs_are_those_that_the_released_code_names():
    """The numbers are in its comments, for distances from 1000 to 4090 and a head of 128."""
    distances = np.arange(1000, 4091)
    peaks = {base: distances[peaks_of(wave(base, 128, distances))].tolist() for base in (10_000.0, 18_000.0, 20_000.0)}
    troughs = {base: distances[troughs_of(wave(base, 128, distances))].tolist() for base in (10_000.0, 18_000.0)}
    assert {1835, 2118} < set(peaks[10_000.0]) and 1970 in troughs[10_000.0]
    assert {1451, 1690, 1970} < set(peaks[18_000.0]) and {1805, 2103} < set(troughs[18_000.0])
    assert {1540, 1798, 2098} < set(peaks[20_000.0])
    assert all(len(found) == 6 and found == sorted(found) for found in (*peaks.values(), *troughs.values()))


def test_chosen_bases_fill_troughs():
    """18000 has a peak where 10000 has a trough, at 1970, and is in the published set for tool use."""
    assert choose_bases(10_000.0, 128, 2) == [10_000.0, 18_000.0]
    assert choose_bases(10_000.0, 128, 1) == [10_000.0]
    assert choose_bases(10_000.0, 128, 6, candidates=[17_000.0, 18_000.0]) == [10_000.0, 18_000.0]  # 17000 fills nothing


def test_each_base_is_the_best_of_all_candidates():
    """The rule again, pair by pair, for a model of another theta and head."""
    theta, distances = 500_000.0, np.arange(200, 2001)
    candidates = [theta * step / 20 for step in range(20, 61)]
    peaks = {base: distances[peaks_of(wave(base, 64, distances))].tolist() for base in candidates}
    troughs = {base: distances[troughs_of(wave(base, 64, distances))].tolist() for base in candidates}
    wanted = [theta]
    for count in range(2, 6):
        pairs: dict[float, list[int]] = {}
        for base in candidates:
            for chosen in wanted:
                for trough in troughs[chosen]:
                    covered = any(abs(trough - peak) <= 4 for other in wanted for peak in peaks[other])
                    near = [abs(trough - peak) for peak in peaks[base] if abs(trough - peak) <= 4]
                    if not covered and base not in wanted:
                        pairs.setdefault(base, []).extend(near)
        most = max(map(len, pairs.values()))
        distance = {base: sum(n * n for n in near) / most for base, near in pairs.items() if len(near) == most}
        wanted.append(min(base for base in distance if distance[base] == min(distance.values())))
        assert most > 0 and choose_bases(theta, 64, count, (200, 2000), tolerance=4) == sorted(wanted)
