"""Prompts that begin alike: trees against rows one by one, in scores and gradients; and passes that run out of memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import drawn

from lpes_jax import generation, memory, scoring
from lpes_jax.errors import UserError
from lpes_jax.generation import generate_ids
from lpes_jax.methods.attention_buckets import attention_buckets
from lpes_jax.models.llama import model as llama_model
from lpes_jax.models.llama.method import TableMethod, table_method
from lpes_jax.prefixes import (
    Costs,
    Group,
    Row,
    Shape,
    _rounded_up,
    batches,
    cheapest_groups,
    groups_by_prompt,
    make_group,
    pack_groups,
    pack_rows,
    round_up,
)
from lpes_jax.rope import RopeParameters, RopeTable
from lpes_jax.scores import batch_scores
from lpes_jax.scoring import Scorer
from lpes_jax.tasks.prompts import EncodedPrompt

ids = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # three tokens: rows begin alike as often as not


@st.composite
def families(draw) -> list[Row]:
    """Up to four rows of at most 31 tokens, the first or more of them in common."""
    shared = draw(st.lists(st.integers(0, 299), min_size=1, max_size=20))
    return [(shared[: draw(st.integers(1, 20))] + draw(ids), draw(ids)) for _ in range(draw(st.integers(1, 4)))]


@given(families())
@settings(max_examples=drawn(60), deadline=None)
def test_what_an_answer_token_sees_is_its_row(rows):
    tree = make_group(rows, list(range(len(rows))))
    for row, answer_reads in zip(tree.rows, tree.read_index, strict=True):
        prompt, answer = rows[row]
        for number, index in enumerate(tree.read[answer_reads]):
            seen = [j for j in range(index + 1) if index < tree.ends[j]]
            assert tree.tokens[seen].tolist() == prompt + answer[:number]
            assert tree.positions[seen].tolist() == list(range(len(seen)))
    distinct = {tuple(sequence[:end]) for p, a in rows for sequence in [(p + a)[:-1]] for end in range(1, len(sequence) + 1)}
    assert len(tree.tokens) == len(distinct)  # every beginning once


LARGEST: list[Row] = [([7] * 31 + [row] * 25, [8] * 6) for row in range(4)]  # its tree is as wide as any that is drawn


@pytest.fixture(scope="module")
def both_ways(tiny_model):
    """Scores of four rows as a tree (in a batch with the largest tree), and as separate rows; each compiled once."""
    method, score = table_method(tiny_model.config.rope_table(64)), jax.jit(lambda *inputs: batch_scores(*inputs))

    def run(rows: list[Row]):
        filled = LARGEST + rows + [rows[0]] * (4 - len(rows))
        largest, tree = make_group(filled, [0, 1, 2, 3]), make_group(filled, [4, 5, 6, 7])
        together = score(tiny_model, pack_groups([largest, tree], filled), method)
        separate = score(tiny_model, pack_rows([filled[row] for row in tree.rows] + LARGEST[:1], 6), method)
        return [np.asarray(values)[4:] for values in together], [np.asarray(values)[:4] for values in separate]

    yield run
    assert score._cache_size() == 2


BEFORE = list(range(50, 90))  # what all roots begin with, and more than is left of them


@pytest.fixture(scope="module")
def both_ways_cut(tiny_model):
    """Scores of four rows that begin with `BEFORE`: as a tree cut to a root of 32 tokens, and as rows. Each compiles once."""
    method, score = table_method(tiny_model.config.rope_table(192)), jax.jit(lambda *inputs: batch_scores(*inputs))

    def run(rows: list[Row]):
        filled = rows + [rows[0]] * (4 - len(rows))
        tree = make_group(filled, [0, 1, 2, 3])
        assert tree.prefix > 32
        packed = pack_groups([tree], filled, 6, Shape(32, 160, 24, 4))
        separate = pack_rows([filled[row] for row in tree.rows], 6, longest=96)
        return [[np.asarray(values) for values in score(tiny_model, batch, method)] for batch in (packed, separate)]

    yield run
    assert score._cache_size() == 2


@given(families())
@settings(max_examples=drawn(40), deadline=None)
def test_a_tree_of_rows_scores_like_separate_rows(both_ways, rows):
    (correct, log_likelihood), (alone_correct, alone_likelihood) = both_ways(rows)
    np.testing.assert_array_equal(correct, alone_correct)
    np.testing.assert_allclose(log_likelihood, alone_likelihood, atol=1e-4, rtol=1e-5)


def haystacks(questions: int, length: int = 60, count: int = 3, seed: int = 0) -> list[EncodedPrompt]:
    """Prompts of `count` haystacks, a few tokens longer or shorter, with questions about each; a header before them all."""
    rng = np.random.default_rng(seed)

    def random(size: int) -> list[int]:
        return rng.integers(0, 300, size).tolist()

    header, bodies = random(4), [random(length + index) for index in range(count)]
    return [EncodedPrompt(header + body + random(5), [random(3)]) for body in bodies for _ in range(questions)]


def rows_of(prompts: list[EncodedPrompt]) -> list[Row]:
    return [(prompt.ids, answer) for prompt in prompts for answer in prompt.answers]


def test_groups_are_cut_where_sharing_pays(tiny_config):
    costs = Costs.of(tiny_config, "cpu")

    def found(prompts, most_tokens=10**6) -> list[list[int]]:
        return sorted(sorted(group) for group in cheapest_groups(rows_of(prompts), costs, most_tokens))

    prompts = haystacks(5)
    assert found(prompts) == [[*range(start, start + 5)] for start in (0, 5, 10)]
    mixed = [prompts[index] for index in (10, 0, 5, 1, 11, 6)]
    assert found(mixed) == [[0, 4], [1, 3], [2, 5]]  # whatever their order
    assert found(haystacks(1)) == [[0], [1], [2]]  # a header alone is not worth it
    assert found(prompts, most_tokens=90) == [[index] for index in range(15)]
    small = cheapest_groups(rows_of(prompts), costs, 128)
    assert sorted(index for group in small for index in group) == [*range(15)] and max(map(len, small)) > 1
    assert all(sum(make_group(rows_of(prompts), group).shape) <= 128 for group in small)
    twice = [EncodedPrompt(prompt.ids, prompt.answers * 2) for prompt in haystacks(1)]
    assert found(twice) == [[0, 1], [2, 3], [4, 5]]


LONGROPE = RopeParameters(
    1e4, "longrope", 4.0, original_max_position_embeddings=48, short_factor=(1.0,) * 4, long_factor=(1.0, 1.5, 2.0, 4.0)
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"rope": RopeParameters(1e4, "dynamic", 4.0, original_max_position_embeddings=48)}, marks=pytest.mark.long
        ),
        {"rope": LONGROPE, "sliding_window": 24, "sliding_layers": (1,)},
        pytest.param({"sliding_window": 24, "sliding_layers": (0, 1, 2)}, marks=pytest.mark.long),
    ],
    ids=["dynamic", "longrope, and a window in one layer", "windows"],
)
def test_the_scorer_shares_and_changes_no_score(tiny_model, monkeypatch, changes):
    model = nnx.merge(*nnx.split(tiny_model))
    model.config = replace(tiny_model.config, **changes)
    prompts = haystacks(4)
    likely = generate_ids(model, [prompt.ids for prompt in prompts[::2]], max_new_tokens=3)
    prompts[::2] = [EncodedPrompt(p.ids, [new, *p.answers]) for p, new in zip(prompts[::2], likely, strict=True)]
    factors = np.array([[1, 1, 1], [1.3, 1, 1.7], [2, 1.5, 1]])
    plain = Scorer(model, prompts, share_prefixes=False)
    wanted = plain(factors)
    assert plain.tokens_saved == 0 and wanted.correct[0, ::2].all() and not wanted.correct.all()
    monkeypatch.setattr(llama_model, "_SHORT", 0)  # the last layer where it is read, and no further
    shared, done = Scorer(model, prompts), []
    scores = shared(factors, on_prompts=done.append)
    assert 0.6 < shared.tokens_saved < 0.8 and sum(done) == 3 * 12
    np.testing.assert_array_equal(scores.correct, wanted.correct)
    np.testing.assert_allclose(scores.log_likelihood, wanted.log_likelihood, atol=1e-4, rtol=1e-5)


def test_a_method_of_several_tables_shares_as_well(tiny_model):
    prompts, own = haystacks(4), tiny_model.config.rope_table(80)
    tables = RopeTable(own.inv_freq / jnp.array([1.0, 1.5])[:, None, None, None], jnp.ones(2))
    method = TableMethod(tables, merge=mean)
    one, other = (Scorer(tiny_model, prompts, share_prefixes=share).method_scores(method) for share in (True, False))
    np.testing.assert_array_equal(one.correct, other.correct)
    np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, atol=1e-4, rtol=1e-5)


def mean(logits: jax.Array) -> jax.Array:
    return logits.mean(axis=0)


@pytest.mark.long
def test_gradients_of_a_tree_are_those_of_its_rows(tiny_model):
    rows, table = rows_of(haystacks(3, length=40, count=2)), tiny_model.config.rope_table(64)
    trees = [make_group(rows, [0, 1, 2]), make_group(rows, [3, 4])]  # the second has padding of every kind
    packed = pack_groups(trees, rows)
    kept = jnp.array([True] * 5 + [False])

    def loss(batch, factors, remat: bool):
        scaled = RopeTable(table.inv_freq / factors, table.attention_scaling)
        log_likelihood = batch_scores(tiny_model, batch, table_method(scaled), remat=remat)[1]
        return jnp.where(kept[: len(log_likelihood)], log_likelihood, 0).sum()

    factors = jnp.array([1.0, 1.2, 1.5])[:, None, None] * jnp.ones((3, 1, 4))
    gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=2)
    wanted = gradient(pack_rows([rows[row] for tree in trees for row in tree.rows]), factors, False)
    assert float(jnp.abs(wanted).max()) > 1
    np.testing.assert_allclose(gradient(packed, factors, True), wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))


# Memory


def test_a_pass_that_runs_out_of_memory_is_done_again_in_smaller_ones(tiny_model, monkeypatch):
    prompts, factors = haystacks(5), np.array([[1.0, 1, 1], [1.3, 1, 1.7], [2, 1.5, 1], [1, 2, 1]])
    wanted = Scorer(tiny_model, prompts)(factors)
    run, passes, room = scoring._sharded_scores, [], 100

    def in_little_memory(model, batch, factors, *more):
        passes.append(len(factors) * batch.groups.tokens.size)
        if passes[-1] > room:
            return (jnp.zeros(2**44),) * 2  # XLA's own error
        return run(model, batch, factors, *more)

    monkeypatch.setattr(scoring, "_sharded_scores", in_little_memory)
    scorer, done = Scorer(tiny_model, prompts, batch_size=6, population_chunk=4), []
    scores = scorer(factors, on_prompts=done.append)
    halved = passes.index(128) + 1  # one individual, one tree, and still too much: smaller trees from here on
    assert passes[:halved] == [4 * 384, 2 * 384, 384, 128] and max(passes[halved:]) == 96 and sum(done) == 4 * 15
    np.testing.assert_array_equal(scores.correct, wanted.correct)
    np.testing.assert_allclose(scores.log_likelihood, wanted.log_likelihood, atol=1e-4, rtol=1e-5)
    scorer(factors)
    assert max(passes[halved:]) == 96  # it remembers
    room = 8
    with pytest.raises(UserError, match=r"does not hold one prompt of \d+ tokens"):
        scorer(factors)
    monkeypatch.setattr(scoring, "_sharded_scores", lambda *inputs: jnp.zeros(3) @ jnp.zeros(4))
    with pytest.raises(TypeError):  # all else is not hidden
        scorer(factors)


def test_a_method_of_several_tables_gets_passes_as_small_as_it_needs(tiny_model, monkeypatch):
    prompts, method = haystacks(2), attention_buckets((10_000.0, 20_000.0, 30_000.0), False)
    scorer = Scorer(tiny_model, prompts)
    method = method(tiny_model.config, scorer.longest)
    wanted, run, passes, room = scorer.method_scores(method), scoring._method_scores, [], 400

    def in_little_memory(model, batch, method, mesh):
        passes.append(3 * batch.groups.tokens.size)
        return (jnp.zeros(2**44),) * 2 if passes[-1] > room else run(model, batch, method, mesh)

    monkeypatch.setattr(scoring, "_method_scores", in_little_memory)
    scores = scorer.method_scores(method)
    failed = [number for number, tokens in enumerate(passes) if tokens > room]
    assert 1 <= len(failed) < 4 and len(passes) > failed[-1] + 1  # then smaller ones, to the end
    np.testing.assert_array_equal(scores.correct, wanted.correct)
    np.testing.assert_allclose(scores.log_likelihood, wanted.log_likelihood, atol=1e-4, rtol=1e-5)
    room = 8
    with pytest.raises(UserError, match=r"does not hold one prompt of \d+ tokens"):
        scorer.method_scores(method)
    monkeypatch.setattr(scoring, "tokens_worth_it", lambda model, length: 3 * 128)
    monkeypatch.setattr(scoring, "_method_scores", in_little_memory)
    room, passes[:] = 3 * 128, []
    Scorer(tiny_model, prompts).method_scores(method)
    assert max(passes) <= room  # planned so, not found out


@pytest.mark.long
def test_few_individuals_are_scored_by_few_programs(tiny_model, monkeypatch):
    prompts = [prompt for length in (20, 60, 150, 300) for prompt in haystacks(1, length=length, count=3)]
    monkeypatch.setattr(scoring, "tokens_of_a_compilation", lambda model: 6000)
    factors = np.ones((1, 3), np.float32)
    many, few = Scorer(tiny_model, prompts, individuals=1000), Scorer(tiny_model, prompts, individuals=1)
    np.testing.assert_allclose(few(factors).log_likelihood, many(factors).log_likelihood, atol=1e-4, rtol=1e-5)
    assert few.compilations == 1 < many.compilations


def test_generation_compiles_another_width_if_that_saves_time(tiny_model, monkeypatch):
    prompts = [prompt.ids for length in (20, 150) for prompt in haystacks(1, length=length, count=2)]
    run, widths = generation.continuation, []

    def noted(model, tokens, *more):
        widths.append(tokens.shape[1])
        return run(model, tokens, *more)

    monkeypatch.setattr(generation, "continuation", noted)
    wanted = generate_ids(tiny_model, prompts, max_new_tokens=3, batch_size=2)
    assert len(set(widths)) == 1  # a program costs more than all of these prompts
    monkeypatch.setattr(generation, "tokens_of_a_compilation", lambda model: 100)
    assert generate_ids(tiny_model, prompts, max_new_tokens=3, batch_size=2) == wanted
    assert widths[2] > widths[3]


def test_generation_that_runs_out_of_memory_goes_on_with_fewer_prompts(tiny_model, monkeypatch):
    prompts = [prompt.ids for prompt in haystacks(1, length=20, count=5)]
    wanted = generate_ids(tiny_model, prompts, max_new_tokens=3)
    run, sizes = generation.continuation, []

    def in_little_memory(model, tokens, *more):
        sizes.append(len(tokens))
        return jnp.zeros(2**44) if len(tokens) > 2 else run(model, tokens, *more)

    monkeypatch.setattr(generation, "continuation", in_little_memory)
    assert generate_ids(tiny_model, prompts, max_new_tokens=3) == wanted
    assert sizes == [5, 3, 2, 2, 2]


def test_the_model_of_memory_is_near_what_the_compiler_takes(tiny_model):
    rows = [([7] * 500, [8] * 8)] * 4
    leaves, structure = jax.tree.flatten((tiny_model, pack_rows(rows), table_method(tiny_model.config.rope_table(512))))
    scores = jax.jit(lambda *leaves: batch_scores(*jax.tree.unflatten(structure, leaves)))
    taken = scores.lower(*leaves).compile().memory_analysis().temp_size_in_bytes
    assert 0.5 < memory.pass_memory(tiny_model).bytes(4 * 512, 4 * 8) / taken < 4
    assert memory.pass_memory(tiny_model, cached=True).bytes(100, 1) > memory.pass_memory(tiny_model).bytes(100, 1)
    assert memory.tokens_that_fit(tiny_model, 10**12, 1) == 10**12  # one row at least


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=60),
    st.integers(32, 2000),
    st.integers(1, 4),
    st.sampled_from([None, 1, 3]),
)
def test_batches_contain_every_tree_once_within_the_room_and_pad_less_than_one_shape_for_all(shapes, room, shards, most):
    trees = [
        Group([i], *(np.zeros(prefix + branches, int),) * 3, prefix, np.zeros(1, int), [np.zeros(1, int)])
        for i, (prefix, branches) in enumerate(shapes)
    ]
    costs = Costs(50.0, 1.0, 2.0)
    cost, found = batches(trees, room, costs, shards, most)
    assert sorted(row for _, cut in found for batch in cut for tree in batch for row in tree.rows) == list(range(len(trees)))
    for shape, cut in found:
        width = shape.prefix + shape.branches
        [size] = {len(batch) for batch in cut}  # a program a shape
        assert size % shards == 0 and size <= shards * min(most or size, max(1, room // width))
        for batch in cut:  # roots are padded, or what is cut from them fits before the rest
            assert all(max(0, shape.prefix - tree.prefix) + len(tree.tokens) <= width for tree in batch)
        assert all(any(tree.rows for tree in batch) for batch in cut)
    # It costs what it says, and no more than one shape for all.
    own = sum(costs.group(tree.prefix, len(tree.tokens) - tree.prefix) for tree in trees) / costs.token
    read = sum(len(batch) * costs.group(shape.prefix, shape.branches) for shape, cut in found for batch in cut) / costs.token
    np.testing.assert_allclose(cost, read + 0.03 * own * len(found))
    if shards == 1 and most is None:
        roots, branches = np.array([tree.shape for tree in trees]).max(axis=0)
        size = -(-len(trees) // -(-len(trees) // max(1, room // (roots + branches))))
        assert cost <= -(-len(trees) // size) * size * costs.group(roots, branches) / costs.token + 0.03 * own + 1e-6


def test_roots_are_cut_where_padding_them_costs_more():
    rows: list[Row] = [
        (list(range(1000, 1000 + length)) + [index], [9, index, 7]) for index, length in enumerate((700, 860, 1010))
    ]
    rows += [(ids, [9, 8]) for ids, _ in rows]
    trees = [make_group(rows, own_rows) for own_rows in groups_by_prompt(rows)]
    assert sorted(row for tree in trees for row in tree.rows) == list(range(6))
    costs = Costs(1e5, 1.0, 2.0)
    _, [(shape, [batch])] = batches(trees, 2**14, costs, shape_cost=2**14)  # one program
    assert len(batch) == 3 and shape.prefix == 672  # of 701, by 32
    assert shape.prefix + shape.branches == 1024 < 1024 + 32 == sum(Shape.of(trees)[:2])


@given(families())
@settings(max_examples=drawn(40), deadline=None)
def test_a_tree_with_its_root_cut_scores_like_separate_rows(both_ways_cut, rows):
    (correct, log_likelihood), (alone_correct, alone_likelihood) = both_ways_cut(
        [(BEFORE + ids, answer) for ids, answer in rows]
    )
    np.testing.assert_array_equal(correct, alone_correct)
    np.testing.assert_allclose(log_likelihood, alone_likelihood, atol=1e-4, rtol=1e-5)


def test_costs_are_the_multiplications_of_a_layer(tiny_model, tiny_config):
    matrices = [leaf for leaf in jax.tree.leaves(tiny_model.layers) if leaf.ndim == 3]
    cpu, gpu = (Costs.of(tiny_config, platform) for platform in ("cpu", "gpu"))
    assert cpu.token == gpu.token == sum(leaf[0].size for leaf in matrices)
    assert cpu.causal_pair == cpu.masked_pair == gpu.causal_pair == gpu.masked_pair / 2 == 2 * 2 * 6 * 8


def test_all_lengths_are_rounded_up_at_once():
    np.testing.assert_array_equal(_rounded_up(2100), [0, *map(round_up, range(1, 2101))])


def test_a_tree_that_just_fits_is_made(tiny_config):
    """A root of 32 tokens and two branches of 16 are 64 with their padding."""
    root = list(range(32))
    rows: list[Row] = [([*root, *range(100 + n, 115 + n)], [7]) for n in (0, 50)]
    costs = Costs.of(tiny_config, "cpu")
    assert cheapest_groups(rows, costs, 64) == [[0, 1]] and cheapest_groups(rows, costs, 63) == [[0], [1]]
