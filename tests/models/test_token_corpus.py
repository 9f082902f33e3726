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
from lpes_jax.models.llama.tokenizer import encode_text, load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "tokens.json"
QWEN_FILES = [Path(path) for path in os.environ.get("LPES_TEST_QWEN_GGUF", "").split(os.pathsep) if path]
TEXTS = [text for _, text in hard_texts()]


def record(tokenizer: Any) -> dict[str, Any]:
    """The ids of every text as a prompt, and a digest of their decoded texts."""
    ids = [tokenizer.encode(text) for text in TEXTS]
    decoded = [tokenizer.decode(row, skip_special_tokens=skip) for row in ids for skip in (False, True)]
    return {"decoded": hashlib.sha256(json.dumps(decoded).encode()).hexdigest(), "ids": ids}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return load_tokenizer(smollm2_path)


def assert_as_recorded(tokenizer: Any, golden: dict[str, Any]) -> None:
    found = record(tokenizer)
    others = {text: (new, old) for text, new, old in zip(TEXTS, found["ids"], golden["ids"], strict=True) if new != old}
    assert not others
    assert found["decoded"] == golden["decoded"]


def test_the_corpus_is_the_recorded_one(golden):
    assert golden["texts"] == TEXTS
    assert len(set(TEXTS)) == len(TEXTS) > 300


def test_the_bundled_model(golden):
    assert_as_recorded(load_tokenizer(zoo.resolve("tiny-retriever")), golden["tiny-retriever"])


def test_smollm2(golden, tokenizer):
    assert_as_recorded(tokenizer, golden["smollm2-135m-instruct"])


def test_smollm_ids_are_those_of_the_original(tokenizer):
    assert encode_text(tokenizer, "Hello, my name is") == [19556, 28, 957, 1462, 314]
    assert encode_text(tokenizer, "The capital of France is") == [504, 3575, 282, 4649, 314]
    assert encode_text(tokenizer, " 2024") == [216, 34, 32, 34, 36]  # digits one by one, the space by itself
    assert encode_text(tokenizer, "<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert len(tokenizer) == 49152
    names = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_smollm_chat_template(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert encode_text(tokenizer, text).count(1) == 3
    assert tokenizer.decode(encode_text(tokenizer, text), skip_special_tokens=True).startswith("system\nBe brief.\nuser\n")


@pytest.mark.parametrize("number, name", [(0, "0.5b"), (1, "1.5b")])
def test_qwen2_5_coder(golden, number, name):
    """Both have the ids of one vocabulary."""
    if number >= len(QWEN_FILES):
        pytest.skip(f"LPES_TEST_QWEN_GGUF names no file of Qwen2.5-Coder-{name}")
    assert_as_recorded(load_tokenizer(QWEN_FILES[number]), golden["qwen2.5-coder"])


def main() -> None:
    names = {name: zoo.resolve(name) for name in ("tiny-retriever", "smollm2-135m-instruct")}
    smaller, larger = (record(load_tokenizer(path)) for path in QWEN_FILES)
    assert smaller == larger
    golden = (
        {"texts": TEXTS} | {name: record(load_tokenizer(path)) for name, path in names.items()} | {"qwen2.5-coder": smaller}
    )
    lines = json.dumps(golden, separators=(",", ":")).replace("],[", "],\n[").replace('","', '",\n"')
    GOLDEN.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
