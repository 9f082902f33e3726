"""Greedy generation with a cache against a full pass for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama import generate
from lpes_jax.models.llama.attention import cached_attention
from lpes_jax.models.llama.method import table_method
from lpes_jax.rope import rope_table

NEW = 10
FACTORS = [1.0, 2.5, 1.5]


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, 300, length).tolist() for length in lengths]


def without_cache(
    model: lj.Llama, prompts: list[list[int]], factors: lj.LayerFactors | None, count: int = NEW
) -> list[list[int]]:
    """Every token from a pass over all tokens before it, at position prompt length + number of new tokens."""
    rows = [list(prompt) for prompt in prompts]
    width = max(map(len, rows)) + count
    for _ in range(count):
        tokens = np.full((len(rows), width), 299, np.int32)  # padding that a mistake would show
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        logits = np.asarray(lj.logits(model, jnp.asarray(tokens), factors))
        for row, ids in enumerate(rows):
            last = np.sort(logits[row, len(ids) - 1])
            assert last[-1] - last[-2] > 1e-3  # no tie that rounding may decide
            ids.append(int(logits[row, len(ids) - 1].argmax()))
    return [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.parametrize("factors", [None, lj.LayerFactors(np.array(FACTORS))], ids=["plain", "factors"])
@pytest.mark.parametrize("lengths", mostly_long([(31,), (32,), (33,), (5, 33, 17, 1)], (5, 33, 17, 1)), ids=str)
def test_cache_equals_full_recompute(tiny_model, lengths, factors):
    prompts = prompts_of(*lengths)
    values = None if factors is None else factors.factors
    assert generate_ids(tiny_model, prompts, factors=values, max_new_tokens=NEW) == without_cache(tiny_model, prompts, factors)


FINER = [("layer_group", (3, 2)), ("layer_group_band", (3, 2, 4)), ("layer_band", (3, 4))]


@pytest.mark.parametrize("granularity, shape", mostly_long(FINER, FINER[1], names=2))
def test_cache_equals_full_recompute_with_finer_factors(tiny_model, granularity, shape):
    prompts = prompts_of(12, 30)
    factors = lj.LayerFactors(np.random.default_rng(0).uniform(1, 3, shape), granularity)
    cached = generate_ids(tiny_model, prompts, factors=factors.factors, granularity=granularity, max_new_tokens=NEW)
    assert cached == without_cache(tiny_model, prompts, factors)


def test_factors_change_what_is_generated(tiny_model):
    prompts = prompts_of(31)
    assert generate_ids(tiny_model, prompts, factors=np.array(FACTORS), max_new_tokens=NEW) != generate_ids(
        tiny_model, prompts, max_new_tokens=NEW
    )


def test_one_model_with_factors_a_then_b_equals_fresh_b(tiny_model):
    prompts = prompts_of(31, 20)
    first, second = np.array([1.0, 2.0, 1.0]), np.array([3.0, 1.0, 2.0])
    wanted = without_cache(tiny_model, prompts, lj.LayerFactors(second))
    generate_ids(tiny_model, prompts, factors=first, max_new_tokens=NEW)
    assert generate_ids(tiny_model, prompts, factors=second, max_new_tokens=NEW) == wanted


def test_batches_change_nothing(tiny_model):
    prompts = prompts_of(31, 5, 33, 64, 1, 12, 7)
    wanted = generate_ids(tiny_model, prompts, factors=np.array(FACTORS), max_new_tokens=NEW, batch_size=1)
    done = []
    for batch_size in (2, 3, 7):
        outputs = generate_ids(
            tiny_model, prompts, factors=np.array(FACTORS), max_new_tokens=NEW, batch_size=batch_size, on_prompts=done.append
        )
        assert outputs == wanted
    assert sum(done) == 3 * 7
    assert len({tuple(ids) for ids in wanted}) == 7  # each prompt has its own


def test_one_new_token(tiny_model):
    prompts = prompts_of(31, 4)
    assert generate_ids(tiny_model, prompts, max_new_tokens=1) == without_cache(tiny_model, prompts, None, 1)


def test_stop_ids_cut_each_row_where_it_stops(tiny_model):
    prompts = prompts_of(31, 20, 9)
    free = generate_ids(tiny_model, prompts, max_new_tokens=NEW)
    stop = [free[0][3], free[1][6]]

    def cut(ids: list[int]) -> list[int]:
        return ids[: next((index for index, token in enumerate(ids) if token in stop), len(ids))]

    outputs = generate_ids(tiny_model, prompts, max_new_tokens=NEW, stop=stop)
    assert outputs == [cut(ids) for ids in free]
    assert len(outputs[0]) <= 3 and len(outputs[1]) <= 6 and outputs[0] == free[0][: len(outputs[0])]


def test_an_answer_that_stops_at_once_is_empty(tiny_model):
    prompts = prompts_of(31)
    first = generate_ids(tiny_model, prompts, max_new_tokens=1)[0][0]
    assert generate_ids(tiny_model, prompts, max_new_tokens=NEW, stop=[first]) == [[]]


def test_generation_ends_when_every_row_has_stopped(tiny_model, monkeypatch):
    """What follows a stop id is that id, and once all rows have stopped no more passes are made."""
    prompts = prompts_of(8, 8)
    free = generate_ids(tiny_model, prompts, max_new_tokens=NEW)
    stop = [free[0][2], free[1][4]]
    ends = [next(index for index, token in enumerate(ids) if token in stop) for ids in free]
    config, passes = tiny_model.config, []

    def counted(*inputs):
        jax.debug.callback(lambda: passes.append(1))
        return cached_attention(*inputs)

    monkeypatch.setattr(generate, "cached_attention", counted)
    new = generate.greedy(
        tiny_model,
        jnp.array(prompts, jnp.int32),
        jnp.array([8, 8], jnp.int32),
        table_method(rope_table(config.rope, config.head_dim, config.num_layers)),
        jnp.array(stop, jnp.int32),
        61,  # of no other test: it is compiled here, with the counter
    )
    for row, ids, end in zip(np.asarray(new).tolist(), free, ends, strict=True):
        assert row[:end] == ids[:end] and set(row[end:]) == {ids[end]} and len(row) == 61
    jax.effects_barrier()
    assert len(passes) == config.num_layers * max(ends)  # the first token comes from the prompt's own pass
