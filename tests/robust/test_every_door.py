"""Every public name of `lpes_jax` and every verb, fed a damaged model, ids out of range, several ends of text, and a bare text.

Each refuses in one line or does as all others do. A new name or verb must stand in `DOORS`; what does not apply to it says why.
"""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import mostly_long

import lpes_jax as lj
from lpes_jax.cli import VERBS
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.prefixes import pack_rows

pytestmark = pytest.mark.promotes
NOT_FINITE = "the model's logits are not finite"
NO_EMBEDDING = "but the model's embedding has 40 rows"
NO_MODEL, NO_IDS, NO_TEXT = "runs no model", "takes no ids", "takes no texts, and so no end of one"
TINY_TASK = {"num_pairs": 2, "key_length": 1, "positions": (0,), "limit": 1}
TINY_SEARCH = TINY_TASK | {
    **{"test_limit": 1, "control_points": 2, "population_size": 3, "parents": 2, "mutations": 1, "crossovers": 1},
    **{"generations": 0, "uniform_candidates": 1},
}


@dataclass(frozen=True)
class Folders:
    """The models: sound, with NaN in its first layer, with fewer rows than the tokenizer has tokens, with several ends."""

    sound: Path
    nan: Path
    few_rows: Path
    ends: Path
    out: Path


@pytest.fixture(scope="module")
def folders(model_folder: Path, tiny_model: Llama, tiny_config: LlamaConfig, tmp_path_factory) -> Folders:
    root = tmp_path_factory.mktemp("doors")
    found = Folders(model_folder, root / "nan", root / "few_rows", root / "ends", root / "out")
    tokenizer = lj.load_tokenizer(str(model_folder))

    def write(folder: Path, model: Llama) -> None:
        shutil.copytree(model_folder, folder)
        save_llama(model, folder)

    broken = nnx.clone(tiny_model)
    broken.layers.query[...] = broken.layers.query[...].at[0, 0, 0].set(jnp.nan)
    write(found.nan, broken)
    write(found.few_rows, Llama(replace(tiny_config, vocab_size=40), rngs=nnx.Rngs(0)))

    # Every token is followed by A, A by an end that generation_config.json alone names, and all behind it by B.
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in ("A", "!", "B")}
    talker = Llama(tiny_config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(talker)
    talker = nnx.merge(graph, jax.tree.map(jnp.zeros_like, state))
    embed, head = np.zeros((300, 48), np.float32), np.zeros((48, 300), np.float32)
    embed[:, 0] = 1
    for text, channel, following in (("A", 1, "!"), ("!", 2, "B"), ("B", 2, "B")):
        embed[ids[text]] = np.eye(48)[channel]
        head[channel, ids[following]] = 5
    head[0, ids["A"]] = 5
    talker.embed[...], talker.head[...], talker.norm[...] = jnp.asarray(embed), jnp.asarray(head), jnp.ones(48)
    write(found.ends, talker)
    (found.ends / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["!"], 3]}))
    return found


def refused(said: str, call: Callable[[], object]) -> None:
    with pytest.raises(lj.UserError, match=said):
        call()


def model_of(folder: Path) -> tuple[Llama, Any]:
    return lj.load_model(str(folder), "float32"), lj.load_tokenizer(str(folder))


def verb(name: str, folder: Path, *arguments: object) -> int:
    module = import_module(VERBS[name])
    return module.main(["--model", str(folder), *map(str, arguments)])


def flags(settings: dict[str, Any]) -> list[str]:
    found = []
    for name, value in settings.items():
        found += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return found


def outputs(folder: Path) -> set[str]:
    return {json.loads(line)["output"] for line in (folder / "samples.jsonl").read_text().splitlines()}


FIRST, OTHERS = slice(0, 1), slice(1, None)  # of the ways in which a verb runs a model
GENERATED = {"metrics": ("substring",), "max_new_tokens": 6}


class Door:
    """What a name or verb does with each of the four; a text instead of a method says why it does not apply."""

    nan: Any = NO_MODEL
    ids: Any = NO_IDS
    ends: Any = NO_TEXT
    text: Any = NO_TEXT


class Logits(Door):
    def nan(self, folders: Folders) -> None:
        refused(f"{NOT_FINITE}: first in layer 0", lambda: lj.logits(model_of(folders.nan)[0], [[1, 2]]))

    def ids(self, folders: Folders) -> None:
        for bad in (-1, 40, 100_000):
            refused(NO_EMBEDDING, lambda bad=bad: lj.logits(model_of(folders.few_rows)[0], [[1, bad]]))

    def text(self, folders: Folders) -> None:
        refused("tokens must be whole numbers", lambda: lj.logits(model_of(folders.sound)[0], "AB"))


class Generate(Door):
    def nan(self, folders: Folders) -> None:
        refused(f"{NOT_FINITE}: first in layer 0", lambda: lj.generate(*model_of(folders.nan), ["AB"], max_new_tokens=2))

    def ids(self, folders: Folders) -> None:
        refused(NO_EMBEDDING, lambda: lj.generate(*model_of(folders.few_rows), ["zz"], max_new_tokens=2))

    def ends(self, folders: Folders) -> None:
        assert lj.generate(*model_of(folders.ends), ["hello", "x"], max_new_tokens=6) == ["A", "A"]
        assert lj.generate(*model_of(folders.ends), ["x"], max_new_tokens=4, stop_ids=[]) == ["A!BB"]

    def text(self, folders: Folders) -> None:
        model, tokenizer = model_of(folders.sound)
        assert lj.generate(model, tokenizer, "AB", max_new_tokens=2) == lj.generate(model, tokenizer, ["AB"], max_new_tokens=2)


class PopulationScores(Door):
    def nan(self, folders: Folders) -> None:
        batch = pack_rows([([1, 2], [3])])
        refused(
            f"{NOT_FINITE}: first in layer 0", lambda: lj.population_scores(model_of(folders.nan)[0], batch, jnp.ones((1, 3)))
        )

    def ids(self, folders: Folders) -> None:
        for row in (([1, 40], [3]), ([1, 2], [99]), ([-1], [3])):
            scores = lambda row=row: lj.population_scores(model_of(folders.few_rows)[0], pack_rows([row]), jnp.ones((1, 3)))  # noqa: E731
            refused(NO_EMBEDDING, scores)


class RunEvaluation(Door):
    def nan(self, folders: Folders) -> None:
        settings = lj.EvaluateSettings.of(model=str(folders.nan), dtype="float32", output_path=folders.out / "e", **TINY_TASK)
        refused(f"{NOT_FINITE}: first in layer 0", lambda: lj.run_evaluation(settings))
        assert not (folders.out / "e").exists()

    def ids(self, folders: Folders) -> None:
        settings = lj.EvaluateSettings.of(model=str(folders.few_rows), output_path=folders.out / "e", **TINY_TASK)
        refused(NO_EMBEDDING, lambda: lj.run_evaluation(settings))

    def ends(self, folders: Folders) -> None:
        settings = lj.EvaluateSettings.of(model=str(folders.ends), output_path=folders.out / "ends", **TINY_TASK, **GENERATED)
        lj.run_evaluation(settings)
        assert outputs(folders.out / "ends") == {"A"}


class RunSearch(Door):
    def nan(self, folders: Folders) -> None:
        settings = lj.SearchSettings.of(model=str(folders.nan), output_path=folders.out / "s", **TINY_SEARCH)
        refused(f"{NOT_FINITE}.* first in layer 0", lambda: lj.run_search(settings))

    def ids(self, folders: Folders) -> None:
        settings = lj.SearchSettings.of(model=str(folders.few_rows), output_path=folders.out / "s2", **TINY_SEARCH)
        refused(NO_EMBEDDING, lambda: lj.run_search(settings))

    def ends(self, folders: Folders) -> None:
        settings = lj.SearchSettings.of(model=str(folders.ends), output_path=folders.out / "ends_s", **TINY_SEARCH, **GENERATED)
        lj.run_search(settings)
        assert outputs(folders.out / "ends_s") == {"A"}


class OfFactors(Door):
    nan = "holds numbers, and runs no model"

    def ids(self, folders: Folders) -> None:
        for bad in (0, -1, np.nan, -np.inf, 1e-38, 1e39):
            refused("factors must be", lambda bad=bad: lj.LayerFactors(np.array([1.0, bad])))

    def text(self, folders: Folders) -> None:
        refused("factors must be numbers", lambda: lj.LayerFactors(np.array(["AB", "CD"])))


class ScaleLayers(Door):
    def ids(self, folders: Folders) -> None:
        table = model_of(folders.sound)[0].config.rope_table(4).inv_freq
        refused("1 layers of factors, but the table has 3", lambda: lj.scale_layers(table, jnp.ones(1)))


class Bezier(Door):
    def ids(self, folders: Folders) -> None:
        refused("strictly increasing", lambda: lj.bezier(jnp.array([[1.0, 1.0], [0.0, 1.0]]), 3))


class Preset(Door):
    def text(self, folders: Folders) -> None:
        refused("--preset 'AB' is not known", lambda: lj.preset("AB"))


class LoadModel(Door):
    nan = "reads weights; what runs them looks at what comes out"

    def text(self, folders: Folders) -> None:
        refused("dtype 'AB' is not supported", lambda: lj.load_model(str(folders.sound), "AB"))


class LoadTokenizer(Door):
    def ends(self, folders: Folders) -> None:
        tokenizer = lj.load_tokenizer(str(folders.ends))
        assert tokenizer.stop_ids == sorted({tokenizer.convert_tokens_to_ids("!"), 3})


class Verb(Door):
    """A verb, by its exit code and its one line."""

    name = ""
    settings: dict[str, Any] = {}  # noqa: RUF012

    def more(self, folders: Folders) -> list[list[str]]:
        """Flags of all the ways that the verb runs a model; those that differ most come first."""
        return [flags(self.settings)]

    def nan(self, folders: Folders, said: Callable[[], str], which: slice = FIRST) -> None:
        for number, more in [*enumerate(self.more(folders))][which]:
            folder = folders.out / f"{self.name}_{number}"
            assert verb(self.name, folders.nan, *more, *self.into(folder)) == 2, more
            line = said()
            assert "error: " in line and NOT_FINITE in line and "first in layer 0" in line, (more, line)
            assert not (folder / "results.json").exists() and not (folder / "factors.json").exists()

    def ids(self, folders: Folders, said: Callable[[], str], which: slice = FIRST) -> None:
        for number, more in [*enumerate(self.more(folders))][which]:
            assert verb(self.name, folders.few_rows, *more, *self.into(folders.out / f"{self.name}_ids_{number}")) == 2, more
            assert NO_EMBEDDING in said(), more

    def into(self, folder: Path) -> list[str]:
        return ["--output-path", str(folder)]


class Evaluate(Verb):
    name, settings = "evaluate", TINY_TASK

    def more(self, folders: Folders) -> list[list[str]]:
        text = folders.out / "text.txt"
        text.parent.mkdir(exist_ok=True)
        text.write_text("The boat left the port with salt and grain. " * 40)
        for split in ("dev", "test"):
            (folders.out / "mmlu" / split).mkdir(parents=True, exist_ok=True)
            with (folders.out / "mmlu" / split / f"law_{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([(f"Question {i}?", "w", "x", "y", "z", "ABCD"[i % 4]) for i in range(4)])
        return [
            flags(self.settings | GENERATED),
            flags({"task": "perplexity", "data": text, "window": 16, "limit": 2}),
            flags({"task": "mmlu", "data": folders.out / "mmlu", "num_shots": 1, "split": "all", "limit": 2}),
            flags(self.settings),
        ]

    def ends(self, folders: Folders, said: Callable[[], str]) -> None:
        assert verb(self.name, folders.ends, *flags(self.settings | GENERATED), *self.into(folders.out / "ends_e")) == 0, said()
        assert outputs(folders.out / "ends_e") == {"A"}


class Search(Verb):
    name, settings = "search", TINY_SEARCH

    def more(self, folders: Folders) -> list[list[str]]:
        gradient = {"limit": 4, "test_limit": 1, "algorithm": "gradient", "curve": "free", "steps": 2, "minibatch_size": 2}
        with_text = {"text_weight": 1.0, "text_window": 16, "text_minibatch": 2}
        return [
            flags(self.settings),
            flags(TINY_TASK | gradient | with_text),
            flags(self.settings | {"fitness": "metric", "max_new_tokens": 4}),
            flags(TINY_TASK | gradient),
        ]

    def ends(self, folders: Folders, said: Callable[[], str]) -> None:
        settings = self.settings | GENERATED | {"fitness": "metric"}
        assert verb(self.name, folders.ends, *flags(settings), *self.into(folders.out / "ends_v")) == 0, said()
        assert outputs(folders.out / "ends_v") == {"A"}


class Compare(Verb):
    name, settings = "compare", TINY_TASK | {"test_limit": 1, "budget": 1, "repeats": 1, "channel_strings": 1}

    def more(self, folders: Folders) -> list[list[str]]:
        text = folders.out / "learnt.txt"  # else the model would write some
        text.parent.mkdir(exist_ok=True)
        text.write_text("The boat left the port with salt and grain. " * 99)
        router = {"router_steps": 1, "router_batch": 1, "text": text}
        own = {"moice": router} | dict.fromkeys(("seal", "uniform", "hidden_channel", "zero_tuning"), {})
        return [flags(self.settings | more | {"methods": (name,), "limit": 2}) for name, more in own.items()]

    def ends(self, folders: Folders, said: Callable[[], str]) -> None:
        settings = self.settings | GENERATED | {"methods": ("baseline",)}
        assert verb(self.name, folders.ends, *flags(settings), *self.into(folders.out / "ends_c")) == 0, said()
        assert outputs(folders.out / "ends_c") == {"A"}


class Export(Verb):
    name = "export"
    ends = "generates a fixed number of tokens"

    def more(self, folders: Folders) -> list[list[str]]:
        folders.out.mkdir(exist_ok=True)
        lj.LayerFactors.uniform(1.3, 3).save(folders.out / "factors.json")
        return [flags({"factors": folders.out / "factors.json"})]


class Profile(Verb):
    name, settings = "profile", {"tasks": "kv", "lengths": 200, "positions": 0, "key_length": 2, "minutes": 0.5}


class Doctor(Verb):
    name, settings = "doctor", {"num_tokens": 8}

    def into(self, folder: Path) -> list[str]:
        return []

    def ends(self, folders: Folders, said: Callable[[], str]) -> None:
        assert verb(self.name, folders.ends, "--num-tokens", 8) == 0
        assert "'!'" in said()


class Harness(Door):
    """lm-evaluation-harness's model, if the harness is installed."""

    def model(self, folder: Path) -> Any:
        pytest.importorskip("lm_eval")
        from lpes_jax.lm_eval import LayerFactorsLM

        return LayerFactorsLM(pretrained=str(folder), dtype="float32")

    def nan(self, folders: Folders) -> None:
        model = self.model(folders.nan)
        refused(NOT_FINITE, lambda: model._loglikelihood_tokens([(("a", "b"), [1], [2])], disable_tqdm=True))
        refused(NOT_FINITE, lambda: model.generate_until([request("ab")], disable_tqdm=True))

    def ids(self, folders: Folders) -> None:
        model = self.model(folders.few_rows)
        refused(NO_EMBEDDING, lambda: model._loglikelihood_tokens([(("a", "b"), [1], [99])], disable_tqdm=True))
        refused(NO_EMBEDDING, lambda: model.generate_until([request("zz")], disable_tqdm=True))

    def ends(self, folders: Folders) -> None:
        [text] = self.model(folders.ends).generate_until([request("hello")], disable_tqdm=True)
        assert "A" in text and "B" not in text


def request(text: str) -> SimpleNamespace:
    return SimpleNamespace(args=(text, {"until": [], "max_gen_toks": 6}))


class Settings(Door):
    """Has only settings; their readers check them."""

    text = "is a record of settings"


DOORS: dict[str, Door] = {
    "EvaluateSettings": Settings(),
    "LayerFactors": OfFactors(),
    "Llama": Settings(),
    "LlamaConfig": Settings(),
    "SearchSettings": Settings(),
    "UserError": Settings(),
    "bezier": Bezier(),
    "generate": Generate(),
    "load_model": LoadModel(),
    "load_tokenizer": LoadTokenizer(),
    "logits": Logits(),
    "population_scores": PopulationScores(),
    "preset": Preset(),
    "run_evaluation": RunEvaluation(),
    "run_search": RunSearch(),
    "scale_layers": ScaleLayers(),
    "verb search": Search(),
    "verb evaluate": Evaluate(),
    "verb compare": Compare(),
    "verb export": Export(),
    "verb doctor": Doctor(),
    "verb profile": Profile(),
    "verb lm_eval": Harness(),
}
FED = [(name, what) for name, door in DOORS.items() for what in ("nan", "ids", "ends", "text") if callable(getattr(door, what))]
OF_VERBS = [(name, what) for name in ("run_evaluation", "run_search") for what in ("nan", "ends")]  # the verbs do the same
OF_VERBS += [("verb search", "ends"), ("verb compare", "ends")]  # their texts are those of `verb evaluate`


def test_every_public_name_and_verb_is_here():
    assert {name for name in DOORS if not name.startswith("verb ")} == set(lj.__all__)
    assert {name.removeprefix("verb ") for name in DOORS if name.startswith("verb ")} == {*VERBS, "lm_eval"}


@pytest.mark.parametrize(("name", "what"), mostly_long(FED, *(fed for fed in FED if fed not in OF_VERBS), names=2))
def test_all_doors_refuse_or_do_the_same(name: str, what: str, folders: Folders, capfd):
    def said() -> str:
        captured = capfd.readouterr()
        return captured.out + captured.err

    door = DOORS[name]
    getattr(door, what)(folders, *((said,) if isinstance(door, Verb) else ()))


@pytest.mark.long
@pytest.mark.parametrize("what", ["nan", "ids"])
@pytest.mark.parametrize("name", ["search", "evaluate", "compare"])
def test_the_other_ways_of_a_verb_refuse_too(name: str, what: str, folders: Folders, capfd):
    def said() -> str:
        captured = capfd.readouterr()
        return captured.out + captured.err

    getattr(DOORS[f"verb {name}"], what)(folders, said, OTHERS)
