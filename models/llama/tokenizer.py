"""Tokenizers, without torch: a Hugging Face tokenizer folder, or the one inside a GGUF file.

    tokenizer = load_tokenizer(Path("model.gguf"))
    ids = encode_text(tokenizer, "The capital of France is")
    ends = stop_ids(Path("model.gguf"), tokenizer)

Where a folder has a tokenizer.json, its pipeline runs as it stands: normalizer, pre-tokenizer, model, decoder, and the flags of
its added tokens. Only its truncation and padding are left out, which would cut prompts or fill them up. Neither the class that
tokenizer_config.json names nor what is installed changes that. (The tokenizer classes of transformers 5 put pipelines of their
own in its place.) The other files say the rest: which token is which, tokens that tokenizer.json lacks, chat templates, the
padding side and the like.

BOS before a prompt: the post-processor of tokenizer.json puts it or not. But where the folder's class has a default for it in
`_CLASSES` (LlamaTokenizer and its kin), `add_bos_token` and `add_eos_token` of tokenizer_config.json win, and without them
that default does. This is what transformers 4 does; its other classes (PreTrainedTokenizerFast, Qwen2Tokenizer, GPT2Tokenizer)
ignore the two keys. A folder that names no class has the one of its model type. In folders that transformers 5 wrote, the
post-processor wins, whatever the class: 5 works the two keys into it and drops them (`backend` in the config tells such
folders).

A GGUF file holds the vocabulary, and its merges or scores, but only a name for the rule that cuts text into words. The rules
known here are in `_PRE_TOKENIZERS`; a wrong one gives other ids without any error, so every other name is refused. Where the
model's tokenizer.json lies beside the .gguf file, it is taken instead.

SentencePiece vocabularies (`tokenizer.ggml.model` is `llama`) become what transformers' `LlamaTokenizer` is: text gets one
space before it unless it begins with one, and none behind a special token. Files of Phi-3 get a space in both places, as
that model's own tokenizer.json does. All agree on text that begins with neither a space nor a special token.
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
# Upper case then lower case, the one or the other at least once; letters without case (Lm, Lo, M) count as both.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
# `tokenizer.ggml.pre` -> how text is cut before the merges.
_PRE_TOKENIZERS = {
    "llama-bpe": _words(rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}{{1,3}}|{_REST}"),
    "qwen2": _words(rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}|{_REST}"),
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "tekken": _words(rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
}
_NORMALIZERS = {"qwen2": normalizers.NFC()}
# Made of tiktoken's vocabularies: a word that is a token is that token, whatever the merges say; and BOS unless denied.
_TIKTOKEN = ("llama-bpe", "tekken")
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
# What ends a text by its name, as in llama.cpp: a GGUF file has no list of them, and one eos_token_id.
_ENDS = ("</s>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Tokenizer classes of transformers 4: what they take where tokenizer_config.json leaves it out, and whether BOS is put before a
# text (None: their post-processor says so, and `add_bos_token` is ignored).
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
    """The tokenizer of a model folder or a .gguf file. Raises UserError where there is none, or none that is understood."""
    if path.is_dir():
        return _from_folder(path)
    if (path.parent / "tokenizer.json").exists():
        return _from_folder(path.parent)
    return _from_gguf(GgufFile.open(path))


def embedded_tokenizer(path: Path) -> "transformers.PreTrainedTokenizerFast | None":
    """The tokenizer inside a .gguf file, whatever lies beside it; None where it is of a kind that is not known here."""
    try:
        return _from_gguf(GgufFile.open(path))
    except UserError:
        return None


def encode_text(tokenizer: "transformers.PreTrainedTokenizerFast", text: str) -> list[int]:
    """The ids of a whole prompt, with one BOS before it where the tokenizer puts one (or a chat template already wrote it)."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:  # a chat template wrote one, the tokenizer another
        return ids[1:]
    return ids


def stop_ids(path: Path, tokenizer: "transformers.PreTrainedTokenizerFast") -> list[int]:
    """Every id that ends a generated text, sorted: those of config.json, generation_config.json and the tokenizer together.

    path: the model's folder, or its .gguf file, whose metadata count as its config (config files beside it count too).
    Raises UserError where an `eos_token_id` is neither an id, a list of ids, nor null.
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
    """The pipeline of tokenizer.json as it stands, without truncation and padding."""
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
            f"{folder}: tokenizer.model alone, which only SentencePiece reads; convert it once: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), with sentencepiece installed"
        )
    try:
        if (folder / "tokenizer.json").exists():
            tokenizer = _from_tokenizer_json(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # anything: the files' content decides which class of which library fails
        raise UserError(f"{folder}: the tokenizer cannot be read ({_one_line(error)}); fetch its files again") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; put the model's tokenizer.json there")
    if tokenizer.eos_token_id is not None and tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]:
        raise UserError(f"{folder}: the tokenizer ends every prompt; set add_eos_token to false in tokenizer_config.json")
    return tokenizer


def _from_tokenizer_json(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    """tokenizer.json with the settings of the files beside it (see the top of this file)."""
    from transformers import PreTrainedTokenizerFast

    own = own_tokenizer(folder)
    config, names, model = (
        _json_object(folder / file) for file in ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    )
    kind = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = str(kind or _CLASS_OF_MODEL_TYPE.get(str(model.get("model_type")))).removesuffix("Fast")
    defaults, adds_bos = _CLASSES.get(kind, ({}, None))
    defaults = {key: value for key, value in defaults.items() if key not in config and key not in names}
    there = {key: value for key, value in defaults.items() if key == "padding_side" or own.token_to_id(value) is not None}
    # transformers reads the settings around an empty tokenizer: nothing in them changes the pipeline.
    empty = Tokenizer(models.BPE())
    how: dict[str, Any] = {"local_files_only": True, "tokenizer_object": empty, **there}
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
    """The added tokens of `tokenizer` that `own`, the pipeline of tokenizer.json, lacks or has as not special, by their ids.

    Those that it has keep its rules on the spaces around them, and on normalisation.
    """
    has = {token.content: token for token in own.get_added_tokens_decoder().values()}
    tokens = []
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        if (there := has.get(token.content)) is None:
            tokens.append(token)
        elif token.special and not there.special:
            flags = {flag: getattr(there, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            tokens.append(AddedToken(token.content, special=True, **flags))
    return tokens


def _template(own: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """What puts `bos` before each text and `eos` behind it."""
    special = [(token, index) for token in (bos, eos) if token is not None and (index := own.token_to_id(token)) is not None]

    def around(text: str, part: int) -> str:
        return " ".join(f"{token}:{part}" for token in (bos, text, eos) if token is not None)

    return processors.TemplateProcessing(
        single=around("$A", 0), pair=f"{around('$A', 0)} {around('$B', 1)}", special_tokens=special
    )


def _json_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
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
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.tokens holds a token twice or has not one token_type each; convert it again"
        )
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
    except Exception as error:  # the library raises nothing narrower, as for merges of tokens that do not exist
        raise UserError(
            f"{gguf.path}: tokenizer.ggml.merges do not fit the tokens ({_one_line(error)}); convert it again"
        ) from error
    if _flag(gguf, "add_eos_token", False):
        raise UserError(f"{gguf.path}: tokenizer.ggml.add_eos_token ends every prompt; set it to false (gguf-set-metadata)")
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,  # decoding gives back the text
        **{name: token for name, token in named.items() if token is not None},
    )


def _byte_level(gguf: GgufFile, tokens: list[str], types: list[int], words: str, unknown: str | None) -> Tokenizer:
    """Byte-level BPE with the file's merges, in the words that `_PRE_TOKENIZERS[words]` cuts."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(gguf), ignore_merges=words in _TIKTOKEN))
    if words in _NORMALIZERS:
        tokenizer.normalizer = _NORMALIZERS[words]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[int], words: str, unknown: str | None) -> Tokenizer:
    """SentencePiece's BPE: characters join to the piece of the highest score; what has no piece goes byte by byte."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if gguf.metadata.get(f"tokenizer.ggml.{key}"):
            raise UserError(
                f"{gguf.path}: tokenizer.ggml.{key} (text changed before it is cut) is not supported; "
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
    """All pairs of pieces that make a piece, the highest score first; of one piece, the longer left part first."""
    scores = _list(gguf, "scores", float)
    if len(scores) != len(tokens):
        raise UserError(f"{gguf.path}: tokenizer.ggml.scores has not one score for each token; convert it again")
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
    """Control tokens (special) and user-defined ones, which are found in the text before it is cut."""
    # A GGUF file does not say which tokens swallow the spaces behind them. llama.cpp knows it of Phi-3 by name.
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
