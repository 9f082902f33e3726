"""When an answer counts as right."""

import pytest

from lpes_jax.tasks.metrics import begins_with, substring


@pytest.mark.parametrize(
    "output, right",
    [
        ("ab-12", True),
        (' "AB-12"}', True),  # framed, and in another case
        ("\n\nThe value is ab-12.", True),  # no first-line rule for key-value retrieval
        ("ab-1", False),
        ("ab 12", False),
        ("", False),
    ],
)
def test_substring(output, right):
    assert substring(output, "ab-12") is right
    assert substring(output, "AB-12") is right


@pytest.mark.parametrize(
    "output, right",
    [([5, 6, 7], True), ([5, 6], True), ([8, 9, 1], True), ([5], False), ([4, 5, 6], False), ([6, 5], False), ([], False)],
)
def test_begins_with(output, right):
    assert begins_with(output, [[5, 6], [8]]) is right
    assert begins_with(tuple(output), ((5, 6), (8,))) is right


def test_begins_with_no_admitted_answer():
    assert begins_with([1, 2], []) is False
