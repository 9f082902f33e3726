"""Verdicts without generation, populations and shapes; several devices are in devices/."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_prompts import population_of, prompts_of, with_likely_answers
from selection import mostly_long

import lpes_jax as lj
from lpes_jax import scoring
from lpes_jax.generation import generate_ids
from lpes_jax.scoring import Scorer, round_up
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.metrics import begins_with
from lpes_jax.tasks.prompts import EncodedPrompt, encode


def assert_same(one: scoring.Scores, other: scoring.Scores) -> None:
    assert one.correct.any() and not one.correct.all()
    np.testing.assert_array_equal(one.correct, other.correct)
    np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, rtol=1e-5, atol=1e-4)  # sums of logits up to 20


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, pairs, key_length, counts, top",
    [
        ("smollm2-135m-instruct", 2, 3, (20, 10), 1.3),
        ("tiny-retriever", 6, 8, (150, 30), 1.68),
    ],
)
def test_the_verdict_is_what_greedy_generation_gives(request, name, pairs, key_length, counts, top):
    """Forced opener and admitted openers: `prefix` without generation is begins_with on the generated ids."""
    if name.startswith("smollm2"):
        request.getfixturevalue("smollm2_path")  # skips where it cannot be had
    model, tokenizer = lj.load_model(name, "float32"), lj.load_tokenizer(name)
    factors, all_verdicts = np.linspace(1.0, top, model.config.num_layers), []
    for count, opener in zip(counts, (' "', None), strict=True):
        task = KeyValue(num_pairs=pairs, key_length=key_length, answer_opener=opener)
        examples = task.examples("all", count, seed=0)
        prompts = [task.prompt(example, index % pairs) for index, example in enumerate(examples)]
        encoded = encode(prompts, tokenizer, model.config.max_position_embeddings)
        longest = max(len(answer) for prompt in encoded for answer in prompt.answers)
        new = generate_ids(model, [prompt.ids for prompt in encoded], factors=factors, max_new_tokens=longest)
        generated = [begins_with(ids, prompt.answers) for ids, prompt in zip(new, encoded, strict=True)]
        assert Scorer(model, encoded)(factors[None]).correct[0].tolist() == generated
        all_verdicts += generated
    assert 0.1 < np.mean(all_verdicts) < 0.95  # both verdicts are frequent


def test_the_verdict_of_a_tiny_model_is_what_greedy_generation_gives(tiny_model):
    prompts = with_likely_answers(tiny_model, prompts_of(*range(5, 45), answers=(3, 2)))
    new = generate_ids(tiny_model, [prompt.ids for prompt in prompts], max_new_tokens=3)
    generated = [begins_with(ids, prompt.answers) for ids, prompt in zip(new, prompts, strict=True)]
    assert Scorer(tiny_model, prompts)(np.ones((1, 3))).correct[0].tolist() == generated
    assert generated[1::2] == [True] * 20 and generated[::2] == [False] * 20


def test_log_likelihood_equals_numpy_on_the_logits(tiny_model):
    prompts, factors = prompts_of(7, 31, 40), population_of((2, 3))
    scores = Scorer(tiny_model, prompts)(factors)
    for individual, prompt in np.ndindex(2, 3):
        ids, (answer,) = prompts[prompt].ids, prompts[prompt].answers
        tokens = jnp.array([ids + answer], jnp.int32)
        logits = np.asarray(lj.logits(tiny_model, tokens, lj.LayerFactors(factors[individual])), np.float64)[0]
        log_probabilities = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_probabilities -= logits.max(-1, keepdims=True)
        wanted = sum(log_probabilities[len(ids) - 1 + index, token] for index, token in enumerate(answer))
        assert scores.log_likelihood[individual, prompt] == pytest.approx(wanted, rel=2e-5)


def test_admitted_answers_combine_as_any_and_logsumexp(tiny_model):
    prompts = with_likely_answers(tiny_model, prompts_of(9, 20, 29, 12, answers=(3, 1, 2)))
    together = Scorer(tiny_model, prompts)(np.ones((1, 3)))
    separate = [
        Scorer(tiny_model, [EncodedPrompt(prompt.ids, [prompt.answers[index]]) for prompt in prompts])(np.ones((1, 3)))
        for index in range(3)
    ]
    np.testing.assert_array_equal(together.correct, np.any([scores.correct for scores in separate], axis=0))
    assert together.correct[0].tolist() == [False, True, False, True]
    wanted = np.log(np.sum([np.exp(np.float64(scores.log_likelihood)) for scores in separate], axis=0))
    np.testing.assert_allclose(together.log_likelihood, wanted, rtol=1e-5)


SHAPES = [("layer", (3,)), ("layer_band", (3, 4)), ("layer_group", (3, 2))]


@pytest.mark.parametrize("granularity, shape", mostly_long(SHAPES, SHAPES[2], names=2))
def test_a_population_equals_its_individuals(tiny_model, granularity, shape):
    prompts = with_likely_answers(tiny_model, prompts_of(9, 20, 33, 12))
    scorer, factors = Scorer(tiny_model, prompts, population_chunk=4), population_of((6, *shape))
    together = scorer(factors, granularity)
    separate = [scorer(factors[index : index + 1], granularity) for index in range(6)]
    assert_same(together, scoring.Scores(*(np.concatenate(values) for values in zip(*separate, strict=True))))
    assert len(np.unique(together.log_likelihood.round(3), axis=0)) == 6  # individuals differ


@pytest.mark.parametrize("batch_size, chunk", mostly_long([(1, 1), (5, 2), (14, 8)], (5, 2), names=2))
def test_chunk_and_batch_size_change_nothing(tiny_model, batch_size, chunk):
    prompts = with_likely_answers(tiny_model, prompts_of(9, 40, 33, 12, 5, 31, 59, answers=(3, 2)))
    factors = population_of((5, 3))
    wanted = Scorer(tiny_model, prompts)(factors)
    done = []
    scorer = Scorer(tiny_model, prompts, batch_size=batch_size, population_chunk=chunk)
    assert_same(wanted, scorer(factors, on_prompts=done.append))
    assert sum(done) == 5 * 7  # each pair once, though the answers of a prompt may stand in two batches


def compilations(caplog: pytest.LogCaptureFixture) -> int:
    return sum("Compiling" in (text := record.getMessage()) and "_sharded_scores" in text for record in caplog.records)


def test_new_factors_compile_nothing_and_the_count_is_right(tiny_model, caplog):
    prompts = prompts_of(9, 40, 33, 12, 70)
    scoring._sharded_scores.clear_cache()
    scorer = Scorer(tiny_model, prompts, batch_size=2, population_chunk=4)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        scorer(population_of((4, 3)))
        first = compilations(caplog)
        assert first == scorer.compilations == len({round_up(longest) for longest in (15, 43, 73)})
        for seed in range(10):
            scorer(population_of((4, 3), seed))
        assert compilations(caplog) == scorer.compilations == first
        scorer(population_of((4, 3, 4)), "layer_band")
        assert compilations(caplog) == scorer.compilations == 2 * first
        scorer(population_of((7, 3)))  # a slab of four and one of three, filled to four
        assert compilations(caplog) == scorer.compilations == 2 * first


def test_twenty_lengths_and_a_short_last_batch_keep_to_few_shapes(tiny_model, caplog):
    prompts = prompts_of(*range(5, 105, 5), 101)  # 21 prompts in batches of four: the last one short
    scoring._sharded_scores.clear_cache()
    scorer = Scorer(tiny_model, prompts, batch_size=4)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        scores = scorer(population_of((1, 3)))
        assert compilations(caplog) == scorer.compilations <= 4
    assert np.isfinite(scores.log_likelihood).all() and scores.correct.shape == (1, 21)


def test_padded_lengths():
    lengths = np.arange(1, 20_000)
    padded = np.array([round_up(int(length)) for length in lengths])
    assert (padded >= lengths).all() and (padded % 32 == 0).all()
    assert ((padded - lengths) < np.maximum(32, lengths / 8)).all()  # little waste
    assert len(set(padded.tolist())) < 90  # few shapes
    assert [round_up(length) for length in (1, 32, 33, 512, 513, 600, 1024, 1025)] == [32, 32, 64, 512, 576, 640, 1024, 1152]
