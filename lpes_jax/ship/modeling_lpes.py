"""A model of transformers whose layers rotate by position / factor (LPES), with factors per layer, KV group and frequency.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

transformers 4.57 and 5 load this file from its folder, and so do vLLM and SGLang through their Transformers backends.
config.json has the factors under `lpes_rates`, and the model's own RoPE under `lpes_rope`. Its usual RoPE entries name a type
that transformers does not have, so that nothing loads the weights as the model without factors.

Letters: L layers, K key-value heads, H heads, G = 1 or K, R rotated part of a head, B batch, T tokens, D head dim.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
import sys
from functools import wraps

import torch
from transformers.models.llama.configuration_llama import LlamaConfig as FamilyConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer as FamilyDecoderLayer
from transformers.models.llama.modeling_llama import LlamaForCausalLM as FamilyForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel as FamilyModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as FamilyRotaryEmbedding

LOCKED = {"rope_type": "lpes"}  # not a RoPE type of transformers: loading config.json without this file fails
_RANK = {"layer": 1, "layer_band": 2, "layer_group": 2, "layer_group_band": 3}


class LpesConfig(FamilyConfig):
    model_type = "lpes_llama"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return super().from_dict({**config_dict, **config_dict["lpes_rope"]}, **kwargs)

    def to_dict(self):
        found = super().to_dict()
        return {**found, **{key: LOCKED for key in ("rope_scaling", "rope_parameters") if key in found}}


def multipliers(config, half):
    """1 / factor of each frequency: float32 [L, G, R/2]. A factor of null is infinite: the frequency does not rotate."""

    def filled(numbers):
        if isinstance(numbers, list):
            return [filled(number) for number in numbers]
        return float("inf") if numbers is None else numbers

    granularity = config.lpes_rates["granularity"]
    table = torch.tensor(filled(config.lpes_rates["factors"]), dtype=torch.float32, device="cpu")
    if len(table) != config.num_hidden_layers or table.dim() != _RANK[granularity]:
        raise ValueError(f"lpes_rates of shape {list(table.shape)} are not of {config.num_hidden_layers} layers, {granularity}")
    bands = table.shape[-1] if "band" in granularity else 1
    return 1 / table.reshape(len(table), -1, bands).repeat_interleave(half // bands, dim=-1)


class LpesRotaryEmbedding(FamilyRotaryEmbedding):
    """Gives the layers the inputs of their cos and sin: frequencies [L, G, R/2], positions, and a scaling factor."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.register_buffer("multipliers", multipliers(config, self.inv_freq.shape[-1]), persistent=False)
        self.is_checked = False

    def fill(self):
        """Set the multipliers. No weights file has them, so they are lost if a model is built on the meta device."""
        with torch.no_grad():
            self.multipliers.copy_(multipliers(self.config, self.multipliers.shape[-1]))

    def check(self):
        if not torch.equal(self.multipliers.cpu(), multipliers(self.config, self.multipliers.shape[-1])):
            raise RuntimeError("the factors of LPES were lost while the model was loaded; load it with from_pretrained")
        self.is_checked = True

    @torch.no_grad()
    def forward(self, x, position_ids, *args, **kwargs):
        if self.rope_type in ("dynamic", "longrope"):
            super().forward(x, position_ids, *args, **kwargs)  # sets inv_freq by the length
        if self.inv_freq.dtype != torch.float32 or self.multipliers.dtype != torch.float32:
            raise RuntimeError(f"frequencies in {self.inv_freq.dtype}: load with dtype=..., model.to(dtype) rounds them")
        if not self.is_checked and not torch.compiler.is_compiling() and x.device.type != "meta":
            self.check()
        return self.inv_freq * self.multipliers, position_ids, self.attention_scaling


class LpesDecoderLayer(FamilyDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, hidden_states, *args, position_embeddings, **kwargs):
        frequencies, positions, scaling = position_embeddings
        own = frequencies[self.layer_idx].to(positions.device)  # [G, R/2]
        angles = positions[:, None, :, None].float() * own[:, None, :]
        angles = angles if len(own) > 1 else angles[:, 0]
        emb = torch.cat((angles, angles), dim=-1)  # [B, T, R], or [B, K, T, R]
        cos_sin = tuple((half * scaling).to(hidden_states.dtype) for half in (emb.cos(), emb.sin()))
        return super().forward(hidden_states, *args, position_embeddings=cos_sin, **kwargs)


def take_groups():
    """Make the family's apply_rotary_pos_emb accept cos and sin of [B, K, T, R]; with three axes it is unchanged."""
    modeling = sys.modules[FamilyModel.__module__]
    plain = modeling.apply_rotary_pos_emb
    if getattr(plain, "takes_groups", False):
        return

    @wraps(plain)
    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        if cos.dim() == 3:
            return plain(q, k, cos, sin, *args, **kwargs)
        if k.shape[1] != cos.shape[1]:
            raise RuntimeError(
                f"{k.shape[1]} of {cos.shape[1]} KV heads: factors of KV groups do not work with tensor parallelism"
            )
        # q [B, H, T, D]: the heads of a group are adjacent. As [B, H/K, K, T, D], they broadcast with cos [B, 1, K, T, R].
        q, k = plain(q.unflatten(1, (cos.shape[1], -1)).transpose(1, 2), k[:, None], cos, sin)
        return q.transpose(1, 2).flatten(1, 2), k[:, 0]

    apply_rotary_pos_emb.takes_groups = True
    modeling.apply_rotary_pos_emb = apply_rotary_pos_emb


class _Lpes:
    config_class = LpesConfig
    _no_split_modules = ["LpesDecoderLayer"]

    def _init_weights(self, module):  # transformers 5 calls it for all tensors that are in no file
        super()._init_weights(module)
        if isinstance(module, LpesRotaryEmbedding):
            module.fill()


class LpesModel(_Lpes, FamilyModel):
    def __init__(self, config):
        super().__init__(config)
        if "group" in config.lpes_rates["granularity"]:
            take_groups()
        self.layers = torch.nn.ModuleList(LpesDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.rotary_emb = LpesRotaryEmbedding(config)
        self.post_init()


class LpesForCausalLM(_Lpes, FamilyForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = LpesModel(config)
        self.post_init()
