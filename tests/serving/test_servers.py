"""Folders of `export --to hf` in servers, each in a venv of its own: `make serve-test` (not part of `make test`).

The folders are of the bundled model, and of SmolLM2 where that can be had. Compared are the log-probabilities of their
self_test.json; of SmolLM2 with gains also those of the answers of held-out key-value questions, and greedy ids. Tiny models of
every family go through both versions of transformers. Each run leaves a record (records.py).
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from serving import venvs
from serving.records import keep

import lpes_jax as lj
from lpes_jax.export import ExportSettings, run_export
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.checkpoint import load_llama, open_checkpoint
from lpes_jax.models.zoo import resolve
from lpes_jax.tasks.prompts import EncodedPrompt

sys.path += [str(venvs.ROOT / "experiments"), str(venvs.ROOT / "tests" / "models")]
from family_models import FAMILIES  # noqa: E402
from serve_llama_cpp import Answers, answers_of_lpes, prompts_of  # noqa: E402
from ship.test_export_hf import FOUND, IDS, exported, ours, source_of  # noqa: E402

pytestmark = pytest.mark.serving
HERE = Path(__file__).parent
OF_SMOLLM2 = {
    "smollm2, gains": "smollm2-135m-instruct/gains-mixture",
    "smollm2, factors by frequency": "smollm2-135m-instruct/best-kv-5-10-20",
}
FORMS = ("tiny-retriever, gains", "tiny-retriever, factors by layer", *OF_SMOLLM2)
OPTIMISED = [pytest.param(form, marks=[pytest.mark.slow] if form in OF_SMOLLM2 else []) for form in FORMS]  # whole models
HELD_OUT, NEW_TOKENS = "smollm2, gains", 16
ASKED = "log-probabilities of self_test.json along its prompts"


class Questions(NamedTuple):
    """Held-out questions, lpes_jax's answers with and without the gains in its table, and the file of the questions."""

    prompts: list[EncodedPrompt]
    with_gains: Answers
    plain: Answers
    new_ids: list[list[int]]
    file: Path


class Folders:
    """Folders of FORMS, each exported when it is first asked for, once for all servers."""

    def __init__(self, root: Path):
        self._root, self._found = root, dict[str, Path | lj.UserError]()

    def __getitem__(self, form: str) -> Path:
        """Skips the test if the model cannot be downloaded."""
        if form not in self._found:
            model, factors = self._asked(form)
            target = self._root / str(FORMS.index(form))
            try:
                self._found[form] = run_export(ExportSettings.of(model=model, factors=factors, output_path=target))
            except lj.UserError as error:
                if form not in OF_SMOLLM2:
                    raise
                self._found[form] = error
        if isinstance(found := self._found[form], lj.UserError):
            pytest.skip(f"no model: {found}"[:200])
        return found

    def _asked(self, form: str) -> tuple[str, Path]:
        """A name in models/zoo, and factors: of the bundled model random ones."""
        if form in OF_SMOLLM2:
            return "smollm2-135m-instruct", Path(OF_SMOLLM2[form])
        rng = np.random.default_rng(FORMS.index(form))
        rates = rng.uniform(0.8, 1.3, 10) if "factors" in form else np.ones(10)
        gains = rng.uniform(0.7, 1.5, (10, 16))
        factors = lj.LayerFactors(rates, gains=gains, gains_granularity="layer_band", search={"num_pairs": 12})
        factors.save(self._root / "factors.json")
        return "tiny-retriever", self._root / "factors.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    """20 prompts of SmolLM2: two questions of 5 pairs and two of 10, each with the fact at five positions."""
    try:
        checkpoint = open_checkpoint(resolve("smollm2-135m-instruct"))
    except lj.UserError as error:
        pytest.skip(f"no model: {error}"[:200])
    model, factors = load_llama(checkpoint, "float32"), lj.LayerFactors.load(OF_SMOLLM2[HELD_OUT])
    tokenizer = lj.load_tokenizer("smollm2-135m-instruct")
    prompts = prompts_of((5, 10), (2, 2), tokenizer, checkpoint.config.max_position_embeddings)
    new = generate_ids(model, [prompt.ids for prompt in prompts], factors=factors, max_new_tokens=NEW_TOKENS)
    file = tmp_path_factory.mktemp("questions") / "questions.json"
    asked = [{"ids": prompt.ids, "answer": prompt.answers[0]} for prompt in prompts]
    file.write_text(json.dumps({"new_tokens": NEW_TOKENS, "questions": asked}))
    return Questions(prompts, answers_of_lpes(model, prompts, factors), answers_of_lpes(model, prompts, None), new, file)


def ask(server: str, script: str, folders: Folders, form: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The server's answers for a form, compared with lpes_jax and recorded; skipped without the model or the venv."""
    venvs.python(server)
    folder = folders[form]
    held_out = request.getfixturevalue("questions") if form == HELD_OUT else None
    answer = venvs.run(server, HERE / script, folder, *([] if held_out is None else [held_out.file]))
    answers = answer.pop("answers")
    if held_out is not None:
        answer["held_out"] = compared(held_out, answers)
    keep(server, form, ASKED + (" and of the answers of held-out questions, greedy ids" if held_out else ""), answer)
    return answer


def compared(held_out: Questions, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Log-probabilities of each answer side by side, and how many of the greedy continuations are lpes_jax's."""
    pairs = list(zip(held_out.with_gains.answers, answers, strict=True))
    off = np.concatenate([np.abs(wanted - answer["log_probs"]) for wanted, answer in pairs])
    plain = np.concatenate(
        [np.abs(wanted - without) for (wanted, _), without in zip(pairs, held_out.plain.answers, strict=True)]
    )
    return {
        "prompts": len(answers),
        "tokens": [
            min(map(len, (entry.ids for entry in held_out.prompts))),
            max(map(len, (entry.ids for entry in held_out.prompts))),
        ],
        "answer_tokens": len(off),
        "off_most": float(off.max()),
        "off_mean": float(off.mean()),
        "from_plain_mean": float(plain.mean()),
        "same_greedy_ids": sum(answer["new_ids"] == new for answer, new in zip(answers, held_out.new_ids, strict=True)),
        "new_tokens": NEW_TOKENS,
        "log_likelihoods": {
            "of": ["server", "lpes_jax", "lpes_jax without the gains"],
            "by_prompt": [
                [round(float(np.sum(values)), 5) for values in (answer["log_probs"], wanted, without)]
                for (wanted, answer), without in zip(pairs, held_out.plain.answers, strict=True)
            ],
        },
    }


def check(form: str, answer: dict[str, Any]) -> None:
    assert answer["off_most"] < 1e-3 and answer["from_plain_most"] > 1
    if form == HELD_OUT:
        found = answer["held_out"]
        assert found["prompts"] == found["same_greedy_ids"] == 20
        assert found["off_most"] < 1e-3 and found["from_plain_mean"] > 0.1


@pytest.mark.parametrize("form", OPTIMISED)
@pytest.mark.parametrize("server", ["transformers4", "transformers5"])
def test_transformers(folders, request, server, form):
    answer = ask(server, "ask_transformers.py", folders, form, request)
    check(form, answer)
    assert answer["self_test_passes"]
    if "factors" in form:
        said = answer["without_trust"]
        assert answer["class"] == "LpesForCausalLM" and said["AutoModelForCausalLM"].startswith("ValueError")
        assert said["LlamaForCausalLM"] == "KeyError: 'lpes'"


@pytest.mark.parametrize("form", OPTIMISED)
def test_vllm(folders, request, form):
    answer = ask("vllm", "ask_vllm.py", folders, form, request)
    check(form, answer)
    assert answer["without_trust"] == ("ValidationError" if "factors" in form else None)


class Families:
    """Of each family a folder with its source, and beside it a folder for each kind of factors that it takes."""

    def __init__(self, root: Path):
        self._root = root

    def __getitem__(self, family: str) -> Path:
        folder = self._root / family / family  # alone in its own, which is asked as a whole
        if folder.exists():
            return folder.parent
        folder.mkdir(parents=True)
        source = source_of(folder / "source", family)
        model = load_llama(open_checkpoint(source), "float32")
        for name, factors in FOUND.items():
            if family == "qwen3" and name == "gains of groups":
                continue  # refused: its heads share one norm
            written = exported(source, factors, folder / name)
            expected = {"ids": IDS, "logits": ours(model, factors).tolist(), "has_gains": factors.gains is not None}
            (written / "expected.json").write_text(json.dumps(expected))
        return folder.parent


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("server", ["transformers4", "transformers5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(families, family, server):
    venvs.python(server)
    answer = venvs.run(server, HERE / "ask_families.py", families[family], venvs.ROOT / "lpes_jax" / "torch.py")
    keep(server, f"tiny random {family}", "logits of 14 tokens, ours and the hook's", answer)
    found = answer["families"][family]
    assert found["folders"] == (4 if family == "qwen3" else 5)
    assert found["off_most"] < 1e-4 < 1e-2 < found["from_plain_least"], found
    assert found["from_hook_most"] == 0 and found["from_hook_with_gains_relative"] < 1e-5, found
    assert len(found["without_trust"]) == 2 and all(all(refused) for refused in found["without_trust"]), found
