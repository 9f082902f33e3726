"""Small programs for two devices, each by XLA's partitioners Shardy and GSPMD: which of them crash?

    python experiments/shardy_crash.py --output-path runs/shardy                   # on a machine with two GPUs
    python experiments/shardy_crash.py --platform cpu --output-path runs/shardy    # two virtual CPU devices

On two GPUs, Shardy ended the gradient of a search in a segmentation fault. The cause is an operand of `jax.shard_map` without
elements: on a GPU, XLA replaces it by a constant before its Shardy pass, which crashes. `an empty constant` is the
smallest program: a scatter that sets a whole axis has indices without elements. The library updates a slice instead. The
other programs have what the search has besides: products, a scan with rematerialised layers, XLA's and cuDNN's attention,
forward and backward. `descent` is the search itself on the bundled model, in bfloat16 and in float32. Every program runs in
a process of its own, because a crash ends the process.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grid import markdown_document, markdown_table, run_script

from lpes_jax.store.files import write_json, write_text
from lpes_jax.store.provenance import environment

START = """
import faulthandler, functools, sys
faulthandler.enable()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
jax.config.update("jax_use_shardy_partitioner", {shardy})
devices = np.array(jax.devices()[:2]).reshape(2, 1)
assert devices.size == 2
mesh = Mesh(devices, ("population", "model"), axis_types=(AxisType.Auto,) * 2)
whole, shared = P(), P("population")
B, S, H, D, L = 4, 256, 4, 64, 3
x = jax.random.normal(jax.random.key(0), (B, S, H * D), jnp.bfloat16)
w = jax.random.normal(jax.random.key(1), (L, H * D, H * D), jnp.bfloat16) / 16

def split(f, inputs=(whole, whole, shared)):
    axes = set(mesh.axis_names)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=whole, axis_names=axes, check_vma=False))

def summed(loss):
    def f(p, w, x):
        value, gradient = jax.value_and_grad(loss)(p, w, x)
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "population"), (value, gradient))
    return f

def attention(kind):
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind)
    return attend

def layers(attend, remat=True):
    def one(p, w, y):
        q = (y @ w).reshape(y.shape[0], S, H, D) * p.astype(y.dtype)
        return y + attend(q, q, q).reshape(y.shape)
    def loss(p, w, x):
        body = jax.checkpoint(one) if remat else one
        y, _ = jax.lax.scan(lambda y, layer: (body(*layer, y), None), x, (p, w))
        return (y.astype(jnp.float32) ** 2).mean()
    return loss

p = jnp.ones((L, D), jnp.float32)
"""
PROGRAMS = {
    "an empty constant": """
print(split(lambda p, w, x: jax.lax.psum(p.at[0:L].set(x.sum().astype(p.dtype)), 'population'))(p, w, x)[0, 0])
""",
    "an empty argument": """
total = lambda empty, w, x: jax.lax.psum(empty.sum() + x.sum(), 'population')
print(split(total)(jnp.zeros(0), w, x))
""",
    "an update of a slice": """
def f(p, w, x):
    moved = jax.lax.dynamic_update_slice_in_dim(p, jnp.full_like(p, x.sum()), 0, axis=0)
    return jax.lax.psum(moved, 'population')
print(split(f)(p, w, x)[0, 0])
""",
    "products": "print(split(summed(lambda p, w, x: ((x @ w[0]).astype(jnp.float32) ** 2).mean() * p.sum()))(p, w, x)[0])",
    "scan": "print(split(summed(layers(lambda q, k, v: q * k + v, remat=False)))(p, w, x)[0])",
    "scan, remat": "print(split(summed(layers(lambda q, k, v: q * k + v)))(p, w, x)[0])",
    "XLA's attention": "print(split(summed(layers(attention('xla'))))(p, w, x)[0])",
    "cuDNN's attention, forward": """
loss = layers(attention('cudnn'))
print(split(lambda p, w, x: jax.lax.psum(loss(p, w, x), 'population'))(p, w, x))
""",
    "cuDNN's attention, gradient": "print(split(summed(layers(attention('cudnn'), remat=False)))(p, w, x)[0])",
    "cuDNN's attention, gradient, remat": "print(split(summed(layers(attention('cudnn'))))(p, w, x)[0])",
    "cuDNN's attention, without shard_map": """
from jax.sharding import NamedSharding
x = jax.device_put(x, NamedSharding(mesh, shared))
print(jax.jit(jax.value_and_grad(layers(attention('cudnn'))))(p, w, x)[0])
""",
    "without Triton's products": """
inputs = whole, whole, shared
f = jax.shard_map(summed(layers(attention('xla'))), mesh=mesh, in_specs=inputs, out_specs=whole, check_vma=False)
options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
print(jax.jit(f, compiler_options=options)(p, w, x)[0])
""",
}
DESCENT = """
import sys
import jax
jax.config.update("jax_use_shardy_partitioner", {shardy})
from lpes_jax.search.__main__ import main
sys.exit(main("--dtype {dtype} --model tiny-retriever --algorithm gradient --curve free --num-pairs 5 --key-length 8 "
              "--limit 8 --test-limit 2 --steps 2 --look-every 1 --uniform-candidates 1 --overwrite "
              "--output-path {folder}".split()))
"""
DESCENTS = {"descent": "bfloat16", "descent, float32": "float32"}
Partitioner = Literal["Shardy", "GSPMD"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where to run."""

    output_path: Path = Path("runs/shardy_crash")
    """Folder of tables.md, summary.json and each program's output."""
    platform: Literal["gpu", "cpu"] = "gpu"
    """cpu: two virtual devices; cuDNN's attention is left out there."""
    side_by_side: int = 6
    """Processes at a time."""


def main(s: Settings) -> None:
    """Run every program and write the table."""
    s.output_path.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*PROGRAMS, *DESCENTS) if s.platform == "gpu" or "cuDNN" not in name]
    jobs: list[tuple[str, Partitioner]] = [(name, by) for name in names for by in ("Shardy", "GSPMD")]
    with ThreadPoolExecutor(s.side_by_side) as pool:
        ends = dict(zip(jobs, pool.map(lambda job: ended(s, *job), jobs), strict=True))
    table = markdown_table(
        ["program", "Shardy", "GSPMD"], [[name, ends[name, "Shardy"], ends[name, "GSPMD"]] for name in names]
    )
    origin = environment()
    write_json(s.output_path / "summary.json", {"programs": [[*job, end] for job, end in ends.items()], **origin})
    write_text(s.output_path / "tables.md", markdown_document("Two devices by Shardy and by GSPMD", [table]))
    print(table)


def ended(s: Settings, name: str, by: Partitioner) -> str:
    """How a program ended: "ok", or its exit status and the last line of its output."""
    label = f"{name}_{by}".replace(" ", "_").replace("'", "").replace(",", "")
    if name in DESCENTS:
        program = DESCENT.format(dtype=DESCENTS[name], shardy=by == "Shardy", folder=s.output_path / label)
    else:
        program = START.format(shardy=by == "Shardy") + PROGRAMS[name]
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": ""}
    if s.platform == "cpu":
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (s.output_path / f"{label}.log").write_text(done.stdout, encoding="utf-8")
    if done.returncode == 0:
        return "ok"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return f"{done.returncode}: {lines[-1][:80] if lines else ''}"


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
