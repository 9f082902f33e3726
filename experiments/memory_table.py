"""Which verbs fit which cards, by the planner of `doctor`: model size x card.

    python experiments/memory_table.py                    # prints a Markdown table
    python experiments/memory_table.py --prompt-tokens 4096 --share 0.95

Sizes are those of Llama 2 and of Qwen2.5. bf16: all weights in 16 bits; q8: the layers' matrices as in a Q8_0 file (or
--weight-format int8); q4: as in a Q4_K file. The embedding and the head have 16 bits. A cell says what fits: s, search and
profile at full speed; (s), search and profile with smaller passes; b, search --preset best with its minibatch; b8, with
--minibatch-size 8. All cells are planned; in bold ones steps of both also ran (`bench_packed.py`).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from gguf import GGMLQuantizationType

from lpes_jax.doctor.plan import GIB, Needs, plan
from lpes_jax.models.llama.checkpoint import weight_bytes
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.packing import LAYOUTS
from lpes_jax.rope import RopeParameters

CARDS = (16, 24, 48, 80, 141)  # GiB
# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Llama-2-7B": (4096, 11008, 32, 32, 32, 32000, False),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Llama-2-13B": (5120, 13824, 40, 40, 40, 32000, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Llama-2-70B": (8192, 28672, 80, 64, 8, 32000, False),
}
RECORD = Path(__file__).with_name("results") / "bench_packed" / "llama_2_7b_h200.json"
FORMS = {"bf16": None, "q8": LAYOUTS[GGMLQuantizationType.Q8_0], "q4": LAYOUTS[GGMLQuantizationType.Q4_K]}


@dataclass(frozen=True)
class MemoryTableFlags:
    """Cards, and the length of prompts."""

    prompt_tokens: int = 2048
    """Tokens of a prompt with its answer."""
    share: float = 0.95
    """The part of a card that XLA may use (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


def config_of(name: str) -> LlamaConfig:
    """The config of a size."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        rope=RopeParameters(rope_theta=1e4),
    )


def cell(needs: list[Needs]) -> str:
    """What fits, in a few letters."""
    search, _, best = needs
    letters = [] if not search.at_once else ["s" if search.enough else "(s)"]
    if best.at_once:
        letters.append("b" if best.enough else f"b{best.at_once}")
    return " ".join(letters) or "-"


def measured() -> set[tuple[str, str, int]]:
    """Shape, form and GiB of the records in which a genetic and a gradient step ran."""
    steps: dict[tuple[str, str, int], set[str]] = {}
    for each in json.loads(RECORD.read_text(encoding="utf-8"))["cells"]:
        if "seconds" in each:
            steps.setdefault(("Llama-2-7B", each["form"], int(each["gib"])), set()).add(each["step"])
    return {key for key, found in steps.items() if found == {"genetic", "gradient"}}


def table(flags: MemoryTableFlags) -> str:
    """The table in Markdown."""
    ran = measured()
    lines = [
        f"| model | weights | GiB | {' | '.join(f'{card} GiB' for card in CARDS)} |",
        "| --- | --- | ---: " + "| --- " * len(CARDS) + "|",
    ]
    for name in SHAPES:
        config = config_of(name)
        for form, layout in FORMS.items():
            weights = weight_bytes(config, 2, {} if layout is None else layout)
            cells = []
            for card in CARDS:
                needs = plan(config, weights, 2, int(card * flags.share * GIB), flags.prompt_tokens, packed=layout is not None)
                cells.append(f"**{cell(needs)}**" if (name, form, card) in ran else cell(needs))
            lines.append(f"| {name} | {form} | {weights / GIB:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(tyro.cli(MemoryTableFlags, description=__doc__)))
