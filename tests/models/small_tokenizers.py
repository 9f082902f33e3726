"""Small tokenizers in the pipelines of real models, as Hugging Face folders and as .gguf files."""

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [
    "Ġ v", "a l", "Ġv al", "u e", "Ġval ue", "v al", "val ue", "1 2", "12 3", "2 0", "20 2", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "Ã ©",
    "' s", "i s", "Ġ is", "I T", "' S", "i t", "Ġ i", "t h", "th e", "Ġ the", "Ã ¼", "Ì ģ", "e Ì",
]  # fmt: skip
# The words of tokenizer.json of Llama 3, of Qwen2 and of Mistral-Nemo (tekken).
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}"
    r"\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<unk>", "<s>", "</s>")
PIECES = ["▁", "▁▁", "▁▁▁▁", "▁v", "al", "▁val", "ue", "▁value", "va", "val", "value", "▁i", "▁is", "is", "▁t", "he", "▁the"]
PIECES += [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:'<>|[]/é日本"]


def byte_level(words: str, *, nfc: bool = False, bos: bool = False, ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE; `words` is a regular expression, or "digits" for SmolLM's rule. <s> and </s> come last."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), *(["123456"] if ignore_merges else []), *SPECIAL]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if words == "digits":
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        cut = [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, bos)


def sentencepiece(spaces: str, *, bos: bool = False, rstrip: bool = False) -> Tokenizer:
    """SentencePiece's BPE. `spaces`: "none" (Yi), "first" (LlamaTokenizer, legacy=False) or "each" (Llama 2, Phi-3).

    `rstrip`: <|user|> and </s> take the spaces behind them, as in Phi-3.
    """
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|user|>"]
    known = set(PIECES)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in PIECES
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in known and piece[cut:] in known
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    strip = [decoders.Strip(content=" ", left=1, right=0)] if spaces != "none" else []
    if spaces == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if spaces == "each" else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, rstrip=rstrip) for token in ("<|user|>", "</s>")])
    return _finish(tokenizer, bos)


def _finish(tokenizer: Tokenizer, bos: bool) -> Tokenizer:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL if token not in known])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_folder(
    folder: Path, tokenizer: Tokenizer, model_type: str = "llama", config: dict[str, Any] | None = None, **files: Any
) -> Path:
    """tokenizer.json, tokenizer_config.json (unless `config` is None), config.json, and `files`, with __ for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"config__json": {"model_type": model_type}} | files
    if config is not None:
        written["tokenizer_config__json"] = config
    for name, content in written.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def write_gguf(path: Path, tokenizer: Tokenizer, pre: str, *, architecture: str = "llama", **keys: Any) -> Path:
    """The same vocabulary as llama.cpp's converter writes it; `pre` is "llama" for SentencePiece."""
    words = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    types = [2 if token == "<unk>" else 3 if token in special else 6 if token.startswith("<0x") else 1 for token in words]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama" if pre == "llama" else "gpt2")
    writer.add_tokenizer_pre("default" if pre == "llama" else pre)
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    for key, token in {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"}.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", words.index(token))
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
