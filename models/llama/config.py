"""What a Llama-family checkpoint says of itself, and what this port can run.

A checkpoint is understood wholly or refused: a key that changes the computation and that the port does not implement raises
a `UserError` that names it.
"""

from dataclasses import dataclass

from lpes_jax.errors import UserError
from lpes_jax.rope import RopeParameters

SUPPORTED_MODEL_TYPES = ("llama",)

# Keys of a Hugging Face config that change the computation, with the value that this port implements.
_IMPLEMENTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-architecture decoder; the names are those of Hugging Face's `LlamaConfig`."""

    vocab_size: int
    hidden_size: int  # E
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    tie_word_embeddings: bool = False
    model_type: str = "llama"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < 2**31:
                raise UserError(f"model config: {name} must be a positive whole number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model config: {self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise UserError(f"model config: head_dim must be even for RoPE, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: dict, where: str = "config.json") -> "LlamaConfig":
        """From the contents of a Hugging Face `config.json`; `where` names the file in errors."""
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UserError(
                f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        for key, implemented in _IMPLEMENTED.items():
            if config.get(key, implemented) not in (implemented, None):
                raise UserError(f"{where}: {key}={config[key]!r} is not supported (only {implemented!r})")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
        if missing := [key for key in needed if config.get(key) is None]:
            raise UserError(f"{where}: {', '.join(missing)} missing; is this the config.json of a Llama-architecture model?")
        for key in needed:
            if isinstance(config[key], bool) or not isinstance(config[key], int | float) or not config[key] > 0:
                raise UserError(f"{where}: {key} must be a positive number, got {config[key]!r}")
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=float(config["rms_norm_eps"]),
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            rope=RopeParameters.from_hf(config, where),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            model_type=model_type,
        )

    def to_hf(self) -> dict:
        """The `config.json` that transformers reads for this model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope.to_hf(),
            "tie_word_embeddings": self.tie_word_embeddings,
        }
