"""Tokenizers, without torch: a Hugging Face tokenizer folder, or the one inside a GGUF file.

    tokenizer = load_tokenizer(Path("model.gguf"))
    ids = encode_text(tokenizer, "The capital of France is")

A GGUF file holds the vocabulary and the merges, but only a name for the rule that cuts text into words. The rules known here
are in `_PRE_TOKENIZERS`; a wrong one gives other ids without any error, so every other name is refused. Where the model's
tokenizer.json lies beside the .gguf file, it is taken instead.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lpes_jax.errors import UserError
from lpes_jax.models.llama.gguf import GgufFile

if TYPE_CHECKING:
    import transformers

_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# `tokenizer.ggml.pre` -> how text is cut before the merges.
_PRE_TOKENIZERS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
_NORMALIZERS = {"qwen2": normalizers.NFC()}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: Path) -> "transformers.PreTrainedTokenizerFast":
    """The tokenizer of a model folder or a .gguf file. Raises UserError where there is none, or none that is understood."""
    if path.is_dir():
        return _from_folder(path)
    if (path.parent / "tokenizer.json").exists():
        return _from_folder(path.parent)
    return _from_gguf(GgufFile.open(path))


def encode_text(tokenizer: "transformers.PreTrainedTokenizerFast", text: str) -> list[int]:
    """The ids of a whole prompt, with one BOS before it where the tokenizer puts one (or a chat template already wrote it)."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:  # a chat template wrote one, the tokenizer another
        return ids[1:]
    return ids


def _from_folder(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).exists() for name in _FOLDER_FILES):
        raise UserError(f"{folder}: no tokenizer ({', '.join(_FOLDER_FILES)}); put the model's tokenizer.json there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # anything: the files' content decides which class of which library fails
        raise UserError(f"{folder}: the tokenizer cannot be read ({_one_line(error)}); fetch its files again") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; put the model's tokenizer.json there")
    return tokenizer


def _from_gguf(gguf: GgufFile) -> "transformers.PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    metadata = gguf.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in list(_PRE_TOKENIZERS):  # a list: `pre` may be anything
        known = " or ".join(map(repr, _PRE_TOKENIZERS))
        raise UserError(
            f"{gguf.path}: its tokenizer (model {model!r}, pre {pre!r}) is not supported (only model 'gpt2' with pre {known}); "
            "put the model's Hugging Face tokenizer files (tokenizer.json, tokenizer_config.json) beside it"
        )
    tokens = _list(gguf, "tokens", str)
    types = _list(gguf, "token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _list(gguf, "merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(types):
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.tokens holds a token twice or has not one token_type each; convert it again"
        )
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises nothing narrower for merges of tokens that do not exist
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.merges do not fit the tokens ({_one_line(error)}); convert it again"
        ) from error
    if pre in _NORMALIZERS:
        tokenizer.normalizer = _NORMALIZERS[pre]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()

    def added(kind: int) -> list[AddedToken]:
        special = kind == _CONTROL
        return [
            AddedToken(token, special=special, normalized=False) for token, k in zip(tokens, types, strict=True) if k == kind
        ]

    tokenizer.add_special_tokens(added(_CONTROL))
    tokenizer.add_tokens(added(_USER_DEFINED))

    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {name: _token(gguf, tokens, f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    bos = named["bos_token"]
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        if bos is None:
            raise UserError(f"{gguf.path}: tokenizer.ggml.add_bos_token without a bos_token_id; convert it again")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,  # decoding gives back the text
        **{name: token for name, token in named.items() if token is not None},
    )


def _list(gguf: GgufFile, key: str, kind: type) -> list[Any]:
    values = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.{key} is missing or not a list of {kind.__name__}; convert the model again"
        )
    return values


def _token(gguf: GgufFile, tokens: list[str], key: str) -> str | None:
    index: Any = gguf.metadata.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise UserError(f"{gguf.path}: {key}={index!r} is not the id of one of its {len(tokens):,} tokens; convert it again")
    return tokens[index]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
