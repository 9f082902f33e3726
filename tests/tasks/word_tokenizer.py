"""A tokenizer whose tokens can be counted by hand."""

import re
from zlib import crc32


def words(texts: list[str]) -> dict[str, list[list[int]]]:
    """A tokenizer: each word with the white space before it is a token, and so is white space at the end."""
    return {"input_ids": [[crc32(token.encode()) for token in re.findall(r"\s*\S+|\s+$", text)] for text in texts]}


def num_words(text: str) -> int:
    return len(words([text])["input_ids"][0])
