"""Plain text in windows of several lengths: the split, the windows per step, and the bound by quarter."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_gradient import looks_of, prompts_of, run

from lpes_jax.errors import UserError
from lpes_jax.models.llama.method import table_method
from lpes_jax.rope import RopeTable
from lpes_jax.search.gradient import initial_state, rises_within
from lpes_jax.search.minibatches import Data, draws, pack, windows_per_step
from lpes_jax.search.plain_text import split_windows, text_windows
from lpes_jax.settings.search import GradientSettings, SearchSettings, TextSettings
from lpes_jax.text_nll import token_nll

pytestmark = pytest.mark.promotes


def test_no_token_is_on_both_sides(guesser, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number:04d}," for number in range(1000)), encoding="utf-8")  # a token a byte, 2,000 to search on
    train, held_back = split_windows(text, guesser, tokenizer, 0, (60, 20, 250), 0.25)
    assert [windows.shape[1] for windows in train] == [windows.shape[1] for windows in held_back] == [20, 60, 250]
    last = max(tokenizer.decode(row)[-5:-1] for windows in train for row in windows)
    first = min(tokenizer.decode(row)[:4] for windows in held_back for row in windows)
    assert 280 < int(last) < int(first) <= 310
    # With one length all is as it was: the last windows are held back, newest first.
    [rest], [kept] = split_windows(text, guesser, tokenizer, 0, 64, 0.25)
    whole = text_windows(text, guesser, tokenizer, 0, 64)
    assert (np.concatenate([rest, kept[::-1]]) == whole).all() and len(kept) == -(-len(whole) // 4)
    # The model writes the longest windows, and shorter ones are their beginnings.
    written, held = split_windows(None, guesser, tokenizer, 0, (8, 12), 0.25)
    assert [len(windows) for windows in (*written, *held)] == [48, 48, 16, 16] and (written[0] == written[1][:, :8]).all()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((64, 513), "--text-window 64 513: the model's window is 512 tokens"),
        (600, "--text-window 600: the model's window is 512 tokens"),
        ((64, 64), "--text-window 64 64: give one length from 2 tokens on, or several, each once"),
        ((1, 64), "give one length from 2"),
        (1, "give one length from 2"),
        ((), "give one length"),
        ((16, 500), "--text .*: 1 windows of 500 tokens asked for"),
        ((16, 200), "--text is too short to hold a part back in windows of 200 tokens"),
    ],
)
def test_lengths_that_cannot_be_are_refused(guesser, tokenizer, tmp_path, lengths, message):
    text = tmp_path / "text.txt"
    text.write_text("ten bytes." * 75, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        split_windows(text, guesser, tokenizer, 0, lengths, 0.25)


def test_a_step_has_about_as_many_tokens_of_each_length():
    assert windows_per_step([512], 4) == [4]
    assert windows_per_step([512, 2048, 8192], 4) == [21, 5, 1]
    assert windows_per_step([512, 8192], 1) == [8, 1]
    texts = [jnp.zeros((40, length), jnp.int32) for length in (8, 16)]
    prompts = pack(prompts_of(0, 3), [1.0] * 3)
    [(_, windows)] = [next(draws(Data([prompts], texts), minibatch_size=2, text_minibatch=4, by_weight=False, seed=0))]
    assert [batch.tokens.shape for batch in windows] == [(4, 8), (2, 16)]


def with_texts_of_two_lengths(model):
    """What `looks_of` takes: factors that divide positions, random prompts, and windows of 10 and of 33 tokens."""
    train, held_back = (Data([pack(prompts_of(seed), [0.2, 0.3, 0.5] * 2)]) for seed in (2, 3))
    rng = np.random.default_rng(0)
    texts = [jnp.asarray(rng.integers(1, 250, (4, length)), jnp.int32) for length in (10, 33)]
    own = model.config.rope_table(64)

    def apply(model, parameters):
        return model, RopeTable(own.inv_freq / parameters["y"][:, None, None], own.attention_scaling)

    parameters = {"y": jnp.ones(3)}
    return model, Data(train.tasks, texts), Data(held_back.tasks, texts), parameters, apply, lambda moved: moved


def test_losses_of_lengths_count_alike_and_the_gate_is_by_quarter(tiny_model):
    data = model, _, held_back, parameters, apply, _ = with_texts_of_two_lengths(tiny_model)

    def in_quarters(parameters) -> list[float]:
        nll = np.asarray(token_nll(model, held_back.texts[1], table_method(apply(model, parameters)[1])))[:, 1:]
        return [float(nll[:, first : first + 8].mean()) for first in range(0, 32, 8)]

    settings = GradientSettings(minibatch_size=6, learning_rate=0.02, steps=6, look_every=1)
    text = TextSettings(text_minibatch=1, text_weight=0.5, max_text_loss_rise=0.0)
    looks, best = looks_of(data, settings, text)
    start = in_quarters(looks[0].parameters)
    for measured in looks:
        quarters = in_quarters(measured.parameters)
        assert measured.text_quarters == pytest.approx(quarters, rel=1e-5)
        assert measured.text_losses[1] == pytest.approx(np.mean(quarters), rel=1e-5)
        assert measured.text_loss == pytest.approx(np.mean(measured.text_losses))
        assert measured.loss == pytest.approx(measured.task_losses[0] + 0.5 * measured.text_loss, rel=1e-5)
        rises = np.subtract(measured.text_quarters, looks[0].text_quarters)
        assert measured.allowed == bool((rises <= 0).all()) and np.allclose(rises, np.subtract(quarters, start), atol=1e-4)
    assert best.allowed
    like = initial_state(parameters, 1, 2)
    assert len(like.first_text_quarters) == len(like.best.text_quarters) == 4 and len(like.best.text_losses) == 2


@pytest.mark.long
def test_a_bound_that_no_text_loss_reaches_refuses_nothing(tiny_model):
    settings = GradientSettings(minibatch_size=6, learning_rate=0.02, steps=1, look_every=1)
    text = TextSettings(text_minibatch=1, text_weight=0.5, max_text_loss_rise=9.0)
    assert all(measured.allowed for measured in looks_of(with_texts_of_two_lengths(tiny_model), settings, text)[0])


def test_a_better_text_on_the_whole_is_refused_for_one_worse_quarter():
    first, now = (3.0, 3.0, 3.0, 3.0), (2.5, 2.5, 2.5, 3.02)
    assert not rises_within(0.01, now, first) and rises_within(0.03, now, first) and rises_within(None, now, first)
    assert rises_within(0.0, first, first) and rises_within(0.0, [], [])


@pytest.mark.long
@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_a_search_with_text_at_two_lengths_resumes_to_the_same_history(guesser, tokenizer, tmp_path, objective):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    settings = SearchSettings.of(
        algorithm="gradient", curve="free", num_pairs="2:4", key_length=1, limit=8, test_limit=2, uniform_candidates=2,
        steps=3, look_every=1, minibatch_size=6, text=text, text_weight=0.5, text_window=(32, 96), text_minibatch=1,
        max_text_loss_rise=0.1, output_path=tmp_path / "run", text_objective=objective,
    )  # fmt: skip
    history, result = run(settings, guesser, tokenizer)
    assert [len(line["text_quarters"]) for line in history] == [4] * 4 and len(history[0]["text_losses"]) == 2
    assert [len(line.get("text_divergence", ())) for line in history] == [2 * (objective == "kl")] * 4
    assert len(history[0]["task_losses"]) == 1  # lengths of a range are one task
    lengths = {prompt.num_items for prompt in result.outcomes[0].prompts}
    assert lengths <= {2, 3, 4}
    for name in ("results.json", "factors.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    lines = (tmp_path / "run/history.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/history.jsonl").write_text("".join(lines[:3]))  # the state of step 2 is the one before the last
    assert run(settings.replace(resume=True), guesser, tokenizer)[0] == history
