"""Tokenizers, without torch: from a Hugging Face tokenizer folder, or from inside a GGUF file.

    tokenizer = load_tokenizer(Path("model.gguf"))
    ids = encode_text(tokenizer, "The capital of France is")
    ends = stop_ids(Path("model.gguf"), tokenizer)

If a folder has a tokenizer.json, its pipeline runs unchanged: normalizer, pre-tokenizer, model, decoder, and the flags of its
added tokens. Only its truncation and padding are removed, because they would cut or pad prompts. Neither the class in
tokenizer_config.json nor the installed packages change the pipeline. (The tokenizer classes of transformers 5 replace it by
pipelines of their own.) The other files supply the rest: the roles of tokens, tokens that tokenizer.json lacks, chat templates,
the padding side and the like.

BOS before a prompt: normally the post-processor of tokenizer.json decides. If the folder's class has a default in `_CLASSES`
(LlamaTokenizer and its relatives), `add_bos_token` and `add_eos_token` of tokenizer_config.json take precedence, and without
them that default. This is what transformers 4 does; its other classes (PreTrainedTokenizerFast, Qwen2Tokenizer, GPT2Tokenizer)
ignore the two keys. A folder that names no class has the class of its model type. In folders written by transformers 5, the
post-processor always decides, because version 5 builds the two keys into it and drops them (`backend` in the config identifies
such folders).

A GGUF file contains the vocabulary and its merges or scores, but only the name of the rule that splits text into words.
`_PRE_TOKENIZERS` has the supported rules. A wrong rule gives other ids without any error, so every other name is refused. If
the model's tokenizer.json is beside the .gguf file, it is used instead.

SentencePiece vocabularies (`tokenizer.ggml.model` is `llama`) follow transformers' `LlamaTokenizer`: a text gets one space
before it unless it begins with one, and a text after a special token gets none. Files of Phi-3 get a space in both cases, as in
that model's own tokenizer.json. All agree on text that begins with neither a space nor a special token.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lpes_jax.errors import UserError
from lpes_jax.json_files import read_json
from lpes_jax.models.llama.gguf import GgufFile

if TYPE_CHECKING:
    import transformers


def _words(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS_AND_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
# Upper case then lower case, at least one of the two; letters without case (Lm, Lo, M) count as both.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
# `tokenizer.ggml.pre` -> how text is split before the merges.
_PRE_TOKENIZERS = {
    "llama-bpe": _words(rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}{{1,3}}|{_REST}"),
    "qwen2": _words(rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}|{_REST}"),
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "tekken": _words(rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
}
_NORMALIZERS = {"qwen2": normalizers.NFC()}
# Converted from tiktoken: a word that is a token becomes that token, whatever the merges say; BOS is on by default.
_TIKTOKEN = ("llama-bpe", "tekken")
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
# Tokens that end a text, by name, as in llama.cpp: a GGUF file has only one eos_token_id and no list.
_ENDS = ("</s>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Tokenizer classes of transformers 4: their defaults for entries that tokenizer_config.json lacks, and whether they put BOS
# before a text (None: their post-processor decides, and `add_bos_token` is ignored).
_ENDOFTEXT = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
_CLASSES: dict[str, tuple[dict[str, str], bool | None]] = {
    "LlamaTokenizer": (_LLAMA, True),
    "CodeLlamaTokenizer": (_LLAMA, True),
    "GemmaTokenizer": (_LLAMA | {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, True),
    "CohereTokenizer": (
        _LLAMA | {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        True,
    ),
    "GPTNeoXTokenizer": (_ENDOFTEXT | {"bos_token": "<|endoftext|>"}, False),
    "GPT2Tokenizer": (_ENDOFTEXT | {"bos_token": "<|endoftext|>"}, None),
    "Qwen2Tokenizer": (_ENDOFTEXT | {"pad_token": "<|endoftext|>"}, None),
}
_CLASS_OF_MODEL_TYPE = {
    "llama": "LlamaTokenizer", "mistral": "LlamaTokenizer", "phi3": "LlamaTokenizer", "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}  # fmt: skip


def load_tokenizer(path: Path) -> "transformers.PreTrainedTokenizerFast":
    """The tokenizer of a model folder or a .gguf file. Raises UserError if there is none, or none that is supported."""
    if path.is_dir():
        return _from_folder(path)
    if (path.parent / "tokenizer.json").exists():
        return _from_folder(path.parent)
    return _from_gguf(GgufFile.open(path))


def embedded_tokenizer(path: Path) -> "transformers.PreTrainedTokenizerFast | None":
    """The tokenizer inside a .gguf file, ignoring files beside it; None if its kind is not supported."""
    try:
        return _from_gguf(GgufFile.open(path))
    except UserError:
        return None


def encode_text(tokenizer: "transformers.PreTrainedTokenizerFast", text: str) -> list[int]:
    """The ids of a whole prompt, with one BOS before it if the tokenizer adds one (or a chat template wrote one)."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:  # one from a chat template, one from the tokenizer
        return ids[1:]
    return ids


def stop_ids(path: Path, tokenizer: "transformers.PreTrainedTokenizerFast") -> list[int]:
    """All ids that end a generated text, sorted: those of config.json, generation_config.json and the tokenizer.

    Args:
        path: The model's folder, or its .gguf file. A file's metadata are read too, in addition to config files beside it.
        tokenizer: The model's tokenizer.

    Raises:
        UserError: An `eos_token_id` is neither an id, a list of ids, nor null.
    """
    folder = path if path.is_dir() else path.parent
    ids = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set[int]()
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.exists():
            ids |= _eos_ids(file)
    if path.is_dir():
        return sorted(ids)
    gguf = GgufFile.open(path)
    tokens, types = (gguf.metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type"))
    ids |= {
        index for index, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and token in _ENDS
    }
    for key in ("eos", "eot", "eom"):
        if (index := gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            _token(gguf, tokens, f"tokenizer.ggml.{key}_token_id")
            ids.add(index)
    return sorted(ids)


def _eos_ids(file: Path) -> set[int]:
    eos = read_json(file, dict, finite=False, hint="; fetch it again").get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 2**31 for index in ids):
        raise UserError(f"{file}: eos_token_id must be a token id, a list of them or null, got {eos!r:.60}")
    return set(ids)


def own_tokenizer(folder: Path) -> Tokenizer:
    """The pipeline of tokenizer.json, without truncation and padding."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_folder(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).exists() for name in _FOLDER_FILES):
        raise UserError(f"{folder}: no tokenizer ({', '.join(_FOLDER_FILES)}); put the model's tokenizer.json there")
    only_sentencepiece = not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    if only_sentencepiece and (folder / "tokenizer.model").exists() and find_spec("sentencepiece") is None:
        raise UserError(
            f"{folder}: has only tokenizer.model, which needs SentencePiece; convert it once: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), with sentencepiece installed"
        )
    try:
        if (folder / "tokenizer.json").exists():
            tokenizer = _from_tokenizer_json(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # any type: the files' content decides which class of which library fails
        raise UserError(f"{folder}: the tokenizer cannot be read ({_one_line(error)}); fetch its files again") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; put the model's tokenizer.json there")
    if tokenizer.eos_token_id is not None and tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]:
        raise UserError(f"{folder}: the tokenizer ends every prompt; set add_eos_token to false in tokenizer_config.json")
    return tokenizer


def _from_tokenizer_json(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    """The pipeline of tokenizer.json with the settings of the files beside it (see the top of this file)."""
    from transformers import PreTrainedTokenizerFast

    own = own_tokenizer(folder)
    config, names, model = (
        _json_object(folder / file) for file in ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    )
    kind = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = str(kind or _CLASS_OF_MODEL_TYPE.get(str(model.get("model_type")))).removesuffix("Fast")
    defaults, adds_bos = _CLASSES.get(kind, ({}, None))
    defaults = {key: value for key, value in defaults.items() if key not in config and key not in names}
    available = {key: value for key, value in defaults.items() if key == "padding_side" or own.token_to_id(value) is not None}
    # transformers applies the settings to an empty tokenizer, so they cannot change the pipeline.
    empty = Tokenizer(models.BPE())
    how: dict[str, Any] = {"local_files_only": True, "tokenizer_object": empty, **available}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **how)
    for token in added_by_settings(own, tokenizer):
        own.add_tokens([token])
    if adds_bos is not None and "backend" not in config:
        bos = tokenizer.bos_token if config.get("add_bos_token", adds_bos) else None
        eos = tokenizer.eos_token if config.get("add_eos_token", False) else None
        if bos is not None or not config.get("add_bos_token", adds_bos):
            own.post_processor = _template(own, bos, eos)
    tokenizer._tokenizer = own
    return tokenizer


def added_by_settings(own: Tokenizer, tokenizer: "transformers.PreTrainedTokenizerFast") -> list[AddedToken]:
    """The added tokens of `tokenizer` that `own`, the pipeline of tokenizer.json, lacks or does not have as special, by id.

    Tokens that `own` has keep its flags for surrounding spaces and for normalisation.
    """
    own_tokens = {token.content: token for token in own.get_added_tokens_decoder().values()}
    tokens = []
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        if (existing := own_tokens.get(token.content)) is None:
            tokens.append(token)
        elif token.special and not existing.special:
            flags = {flag: getattr(existing, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            tokens.append(AddedToken(token.content, special=True, **flags))
    return tokens


def _template(own: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """A post-processor that puts `bos` before each text and `eos` after it."""
    special = [(token, index) for token in (bos, eos) if token is not None and (index := own.token_to_id(token)) is not None]

    def around(text: str, part: int) -> str:
        return " ".join(f"{token}:{part}" for token in (bos, text, eos) if token is not None)

    return processors.TemplateProcessing(
        single=around("$A", 0), pair=f"{around('$A', 0)} {around('$B', 1)}", special_tokens=special
    )


def _json_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    content = read_json(file) if file.exists() else {}
    if not isinstance(content, dict):
        raise UserError(f"{file}: must be a JSON object, got {type(content).__name__}; fetch it again")
    return content


def _from_gguf(gguf: GgufFile) -> "transformers.PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    metadata = gguf.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    words = _ALIASES.get(pre, pre) if isinstance(pre, str) else ""
    sentencepiece = model == "llama"
    if not sentencepiece and (model != "gpt2" or words not in _PRE_TOKENIZERS):
        known = ", ".join(map(repr, _PRE_TOKENIZERS))
        raise UserError(
            f"{gguf.path}: its tokenizer (model {model!r:.60}, pre {pre!r:.60}) is not supported (only model 'llama', and "
            f"'gpt2' with pre {known}); put the model's Hugging Face tokenizer files (tokenizer.json, tokenizer_config.json) "
            "beside it"
        )
    tokens, types = _list(gguf, "tokens", str), _list(gguf, "token_type", int)
    if not len(set(tokens)) == len(tokens) == len(types):
        raise UserError(f"{gguf.path}: tokenizer.ggml.tokens repeats a token or lacks one token_type each; convert it again")
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if sentencepiece else {}  # llama.cpp's
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {name: _token(gguf, tokens, f"tokenizer.ggml.{key}_token_id", defaults.get(key)) for name, key in named.items()}
    build = _sentencepiece if sentencepiece else _byte_level
    try:
        tokenizer = build(gguf, tokens, types, words, named["unk_token"])
        _add_tokens(tokenizer, gguf, tokens, types)
        if _flag(gguf, "add_bos_token", sentencepiece or words in _TIKTOKEN):
            if (bos := named["bos_token"]) is None:
                raise UserError(f"{gguf.path}: tokenizer.ggml.add_bos_token without a bos_token_id; convert it again")
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, tokens.index(bos))]
            )
    except UserError:
        raise
    except Exception as error:  # the library has no narrower type, for example for merges of tokens that do not exist
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.merges do not fit the tokens ({_one_line(error)}); convert it again"
        ) from error
    if _flag(gguf, "add_eos_token", False):
        raise UserError(f"{gguf.path}: tokenizer.ggml.add_eos_token ends every prompt; set it to false (gguf-set-metadata)")
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,  # so that decoding returns the text
        **{name: token for name, token in named.items() if token is not None},
    )


def _byte_level(gguf: GgufFile, tokens: list[str], types: list[int], words: str, unknown: str | None) -> Tokenizer:
    """Byte-level BPE with the file's merges, on words split by `_PRE_TOKENIZERS[words]`."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(gguf), ignore_merges=words in _TIKTOKEN))
    if words in _NORMALIZERS:
        tokenizer.normalizer = _NORMALIZERS[words]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[int], words: str, unknown: str | None) -> Tokenizer:
    """SentencePiece's BPE: characters are joined to the piece with the highest score; text without a piece becomes bytes."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if gguf.metadata.get(f"tokenizer.ggml.{key}"):
            raise UserError(
                f"{gguf.path}: tokenizer.ggml.{key} (it changes text before it is split) is not supported; "
                "put the model's tokenizer.json beside it"
            )
    if spaced := [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED and " " in token]:
        raise UserError(
            f"{gguf.path}: the added token {spaced[0]!r:.60} has a space in it, and a GGUF file does not say how such "
            "tokens are found; put the model's tokenizer.json beside it"
        )
    merges = _merges(gguf) if "tokenizer.ggml.merges" in gguf.metadata else _merges_of_scores(gguf, tokens, types)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    byte_fallback = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback))
    prefix = _flag(gguf, "add_space_prefix", True)
    if gguf.metadata.get("general.architecture") == "phi3" and prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges_of_scores(gguf: GgufFile, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, by falling score; for the same piece, the longer left part first."""
    scores = _list(gguf, "scores", float)
    if len(scores) != len(tokens):
        raise UserError(f"{gguf.path}: tokenizer.ggml.scores lacks one score for each token; convert it again")
    scored = zip(tokens, types, scores, strict=True)
    pieces = {token: score for token, kind, score in scored if kind in (_NORMAL, _USER_DEFINED)}
    ranked = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[:2])
    return [merge[2:] for merge in ranked]


def _add_tokens(tokenizer: Tokenizer, gguf: GgufFile, tokens: list[str], types: list[int]) -> None:
    """Add control tokens (special) and user-defined ones, which are found in the text before it is split."""
    # A GGUF file does not say which tokens remove the spaces after them. llama.cpp knows this for Phi-3 by name.
    phi3 = gguf.metadata.get("general.architecture") == "phi3" and gguf.metadata.get("tokenizer.ggml.model") == "llama"
    keep_spaces = ("<unk>", "<s>", "<|endoftext|>")

    def added(*kinds: int) -> list[AddedToken]:
        return [
            AddedToken(token, special=_USER_DEFINED not in kinds, normalized=False, rstrip=phi3 and token not in keep_spaces)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]

    tokenizer.add_special_tokens(added(_CONTROL, _UNKNOWN))
    tokenizer.add_tokens(added(_USER_DEFINED))


def _merges(gguf: GgufFile) -> list[tuple[str, str]]:
    merges = []
    for merge in _list(gguf, "merges", str):
        space = merge.find(" ", 1)
        if space < 0:
            raise UserError(f"{gguf.path}: tokenizer.ggml.merges has {merge!r:.60}, not two tokens; convert it again")
        merges.append((merge[:space], merge[space + 1 :]))
    return merges


def _list(gguf: GgufFile, key: str, kind: type) -> list[Any]:
    values = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.{key} is missing or not a list of {kind.__name__}; convert the model again"
        )
    return values


def _flag(gguf: GgufFile, key: str, default: bool) -> bool:
    value = gguf.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise UserError(f"{gguf.path}: tokenizer.ggml.{key} must be true or false, got {value!r:.60}; convert it again")
    return value


def _token(gguf: GgufFile, tokens: list[str], key: str, default: int | None = None) -> str | None:
    index: Any = gguf.metadata.get(key, default)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise UserError(
            f"{gguf.path}: {key}={index!r:.60} is not the id of one of its {len(tokens):,} tokens; convert it again"
        )
    return tokens[index]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
