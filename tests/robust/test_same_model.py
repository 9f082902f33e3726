"""Factors know their model: every verb refuses a difference, naming the entry and both values; other weights are a warning."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from selection import mostly_long
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lpes_jax as lj
from lpes_jax.compare.__main__ import main as compare
from lpes_jax.evaluate.__main__ import main as evaluate
from lpes_jax.export.__main__ import main as export
from lpes_jax.factors import LayerFactors
from lpes_jax.methods.tables import lpes
from lpes_jax.models import zoo
from lpes_jax.models.llama import Llama, LlamaConfig, load
from lpes_jax.models.llama.checkpoint import open_checkpoint, save_llama
from lpes_jax.models.llama.tokenizer import load_tokenizer
from lpes_jax.rope import RopeParameters
from lpes_jax.same_model import check_model, facts, tokenizer_sha256
from lpes_jax.search.__main__ import main as search

SMALL = ("--num-pairs", "3", "--key-length", "1", "--limit", "2", "--positions", "0", "100", "--dtype", "float32")


def found(config: LlamaConfig, tokenizer: Any = None, **more: Any) -> LayerFactors:
    """Factors as a search of this model leaves them."""
    model = {"name": "mine", "num_layers": config.num_layers, "sha256": "ab" * 32} | facts(config, tokenizer) | more
    return LayerFactors(np.linspace(0.9, 1.3, config.num_layers), model=model, rope=config.rope.to_hf())


def as_first_release(factors: LayerFactors) -> LayerFactors:
    """The same with the record of the first release."""
    kept = ("name", "num_layers", "sha256")
    return replace(factors, model={name: factors.model[name] for name in kept})


def rope(kind: str, **keys: Any) -> RopeParameters:
    windows = {"max_position_embeddings": keys.pop("window", 512)}
    return RopeParameters.from_hf(windows | {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | keys})


# What is compared


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_heads": 2}, "num_heads 6, here 2"),
        ({"num_heads": 3, "num_kv_heads": 3}, "num_heads 6, here 3; num_kv_heads 2, here 3"),
        ({"head_dim": 16}, "head_dim 8, here 16; rotary_dim 8, here 16"),
        ({"hidden_size": 64}, "hidden_size 48, here 64"),
        ({"vocab_size": 301}, "vocab_size 300, here 301"),
        ({"rope": RopeParameters(500_000.0)}, "rope_theta 10000.0, here 500000.0"),
        ({"rope": RopeParameters(10_001.0)}, "rope_theta 10000.0, here 10001.0"),
        ({"rope": rope("linear", factor=4.0)}, "rope_type 'default', here 'linear'"),
        ({"rope": rope("dynamic", factor=2.0)}, "rope_type 'default', here 'dynamic'"),
        ({"rope": rope("yarn", factor=2, rope_theta=700)}, "rope_theta 10000.0, here 700.0; rope_type 'default', here 'yarn'"),
    ],
)  # fmt: skip
def test_sizes_and_rope(tiny_config, changes, words):
    factors, other = found(tiny_config), replace(tiny_config, **changes)
    with pytest.raises(
        lj.UserError, match=re.escape(f"f.json: found for another model, mine ({words}); give factors")
    ) as refusal:
        check_model(factors, other, where="f.json")
    assert "--other-model" in str(refusal.value) and "\n" not in str(refusal.value)
    record = check_model(factors, other, where="f.json", other_model=True, quiet=True)
    assert record["differs"] == words.split("; ") and record["other_model"] is True
    assert check_model(factors, tiny_config)["differs"] == []
    old = as_first_release(factors)  # it knows of its RoPE, not of its sizes
    if "rope" in changes:
        with pytest.raises(lj.UserError, match=re.escape(words)):
            check_model(old, other)
    else:
        assert check_model(old, other, quiet=True)["differs"] == []


def test_what_cannot_run_is_refused_with_other_model_too(tiny_config):
    with pytest.raises(lj.UserError, match="f.json: 3 layers of factors, but the model has 4"):
        check_model(found(tiny_config), replace(tiny_config, num_layers=4), where="f.json", other_model=True)


ONES = [1.0] * 4
SAME = {  # (recorded, here): one RoPE, written down in two ways
    "default and linear of 1": (rope("default"), rope("linear", factor=1.0)),
    "yarn with its factor worked out": (
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
        rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.1 * np.log(4.0) + 1),
    ),
    "rounded to float32": (rope("default", rope_theta=1e6 / 3), rope("default", rope_theta=float(np.float32(1e6 / 3)))),
}
OTHERS = {
    "linear": (rope("linear", factor=2.0), rope("linear", factor=4.0), "factor 2.0, here 4.0"),
    "the window of dynamic": (
        rope("dynamic", factor=2.0, window=512),
        rope("dynamic", factor=2.0, window=256),
        "the trained window of RoPE 512, here 256",
    ),
    "yarn": (
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
        rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.9),
        "attention_factor 1.138",
    ),
    "one list of longrope": (
        rope("longrope", short_factor=ONES, long_factor=ONES, original_max_position_embeddings=64, factor=1.0),
        rope("longrope", short_factor=ONES, long_factor=[1.0, 1.0, 2.0, 2.0], original_max_position_embeddings=64, factor=1.0),
        "long_factor",
    ),
    "the window of longrope": (
        rope("longrope", short_factor=ONES, long_factor=[2.0] * 4, original_max_position_embeddings=64, factor=1.0),
        rope("longrope", short_factor=ONES, long_factor=[2.0] * 4, original_max_position_embeddings=128, factor=1.0),
        "original_max_position_embeddings 64, here 128",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_one_rope_in_two_spellings(tiny_config, name):
    one, other = (replace(tiny_config, rope=rope) for rope in SAME[name])
    assert check_model(found(one), other)["differs"] == check_model(as_first_release(found(one)), other)["differs"] == []


@pytest.mark.parametrize("name", OTHERS)
def test_two_ropes_of_one_type(tiny_config, name):
    *both, words = OTHERS[name]
    one, other = (replace(tiny_config, rope=rope) for rope in both)
    assert check_model(found(one), one)["differs"] == []
    with pytest.raises(lj.UserError, match=re.escape(words)):
        check_model(found(one), other)


def test_the_rope_of_llama_3_from_a_folder_and_from_a_gguf_file(tiny_config):
    """A GGUF file has the result of the rule: divisors of the frequencies, in float32."""
    from lpes_jax.rope import inverse_frequencies

    keys = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = rope("llama3", **keys)
    divisors = np.asarray(inverse_frequencies(rope("default"), 8)) / np.asarray(inverse_frequencies(folder, 8))
    lists = {"short_factor": divisors.tolist(), "long_factor": divisors.tolist()}
    in_gguf = rope("longrope", **lists, original_max_position_embeddings=512, attention_factor=1.0)
    one, other = replace(tiny_config, rope=folder), replace(tiny_config, rope=in_gguf)
    assert check_model(found(one), other)["differs"] == check_model(found(other), one)["differs"] == []
    with pytest.raises(lj.UserError, match="rope_type 'longrope', here 'llama3'"):
        check_model(found(other), replace(one, rope=rope("llama3", **keys | {"factor": 4.0})))


def test_tokenizers(tiny_config):
    def changed(change: Callable[[Tokenizer], None]) -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer()
        change(tokenizer.backend_tokenizer)
        return tokenizer

    def digits(edited: Tokenizer) -> None:
        threes = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
        edited.pre_tokenizer = pre_tokenizers.Sequence([threes, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        edited.model = models.BPE(edited.get_vocab() | {"14": 256, "84": 257}, [("1", "4"), ("8", "4")])

    def composed(edited: Tokenizer) -> None:
        edited.normalizer = normalizers.NFC()

    own = byte_tokenizer()
    others = [byte_tokenizer(backwards=True), changed(digits), changed(composed)]
    assert len({tokenizer_sha256(tokenizer) for tokenizer in (own, *others)}) == 4
    assert tokenizer_sha256(own) == tokenizer_sha256(byte_tokenizer())
    for other in others:
        hashes = "tokenizer_sha256 " + ", here ".join(tokenizer_sha256(tokenizer)[:8] for tokenizer in (own, other))
        with pytest.raises(lj.UserError, match=re.escape(f"({hashes})")):
            check_model(found(tiny_config, own), tiny_config, tokenizer=other)
    special = byte_tokenizer()
    special.add_special_tokens({"eos_token": "<end>"})  # a token more is a larger vocabulary
    assert tokenizer_sha256(special) != tokenizer_sha256(own)
    padded = byte_tokenizer()
    padded.add_tokens(["[PAD256]", "[PAD257]"])  # as the converter to GGUF fills up the embedding's rows
    assert tokenizer_sha256(padded) == tokenizer_sha256(own)


def test_a_gguf_file_and_a_folder_of_one_tokenizer_have_one_hash(tmp_path):
    import sys

    sys.path.append(str(Path(__file__).parents[1] / "models"))
    from test_tokenizer import TOKENS, write

    tokens = [*TOKENS, "[PAD269]", "[PAD270]"]
    kinds = [1] * (len(TOKENS) - 3) + [3, 3, 4, 1, 1]
    for pre in ("smollm", "qwen2", "llama-bpe"):
        in_gguf = load_tokenizer(write(tmp_path / f"{pre}.gguf", pre=pre, tokens=tokens, token_type=kinds))
        in_gguf.save_pretrained(tmp_path / pre)
        file = tmp_path / pre / "tokenizer.json"
        record = json.loads(file.read_text())
        record["model"]["vocab"] = {token: index for token, index in record["model"]["vocab"].items() if "[PAD" not in token}
        file.write_text(json.dumps(record))
        assert len(load_tokenizer(tmp_path / pre)) == len(in_gguf) - 2
        assert tokenizer_sha256(load_tokenizer(tmp_path / pre)) == tokenizer_sha256(in_gguf)


def test_weights(tiny_config, capsys):
    factors = found(tiny_config)
    assert check_model(factors, tiny_config, sha256="ab" * 32)["weights"] == "same"
    assert capsys.readouterr().err == ""
    record = check_model(factors, tiny_config, sha256="cd" * 32, where="f.json")
    assert record == {"name": "mine", "sha256": "ab" * 32, "weights": "other", "differs": [], "other_model": False}
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(
        "warning: f.json: found for other weights, mine of the same sizes (sha256 abababab, here cdcdcdcd)"
    )
    unknown = replace(factors, model=factors.model | {"sha256": None})
    assert check_model(unknown, tiny_config, sha256="cd" * 32)["weights"] == "unknown"
    assert check_model(factors, tiny_config)["weights"] == "unknown" and capsys.readouterr().err == ""
    check_model(LayerFactors.uniform(1.5, 3), tiny_config, where="by_hand.json")
    said = capsys.readouterr().err
    assert said == "note: by_hand.json: does not name the model it was found for, so only its shape was checked\n"
    check_model(factors, replace(tiny_config, vocab_size=5), sha256="cd" * 32, where="f.json", other_model=True)
    said = capsys.readouterr().err
    assert said == "warning: f.json: found for another model, mine (vocab_size 300, here 5), and used anyway\n"


# Files


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({"format": "lpes-factors/1", "factors": [1.0, 1.5, 2.0]} | changes))
    return path


@pytest.mark.parametrize("value", ["frequency / factor", "position * factor", "", None, 7, ["position / factor"]])
def test_what_factors_apply_to_is_read(tmp_path, value):
    with pytest.raises(lj.UserError, match=re.escape(f"f.json: applies_to {value!r} is not supported; factors apply to 'posi")):
        LayerFactors.load(written(tmp_path / "f.json", applies_to=value))
    assert LayerFactors.load(written(tmp_path / "f.json", applies_to="position / factor")).num_layers == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)
KNOWN = st.sampled_from(
    [*("name", "sha256", "num_layers", "num_kv_heads", "vocab_size", "rope_window", "tokenizer_sha256")]
    + [*("rope_type", "rope_theta", "type", "factor", "short_factor", "original_max_position_embeddings")]
)


TOKENIZER = byte_tokenizer()


@given(JSON | st.dictionaries(KNOWN, JSON, max_size=5), JSON | st.dictionaries(KNOWN, JSON, max_size=5))
def test_no_record_of_a_model_ends_in_a_traceback(tmp_path_factory, model, rope):
    config = LlamaConfig(300, 48, 96, 3, 6, 2, 8, 1e-5, 512, RopeParameters(10_000.0))
    path = written(tmp_path_factory.getbasetemp() / "any.json", model=model, rope=rope)
    try:
        record = check_model(LayerFactors.load(path), config, tokenizer=TOKENIZER, sha256="ab", where=str(path), quiet=True)
    except lj.UserError as refusal:
        assert str(path) in str(refusal)
    else:
        json.dumps(record)


# Doors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tiny_model: Llama) -> dict[str, Path]:
    """The tiny model; the same weights with another RoPE, with another tokenizer; other weights; another number of KV heads."""
    root = tmp_path_factory.mktemp("models")
    paths = {name: root / name for name in ("own", "rope", "tokenizer", "weights", "heads")}
    for path in paths.values():
        shutil.copytree(model_folder, path)
    config = json.loads((paths["rope"] / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (paths["rope"] / "config.json").write_text(json.dumps(config))
    byte_tokenizer(backwards=True).save_pretrained(paths["tokenizer"])
    graph, state = nnx.split(tiny_model)
    save_llama(nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 0.99, state)), paths["weights"])
    more = replace(tiny_model.config, num_heads=6, num_kv_heads=6)
    save_llama(Llama(more, rngs=nnx.Rngs(0), dtype=jnp.float32), paths["heads"])
    return paths


@pytest.fixture(scope="module")
def factors_file(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """Factors of the tiny model, with all that a search says of it."""
    own = load(str(folders["own"]), "float32")
    path = tmp_path_factory.mktemp("factors") / "found.json"
    replace(found(own.model.config, own.tokenizer), model=own.identity | facts(own.model.config, own.tokenizer)).save(path)
    return path


DIFFERS = {
    "rope": "rope_theta 10000.0, here 20000.0",
    "tokenizer": "tokenizer_sha256 [0-9a-f]{8}, here [0-9a-f]{8}",
    "heads": "num_kv_heads 2, here 6",
}
VERBS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "evaluate": (evaluate, (*SMALL, "--metrics", "prefix", "--factors")),
    "compare": (compare, (*SMALL, "--test-limit", "2", "--methods", "lpes", "--factors")),
    "export": (export, ("--no-self-test", "--factors")),
    "search": (search, (*SMALL, "--test-limit", "1", "--curve", "free", "--initial-factors")),
}


@pytest.mark.parametrize("other", DIFFERS)
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_refuse_the_factors_of_another_model(folders, factors_file, tmp_path, capsys, verb, other):
    main, flags = VERBS[verb]
    code = main(["--model", str(folders[other]), *flags, str(factors_file), "--output-path", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert (
        code == 2
        and said.count("\n") == 1
        and re.search(rf"error: .*{factors_file}: found for another model.*\({DIFFERS[other]}", said)
    )
    assert not (tmp_path / "out").exists()


def test_evaluate_says_whose_factors_it_measured(folders, factors_file, tmp_path, capsys):
    main, flags = VERBS["evaluate"]
    for model, more in (("weights", ()), ("rope", ("--other-model",))):
        out = tmp_path / model
        assert main(["--model", str(folders[model]), *flags, str(factors_file), "--output-path", str(out), *more]) == 0
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        record = json.loads((out / "results.json").read_text())["config"]
        if model == "weights":
            assert line.startswith(
                f"warning: {factors_file}: found for other weights, {folders['own']} of the same sizes (sha256 "
            )
            assert record["factors_model"]["weights"] == "other" and record["factors_model"]["differs"] == []
        else:
            assert "(rope_theta 10000.0, here 20000.0), and used anyway" in line
            assert record["factors_model"] == {
                **{name: LayerFactors.load(factors_file).model[name] for name in ("name", "sha256")},
                **{"weights": "same", "differs": ["rope_theta 10000.0, here 20000.0"], "other_model": True},
            }
        assert record["other_model"] is bool(more)


def test_perplexity_says_so_too(folders, factors_file, tmp_path):
    (tmp_path / "text.txt").write_text("A plain text, read from its begin to its end. " * 20)
    settings = lj.EvaluateSettings.of(task="perplexity", data=tmp_path / "text.txt", window=32, limit=1, dtype="float32")
    settings = settings.replace(
        model=str(folders["rope"]), factors=factors_file, only_factors=True, output_path=tmp_path / "out"
    )
    with pytest.raises(lj.UserError, match="found for another model"):
        lj.run_evaluation(settings)
    lj.run_evaluation(settings.replace(other_model=True))
    assert json.loads((tmp_path / "out/results.json").read_text())["config"]["factors_model"]["other_model"] is True


def test_a_search_records_its_model_and_takes_anothers_start_where_that_is_asked_for(folders, factors_file, tmp_path, capsys):
    _, flags = VERBS["search"]
    few = ("--algorithm", "random", "--population-size", "2", "--max-evaluations", "2", "--uniform-candidates", "1")
    arguments = ["--model", str(folders["rope"]), *flags, str(factors_file), "--output-path", str(tmp_path / "run"), *few]
    arguments += ["--search-positions", "0", "--weights", "1"]
    assert search([*arguments, "--other-model"]) == 0
    assert "and used anyway" in capsys.readouterr().err
    record = json.loads((tmp_path / "run/results.json").read_text())["config"]
    assert record["factors_model"]["differs"] == ["rope_theta 10000.0, here 20000.0"] and record["other_model"] is True
    new, own = LayerFactors.load(tmp_path / "run/factors.json"), load(str(folders["rope"]), "float32")
    assert new.model == own.identity | {"chat": None} | facts(own.model.config, own.tokenizer)
    assert set(new.model) >= {"num_heads", "num_kv_heads", "head_dim", "rotary_dim", "hidden_size", "vocab_size", "sha256"}
    assert check_model(new, own.model.config, tokenizer=own.tokenizer, sha256=own.identity["sha256"])["weights"] == "same"
    with pytest.raises(lj.UserError, match="rope_theta 20000.0, here 10000.0"):
        check_model(new, load(str(folders["own"]), "float32").model.config)


def test_python_has_a_keyword_for_another_model(folders, factors_file):
    factors, tokens = LayerFactors.load(factors_file), jnp.array([[1, 2, 3]], jnp.int32)
    own, other = (lj.load_model(str(folders[name]), "float32") for name in ("own", "rope"))
    assert lj.logits(own, tokens, factors).shape == (1, 3, 300)
    with pytest.raises(lj.UserError, match="rope_theta 10000.0, here 20000.0.*other_model=True"):
        lj.logits(other, tokens, factors)
    taken = lj.logits(other, tokens, factors, other_model=True)
    numbers = lj.logits(other, tokens, jnp.asarray(factors.factors, jnp.float32))  # numbers alone are of no model
    np.testing.assert_array_equal(taken, numbers)
    tokenizers = [lj.load_tokenizer(str(folders[name])) for name in ("own", "tokenizer")]
    said = lj.generate(own, tokenizers[0], ["ab"], factors, max_new_tokens=2)
    with pytest.raises(lj.UserError, match="tokenizer_sha256"):
        lj.generate(own, tokenizers[1], ["ab"], factors, max_new_tokens=2)
    assert len(lj.generate(own, tokenizers[1], ["ab"], factors, max_new_tokens=2, other_model=True)) == len(said) == 1


def test_inside_of_a_jitted_step_of_ones_own(tiny_model, tiny_config):
    """RoPE kinds that are written in two ways are also compared while JAX traces."""
    one, other = SAME["yarn with its factor worked out"]
    model = nnx.clone(tiny_model)
    model.config = replace(tiny_config, rope=other)
    factors, tokens = found(replace(tiny_config, rope=one)), jnp.array([[5, 6, 7]], jnp.int32)

    @jax.jit
    def step(model: Llama, tokens: jax.Array) -> jax.Array:
        return lj.logits(model, tokens, factors)

    np.testing.assert_allclose(step(model, tokens), lj.logits(model, tokens, factors), atol=1e-5)


def test_bands_go_by_the_rotated_part_of_a_head():
    """Of Phi-4-mini's kind: 12 of 16 elements of a head turn, six frequencies, which three bands divide and eight would not."""
    half = RopeParameters(10_000.0, partial_rotary_factor=0.75)
    config = LlamaConfig(300, 64, 96, 3, 4, 2, 16, 1e-5, 512, half, model_type="phi3")
    three = LayerFactors(np.ones((3, 3)), "layer_band")
    assert lpes(three)(config, 8).tables.inv_freq.shape[-1] == 6
    with pytest.raises(lj.UserError, match="8 bands do not divide the model's 6 frequencies per head"):
        lpes(LayerFactors(np.ones((3, 8)), "layer_band"))(config, 8)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_harness(folders, factors_file, capsys):
    from lpes_jax.lm_eval import LayerFactorsLM

    with pytest.raises(lj.UserError, match="rope_theta 10000.0, here 20000.0"):
        LayerFactorsLM(str(folders["rope"]), str(factors_file), dtype="float32")
    model = LayerFactorsLM(str(folders["rope"]), str(factors_file), dtype="float32", other_model=True)
    assert model.get_model_info()["lpes_factors_model"]["differs"] == ["rope_theta 10000.0, here 20000.0"]
    LayerFactorsLM(str(folders["weights"]), str(factors_file), dtype="float32")
    assert "found for other weights" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_the_hook_in_torch(folders, factors_file, tmp_path):
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    from lpes_jax.torch import apply_layer_factors

    own, other_rope, heads = (
        AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32) for name in ("own", "rope", "heads")
    )
    factors = LayerFactors.load(factors_file)
    for form in (factors_file, factors, json.loads(factors_file.read_text())):
        apply_layer_factors(own, form).close()
        with pytest.raises(ValueError, match=r"another model \(num_kv_heads 2, here 6\); other_model=True accepts them"):
            apply_layer_factors(heads, form)
        with pytest.raises(ValueError, match=r"\(rope_theta 10000.0, here 20000.0\)"):
            apply_layer_factors(other_rope, form)
        apply_layer_factors(other_rope, form, other_model=True).close()
    apply_layer_factors(heads, as_first_release(factors)).close()  # which did not know its KV heads
    with pytest.raises(ValueError, match="applies_to 'x' is not supported"):
        apply_layer_factors(own, json.loads(factors_file.read_text()) | {"applies_to": "x"})
    # A folder exported for another model works there; its factors do not go with a third one.
    flags = ["--model", str(folders["rope"]), "--factors", str(factors_file), "--output-path", str(tmp_path / "out")]
    assert export([*flags, "--other-model", "--no-self-test", "--to", "hf-hook"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    apply_layer_factors(exported).close()
    record = json.loads((tmp_path / "out/config.json").read_text())["lpes_factors"]
    assert record["found_for"]["differs"] == ["rope_theta 10000.0, here 20000.0"] and record["model"]["num_kv_heads"] == 2
    own.config.lpes_factors = record
    with pytest.raises(ValueError, match=r"\(rope_theta 20000.0, here 10000.0\)"):
        apply_layer_factors(own)


# The zoo


ZOO = Path(zoo.__file__).parent


ZOO_FACTORS = sorted(ZOO.glob("*/factors/*.json"))
SMALL_MODELS = {path.parent: path for path in reversed(ZOO_FACTORS) if "smollm2" not in str(path)}.values()


@pytest.mark.parametrize(
    "file", mostly_long(ZOO_FACTORS, *SMALL_MODELS), ids=lambda path: f"{path.parent.parent.name}/{path.stem}"
)
def test_the_factors_of_the_zoo_are_of_their_models(file, capsys, request):
    card = json.loads((file.parent.parent / "model.json").read_text())
    factors = LayerFactors.load(file)
    if "config" in card:
        sizes = {name: value for name, value in card["config"].items() if name != "rope"}
        config = LlamaConfig(
            **{**sizes, "rms_norm_eps": 1e-5, "rope": RopeParameters.from_hf({"rope_parameters": card["config"]["rope"]})}
        )
        sha256 = None
    else:
        checkpoint = open_checkpoint(request.getfixturevalue("smollm2_path"))
        config, sha256 = checkpoint.config, checkpoint.sha256()
    record = check_model(factors, config, sha256=sha256)
    assert record["differs"] == [] and record["weights"] == ("unknown" if sha256 is None else "same")
    assert capsys.readouterr().err == ""
    with pytest.raises(lj.UserError, match="rope_theta"):
        check_model(factors, replace(config, rope=RopeParameters(77_777.0)))
