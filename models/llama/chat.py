"""Prompts in the format that chat models were trained on: the tokenizer's own chat template, or a form by name.

    chat = make_chat(tokenizer, apply_chat_template=True, system_prompt="Be brief.")
    text = chat.render("What is the capital of France?")  # ends where the answer begins

Some models (Vicuna, StableBeluga) have no template; their forms are available by name. There is no fallback: a tokenizer
without a template is an error, and so is a template that drops the system prompt.

A form does not include the BOS, which the tokenizer adds. A template's own BOS is kept, and there is never a second one
(`lpes_jax.tasks.prompts.encode`). Templates that write today's date get a fixed one, so that runs are reproducible.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpes_jax.errors import UserError
from lpes_jax.models.llama import templates
from lpes_jax.settings.groups import PROMPT_FORMS, check_chat

if TYPE_CHECKING:
    import transformers

# The default date of Llama 3's templates, for templates that ask for a date and for those that take one.
_TODAY = "26 Jul 2024"
_DATE = {"%Y": "2024", "%m": "07", "%d": "26", "%b": "Jul", "%B": "July", "%A": "Friday", "%H": "00", "%M": "00", "%S": "00"}
_STRFTIME_NOW = "".join(f" | replace('{directive}', '{value}')" for directive, value in _DATE.items())
_STRFTIME_NOW = "{% macro strftime_now(format) %}{{ format" + _STRFTIME_NOW + " }}{% endmacro %}"


@dataclass(frozen=True)
class _Form:
    """A form with a system prompt, the form without one, and the default system prompt."""

    with_system: str
    without_system: str
    system: str | None


_FORMS = {
    # FastChat's vicuna_v1.1
    "vicuna": _Form(
        "{system} USER: {prompt} ASSISTANT:",
        "USER: {prompt} ASSISTANT:",
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    # the model card of stabilityai/StableBeluga-7B
    "stablebeluga": _Form(
        "### System:\n{system}\n\n### User:\n{prompt}\n\n### Assistant:\n",
        "### User:\n{prompt}\n\n### Assistant:\n",
        "You are StableBeluga, an AI that follows instructions extremely well. "
        "Help as much as you can. Remember, be safe, and don't do anything illegal.",
    ),
    # Meta's llama/generation.py; the tokenizer adds its <s>
    "llama2": _Form("[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{prompt} [/INST]", "[INST] {prompt} [/INST]", None),
}


@dataclass(frozen=True)
class Chat:
    """Turns a question into the text that the model reads. `record` describes the chat in result files."""

    render: Callable[[str], str]
    record: dict[str, Any]


def make_chat(
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    apply_chat_template: bool = False,
    prompt_form: str | None = None,
    system_prompt: str | None = None,
) -> Chat | None:
    """The chat that the flags ask for; None for raw prompts.

    Args:
        tokenizer: The model's tokenizer.
        apply_chat_template: Whether to use its template.
        prompt_form: A form in place of the template.
        system_prompt: None means the default of the template or form; "" means none (in a form).

    Raises:
        UserError: The flags contradict each other, or the tokenizer has no template.
    """
    check_chat(apply_chat_template=apply_chat_template, prompt_form=prompt_form, system_prompt=system_prompt)
    if prompt_form is not None:
        return _of_form(prompt_form, system_prompt)
    if apply_chat_template:
        return _of_template(tokenizer, system_prompt)
    return None


def _of_form(name: str, system_prompt: str | None) -> Chat:
    form = _FORMS[name]
    system = form.system if system_prompt is None else system_prompt
    text = form.with_system if system else form.without_system

    def render(prompt: str) -> str:
        return text.replace("{system}", system or "").replace("{prompt}", prompt)

    return Chat(render, _record(name, text, system))


def _of_template(tokenizer: "transformers.PreTrainedTokenizerFast", system_prompt: str | None) -> Chat:
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # no template, or several without a default
        raise UserError(
            "--apply-chat-template: the model's tokenizer has no chat template; "
            f"remove the flag, or name a form: --prompt-form {', '.join(PROMPT_FORMS)}"
        ) from error
    if not isinstance(template, str) or not _is_unicode(template):
        raise UserError(
            f"--apply-chat-template: the model's chat template must be a text in Unicode, got {template!r:.60}; fix it in "
            "its tokenizer_config.json, or name a form with --prompt-form"
        )
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def render(prompt: str) -> str:
        try:
            text = templates.render(
                tokenizer,
                [*system, {"role": "user", "content": prompt}],
                template=_STRFTIME_NOW + template,
                add_generation_prompt=True,
                date_string=_TODAY,
            )
            if not _is_unicode(text):
                raise ValueError("it writes half of a surrogate pair, which is not a character")
        except Exception as error:  # templates are programs and may raise anything
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--apply-chat-template: the model's chat template fails ({reason})") from error
        for what, part in (("system prompt", system_prompt or ""), ("question", prompt)):
            if part.strip() not in text:
                raise UserError(
                    f"--apply-chat-template: the model's chat template drops or changes the {what}; use --prompt-form instead"
                )
        return text

    return Chat(render, _record("template", template, system_prompt))


def _is_unicode(text: str) -> bool:
    """Whether the text is free of lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode() == text


def _record(name: str, template: str, system_prompt: str | None) -> dict[str, Any]:
    digest = hashlib.sha256(template.encode()).hexdigest()
    return {"form": name, "template_sha256": digest, "system_prompt": system_prompt}
