"""Texts that tell tokenizers apart: digits, spaces, newlines, composed and decomposed letters, emoji, code, special tokens.

    for kind, text in hard_texts(): ...

Two pipelines with the same vocabulary agree on plain English even if something else is wrong. They differ here: in whether a
space is put before the text, in how many digits form a word, in Unicode normalisation, in contractions in capitals, and in the
text around a special token. `doctor` and the tests compare tokenizers on these texts, a few hundred.
"""

from collections.abc import Iterator

TEXTS: dict[str, tuple[str, ...]] = {
    "spaces": (
        "", " ", "  ", "   ", "        ", " leading", "  two leading", "    four leading", "tail ", "tail  ", "a  b",
        "a   b", "a    b     c", " a ", "  a  ", "one two  three   four    five", "word " * 3, "\xa0", "a\xa0b",
        "\u2003wide", "\u3000\u8868\u610f", "a\u200bb", "a\u2009b", "\u202fthin", "a \xa0 b",
    ),
    "newlines": (
        "\n", "\n\n", "\n\n\n", "\r", "\r\n", "\r\n\r\n", " \n", "\n ", " \n ", "a\nb", "a\n\nb", "a \n b", "a\n  b",
        "a  \n", "a\r\nb", "a\rb", "line\n\n\tindented\r\n", "\n\n\n   3 | 4", "x  \n\n  \n y", "\u2028", "a\u2028b\u2029c",
        "a\x85b", "a\x0bb\x0cc", "end.\n\nNext", "Answer:\n", "Answer: ",
    ),
    "tabs": (
        "\t", "\t\t", "\t\t\t", "a\tb", "\ta", "a\t", " \t ", "\t \t", "\n\t", "\t\n", "a\t\tb\t c", "1\t2\t3",
    ),
    "digits": (
        "0", "7", "12", "123", "1234", "12345", "123456", "1234567890", "650841823", "2023", "in 2023 and 1999", " 2024",
        "  42", "3.14159", "1,234,567.89", "-273.15", "+49 30 901820", "1e-10", "6.02e23", "0x1F3a", "0b1011", "08:45",
        "2024-02-29", "½ ¼ ²³", "x²+y³", "①②③", "Ⅳ Ⅻ", "\u0663\u0664\u0665", "१२३", "１２３", "v1.2.3-rc4",
        "a1b2c3", "1st 2nd 3rd", "100%", "$5 and $6", "7" * 9, "value: 93ab", "Key 4f0c", "3f2a-99", "192.168.0.1",
        "1 2  3   4", "12 34", "0000",
    ),
    "contractions": (
        "it's", "It's", "IT'S", "don't", "DON'T", "I'll I'LL", "we've WE'VE", "they're THEY'RE", "I'm I'M", "he'd HE'D",
        "'s 't 're", "it’s", "l'été", "rock'n'roll", "'tis", "o'clock", "dogs' ", "x'LL", "''", "can't've", "ſ'ſ",
        "\u212a'K'ſ",
    ),
    "letters": (
        "Hello, world!", "hello WORLD", "HELLO", "helloWorld HTTPServer", "iPhone", "McDonald", "ALLCAPS lower Mixed",
        "The capital of", "supercalifragilisticexpialidocious", "antidisestablishmentarianism", "a", "A", "a" * 16,
        "abababab", "zzz ZZZ", "naïve", "Große", "ﬁne ﬂow", "ªº", "ǅ ǆ Ǆ",
    ),
    "accents": (
        "\xe9", "e\u0301", "caf\xe9", "cafe\u0301", " \xe9", " e\u0301", "\xfc u\u0308", "\xf1n\u0303",
        "\xc5 \u212b A\u030a", "\u1e69 s\u0323\u0307 s\u0307\u0323", "H\xe9llo W\xf6rld", "He\u0301llo Wo\u0308rld",
        "Ti\u1ebfng Vi\u1ec7t", "Tie\u0302\u0301ng", "\u03a9 \u2126", "\u0130 \u0131", "a\u0300\u0301\u0302\u0303", "\u0301",
        "\xc7ok g\xfczel", "z\u0351\u036b\u0343",
    ),
    "scripts": (
        "中文", "字符 中文 字", "日本語 と ひらがな カタカナ", "\uff76\uff9e \u30ac \u304b\u3099", "한국어",
        "\u1112\u1161\u11ab", "\uac01 \u1100\u1161\u11a8", "Привет, мир",
        "\u0401\u043b\u043a\u0430 \u0438 \u0451\u0436, \u0439 \u0438\u0306", "Ελληνικά", "ไทยภาษา",
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u0937\u093f", "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd",
        "\u09ac\u09be\u0982\u09b2\u09be", "ქართული", "Հայերեն", "አማርኛ", "Ꮳꮃꭹ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𠜎𠜱", "中文mixed英文123数字",
        "。，！？「」", "x中y文z", "Zażółć gęślą jaźń", "Þórr ð", "ÆŒ œæ",
    ),
    "right to left": (
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
        "\u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627", "\u200f\u05e2\u05d1\u05e8\u05d9\u05ea\u200e",
        "\u202eabc\u202c", "abc \u05d0\u05d1\u05d2 123", "\u0644\u0627", "\ufefb",
        "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd", "\u0661\u0662\u0663 abc",
        "\u0641\u0627\u0631\u0633\u06cc\u200c\u0647\u0627",
    ),
    "emoji": (
        "🙂", "🙂🚀", " 🙂", "a🙂b", "👍🏽", "👩\u200d💻", "👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "🇩🇪🇫🇷",
        "1\ufe0f\u20e3", "❤ ❤\ufe0f", "☎\ufe0e", "©®™", "✓✗", "→ ⇒ ∀∃", "Ω≈ç√∫", "♔♕", "░▒▓█", "👍🏽👍🏿 ok",
        "e\u20dd", "text\ufe0f", "\U000e0067",
    ),
    "punctuation": (
        "...", "…", "!!!", "?!", " ?", "a.b", "a. b", "(a)", "[b]", "{c}", '"quoted"', "“curly” ‘quotes’",
        "«guillemets»", "em—dash", "en–dash", "a-b", "a--b", "a---b", "___", "a_b_c", "#tag @user", "&amp;", "50/50",
        "path/to//x\n", "http://example.org/a?b=c&d=%20#e", "a@b.co", "~`^|\\", "*bold* **more**", " - item", "1) first",
        "=====", "-----\n", "....\n\n", "!\n", " ,", "',", '",\n "',
    ),
    "code": (
        "def f(x):\n    return x + 1\n", "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}",
        '{"key": "3f2a-99", "n": [1, 2, 3]}', "SELECT * FROM t WHERE id=42;", '<div class="a">b</div>',
        "x = y if z else None  # comment", "#include <stdio.h>\n\n", "    indented\n        more\n",
        "camelCase snake_case kebab-case", "a->b::c", "!=\t==\t<=\t>=", "`code` ```py\nx\n```", "\\n\\t\\\\",
        "$\\frac{a}{b}$", "0xDEADBEEF", "@dataclass(frozen=True)", "lambda x: x**2", "i+=1;j--;", "/* c */ // d",
        "%s %d %5.2f", "if(a&&b||!c){return;}", "| a | b |\n|---|---|\n| 1 | 2 |", "\tif x:\n\t\ty\n", 'r"[^\\s]+"',
    ),
    "special tokens": (
        "<s>", "</s>", "<unk>", "<pad>", "<s> x", "<s>x", "x</s>", "x </s> y", "<s><s>", "<|endoftext|>", "a<|endoftext|>b",
        "a <|endoftext|> b", "<|begin|>", "<|im_start|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>", "<|begin_of_text|>x", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\n",
        "[INST] hi [/INST]", "<<SYS>>\nx\n<</SYS>>", "<|user|>\n the cap<|end|>",
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "<|im_start|", "< s >", "<think>\n\n</think>",
        "<tool_call>{}</tool_call>", "<0x41>", "<0x0A><0xE9>", "▁", "a▁b", "▁a", "▁▁", "Ġ", "ĠaĊ", "<|IM_START|>",
        "<S>", "<mask>", "[CLS][SEP]",
    ),
    "bytes": (
        "\x00", "a\x00b", "\x01\x02\x7f", "\x1b[31mred\x1b[0m", "\ufeff", "\ufeffBOM", "\ufffd", "\ufffe", "\U0010ffff",
        "\ue000", "\xad", "\xff\xfe", "\xc3\xa9",
    ),
    "long": (
        "The red boat left port 17 at 08:45 with 2023 crates of salt. It's fine, isn't it? I'LL go.\n\nAnswer: A B C D\n",
        'Extract the value of the specified key in the JSON object below.\n\n{"4f0c71d8": "93ab05e2",\n "c3b6": "8e17"}',
        "Answer the question using only the given search results.\n\nDocument [1](Title: A) b\nDocument [2](Title: C) d\n",
        "Première été, Köln; Größe 12 — naïve façade.  Señor, ¿qué?  Ærø, Łódź", "ab" * 40, "0123456789" * 6,
        " " * 70 + "x", "\n" * 20,
    ),
}  # fmt: skip
# In the middle of a text other rules apply than at its beginning, so these kinds are tested there as well.
_INSIDE = ("spaces", "newlines", "digits", "contractions", "accents", "emoji", "special tokens")


def hard_texts() -> Iterator[tuple[str, str]]:
    """Yield (kind, text): each text of `TEXTS`, then those of some kinds between two words."""
    for kind, texts in TEXTS.items():
        yield from ((kind, text) for text in texts)
    for kind in _INSIDE:
        yield from ((kind, f"value{text}is") for text in TEXTS[kind] if text)
