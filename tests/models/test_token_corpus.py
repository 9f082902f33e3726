"""Token ids of a corpus of hard texts, recorded once: they stay as they are.

Always for the bundled model; for SmolLM2 where it can be had; for the two Qwen2.5-Coder models where their .gguf files are
named (in this order, with the system's path separator): LPES_TEST_QWEN_GGUF=qwen-0.5b.gguf:qwen-1.5b.gguf. To record again,
which only another corpus is a reason for:

    LPES_TEST_QWEN_GGUF=... python tests/models/test_token_corpus.py
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lpes_jax.models import zoo
from lpes_jax.models.llama.hard_texts import hard_texts
from lpes_jax.models.llama.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "tokens.json"
QWEN_FILES = [Path(path) for path in os.environ.get("LPES_TEST_QWEN_GGUF", "").split(os.pathsep) if path]
TEXTS = [text for _, text in hard_texts()]


def record(path: Path) -> dict[str, Any]:
    """The ids of every text as a prompt, and a digest of their decoded texts."""
    tokenizer = load_tokenizer(path)
    ids = [tokenizer.encode(text) for text in TEXTS]
    decoded = [tokenizer.decode(row, skip_special_tokens=skip) for row in ids for skip in (False, True)]
    return {"decoded": hashlib.sha256(json.dumps(decoded).encode()).hexdigest(), "ids": ids}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def assert_as_recorded(path: Path, golden: dict[str, Any]) -> None:
    found = record(path)
    others = {text: (new, old) for text, new, old in zip(TEXTS, found["ids"], golden["ids"], strict=True) if new != old}
    assert not others
    assert found["decoded"] == golden["decoded"]


def test_the_corpus_is_the_recorded_one(golden):
    assert golden["texts"] == TEXTS
    assert len(set(TEXTS)) == len(TEXTS) > 300


def test_the_bundled_model(golden):
    assert_as_recorded(zoo.resolve("tiny-retriever"), golden["tiny-retriever"])


def test_smollm2(golden, smollm2_path):
    assert_as_recorded(smollm2_path, golden["smollm2-135m-instruct"])


@pytest.mark.parametrize("number, name", [(0, "0.5b"), (1, "1.5b")])
def test_qwen2_5_coder(golden, number, name):
    """Both have the ids of one vocabulary."""
    if number >= len(QWEN_FILES):
        pytest.skip(f"LPES_TEST_QWEN_GGUF names no file of Qwen2.5-Coder-{name}")
    assert_as_recorded(QWEN_FILES[number], golden["qwen2.5-coder"])


def main() -> None:
    names = {name: zoo.resolve(name) for name in ("tiny-retriever", "smollm2-135m-instruct")}
    smaller, larger = (record(path) for path in QWEN_FILES)
    assert smaller == larger
    golden = {"texts": TEXTS} | {name: record(path) for name, path in names.items()} | {"qwen2.5-coder": smaller}
    lines = json.dumps(golden, separators=(",", ":")).replace("],[", "],\n[").replace('","', '",\n"')
    GOLDEN.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
