"""The code of the guides runs, and does what the guides say. The notebook is run by `make docs`."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from lpes_jax.errors import UserError
from lpes_jax.methods import Choice
from lpes_jax.models.llama import LlamaConfig
from lpes_jax.rope import RopeTable
from lpes_jax.tasks.prompts import Task, encode, slot

DOCS = Path(__file__).resolve().parents[1] / "docs"


def names_of(page: str) -> dict[str, Any]:
    """What the Python of a page defines."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile("\n".join(code), page, "exec"), names)
    return names


def test_the_task_of_the_guide_is_a_task():
    task = names_of("guides/add_a_task.md")["Coats"](num_people=5)
    assert isinstance(task, Task) and task.num_items == 5
    search, test = (task.examples(split, 20, seed=3) for split in ("search", "test"))
    assert not {*search} & {*test} and search == task.examples("search", 20, seed=3)
    prompts = [task.prompt(test[0], slot(position, 5), position) for position in (0, 50, 100)]
    assert len({prompt.example for prompt in prompts}) == 1 and len({prompt.text for prompt in prompts}) == 3
    asked, colour = test[0][0]
    for prompt, line in zip(prompts, (0, 2, 4), strict=True):
        assert prompt.text.split("\n")[line] == f"{asked} wears a {colour} coat."
        assert task.score(f" {colour}.", prompt)["recall"] == 1.0 and task.score(" none", prompt)["recall"] == 0.0
    assert [len(encoded.answers) for encoded in encode(prompts, byte_tokenizer(), 4096)] == [1, 1, 1]


def test_the_method_of_the_guide_is_a_method(tiny_config: LlamaConfig):
    names = names_of("guides/add_a_method.md")
    plain = tiny_config.rope_table(8)

    def table(last: float) -> RopeTable:
        return names["ramp"](last)(tiny_config, 8).tables

    np.testing.assert_array_equal(np.asarray(table(1.0).inv_freq).squeeze(), np.asarray(plain.inv_freq).squeeze())
    factors = np.asarray(plain.inv_freq / jnp.reshape(table(2.0).inv_freq, plain.inv_freq.shape))[:, 0, 0]
    np.testing.assert_allclose(factors, np.linspace(1, 2, tiny_config.num_layers), rtol=1e-6)
    with pytest.raises(UserError, match="must be above 0, got -1"):
        names["ramp"](-1)

    class Budget:
        budget = 2

    choices = names["choices"](Budget)
    assert len(choices) == 2 and all(isinstance(choice, Choice) for choice in choices)


def test_the_notebook_has_no_outputs_that_could_be_old():
    notebook = json.loads((DOCS / "tutorials/demo.ipynb").read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
    code = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert 'lj.preset("quick"' in code and "lj.run_search(" in code
