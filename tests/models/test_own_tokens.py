"""A folder's tokens are those of its tokenizer.json, whatever else it says; BOS as in transformers 4; folder and GGUF agree."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import drawn, mostly_long
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lpes_jax.errors import UserError
from lpes_jax.models.llama.hard_texts import hard_texts
from lpes_jax.models.llama.tokenizer import encode_text, load_tokenizer

sys.path.append(str(Path(__file__).parent))
from small_tokenizers import LLAMA3, NAMES, QWEN2, TEKKEN, byte_level, sentencepiece, write_folder, write_gguf  # noqa: E402

TEXTS = [text for _, text in hard_texts()]


def odd() -> Tokenizer:
    """Nobody's pipeline: lower case, NFKC, a prefix space, and words cut at white space and punctuation."""
    vocabulary = {token: index for index, token in enumerate(["<none>", *"Ġabcdefghijklmnopqrstuvwxyz0123456789.,'"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<none>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


PIPELINES = {
    "yi": lambda: sentencepiece("none"),
    "llama 2": lambda: sentencepiece("each", bos=True),
    "metaspace": lambda: sentencepiece("first", bos=True),
    "phi 3": lambda: sentencepiece("each", rstrip=True),
    "llama 3": lambda: byte_level(LLAMA3, bos=True, ignore_merges=True),
    "llama 3 with NFC": lambda: byte_level(LLAMA3, nfc=True),
    "qwen without NFC": lambda: byte_level(QWEN2),
    "smollm": lambda: byte_level("digits"),
    "tekken": lambda: byte_level(TEKKEN, ignore_merges=True),
    "odd": odd,
    "unigram": lambda: Tokenizer(models.Unigram([("<none>", 0.0), ("a", -1.0), ("va", -1.5), (" ", -2.0)], 0)),
}
CLASSES = [
    "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend",
    "CodeLlamaTokenizer", "CohereTokenizer", "T5Tokenizer", "BertTokenizer", "MistralCommonBackend", "NoSuchTokenizer", None,
]  # fmt: skip
MODEL_TYPES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"]


@pytest.mark.parametrize("pipeline", mostly_long(PIPELINES, "llama 2", "llama 3", "qwen without NFC", "odd", "unigram"))
def test_the_pipeline_of_tokenizer_json_runs_whatever_class_is_named(tmp_path, pipeline):
    names = {} if pipeline in ("odd", "unigram") else NAMES
    flags = {"add_bos_token": False, "add_prefix_space": True, "legacy": True, "do_lower_case": True}
    folder = write_folder(tmp_path, PIPELINES[pipeline](), config={})
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = [own.encode(text, add_special_tokens=False).ids for text in TEXTS]
    for number, name in enumerate(CLASSES):
        config = names | ({"tokenizer_class": name} if name else {}) | (flags if number % 2 else {})
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[number % len(MODEL_TYPES)]}))
        tokenizer = load_tokenizer(folder)
        if not names:  # no special token: nothing is added to the file's
            assert len(tokenizer) == own.get_vocab_size()
        found = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        assert found == wanted, name
        assert [tokenizer.decode(ids) for ids in found[:99]] == [
            own.decode(ids, skip_special_tokens=False) for ids in wanted[:99]
        ]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_a_tokenizer_config_the_pipeline_runs_too(tmp_path, model_type):
    folder = write_folder(tmp_path, byte_level(LLAMA3), model_type)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] == [own.encode(text).ids for text in TEXTS]


def test_no_other_reader_is_asked_where_tokenizer_json_is(tmp_path, monkeypatch):
    """A package that is installed may register one, as mistral-common does for folders with a tekken.json."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    folder = write_folder(tmp_path, byte_level(TEKKEN, bos=True), "mistral", NAMES, tekken__json={"vocab": []})
    (folder / "tokenizer.model").write_bytes(b"\x0a\x05")
    assert load_tokenizer(folder).encode("value") == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("value").ids


# What transformers 4.57.6 gives for a tokenizer.json with BOS in its post-processor, and for one without: whether BOS comes
# first, by class and `add_bos_token` (None: the key is left out).
BOS_OF_4 = {
    ("LlamaTokenizer", "llama", None): (True, True), ("LlamaTokenizer", "llama", True): (True, True),
    ("LlamaTokenizer", "llama", False): (False, False), ("LlamaTokenizerFast", "qwen2", None): (True, True),
    ("LlamaTokenizerFast", "qwen2", False): (False, False), ("CodeLlamaTokenizer", "llama", None): (True, True),
    ("CodeLlamaTokenizer", "llama", False): (False, False), ("GemmaTokenizer", "llama", False): (False, False),
    ("CohereTokenizer", "llama", None): (True, True), ("GPTNeoXTokenizer", "llama", None): (False, False),
    ("GPTNeoXTokenizer", "llama", True): (True, True), ("GPT2Tokenizer", "llama", None): (True, False),
    ("GPT2Tokenizer", "llama", True): (True, False), ("Qwen2Tokenizer", "qwen2", True): (True, False),
    ("Qwen2Tokenizer", "qwen2", False): (True, False), ("PreTrainedTokenizerFast", "llama", None): (True, False),
    ("PreTrainedTokenizerFast", "llama", True): (True, False), ("PreTrainedTokenizerFast", "llama", False): (True, False),
    (None, "llama", None): (True, True), (None, "llama", False): (False, False), (None, "mistral", None): (True, True),
    (None, "phi3", None): (True, True), (None, "qwen2", True): (True, False), (None, "qwen3", None): (True, False),
    (None, "smollm3", True): (True, False),
}  # fmt: skip


@pytest.mark.parametrize("name, model_type, add_bos_token", BOS_OF_4)
def test_bos_is_put_as_transformers_4_puts_it(tmp_path, name, model_type, add_bos_token):
    config = NAMES | ({"tokenizer_class": name} if name else {})
    config |= {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    for bos, wanted in zip((True, False), BOS_OF_4[name, model_type, add_bos_token], strict=True):
        tokenizer = load_tokenizer(write_folder(tmp_path / str(bos), sentencepiece("first", bos=bos), model_type, config))
        ids = encode_text(tokenizer, "the value")
        assert tokenizer.convert_ids_to_tokens(ids) == [*(["<s>"] if wanted else []), "▁the", "▁value"]
        assert encode_text(tokenizer, "<s>the value")[:2] != [tokenizer.bos_token_id] * 2


def test_where_bos_is_none_or_no_token_the_post_processor_stays(tmp_path):
    for config in ({"bos_token": None}, {}):  # LlamaTokenizer's own <s>, where the vocabulary has it
        tokenizer = load_tokenizer(
            write_folder(tmp_path, sentencepiece("first", bos=True), config=config | {"tokenizer_class": "LlamaTokenizer"})
        )
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["<s>", "▁the"]
        assert tokenizer.bos_token == (None if config else "<s>")
    without = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer = load_tokenizer(write_folder(tmp_path / "without", without, config={"tokenizer_class": "LlamaTokenizer"}))
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == (None, None, 1)


def test_in_folders_of_transformers_5_the_post_processor_wins(tmp_path):
    """5 drops `add_bos_token` from the config that it writes: the post-processor has it."""
    config = NAMES | {"tokenizer_class": "LlamaTokenizer", "backend": "tokenizers"}
    for bos in (True, False):
        tokenizer = load_tokenizer(write_folder(tmp_path, sentencepiece("first", bos=bos), config=config))
        assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) == bos


def test_a_prompt_that_add_eos_token_ends_is_refused_if_transformers_4_heeds_the_flag(tmp_path):
    config = NAMES | {"add_eos_token": True}
    for name, refused in {"LlamaTokenizer": True, "PreTrainedTokenizerFast": False, "Qwen2Tokenizer": False}.items():
        folder = write_folder(tmp_path, sentencepiece("first", bos=True), config=config | {"tokenizer_class": name})
        if refused:
            with pytest.raises(UserError, match="ends every prompt; set add_eos_token to false"):
                load_tokenizer(folder)
        else:
            assert load_tokenizer(folder).encode("the")[-1] != 2


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def load(folder: Path, config: dict[str, Any], **files: Any) -> Any:
    return load_tokenizer(write_folder(folder, sentencepiece("first", bos=True), config=FAST | config, **files))


def test_truncation_and_padding_of_tokenizer_json_do_not_change_prompts(tmp_path):
    own = byte_level(LLAMA3)
    own.enable_truncation(5)
    own.enable_padding(length=9, pad_token="<unk>", pad_id=own.token_to_id("<unk>"))
    tokenizer = load_tokenizer(write_folder(tmp_path, own, config=FAST | NAMES))
    text = "the value is 2023 " * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer(["v", text])["input_ids"][0] == [own.token_to_id("v")]
    assert tokenizer.backend_tokenizer.encode("v").ids == [own.token_to_id("v")]


def test_special_tokens_are_those_of_the_config(tmp_path):
    flagged = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    assert load(tmp_path / "a", NAMES).eos_token == "</s>"
    assert load(tmp_path / "b", {"bos_token": flagged | {"__type": "AddedToken"}}).bos_token == "</s>"
    mapped = {"eos_token": flagged, "pad_token": "<unk>", "additional_special_tokens": ["<|user|>"]}
    tokenizer = load(tmp_path / "c", {"bos_token": "<s>"}, special_tokens_map__json=mapped)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<unk>")
    assert "<|user|>" in tokenizer.all_special_tokens
    decoder = {"2": flagged | {"special": True}}  # with it, the older file is not read
    both = {"eos_token": "<unk>", "added_tokens_decoder": decoder}
    assert load(tmp_path / "d", both, special_tokens_map__json={"eos_token": "</s>"}).eos_token == "<unk>"
    for spelling in ({"additional_special_tokens": ["value"]}, {"extra_special_tokens": ["value"]}):
        tokenizer = load(tmp_path / "e", NAMES | spelling)
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("avalue")) == ["<s>", "▁", "a", "value"]
        assert tokenizer.decode(tokenizer.encode("avalue"), skip_special_tokens=True) == "a"
    tokenizer = load(tmp_path / "f", NAMES | {"extra_special_tokens": {"image_token": "<|user|>"}})
    assert tokenizer.image_token == "<|user|>"


def test_defaults_of_the_class_apply_if_nothing_is_said_and_the_vocabulary_has_them(tmp_path):
    folder = write_folder(tmp_path, sentencepiece("first"), config={"tokenizer_class": "LlamaTokenizer"})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.padding_side) == (
        "<s>",
        "</s>",
        "<unk>",
        "left",
    )
    size = len(tokenizer)
    tokenizer = load_tokenizer(write_folder(tmp_path, sentencepiece("first"), "qwen2", {"eos_token": "<unk>"}))
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<unk>", None, size)  # there is no <|endoftext|>


def test_tokens_that_tokenizer_json_lacks_are_added_in_the_order_of_their_ids(tmp_path):
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    size = sentencepiece("first").get_vocab_size()
    decoder = {
        str(size): plain | {"content": "<|new|>", "special": True},
        str(size + 1): plain | {"content": "<|word|>", "special": False},
    }
    older = {"<|new|>": size, "<|word|>": size + 1}
    for tokenizer in (
        load(tmp_path / "a", NAMES | {"added_tokens_decoder": decoder}),
        load(tmp_path / "b", NAMES, added_tokens__json=older),
    ):
        assert tokenizer.convert_tokens_to_ids(["<|new|>", "<|word|>"]) == [size, size + 1]
        assert tokenizer.encode("the<|new|>")[-1] == size
    assert load(tmp_path / "c", NAMES | {"eos_token": "<|eot|>"}).eos_token_id == size


def test_the_flags_of_tokenizer_jsons_tokens_stand(tmp_path):
    """Those of the config would swallow spaces. That a token is special, and so left out of an answer, may come from there."""
    swallowing = {"content": "</s>", "lstrip": True, "rstrip": True, "normalized": True, "single_word": True, "special": True}
    tokenizer = load(tmp_path / "a", NAMES | {"added_tokens_decoder": {"2": swallowing}})
    own = sentencepiece("first", bos=True)
    assert [tokenizer.encode(text) for text in TEXTS] == [own.encode(text).ids for text in TEXTS]
    own.add_tokens([AddedToken("value", special=False, rstrip=True)])
    special = {"content": "value", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    index = str(own.token_to_id("value"))
    folder = write_folder(tmp_path / "b", own, config=FAST | NAMES | {"added_tokens_decoder": {index: special}})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a value  b")) == ["<s>", "▁", "a", "▁", "value", "b"]
    assert tokenizer.decode(tokenizer.encode("avalue  b"), skip_special_tokens=True) == "ab"


def test_chat_templates_and_sides_come_from_the_other_files(tmp_path):
    several = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    tokenizer = load(tmp_path / "a", NAMES | {"chat_template": several, "padding_side": "left", "model_max_length": 99})
    assert (tokenizer.get_chat_template(), tokenizer.padding_side, tokenizer.model_max_length) == ("D", "left", 99)
    assert load(tmp_path / "b", NAMES | {"chat_template": "older"}, chat_template__jinja="newer").chat_template == "newer"
    (tmp_path / "c" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "c" / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert load(tmp_path / "c", NAMES, chat_template__jinja="D").chat_template == {"default": "D", "rag": "R"}
    split = load(tmp_path / "d", NAMES | {"split_special_tokens": True})
    assert split.convert_ids_to_tokens(split.encode("</s>")) == ["<s>", "▁", "<", "/", "s", ">"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "7", "[" * 100_000])
def test_settings_that_are_no_json_object_are_refused(tmp_path, file, content):
    folder = write_folder(tmp_path, sentencepiece("first"), config=NAMES)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=str(folder)) as refusal:
        load_tokenizer(folder)
    assert "\n" not in str(refusal.value)


# A model of each kind of vocabulary that is read from .gguf files: its folder's pipeline, its `tokenizer.ggml.pre`.
BOTH: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama 3": (lambda: byte_level(LLAMA3, bos=True, ignore_merges=True), "llama-bpe", {}),
    "llama 3, no BOS": (lambda: byte_level(LLAMA3, ignore_merges=True), "llama-v3", {"add_bos_token": False}),
    "qwen 2": (lambda: byte_level(QWEN2, nfc=True), "qwen2", {}),
    "smollm": (lambda: byte_level("digits"), "smollm", {}),
    "tekken": (lambda: byte_level(TEKKEN, bos=True, ignore_merges=True), "tekken", {}),
    "metaspace": (lambda: sentencepiece("first", bos=True), "llama", {}),
    "metaspace, no BOS": (lambda: sentencepiece("first"), "llama", {"add_bos_token": False}),
    "yi": (lambda: sentencepiece("none", bos=True), "llama", {"add_space_prefix": False}),
    "phi 3": (lambda: sentencepiece("each", bos=True, rstrip=True), "llama", {"architecture": "phi3"}),
}  # fmt: skip


@pytest.fixture(scope="module", params=BOTH)
def both(request, tmp_path_factory) -> tuple[Any, Any]:
    """One model's tokenizer from its folder and from its .gguf file."""
    build, pre, more = BOTH[request.param]
    path = tmp_path_factory.mktemp("both")
    folder = write_folder(path / "folder", build(), config=FAST | NAMES)
    return load_tokenizer(folder), load_tokenizer(write_gguf(path / "m.gguf", build(), pre, **more))


def test_folder_and_gguf_agree_on_hard_texts(both):
    from_folder, from_gguf = both
    for text in TEXTS:
        assert from_gguf.encode(text) == from_folder.encode(text), text
        assert from_gguf.decode(from_gguf.encode(text)) == from_folder.decode(from_folder.encode(text)), text
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        assert getattr(from_gguf, name) == getattr(from_folder, name)


PARTS = [
    " ", "  ", "\n", "\t", "value", "the", "IT'S", "'ll", "12", "2023", "é", "e\u0301", "日本", "🙂", "<s>", "</s>", "▁",
]  # fmt: skip
MIXED = st.lists(st.one_of(st.sampled_from(PARTS), st.characters(codec="utf-8")), max_size=30).map("".join)
RANDOM = st.one_of(st.text(max_size=40), MIXED)


@given(text=RANDOM)
@settings(max_examples=drawn(150), deadline=None)
def test_folder_and_gguf_agree_on_random_texts(both, text):
    from_folder, from_gguf = both
    assert from_gguf.encode(text) == from_folder.encode(text)


@pytest.fixture(scope="module", params=mostly_long(["yi", "llama 2", "llama 3 with NFC", "tekken"], "yi", "llama 3 with NFC"))
def loaded_and_own(request, tmp_path_factory) -> tuple[Any, Tokenizer]:
    config = NAMES | {"tokenizer_class": "Qwen2Tokenizer"}
    folder = write_folder(tmp_path_factory.mktemp("own"), PIPELINES[request.param](), "qwen2", config)
    return load_tokenizer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=RANDOM)
@settings(max_examples=drawn(100), deadline=None)
def test_a_folder_agrees_with_its_file_on_random_texts(loaded_and_own, text):
    tokenizer, own = loaded_and_own
    assert tokenizer.encode(text) == own.encode(text).ids
