"""Every argument that lm-evaluation-harness's `hf` model takes: taken with its meaning there, or refused in one line."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.lm_eval_arguments import TAKEN, UNUSED, read_arguments

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's, and its libraries'
with_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
with_hf = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("lm_eval", "torch", "accelerate")), reason="the harness's hf model cannot run"
)
OURS = {"factors", "other_model", "max_gen_toks"}  # beside those of `hf`
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' and refuse_system is defined %}{{ raise_exception('no system part') }}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}(no thoughts)"
    "{% endif %}{% if effort is defined %}[{{ effort }}]{% endif %}{% endif %}"
)
TAKEN_VALUES = [
    ("pretrained", "org/name", "org/name"),
    ("pretrained", Path("some/folder"), "some/folder"),
    ("factors", "RUN/factors.json", "RUN/factors.json"),
    ("factors", None, None),
    ("other_model", "true", True),
    ("revision", "v1.0", "v1.0"),
    ("revision", 2024, "2024"),
    ("revision", None, None),
    ("tokenizer", "a/folder", "a/folder"),
    ("dtype", None, "auto"),
    ("dtype", "float16", "float16"),
    ("batch_size", "auto", None),
    ("batch_size", "auto:4", None),
    ("batch_size", "16", 16),
    ("max_length", 512, 512),
    ("max_length", "None", None),
    ("max_gen_toks", "32", 32),
    ("add_bos_token", "False", False),
    ("add_bos_token", 1, True),
    ("prefix_token_id", "0", 0),
    ("enable_thinking", "FALSE", False),
    ("think_end_token", "151668", 151668),
    ("think_end_token", 7, 7),
    ("think_end_token", "</think>", "</think>"),
    ("think_end_token", "²", "²"),
    ("chat_template_args", None, {}),
    ("chat_template_args", '{"effort": "low", "deep": false}', {"effort": "low", "deep": False}),
    ("chat_template_args", "{'effort': 'low', 'deep': False}", {"effort": "low", "deep": False}),
    ("chat_template_args", {"tools": [{"name": "f"}]}, {"tools": [{"name": "f"}]}),
    ("device", "cuda:3", "cuda:3"),
    ("max_batch_size", 64, 64),
    ("offload_folder", "./offload", "./offload"),
]
REFUSED_VALUES = [
    ("pretrained", None, "pretrained"),
    ("pretrained", "", "pretrained"),
    ("pretrained", 1e3, "two pairs of quotes"),
    ("factors", 12, "two pairs of quotes"),
    ("factors", " ", "factors"),
    ("other_model", "perhaps", "True or False"),
    ("revision", 1e9, "two pairs of quotes"),
    ("revision", True, "revision"),
    ("tokenizer", ["x"], "tokenizer"),
    ("dtype", 16, "dtype"),
    ("batch_size", 0, "at least 1"),
    ("batch_size", "many", "whole number"),
    ("batch_size", "auto:", None),
    ("batch_size", "auto:-1", "auto:N"),
    ("batch_size", "auto:x", "auto:N"),
    ("batch_size", 1.5, "whole number"),
    ("batch_size", True, "whole number"),
    ("max_length", 0, "at least 1"),
    ("max_length", "9" * 5000, "max_length"),
    ("max_gen_toks", -1, "at least 1"),
    ("add_bos_token", "yes", "True or False"),
    ("prefix_token_id", -1, "at least 0"),
    ("enable_thinking", 2, "True or False"),
    ("think_end_token", "", "text or a token id"),
    ("think_end_token", 1.5, "text or a token id"),
    ("think_end_token", True, "text or a token id"),
    ("chat_template_args", "effort", "mapping"),
    ("chat_template_args", [1], "mapping"),
    ("chat_template_args", {1: 2}, "mapping"),
    ("chat_template_args", {"tokenize": True}, "tokenize"),
    ("chat_template_args", {"messages": []}, "messages"),
    ("device", 0, "--device"),
    ("max_batch_size", "all", "--max_batch_size"),
    ("offload_folder", 3, "offload_folder"),
]
HARMLESS = {  # `hf`'s defaults, and other values that change nothing here
    "backend": ["default", "causal"], "subfolder": ["", None], "truncation": [False, None, "False"],
    "logits_cache": [True, False], "softmax_dtype": [None, "float32"], "mixed_precision_dtype": [None, "None"],
    "trust_remote_code": [False, True, "True"], "use_fast_tokenizer": [True], "parallelize": [False, 0],
    "max_memory_per_gpu": [None], "max_cpu_memory": [None], "tp_plan": [None], "peft": [None], "delta": [None],
    "autogptq": [False], "gptqmodel": [False, None], "gguf_file": [None],
}  # fmt: skip
NOT_HERE = {
    "backend": "seq2seq", "subfolder": "checkpoint-10", "truncation": True, "logits_cache": "x", "softmax_dtype": "bfloat16",
    "mixed_precision_dtype": "bfloat16", "trust_remote_code": "x", "use_fast_tokenizer": False, "parallelize": True,
    "max_memory_per_gpu": "10GiB", "max_cpu_memory": 2**30, "tp_plan": "auto", "peft": "org/lora", "delta": "org/delta",
    "autogptq": "model.safetensors", "gptqmodel": True, "gguf_file": "model.gguf",
}  # fmt: skip


def test_all_arguments_are_tried_here():
    assert {name for name, *_ in TAKEN_VALUES} | {"enable_thinking"} == set(TAKEN)
    assert {name for name, *_ in REFUSED_VALUES} == set(TAKEN)
    assert set(HARMLESS) == set(NOT_HERE) == set(UNUSED)


@with_hf
def test_the_arguments_are_those_of_hf():
    """A later harness may take more: find out what they mean, and take or refuse them in lm_eval_arguments.py."""
    from lm_eval.models.huggingface import HFLM

    parameters = inspect.signature(HFLM.__init__).parameters
    assert {name for name in parameters if name not in ("self", "kwargs")} == ({*TAKEN} | {*UNUSED}) - OURS
    for name, parameter in parameters.items():
        if name in {*TAKEN, *UNUSED} - {"pretrained"}:
            read_arguments({name: parameter.default})


@pytest.mark.parametrize(("name", "value", "meant"), TAKEN_VALUES)
def test_the_argument_is_accepted(name: str, value: Any, meant: Any):
    assert getattr(read_arguments({name: value}), name) == meant


@pytest.mark.parametrize(("name", "value", "said"), REFUSED_VALUES)
def test_the_argument_is_refused_by_name(name: str, value: Any, said: str | None):
    if said is None:
        assert getattr(read_arguments({name: value}), name) is None
        return
    with pytest.raises(UserError, match=name) as error:
        read_arguments({name: value})
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("name", UNUSED)
def test_what_is_not_needed_here_is_left_aside_or_refused_with_the_way_out(name: str):
    for value in HARMLESS[name]:
        read_arguments({name: value})
    with pytest.raises(UserError, match=f"{name} in --model_args cannot be .* here: .*") as error:
        read_arguments({name: NOT_HERE[name]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("torch_dtype", "dtype"), ("think_end", "think_end_token"), ("max_lenght", "max_length"), ("Pretrained", "pretrained")],
)
def test_another_name_is_refused_with_the_one_that_is_meant(name: str, meant: str):
    with pytest.raises(UserError, match=f"^{name} is not an argument .*did you mean {meant}"):
        read_arguments({name: 1})


def test_what_hf_would_hand_on_to_transformers_is_refused():
    for name in ("load_in_8bit", "attn_implementation", "quantization_config", "zzz"):
        with pytest.raises(UserError, match=f"^{name} is not an argument of --model_args; "):
            read_arguments({name: True})


def test_thoughts_need_an_end():
    with pytest.raises(UserError, match="enable_thinking in --model_args needs think_end_token"):
        read_arguments({"enable_thinking": True})
    assert read_arguments({"enable_thinking": "True", "think_end_token": "</think>"}).enable_thinking
    assert read_arguments({"enable_thinking": False}).enable_thinking is False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The tiny model with an end of text, a chat template and a window of 96 tokens."""
    path = tmp_path_factory.mktemp("harness") / "model"
    shutil.copytree(model_folder, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<end>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 96}
    (path / "config.json").write_text(json.dumps(config))
    return path


def model_of(folder: Path, **arguments: Any) -> Any:
    from lpes_jax.lm_eval import LayerFactorsLM

    return LayerFactorsLM(str(folder), dtype="float32", **arguments)


def asked(*prompts: str, **settings: Any) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=(prompt, {"until": [], "max_gen_toks": 24} | settings)) for prompt in prompts]


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Who?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
    [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was"}],
]


@with_harness
def test_the_template_gets_its_arguments(folder):
    def rendered(chat: list[dict[str, str]], **arguments: Any) -> str:
        return model_of(folder, **arguments).apply_chat_template(chat)

    plain = "<user>Who?</user><assistant>"
    assert rendered(CHATS[0]) == plain
    assert rendered(CHATS[0], enable_thinking="False") == plain + "(no thoughts)"
    assert rendered(CHATS[0], enable_thinking=True, think_end_token="B") == plain
    assert rendered(CHATS[0], chat_template_args='{"effort": "low", "enable_thinking": false}') == plain + "(no thoughts)[low]"
    both = {"chat_template_args": {"enable_thinking": False}, "enable_thinking": True, "think_end_token": "B"}
    assert rendered(CHATS[0], **both) == plain
    assert rendered(CHATS[0], chat_template_args={"chat_template": "{{ messages | length }}{{ 1 }}"}) == "11"


@with_hf
def test_prompts_are_those_of_hf(folder):
    from lm_eval.models.huggingface import HFLM

    for arguments in (
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "think_end_token": "B", "chat_template_args": {"effort": "high"}},
        {"chat_template_args": {"refuse_system": True}},
    ):
        theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", **arguments)
        ours = model_of(folder, **arguments)
        for chat in CHATS:
            first = chat[-1]["role"] == "user"
            assert ours.apply_chat_template(chat, first) == theirs.apply_chat_template(chat, first), (arguments, chat)


@with_harness
def test_templates_that_fail_are_one_line(folder, capsys):
    refuses_all = "{{ raise_exception('never') }}"
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}"
    wrong = "{{ messages[0].content + 1 }}"
    for template, said in (
        (refuses_all, "never"),
        (endless, "steps"),
        (wrong, "str"),
        ("no template", "neither a chat template"),
    ):
        model = model_of(folder, chat_template_args={"chat_template": template})
        for chat in CHATS[:2]:
            with pytest.raises(UserError, match="--apply_chat_template: ") as error:
                model.apply_chat_template(chat)
            assert said in str(error.value) and "\n" not in str(error.value)
    capsys.readouterr()
    model = model_of(folder, chat_template_args={"refuse_system": 1})
    assert [model.apply_chat_template(CHATS[1]) for _ in range(2)] == ["<user>Who?</user><assistant>"] * 2
    assert capsys.readouterr().err.count("the template refuses system messages; they are dropped") == 1


@with_harness
def test_templates_by_name(folder):
    model = model_of(folder)
    assert model.chat_template(True) == model.chat_template("default") == TEMPLATE and model.chat_template(False) is None
    with pytest.raises(UserError, match="--apply_chat_template mine: the tokenizer has one chat template"):
        model.chat_template("mine")
    model.tokenizer.chat_template = {"default": TEMPLATE, "loud": "{{ messages[-1]['content'] | upper }}"}
    assert model.apply_chat_template(CHATS[0]) == "<user>Who?</user><assistant>"
    before = model.tokenizer_name
    assert model.chat_template("loud") and model.apply_chat_template(CHATS[0]) == "WHO?"
    assert model.tokenizer_name != before  # or --cache_requests would give the other prompts again
    with pytest.raises(UserError, match="--apply_chat_template mine: the tokenizer's chat templates are default, loud"):
        model.chat_template("mine")
    model = model_of(folder)
    model.tokenizer.chat_template = None
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        model.chat_template(True)


@pytest.fixture(scope="module")
def thoughts(folder: Path) -> tuple[list[str], list[list[int]], str, int]:
    """Prompts, the ids that the model generates, and two ends of its thoughts: a text, and an id."""
    from lpes_jax.generation import generate_ids
    from lpes_jax.models.llama import load

    loaded = load(str(folder), "float32")
    prompts = ["abcdefgh", "mn", "zyxwvutsrqponm", "qq", "Hello, world", "0123456789"]
    encoded = [loaded.tokenizer.encode(prompt) for prompt in prompts]
    ids = generate_ids(loaded.model, encoded, max_new_tokens=24, stop=loaded.stop_ids)
    texts = loaded.tokenizer.batch_decode(ids, skip_special_tokens=True)
    end = next(one for text in texts for one in text[3:-3] if one.isprintable() and one not in " \ufffd")
    return prompts, ids, end, next(token for row in ids for token in row[6:-6] if token not in row[-6:])


@with_harness
@pytest.mark.parametrize("kind", ["text", "id", "digits"])
def test_the_answer_is_what_follows_the_thoughts(folder, thoughts, kind):
    prompts, ids, end_text, end_id = thoughts
    end = {"text": end_text, "id": end_id, "digits": str(end_id)}[kind]
    model = model_of(folder, think_end_token=end, enable_thinking=True)

    def decoded(texts: list[list[int]]) -> list[str]:
        return model.tokenizer.batch_decode(texts, skip_special_tokens=True)

    if kind == "text":
        expected = [text.rpartition(end_text)[2].lstrip() for text in decoded(ids)]
    else:
        last = [max((index for index, token in enumerate(row) if token == end_id), default=-1) for row in ids]
        expected = [text.lstrip() for text in decoded([row[index + 1 :] for row, index in zip(ids, last, strict=True)])]
    assert model.generate_until(asked(*prompts), disable_tqdm=True) == expected != decoded(ids)
    # Stop texts end the answer, and not the thoughts.
    whole, answer = next(
        (whole, answer) for whole, answer in zip(decoded(ids), expected, strict=True) if len(answer) < len(whole) - 1
    )
    in_thoughts = next(one for one in whole[: len(whole) - len(answer)] if one not in "\ufffd " and one != end_text)
    stopped = model.generate_until(asked(*prompts, until=[in_thoughts]), disable_tqdm=True)
    assert stopped == [text.split(in_thoughts)[0] for text in expected]
    with pytest.raises(UserError, match="enable_thinking: given scores given answers"):
        model.loglikelihood([SimpleNamespace(args=("a", "b"), task_name="given")])


@with_hf
@pytest.mark.parametrize("kind", ["text", "id"])
def test_answers_are_those_of_hf(folder, thoughts, kind):
    from lm_eval.models.huggingface import HFLM

    prompts, _, end_text, end_id = thoughts
    end = end_text if kind == "text" else str(end_id)
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4, think_end_token=end)
    expected = theirs.generate_until(asked(*prompts), disable_tqdm=True)
    assert model_of(folder, think_end_token=end).generate_until(asked(*prompts), disable_tqdm=True) == expected
    assert "" not in expected


@with_harness
def test_ends_of_thoughts_that_no_text_has_are_refused(folder):
    with pytest.raises(UserError, match="'<end>' contains a special token.* think_end_token=[0-9]+$") as error:
        model_of(folder, think_end_token="<end>")
    end = int(str(error.value).rsplit("=")[-1])
    assert model_of(folder).tokenizer.decode([end]) == "<end>"
    model_of(folder, think_end_token=end)
    for arguments, named in (({"think_end_token": 10**6}, "think_end_token"), ({"prefix_token_id": "300"}, "prefix_token_id")):
        with pytest.raises(UserError, match=f"{named} in --model_args is .* rows, 0 to 299"):
            model_of(folder, **arguments)


@with_harness
def test_another_tokenizer(folder, tmp_path):
    """One whose ids are others: the digits of each byte's place, backwards."""
    other = tmp_path / "tokenizer"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(vocabulary, reversed(list(vocabulary.values())), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(content))
    own, theirs = model_of(folder), model_of(folder, tokenizer=str(other))
    ids = own.tok_encode("hello"), theirs.tok_encode("hello")
    assert ids[0] != ids[1] and theirs.tokenizer.decode(ids[1]) == "hello"
    assert theirs.tokenizer_name != own.tokenizer_name
    given = model_of(folder, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(other / "tokenizer.json")))
    assert given.tok_encode("hello") == ids[1]
    request = [SimpleNamespace(args=("hel", "lo"))]
    assert theirs.loglikelihood(request, disable_tqdm=True) == given.loglikelihood(request, disable_tqdm=True)
    assert theirs.loglikelihood(request, disable_tqdm=True) != own.loglikelihood(request, disable_tqdm=True)
    # Factors know the tokenizer that they were found with.
    from lpes_jax.models.llama import load
    from lpes_jax.same_model import facts

    loaded = load(str(folder), "float32")
    model = loaded.identity | facts(loaded.model.config, loaded.tokenizer)
    LayerFactors(np.array([1.0, 1.2, 1.4]), model=model).save(tmp_path / "factors.json")
    model_of(folder, factors=str(tmp_path / "factors.json"))
    with pytest.raises(UserError, match="tokenizer_sha256"):
        model_of(folder, factors=str(tmp_path / "factors.json"), tokenizer=str(other))
    large = Tokenizer(models.WordLevel({f"word{n}": n for n in range(301)}, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=large).save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match="tokenizer in --model_args has 301 tokens, but the model's embedding has 300 rows"):
        model_of(folder, tokenizer=str(tmp_path / "large"))
    with pytest.raises(UserError, match="^tokenizer 'no-such': no model 'no-such'"):
        model_of(folder, tokenizer="no-such")
    with pytest.raises(UserError, match="is a local folder and has no revision 'v2'"):
        model_of(folder, revision="v2")
    assert model_of(folder, revision="main").get_model_info()["model_revision"] == "main"


@with_harness
def test_flags_of_the_command_line_beside_arguments(folder):
    from lpes_jax.lm_eval import LayerFactorsLM

    flags = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    both = {"pretrained": str(folder), "batch_size": 2, "device": "cpu"}
    assert LayerFactorsLM.create_from_arg_obj(both, flags)._batch_size == 2
    assert LayerFactorsLM.create_from_arg_string(f"pretrained={folder}", flags | {"batch_size": "auto:3"})._batch_size is None
    with pytest.raises(UserError, match="--batch_size is 4 and batch_size in --model_args 2"):
        LayerFactorsLM.create_from_arg_obj(both, flags | {"batch_size": "4"})
    with pytest.raises(UserError, match="pretraned is not an argument.*did you mean pretrained"):
        LayerFactorsLM.create_from_arg_string("pretraned=x", flags)


@with_harness
def test_generation_settings_that_cannot_be(folder):
    model = model_of(folder)
    for settings, said in (
        ({"max_gen_toks": "many"}, "many"),
        ({"temperature": "hot"}, "hot"),
        ({"temperature": 0.7}, "cannot use temperature"),
        ({"do_sample": True}, "cannot use do_sample"),
        ({"until": [5]}, "until holds 5"),
        ({"max_gen_toks": 0}, "at least 1"),
        ({"stop": ["x"]}, "cannot use stop"),
        ({"num_beams": 2}, "cannot use num_beams"),
    ):
        with pytest.raises(UserError, match=said):
            model.generate_until(asked("ab", **settings), disable_tqdm=True)
    harmless = {"num_beams": 1, "repetition_penalty": 1.0, "top_k": 3, "until": None, "do_sample": False, "temperature": 0}
    [text] = model.generate_until(asked("ab", **harmless), disable_tqdm=True)
    assert [text] == model.generate_until(asked("ab"), disable_tqdm=True) and text
    with pytest.raises(UserError, match="neither a context nor a continuation"):
        model.loglikelihood([SimpleNamespace(args=("", ""))], disable_tqdm=True)


@with_harness
def test_gains_count_at_every_request_type(folder, tmp_path):
    """A text as a continuation of nothing, and as a rolling text: the same tokens, and so the same figure."""
    plain, gained = tmp_path / "plain.json", tmp_path / "gained.json"
    factors = np.array([1.0, 1.5, 0.7])
    LayerFactors(factors).save(plain)
    LayerFactors(factors, gains=np.array([0.2, 3.0, 0.5])).save(gained)
    figures = []
    for file in (plain, gained):
        model = model_of(folder, factors=str(file), other_model=True)
        [(scored, _)] = model.loglikelihood([SimpleNamespace(args=("", "some words"))], disable_tqdm=True)
        [rolling] = model.loglikelihood_rolling([SimpleNamespace(args=("some words",))], disable_tqdm=True)
        assert scored == pytest.approx(rolling, abs=1e-3)
        figures.append(scored)
    assert abs(figures[0] - figures[1]) > 0.01


@with_harness
def test_kept_answers_are_of_one_model(folder, tmp_path):
    from lm_eval.api.model import CachingLM

    request = [SimpleNamespace(args=("hel", "lo"))]
    kept = str(tmp_path / "kept.db")
    first = CachingLM(model_of(folder), kept).loglikelihood(request)
    assert CachingLM(model_of(folder, batch_size=3), kept).loglikelihood(request) == first
    LayerFactors(np.array([1.0, 1.5, 0.7])).save(tmp_path / "factors.json")
    for arguments in ({"factors": str(tmp_path / "factors.json")}, {"max_length": 8}, {"think_end_token": "x"}):
        with pytest.raises(UserError, match="--use_cache: .*kept.db holds the answers of another model"):
            CachingLM(model_of(folder, **arguments), kept)


@with_harness
def test_real_commands_say_it_in_one_line(folder, tmp_path):
    task = tmp_path / "chat.yaml"
    (tmp_path / "asked.jsonl").write_text(json.dumps({"word": "Who?"}) + "\n")
    data = f"{{data_files: {{test: {tmp_path / 'asked.jsonl'}}}, cache_dir: {tmp_path / 'cache'}}}"
    task.write_text(
        f"task: chat\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\noutput_type: generate_until\n"
        'doc_to_text: "{{word}}"\ndoc_to_target: "x"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 4}\n'
        "metric_list: [{metric: exact_match}]\n"
    )

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lpes_jax.lm_eval", "run", "--model", "lpes_jax", "--include_path", str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "HF_HOME": str(tmp_path / "cache"), "XLA_FLAGS": ""}
        return subprocess.run([*command, *more], env=environment, capture_output=True, text=True)

    arguments = [f"pretrained={folder},enable_thinking=False", 'chat_template_args={"effort":"low","n":[1,2]}']
    chat = ["--tasks", "chat", "--apply_chat_template", "--system_instruction", "Be brief.", "--trust_remote_code"]
    chat += ["--output_path", str(tmp_path / "out"), "--log_samples", "--batch_size", "auto:2"]
    done = run("--model_args", *arguments, *chat)
    assert done.returncode == 0, done.stderr[-3000:]
    [samples] = (tmp_path / "out").rglob("samples_chat_*.jsonl")
    prompt = json.loads(samples.read_text())["arguments"]["gen_args_0"]["arg_0"]
    assert prompt == "<system>Be brief.</system><user>Who?</user><assistant>(no thoughts)[low]"
    refused = run("--model_args", f"pretrained={folder},load_in_8bit=True", *chat)
    assert refused.returncode == 2 and refused.stderr.splitlines()[-1].startswith("error: load_in_8bit is not an argument")
    assert "Traceback" not in refused.stderr
    missing = run("--model_args", f"pretrained={folder}", "--tasks", "no_such_task")
    assert missing.returncode == 2 and missing.stderr.splitlines()[-1] == "error: Tasks not found: no_such_task"
    joined = run("--model_args", ",".join(arguments), *chat)  # which the harness takes for JSON that is not
    assert joined.returncode == 2 and joined.stderr.splitlines()[-1].startswith("error: Invalid JSON: pretrained=")
