"""Chat templates and named prompt forms, and tasks that are asked in them; never a fallback, never a second BOS."""

import hashlib
import json

import pytest
from byte_tokenizer import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from lpes_jax.errors import UserError
from lpes_jax.evaluate import EvaluateSettings, run_evaluation
from lpes_jax.models.llama.chat import PROMPT_FORMS, check_chat, make_chat
from lpes_jax.models.llama.checkpoint import save_llama
from lpes_jax.search.checks import check
from lpes_jax.settings.search import SearchSettings
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import encode

# Chat forms of three kinds: with a BOS of its own; with a line end at its end; and one that knows no system prompt.
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
DATED = "{%- set today = strftime_now('%d %B %Y') %}{{ today }}, {{ strftime_now('%Y-%m-%d') }}, {{ date_string }} " + CHATML


def make_tokenizer(template: str | None, bos: bool = True) -> PreTrainedTokenizerFast:
    """Bytes for tokens; with `bos`, <s> before every text."""
    return byte_tokenizer(("<s>", "<|im_start|>", "<|im_end|>"), bos=bos, chat_template=template)


def test_the_template_of_the_tokenizer():
    chat = make_chat(make_tokenizer(CHATML), apply_chat_template=True)
    assert chat.render("Hi {x}") == "<|im_start|>user\nHi {x}<|im_end|>\n<|im_start|>assistant\n"
    sha256 = hashlib.sha256(CHATML.encode()).hexdigest()
    assert chat.record == {"form": "template", "template_sha256": sha256, "system_prompt": None}
    brief = make_chat(make_tokenizer(CHATML), apply_chat_template=True, system_prompt="Be brief.")
    assert brief.render("Hi").startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert brief.record["system_prompt"] == "Be brief."


def test_forms_by_name():
    tokenizer = make_tokenizer(None)
    vicuna = make_chat(tokenizer, prompt_form="vicuna")
    assert vicuna.render("Who?") == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
        "polite answers to the user's questions. USER: Who? ASSISTANT:"
    )
    beluga = make_chat(tokenizer, prompt_form="stablebeluga", system_prompt="Be brief.")
    assert beluga.render("Who?") == "### System:\nBe brief.\n\n### User:\nWho?\n\n### Assistant:\n"
    assert (
        make_chat(tokenizer, prompt_form="stablebeluga").render("Who?").startswith("### System:\nYou are StableBeluga, an AI")
    )
    llama2 = make_chat(tokenizer, prompt_form="llama2")
    assert llama2.render("Who {system}?") == "[INST] Who {system}? [/INST]"  # braces of the question stay
    llama2 = make_chat(tokenizer, prompt_form="llama2", system_prompt="Be brief.")
    assert llama2.render("Who?") == "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWho? [/INST]"
    assert make_chat(tokenizer, prompt_form="vicuna", system_prompt="").render("Who?") == "USER: Who? ASSISTANT:"
    records = [make_chat(tokenizer, prompt_form=name).record for name in PROMPT_FORMS]
    assert [record["form"] for record in records] == list(PROMPT_FORMS)
    assert len({record["template_sha256"] for record in records}) == len(PROMPT_FORMS)


def test_without_flags_prompts_stay_raw():
    assert make_chat(make_tokenizer(CHATML)) is None


def test_a_tokenizer_without_a_template_is_an_error_that_names_the_forms():
    with pytest.raises(UserError, match="no chat template.*--prompt-form vicuna, stablebeluga, llama2"):
        make_chat(make_tokenizer(None), apply_chat_template=True)


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"apply_chat_template": True, "prompt_form": "vicuna"}, "--apply-chat-template and --prompt-form"),
        ({"system_prompt": "x"}, "--system-prompt needs"),
        ({"prompt_form": "chatgpt"}, "'chatgpt'.*vicuna, stablebeluga, llama2"),
    ],
)
def test_flags_that_cannot_go_together(flags, named):
    flags = {"apply_chat_template": False, "prompt_form": None, "system_prompt": None} | flags
    with pytest.raises(UserError, match=named):
        check_chat(**flags)


def test_search_and_evaluate_refuse_them_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserError, match="--system-prompt needs"):
        check(SearchSettings.of(system_prompt="x"))
    with pytest.raises(UserError, match="--system-prompt needs"):
        run_evaluation(EvaluateSettings.of(model="no such model", system_prompt="x", output_path=tmp_path))


@pytest.mark.parametrize(
    "template, named",
    [
        (LLAMA2, "drops or changes the system prompt"),
        (NO_SYSTEM, "fails .no system role"),
        ("{% if %}", "fails"),
        ("x", "drops"),
    ],
)
def test_templates_that_cannot_say_what_is_asked_are_refused(template, named):
    chat = make_chat(make_tokenizer(template), apply_chat_template=True, system_prompt="Be brief.")
    with pytest.raises(UserError, match=named) as error:
        chat.render("Hi")
    assert "--apply-chat-template" in str(error.value) and "\n" not in str(error.value)


def test_templates_that_write_the_date_give_the_same_text_every_day():
    chat = make_chat(make_tokenizer(DATED), apply_chat_template=True)
    assert chat.render("Hi").startswith("26 July 2024, 2024-07-26, 26 Jul 2024 <|im_start|>")


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
@pytest.mark.parametrize("bos", [True, False])
def test_the_opener_is_after_the_chat_and_bos_at_most_once(template, bos):
    """A template that emits BOS, a tokenizer that puts one, both, or neither."""
    tokenizer = make_tokenizer(template, bos)
    chat = make_chat(tokenizer, apply_chat_template=True)
    raw = KeyValue(num_pairs=2, key_length=4)
    task = ChatTask(raw, chat.render)
    [example] = task.examples("test", 1, seed=0)
    prompt = task.prompt(example, 1)
    question = raw.plain.prompt(example, 1).text
    assert prompt.text == chat.render(question) + ' "'
    assert (prompt.answers, prompt.gold, prompt.slot, prompt.example) == ((example.value,), example.value, 1, example.id)
    [encoded] = encode([prompt], tokenizer, window=1000)
    assert encoded.ids.count(256) == (1 if bos or template == LLAMA2 else 0)
    assert (encoded.ids[0] == 256) == (bos or template == LLAMA2)
    assert tokenizer.decode(encoded.ids).removeprefix("<s>") == prompt.text.removeprefix("<s>")


def test_plain_questions_in_a_chat_admit_answers_without_the_space_after_a_line_end():
    raw = KeyValue(num_pairs=2, key_length=4)
    for template, openers in ((CHATML, (" ", ' "', "", '"')), (LLAMA2, (" ", ' "'))):
        chat = make_chat(make_tokenizer(template), apply_chat_template=True)
        task = ChatTask(raw, chat.render)
        [example] = task.examples("test", 1, seed=0)
        prompt = task.plain.prompt(example, 0)
        assert prompt.text == chat.render(raw.plain.prompt(example, 0).text)
        assert prompt.answers == tuple(opener + example.value for opener in openers)
        assert task.plain.plain is None
    assert (task.name, task.num_items) == ("kv", 2)


def test_results_say_how_the_questions_were_asked(tmp_path, tiny_model):
    save_llama(tiny_model, tmp_path / "model")
    make_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    settings = EvaluateSettings.of(
        model=str(tmp_path / "model"), output_path=tmp_path / "out", num_pairs=2, key_length=3, limit=1, positions=(0,),
        metrics=("prefix",), apply_chat_template=True, system_prompt="Be brief.",
    )  # fmt: skip
    [plain, baseline] = run_evaluation(settings)
    assert baseline.prompts[0].text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nExtract the value")
    assert baseline.prompts[0].text.endswith('Corresponding value:<|im_end|>\n<|im_start|>assistant\n "')
    assert plain.prompts[0].text + ' "' == baseline.prompts[0].text
    config = json.loads((tmp_path / "out" / "results.json").read_text())["config"]
    sha256 = hashlib.sha256(CHATML.encode()).hexdigest()
    assert config["chat"] == {"form": "template", "template_sha256": sha256, "system_prompt": "Be brief."}
    assert config["apply_chat_template"] is True
