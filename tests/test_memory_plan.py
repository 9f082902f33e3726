"""The doctor's plan of the memory against the memory of compiled programs, and its verdicts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from selection import mostly_long

import lpes_jax as lj
from lpes_jax import doctor
from lpes_jax.doctor.plan import plan, verdict
from lpes_jax.memory import planned_pass, planned_step
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.models.llama.checkpoint import open_checkpoint, packed_layouts, weight_bytes
from lpes_jax.models.llama.method import table_method
from lpes_jax.prefixes import pack_rows
from lpes_jax.rope import RopeParameters
from lpes_jax.scores import batch_scores

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    rms_norm_eps=1e-5, max_position_embeddings=4096, rope=RopeParameters(rope_theta=1e4),
)  # fmt: skip


def compiled_bytes(config: LlamaConfig, rows: int, length: int, *, gradient: bool) -> int:
    """The temporary memory of a scoring pass or of its gradient, from its compilation; nothing runs."""
    model = Llama(config, rngs=nnx.Rngs(0))
    batch = jax.tree.map(jnp.asarray, pack_rows([([1] * (length - 4), [2] * 4)] * rows))

    def score(factors: Any, model: Any) -> Any:
        table = config.rope_table(length, factors)
        return batch_scores(model, batch, table_method(table), remat=gradient)[1].sum()

    program = jax.jit(jax.grad(score) if gradient else score)
    memory: Any = program.lower(jnp.ones(config.num_layers), model).compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("layers", mostly_long([2, 5], 5))
def test_the_plan_of_a_step_covers_its_compiled_memory_and_is_below_three_times_as_much(layers):
    config = replace(CONFIG, num_layers=layers)
    compiled = compiled_bytes(config, 2, 256, gradient=True)
    planned = planned_step(config, 4, 2, 256, backend="cpu")
    print(f"step, {layers} layers: compiled {compiled:,}, planned {planned:,}")
    assert compiled <= planned < 3 * compiled


def test_the_plan_of_a_pass_covers_its_compiled_memory_and_is_below_three_times_as_much():
    compiled, planned = compiled_bytes(CONFIG, 2, 256, gradient=False), planned_pass(CONFIG, 4, backend="cpu").bytes(512, 128)
    print(f"pass: compiled {compiled:,}, planned {planned:,}")
    assert compiled <= planned < 3 * compiled


def test_bytes_of_weights_are_those_of_the_loaded_model(model_folder):
    checkpoint = open_checkpoint(model_folder)
    for form in ("full", "int8"):
        loaded = lj.load_model(str(model_folder), "float32", weight_format=form)
        layouts = packed_layouts(checkpoint, form)
        planned = weight_bytes(checkpoint.config, 4, layouts)
        offsets = checkpoint.config.num_layers * len(layouts)  # one byte a layer, which the plan leaves out
        rounding = planned + offsets - sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
        assert 0 <= rounding <= len(layouts)


def test_verdicts_follow_the_memory():
    weights = weight_bytes(CONFIG, 2, {})
    verdicts = [[verdict(need) for need in plan(CONFIG, weights, 2, weights + room, 2048)] for room in (0, 2**29, 2**40)]
    assert set(verdicts[0]) == {"does not fit"} and set(verdicts[2]) == {"fits"}
    sizes = [plan(CONFIG, weights, 2, 2**40, length) for length in (512, 4096)]
    assert all(short.least < long.least for short, long in zip(*sizes, strict=True))


def test_the_plan_alone_loads_nothing(capsys, monkeypatch):
    monkeypatch.setattr("lpes_jax.doctor.run.load", lambda *args, **flags: pytest.fail("loaded"))
    settings = doctor.DoctorSettings.of(memory_gb=24.0, weight_format="int8")
    assert doctor.run_doctor(settings) == []
    out = capsys.readouterr().out
    assert "24 GiB" in out and "search --preset best" in out and out.count("fits") == 3
