"""Windows over a text, and their likelihoods."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_tokenizer import words

from lpes_jax.errors import UserError
from lpes_jax.tasks.perplexity import Perplexity, Window, perplexity, perplexity_by_position, slide


@given(st.integers(0, 60), st.integers(2, 12), st.integers(1, 12), st.booleans())
def test_every_token_is_scored_once_with_enough_before_it(length, window, stride, bos):
    ids, begin = list(range(length)), [-1] if bos else []
    stride = min(stride, window)
    windows = slide(ids, window, stride, begin)
    scored = [token for part in windows for token in part.ids[part.scored :]]
    reach = windows[-1].ids[-1] + 1 if windows else 0
    overlapping = stride < window - len(begin)
    expected = list(range(0 if bos else 1, reach))
    # Windows that do not overlap leave out the first token of each where no BOS stands before it: nothing predicts it.
    assert scored == (expected if overlapping or bos else [token for token in expected if token % window])
    assert all(len(part.ids) == window and part.ids[: len(begin)] == begin and part.scored >= 1 for part in windows)
    assert all(part.scored >= window - stride for part in windows[1:])
    assert length - reach < max(stride, window) and (windows or length < window)


def test_windows_of_a_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{number}" for number in range(100)), encoding="utf-8")
    task, [ids] = Perplexity(path, window=10, stride=5), words([path.read_text()])["input_ids"]
    search, test, whole = (task.windows(words, split) for split in ("search", "test", "all"))
    assert search[0].ids == ids[:10] and search[-1].ids == ids[30:40] and len(search) == 7
    assert test[0].ids == ids[40:50] and test[-1].ids == ids[90:] and len(test) == 11
    assert len(whole) == 19 and task.windows(words, "all", 3) == whole[:3]
    with pytest.raises(UserError, match="20 windows of 10 tokens asked for, its 'all' part has 19 .100 tokens."):
        task.windows(words, "all", 20)
    with pytest.raises(UserError, match="1 windows of 101 tokens asked for"):
        Perplexity(path, window=101).windows(words, "all")


def test_perplexity_by_hand():
    windows = [Window([5, 6, 7, 8], 1), Window([7, 8, 9, 1], 2)]
    nlls = [np.array([np.nan, math.log(2), math.log(8), 0.0]), np.array([np.nan, 99.0, math.log(4), math.log(2)])]
    assert perplexity(windows, nlls) == pytest.approx(2 ** (7 / 5))
    assert perplexity_by_position(windows, nlls, num_bins=2) == [(0, pytest.approx(2)), (2, pytest.approx(2 ** (6 / 4)))]
    assert perplexity_by_position(windows[1:], nlls[1:], num_bins=4) == [(2, pytest.approx(4)), (3, pytest.approx(2))]


def test_settings_that_cannot_be(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff")
    for settings, message in (
        ({"window": 1}, "--window must be at least 2"),
        ({"window": 8, "stride": 9}, "--stride 9 must be from 1 to --window 8"),
        ({"window": 8, "stride": 0}, "--stride must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            Perplexity(path, **settings)
    with pytest.raises(UserError, match="--data is needed: any text file"):
        Perplexity()
    with pytest.raises(UserError, match="not readable as UTF-8 text"):
        Perplexity(path).windows(words)
