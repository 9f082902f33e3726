"""The tokenizer of the tests' tiny models: a token for every byte."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    special: Sequence[str] = (), *, bos: bool = False, backwards: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """256 tokens, with `backwards` from the last to the first, and `special` after them.

    The first of `special` is the beginning-of-text token, which stands before every text where `bos`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 256)])
    names = {"bos_token": special[0]} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
