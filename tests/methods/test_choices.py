"""What `compare` tries of each method: every method of the package is in its list, and stays within the budget."""

import pkgutil
from importlib import import_module
from pathlib import Path

import jax
import pytest
from tunings import tuning

from lpes_jax import methods
from lpes_jax.compare import METHODS
from lpes_jax.errors import UserError
from lpes_jax.methods.moice import Router

LEARNING = {"hidden_channel", "moice", "seal", "learnt_factors", "learnt_gains", "learnt_both"}


def test_every_method_of_the_package_is_compared():
    offered = set()
    for module in pkgutil.iter_modules(methods.__path__, methods.__name__ + "."):
        own = [value for name, value in vars(import_module(module.name)).items() if name.endswith("choices")]
        assert own, f"{module.name} offers no choices"
        offered |= set(own)
    assert offered == set(METHODS.values()) - {METHODS["baseline"]}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - LEARNING))
def test_choices_are_within_the_budget_and_fit_the_model(name, tiny_model):
    for budget in (1, 3, 50):
        choices = METHODS[name](tuning(tiny_model, budget=budget))
        assert 1 <= len(choices) <= budget and len({choice.setting for choice in choices}) == len(choices)
        for choice in choices:
            if choice.maker is not None:
                choice.maker(tiny_model.config, 64)


def test_a_trained_router_is_taken_and_no_text_read(tiny_model, tmp_path: Path):
    path = tmp_path / "router.safetensors"
    Router.init(jax.random.key(0), tiny_model.config).save(path)
    [choice] = METHODS["moice"](tuning(tiny_model, router=path))
    assert choice.setting == str(path)
    with pytest.raises(AssertionError):
        METHODS["moice"](tuning(tiny_model))


@pytest.mark.parametrize("name", ["lpes", "pi"])
def test_what_needs_factors_says_so(name, tiny_model):
    with pytest.raises(UserError, match=f"--methods {name} needs --factors, the factors.json of a search"):
        METHODS[name](tuning(tiny_model, factors=None))
    assert METHODS[name](tuning(tiny_model))[0].setting == "f.json"
