"""Tokenizers out of GGUF files against recorded ids, a plain reimplementation and transformers' own classes."""

import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import regex
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from lpes_jax.errors import UserError
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.gguf import GgufFile
from lpes_jax.models.llama.tokenizer import encode_text, load_tokenizer, stop_ids
from lpes_jax.tasks.prompts import Prompt, encode

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


def write(path: Path, architecture: str = "llama", **changes) -> Path:
    """A GGUF file with a vocabulary of bytes and a few merges; `changes` replaces (None: leaves out) keys of its tokenizer."""
    keys = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": MERGES, "bos_token_id": IDS["<s>"],
        "token_type": [NORMAL] * (len(TOKENS) - 3) + [CONTROL, CONTROL, USER_DEFINED], "eos_token_id": IDS["</s>"],
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (keys | changes).items():
        if value is not None:
            kind = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
            kind[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_ids(text: str, tokens: list[str], merges: list[str], splits: list[str], ignore_merges: bool = False) -> list[int]:
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
        if ignore_merges and "".join(parts) in ids:
            parts = ["".join(parts)]
        while pairs := [pair for pair in zip(parts, parts[1:], strict=False) if pair in rank]:
            first, second = min(pairs, key=rank.__getitem__)
            merged, index = [], 0
            while index < len(parts):
                both = parts[index : index + 2] == [first, second]
                merged.append(first + second if both else parts[index])
                index += 2 if both else 1
            parts = merged
        result += [ids[part] for part in parts]
    return result


# Of LLAMA_VOCAB_PRE_TYPE_LLAMA3, _TEKKEN and _SMOLLM in llama.cpp.
LLAMA3_SPLITS = [
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
TEKKEN_SPLITS = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
SMOLLM_SPLITS = [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.mark.long
def test_smollm_ids_are_those_of_a_plain_reimplementation(tokenizer, smollm2_path):
    metadata = GgufFile.open(smollm2_path).metadata
    vocabulary = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    for text in TEXTS:
        ids = encode_text(tokenizer, text)
        assert ids == reference_ids(text, *vocabulary, SMOLLM_SPLITS)
        assert tokenizer.decode(ids) == text


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


@pytest.mark.parametrize("pre, splits", [("llama-bpe", LLAMA3_SPLITS), ("tekken", TEKKEN_SPLITS)])
def test_vocabularies_of_tiktoken(tmp_path, pre, splits):
    """A word that is a token is that token, though no merges lead to it; and BOS comes first unless the file says otherwise."""
    tokens = [*TOKENS, "Ġstrange", "123", "helloWorld"]
    types = [NORMAL] * (len(TOKENS) - 3) + [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * 3
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", pre=pre, tokens=tokens, token_type=types))
    for text in [*TEXTS, "hello strange 1234", "path/to//x\n", "helloWorld HELLO"]:
        ids = encode_text(tokenizer, text)
        assert ids == [IDS["<s>"], *reference_ids(text, tokens, MERGES, splits, ignore_merges=True)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode(" strange", add_special_tokens=False) == [tokens.index("Ġstrange")]
    digits = tokenizer.encode("123", add_special_tokens=False)
    assert digits == ([tokens.index("123")] if pre == "llama-bpe" else [IDS["1"], IDS["2"], IDS["3"]])
    without = load_tokenizer(write(tmp_path / "m.gguf", pre=pre, add_bos_token=False))
    assert encode_text(without, "hello") == [IDS["hello"]]
    if pre == "llama-bpe":
        old = load_tokenizer(write(tmp_path / "m.gguf", pre="llama-v3", tokens=tokens, token_type=types))
        assert encode_text(old, "1234 x") == encode_text(tokenizer, "1234 x")


# A SentencePiece vocabulary: unknown, BOS, EOS, the bytes, then pieces whose scores fall from the first to the last.
PIECES = "▁ ▁▁ ▁▁▁▁ ▁t he in ▁a re ▁the ▁s ▁c er on ▁th ▁ca ▁cap it al ▁capit ▁capital ▁is ▁F an ▁Fr ce ance ▁France ▁b".split()
PIECES += [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:'<>|[]éè日本"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|user|>", "<tool>"]
SPM = {
    "model": "llama", "pre": "default", "tokens": SPM_TOKENS, "merges": None,
    "token_type": [2, CONTROL, CONTROL] + [6] * 256 + [NORMAL] * len(PIECES) + [CONTROL, USER_DEFINED],
    "scores": [0.0] * 259 + [-float(index) for index in range(len(PIECES))] + [0.0, 0.0],
    "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
}  # fmt: skip
SPM_TEXTS = [
    *TEXTS,
    "The capital of France is",
    "the cap in a   can",
    " x",
    "  x",
    "x ",
    "e\u0301 é",
    "a▁b",
    "\n",
    "<s> x",
    "x</s>y z",
]


def reference_pieces(text: str) -> list[int]:
    """SentencePiece's BPE in plain Python: join the neighbours that make the piece of the highest score, the leftmost first."""
    ids = {token: index for index, token in enumerate(SPM_TOKENS)}
    pieces = set(PIECES)
    parts = list(text.replace(" ", "▁"))
    while joined := [
        (SPM["scores"][ids[pair]], -index)
        for index, pair in enumerate(map("".join, zip(parts, parts[1:], strict=False)))
        if pair in pieces
    ]:
        index = -max(joined)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [index for part in parts for index in ([ids[part]] if part in pieces else [3 + byte for byte in part.encode()])]


def test_sentencepiece_ids_are_those_of_transformers_and_of_a_plain_reimplementation(tmp_path):
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", **SPM))
    vocabulary = {token: index for index, token in enumerate(SPM_TOKENS)}
    merges = generate_merges(vocabulary, dict(zip(SPM_TOKENS, SPM["scores"], strict=True)), SPM_TOKENS[:259])
    original = LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    original.add_tokens(["<tool>"])
    for text in [*SPM_TEXTS, "a<tool>b <tool>"]:
        ids = encode_text(tokenizer, text)
        assert ids == encode_text(original, text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
        if not text.startswith((" ", "▁", "<")) and "<" not in text and text:
            assert ids == [1, *reference_pieces(" " + text)]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")
    assert tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "a  b")) == ["<s>", "▁a", "▁▁", "b"]
    assert tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "<s> x")) == ["<s>", "▁", "x"]
    assert tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "<|user|>x")) == ["<s>", "<|user|>", "x"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (1, 2, 0, None)


def test_sentencepiece_without_a_space_before_the_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", **SPM, add_space_prefix=False, add_bos_token=False))
    for text in ("the cap", " the cap", "x  "):
        assert encode_text(tokenizer, text) == reference_pieces(text)
        assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_sentencepiece_defaults_and_merges_of_the_file(tmp_path):
    """Old files name no special ids; 1, 2 and 0 are llama.cpp's defaults. Merges in the file go before scores."""
    changes = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None, "merges": ["▁ t", "h e"], "scores": None}
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", **SPM | changes))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "the")) == ["<s>", "▁t", "he"]


def test_phi3_puts_a_space_after_special_tokens_which_swallow_those_of_the_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", "phi3", **SPM))
    ids = encode_text(tokenizer, "<|user|>\n the cap<s> x")
    expected = [1, SPM_TOKENS.index("<|user|>"), *reference_pieces(" the cap"), 1, *reference_pieces("  x")]
    assert ids == expected
    assert encode_text(tokenizer, " x") == [1, *reference_pieces("  x")]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"scores": None}, "tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "scores lacks one score"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces.*tokenizer.json"),
        ({"tokens": [*SPM_TOKENS[:-1], "a  b"]}, "'a  b' has a space.*tokenizer.json"),
        ({"add_space_prefix": 3}, "add_space_prefix"),
        ({"eos_token_id": 99999}, "eos_token_id=99999"),
    ],
)
def test_sentencepiece_vocabularies_that_are_not_understood_are_refused(tmp_path, changes, named):
    path = write(tmp_path / "m.gguf", **SPM | changes)
    with pytest.raises(UserError, match=named) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_that_ends_with_a_space_is_told_where_no_answer_can_follow(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", **SPM))
    prompt = Prompt(text="the cap in ", answers=("the",), gold="the", example="e", position=0, slot=0, num_items=1)
    with pytest.raises(UserError, match="cap in ', merges with the answer 'the'.*--answer-opener"):
        encode([prompt], tokenizer, window=100)
    [encoded] = encode([Prompt("the cap in", (" the",), "the", "e", 0, 0, 1)], tokenizer, window=100)
    assert encoded.ids + encoded.answers[0] == encode_text(tokenizer, "the cap in the")


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf"))
    ids = encode_text(tokenizer, "hello<tool></s>")
    assert ids == [IDS["hello"], IDS["<tool>"], IDS["</s>"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"
    assert tokenizer.pad_token is None and tokenizer.unk_token is None


def test_bos_is_added_once_and_only_if_the_file_says_so(tmp_path):
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
        ({"model": "t5", "pre": None}, "model 't5'.*tokenizer.json"),
        ({"pre": "gpt-4o"}, "pre 'gpt-4o'.*only.*'llama', and 'gpt2' with pre .*'smollm'.*beside"),
        ({"add_eos_token": True}, "add_eos_token"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
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
    path = write(tmp_path / "folder" / "m.gguf", pre="gpt-4o")
    assert encode_text(load_tokenizer(path), "hello") == [IDS["hello"]]


def test_folders_without_a_readable_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path}: the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_tokenizers_that_end_every_prompt_are_refused(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", IDS["</s>"])])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="add_eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        ({"eos_token_id": 7}, None, [7, IDS["</s>"]]),
        ({"eos_token_id": 0}, {"eos_token_id": [3, 0]}, [0, 3, IDS["</s>"]]),
        ({"eos_token_id": None}, {}, [IDS["</s>"]]),
        ({"eos_token_id": [5]}, {"eos_token_id": None}, [5, IDS["</s>"]]),
    ],
)
def test_a_text_ends_where_any_of_the_files_says_so(tmp_path, config, generation, expected):
    load_tokenizer(write(tmp_path / "m.gguf")).save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "folder" / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids(tmp_path / "folder", load_tokenizer(tmp_path / "folder")) == sorted(expected)


def test_what_ends_a_text_in_a_gguf_file(tmp_path):
    tokens, types = [*TOKENS, "<|endoftext|>", "<|im_end|>"], [NORMAL] * (len(TOKENS) - 3) + [CONTROL] * 2 + [NORMAL] * 3
    path = write(tmp_path / "m.gguf", tokens=tokens, token_type=types, eos_token_id=3, eot_token_id=4)
    assert stop_ids(path, load_tokenizer(path)) == [3, 4, IDS["</s>"]]  # the names count on control tokens alone
    path = write(tmp_path / "m.gguf", tokens=tokens, token_type=[*types[:-1], CONTROL], eos_token_id=None)
    assert stop_ids(path, load_tokenizer(path)) == [IDS["</s>"], len(tokens) - 1]
    with pytest.raises(UserError, match="eot_token_id=9999"):
        stop_ids(write(tmp_path / "m.gguf", eot_token_id=9999), load_tokenizer(path))


@pytest.mark.parametrize("eos", ["</s>", [1, "2"], -1, True, {"id": 1}])
def test_what_is_no_id_is_refused(tmp_path, eos):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match="config.json: eos_token_id"):
        stop_ids(tmp_path, tokenizer)


def test_ids_beyond_the_embedding_are_refused(tiny_model):
    with pytest.raises(UserError, match="gives the id 300, but the model's embedding has 300 rows"):
        generate_ids(tiny_model, [[1, 2], [3, 300]], max_new_tokens=1)


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece reads it")
def test_a_lone_sentencepiece_file_says_how_to_convert_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UserError, match="save_pretrained.*sentencepiece"):
        load_tokenizer(tmp_path)
