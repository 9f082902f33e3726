"""Every flag is defined once, its module imports no JAX, and no flag of the first release is lost."""

import subprocess
import sys
from collections import Counter
from dataclasses import fields

import pytest

from lpes_jax.settings import Settings
from lpes_jax.settings.compare import CompareSettings
from lpes_jax.settings.doctor import ChecksSettings, DoctorSettings
from lpes_jax.settings.evaluate import EvaluateSettings
from lpes_jax.settings.export import ExportSettings
from lpes_jax.settings.groups import HostSettings
from lpes_jax.settings.search import PRESETS, GeneticSettings, SearchSettings, preset

TREES = {
    "search": SearchSettings,
    "evaluate": EvaluateSettings,
    "compare": CompareSettings,
    "export": ExportSettings,
    "doctor": DoctorSettings,
}
OF_TASKS = """task data num_pairs key_length answer_opener queries_per_haystack query_aware num_documents distractors mode
    random_order first_line empty_golds_match unicode_normalise num_sentences num_keys num_queries subset max_prompt_tokens
    subjects num_shots window stride"""
FIRST_RELEASE = {  # of commit 2784098
    "search": OF_TASKS
    + """ model output_path apply_chat_template prompt_form system_prompt limit test_limit positions metrics
    max_new_tokens overlength seed algorithm curve granularity bands control_points layers min_factor max_factor initial_factor
    initial_factors x_step y_step fitness tie_break search_positions weights population_size parents mutations crossovers
    crossover_tries max_change_x max_change_y mutation_rate generations max_evaluations race uniform_candidates steps
    learning_rate schedule weights_in minibatch_size validation_share look_every patience move_x box stay_close text text_weight
    text_minibatch text_window max_text_loss_rise dtype batch_size population_chunk model_axis deterministic resume preset""",
    "evaluate": OF_TASKS
    + """ model output_path factors only_factors split apply_chat_template prompt_form system_prompt positions slots limit seed
    metrics max_new_tokens stop overlength lengths dtype deterministic batch_size model_axis""",
    "compare": OF_TASKS
    + """ model output_path methods factors router text router_steps router_batch channel_strings positions limit test_limit
    budget repeats metrics max_new_tokens overlength seed dtype batch_size resume""",
    "export": "model factors output_path to copy no_self_test",
    "doctor": "model dtype num_tokens compare_with_transformers",
}


def own_flags(group: type[Settings]) -> set[str]:
    """The flags that a class defines itself, not its bases."""
    return {name for name in vars(group).get("__annotations__", {}) if not isinstance(getattr(group, name), Settings)}


def groups() -> set[type[Settings]]:
    """All classes that define flags: the trees, their groups, and the bases of these."""
    trees = [tree() for tree in TREES.values()] + [HostSettings()]
    values = [value for tree in trees for value in (tree, *(getattr(tree, field.name) for field in fields(tree)))]
    return {kind for value in values if isinstance(value, Settings) for kind in type(value).__mro__[:-2]}


def test_each_flag_is_defined_once():
    counts = Counter(name for group in groups() - {ChecksSettings} for name in own_flags(group))
    assert counts["parents"] == counts["seed"] == counts["model"] == 1 and max(counts.values()) == 1, counts.most_common(3)
    assert own_flags(ChecksSettings) & counts.keys() == {"dtype"}  # doctor's takes float16 as well


@pytest.mark.parametrize("verb", TREES)
def test_no_two_flags_of_a_tree_have_one_name_and_none_of_the_first_release_is_lost(verb):
    tree = TREES[verb]()
    parts = [getattr(tree, field.name) for field in fields(tree)]
    count = sum(len(part.flat()) if isinstance(part, Settings) else 1 for part in parts)
    assert count == len(tree.flat())
    assert {*FIRST_RELEASE[verb].split()} <= tree.flat().keys()


def test_settings_import_no_jax():
    modules = "choices settings.groups settings.search settings.evaluate settings.compare settings.export settings.doctor"
    code = f"""
import importlib, pathlib, sys, types
package = types.ModuleType("lpes_jax")  # without its __init__, which gives the whole library
package.__path__ = [{str(__import__("lpes_jax").__path__[0])!r}]
sys.modules["lpes_jax"] = package
for module in {modules.split()}:
    importlib.import_module(f"lpes_jax.{{module}}")
assert not {{"jax", "numpy", "transformers"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_flag_is_found_by_its_name_in_any_group():
    settings = SearchSettings.of(parents=3, text_weight=2.0, algorithm="gradient", task="mdqa")
    assert (settings.ga.parents, settings.text.text_weight, settings.algorithm) == (3, 2.0, "gradient")
    assert settings.task.task == "mdqa" and settings.flat()["parents"] == 3
    changed = settings.replace(parents=5)
    assert changed.ga == GeneticSettings(parents=5) and settings.ga.parents == 3 and changed.text is settings.text
    for wrong in (lambda: SearchSettings.of(parent=3), lambda: settings.replace(ga=GeneticSettings())):
        with pytest.raises(TypeError, match="has no flag 'parent'|has no flag 'ga'"):
            wrong()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_way_to_what_is_named_also_where_that_is_the_default(name):
    defaults = SearchSettings().flat()
    for flag, value in PRESETS[name].items():
        assert preset(name).flat()[flag] == value
        assert preset(name, **{flag: defaults[flag]}).flat()[flag] == defaults[flag]
    assert SearchSettings.of(preset=name) == preset(name) and preset(name).run.preset == name


def test_a_flag_with_conditions_has_those_of_its_group_and_its_own():
    found = SearchSettings().conditions()
    assert found["steps"] == {"algorithm": ("gradient",)} and "seed" not in found
    assert found["bands"] == {"granularity": ("layer_band", "layer_group_band")}
    assert found["parents"] == found["population_size"] and "gradient" not in found["parents"]["algorithm"]
    assert "min_factor" not in found  # bounds the uniform factor, whatever is learnt
