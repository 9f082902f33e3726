"""Tokenizers out of GGUF files against recorded ids, a plain reimplementation and transformers' own classes."""

from pathlib import Path

import gguf
import pytest
import regex
from tokenizers.pre_tokenizers import ByteLevel

from lpes_jax.errors import UserError
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.tokenizer import encode_text, load_tokenizer

TEXTS = [
    "Hello, my name is", "The capital of France is", "a  b", "   three spaces", "tail  ", "12345", "x=3.14e-10 2024",
    "don't I'll THEY'RE", "héllo wörld", "日本語 と 🙂🚀", "line\n\n\tindented\r\n", "Ω≈ç√ ½ ²³", '{"key": "3f2a-99"}', "", " ",
]  # fmt: skip
# From the converter's choice of types in gguf-py: 1 normal, 3 control, 4 user defined.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ Ġ", "Ã ©", "' L", "'L L"]
ALPHABET = sorted(ByteLevel.alphabet())
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<s>", "</s>", "<tool>"]
IDS = {token: index for index, token in enumerate(TOKENS)}


def write(path: Path, **changes) -> Path:
    """A GGUF file with a vocabulary of bytes and a few merges; `changes` replaces (None: leaves out) keys of its tokenizer."""
    keys = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": MERGES, "bos_token_id": IDS["<s>"],
        "token_type": [NORMAL] * (len(TOKENS) - 3) + [CONTROL, CONTROL, USER_DEFINED], "eos_token_id": IDS["</s>"],
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (keys | changes).items():
        if value is not None:
            kind = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
            kind[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_ids(text: str, tokens: list[str], merges: list[str], splits: list[str]) -> list[int]:
    """Byte-level BPE in plain Python, with llama.cpp's regular expressions for cutting text into words."""
    words = [text]
    for split in splits:
        words = [part for word in words for part in regex.findall(f"(?:{split})|(?:(?!{split}).)+", word, flags=regex.DOTALL)]
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    rank = {tuple(merge.split(" ")): index for index, merge in enumerate(merges)}
    ids = {token: index for index, token in enumerate(tokens)}
    result = []
    for word in words:
        parts = [alphabet[byte] for byte in word.encode()]
        while pairs := [pair for pair in zip(parts, parts[1:], strict=False) if pair in rank]:
            first, second = min(pairs, key=rank.__getitem__)
            merged, at = [], 0
            while at < len(parts):
                both = parts[at : at + 2] == [first, second]
                merged.append(first + second if both else parts[at])
                at += 2 if both else 1
            parts = merged
        result += [ids[part] for part in parts]
    return result


# Of LLAMA_VOCAB_PRE_TYPE_SMOLLM in llama.cpp.
SMOLLM_SPLITS = [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


def test_smollm_ids_are_those_of_the_original(tokenizer):
    assert encode_text(tokenizer, "Hello, my name is") == [19556, 28, 957, 1462, 314]
    assert encode_text(tokenizer, "The capital of France is") == [504, 3575, 282, 4649, 314]
    assert encode_text(tokenizer, " 2024") == [216, 34, 32, 34, 36]  # digits one by one, the space by itself
    assert encode_text(tokenizer, "<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert len(tokenizer) == 49152
    names = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_smollm_ids_are_those_of_a_plain_reimplementation(tokenizer, smollm2_path):
    metadata = GgufFile.open(smollm2_path).metadata
    vocabulary = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    for text in TEXTS:
        ids = encode_text(tokenizer, text)
        assert ids == reference_ids(text, *vocabulary, SMOLLM_SPLITS)
        assert tokenizer.decode(ids) == text


def test_smollm_chat_template(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert encode_text(tokenizer, text).count(1) == 3
    assert tokenizer.decode(encode_text(tokenizer, text), skip_special_tokens=True).startswith("system\nBe brief.\nuser\n")


def test_a_saved_tokenizer_folder_gives_the_same_ids(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", add_bos_token=True))
    tokenizer.save_pretrained(tmp_path / "folder")
    again = load_tokenizer(tmp_path / "folder")
    for text in [*TEXTS, "hello 12 <tool></s>"]:
        assert encode_text(again, text) == encode_text(tokenizer, text)


def test_smollm_cuts_digits_and_qwen2_does_what_transformers_does(tmp_path):
    from transformers import Qwen2Tokenizer

    smollm = load_tokenizer(write(tmp_path / "m.gguf"))
    qwen = load_tokenizer(write(tmp_path / "m.gguf", pre="qwen2"))
    original = Qwen2Tokenizer(vocab=IDS, merges=[tuple(merge.split(" ")) for merge in MERGES])
    for text in [*TEXTS, "hello hello", "I'LL", "e\u0301"]:
        assert qwen.encode(text) == original.encode(text, add_special_tokens=False)
        assert smollm.encode(text) == reference_ids(text, TOKENS, MERGES, SMOLLM_SPLITS)
    assert smollm.encode("12") == [IDS["1"], IDS["2"]]
    assert qwen.encode("e\u0301") == [IDS["Ã©"]] != smollm.encode("e\u0301")  # NFC makes one character of two
    assert qwen.encode("x'LL")[1:] == [IDS["'LL"]] and smollm.encode("x'LL")[1:] == [IDS["'"], IDS["L"], IDS["L"]]


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf"))
    ids = encode_text(tokenizer, "hello<tool></s>")
    assert ids == [IDS["hello"], IDS["<tool>"], IDS["</s>"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"
    assert tokenizer.pad_token is None and tokenizer.unk_token is None


def test_bos_stands_once_and_only_where_the_file_says_so(tmp_path):
    without = load_tokenizer(write(tmp_path / "m.gguf"))
    assert encode_text(without, "hello") == [IDS["hello"]]
    assert encode_text(without, "<s>hello") == [IDS["<s>"], IDS["hello"]]
    adding = load_tokenizer(write(tmp_path / "m.gguf", add_bos_token=True))
    assert encode_text(adding, "hello") == [IDS["<s>"], IDS["hello"]]
    assert encode_text(adding, "<s>hello") == [IDS["<s>"], IDS["hello"]]
    assert adding.encode("hello", add_special_tokens=False) == [IDS["hello"]]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model": "llama", "pre": None}, "model 'llama'.*tokenizer.json"),
        ({"pre": "llama-bpe"}, "pre 'llama-bpe'.*only.*'smollm' or 'qwen2'.*beside"),
        ({"pre": None}, "pre None"),
        ({"pre": ["smollm"]}, "pre"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["h e", "no such"]}, "tokenizer.ggml.merges do not fit"),
        ({"merges": ["hello"]}, "tokenizer.ggml.merges"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id=1000000"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token"),
    ],
)
def test_tokenizers_that_are_not_understood_are_refused(tmp_path, changes, named):
    path = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(UserError, match=named) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_tokenizer_files_beside_a_gguf_are_taken(tmp_path):
    load_tokenizer(write(tmp_path / "good.gguf")).save_pretrained(tmp_path / "folder")
    path = write(tmp_path / "folder" / "m.gguf", pre="llama-bpe")
    assert encode_text(load_tokenizer(path), "hello") == [IDS["hello"]]


def test_folders_without_a_readable_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path}: the tokenizer cannot be read"):
        load_tokenizer(tmp_path)
