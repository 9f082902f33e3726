"""L-Eval: the benchmark's prompts, its letters and partial credit, loyalty and fact, open-ended rows, and the cut."""

import json
import re

import pytest
from word_tokenizer import num_words, words

from lpes_jax.errors import UserError
from lpes_jax.tasks import make_task
from lpes_jax.tasks.l_eval import SUBSETS, LEval
from lpes_jax.tasks.prompts import Task, fit

SYSTEM = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice questions, "
    "there is only a sinlge correct option. Please only provide the letter corresponding to the answer (like A or B) when "
    "answering. For other questions, please directly give the concise and accurate answer. "
)


def row(*pairs: tuple[str, str], document: str = "a {long} text", evaluation: str = "exam") -> dict:
    return {
        "instructions": [instruction for instruction, _ in pairs],
        "outputs": [output for _, output in pairs],
        "input": document,
        "source": "made",
        "evaluation": evaluation,
    }


def only_prompt(task: LEval, index: int = 0):
    return task.prompt(task.examples("all", None, 0)[index], 0)


@pytest.mark.parametrize(
    "form, text",
    [
        (
            "plain",
            SYSTEM
            + "Document is as follows. a {long} text \nQuestion: Why?\n (A) x.  Please directly give the answer without any "
            "additional output or explanation \nAnswer:",
        ),
        (
            "llama2",
            f"[INST]<<SYS>>\n{SYSTEM}\n<</SYS>>\n\nDocument is as follows. a {{long}} text \nQuestion: Why?\n (A) x.  Please "
            "directly give the answer without any additional output or explanation [/INST]\nAnswer:",
        ),
        (
            "vicuna",
            "A chat between a curious user and an artificial intelligence assistant.The assistant gives helpful, detailed, and "
            f"polite answers to the user's questions. USER: {SYSTEM}Document is as follows. a {{long}} text \n"
            "Question: Why?\n (A) x  \nAnswer:",
        ),
    ],
)
def test_whole_prompt_byte_for_byte(rows_file, form, text):
    task = LEval("quality", rows_file(row(("Why?\n (A) x", "(A) x"))), form=form)
    prompt = only_prompt(task)
    assert prompt.text == text and isinstance(task, Task)
    assert (prompt.gold, prompt.answers) == ("A", (" A",))
    assert prompt.text[prompt.cut.start : prompt.cut.end] == "a {long} text"


def test_open_ended_prompts_name_the_length_of_the_answer(rows_file):
    data = rows_file(row(("Sum it up.", "in just four words"), evaluation="rouge"), row(("No", "no"), evaluation="LLM"))
    task = LEval("news_summ", data)
    [example] = task.examples("all", None, 0)
    prompt = task.prompt(example, 0)
    assert prompt.text.endswith(
        "a required paragraph. Document is as follows. a {long} text Instruction: Sum it up. \n"
        "Answer this question with 4 words."
    )
    assert prompt.answers == () and task.score("just four", prompt)["rouge1"] == pytest.approx(4 / 6)
    vicuna = only_prompt(LEval("news_summ", data, form="vicuna")).text
    assert vicuna.endswith("Sum it up. The suggested output length is around 4 words.  \nASSISTANT: My english answer is:")
    answers = LEval("natural_question", rows_file(row(("Who?", "the grey dog"), evaluation="f1")))
    assert answers.score("a dog", only_prompt(answers)) == {"f1": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    "subset, gold, output, exam, exact",
    [
        ("coursera", "BD", "BD", 1, 1),
        ("coursera", "BD", "DB", 1, 1),
        ("coursera", "BD", "D", 0.25, 0),
        ("coursera", "BD", "ABD", 0, 0),
        ("coursera", "BD", "The answers are B. and D.", 1, 1),
        ("coursera", "A", "I do not know", 1, 0),  # the benchmark guesses A
        ("coursera", "A", "", 0, 0),
        ("quality", "(B) because", "B", 1, 1),
        ("quality", "(B) because", "(B) for sure. A", 1, 1),
        ("tpo", "B", "A good answer is B", 0, 0),
        ("sci_fi", "True [fact: False]", "True.", 1, 1),
        ("sci_fi", "True [fact: False]", "That is false, not true", 0, 0),
        ("sci_fi", "True [fact: False]", "maybe", 0, 0),
    ],
)
def test_scores_by_hand(rows_file, subset, gold, output, exam, exact):
    task = make_task("l_eval", subset=subset, data=rows_file(row(("Q", gold))))
    assert task.score(output, only_prompt(task)) == {"exam": exam, "exact": exact}


def test_sci_fi_asks_of_the_document_and_of_the_world(rows_file):
    instruction = "The moon is cheese, based on the world described in the document."
    task = LEval("sci_fi", rows_file(row((instruction, "True [fact: False]"))))
    loyalty, fact = (task.prompt(example, 0) for example in task.examples("all", None, 0))
    assert (loyalty.gold, loyalty.details["kind"], fact.gold, fact.details["kind"]) == ("True", "loyalty", "False", "fact")
    assert "a {long} text" in loyalty.text and loyalty.example != fact.example
    assert fact.cut is None and fact.text == (
        "The moon is cheese, based on the real-world knowledge and facts up until your last trainingPlease directly answer "
        "without any additional output or explanation. \nAnswer:"
    )
    assert task.score("False", fact)["exam"] == 1


def test_a_long_document_loses_its_end_and_nothing_else(rows_file):
    task = LEval("quality", rows_file(row(("Why?", "A"), document=" ".join(map(str, range(1000, 2000))))))
    prompt = only_prompt(task)
    [cut] = fit([prompt], words, 4096, max_prompt_tokens=500).prompts
    assert cut.was_cut and 499 <= num_words(cut.text) <= 500
    head, tail = prompt.text.split("1000 ")[0], prompt.text.split(" 1999")[1]
    kept = re.fullmatch(re.escape(head) + r"(1000 .*)" + re.escape(tail), cut.text, re.DOTALL)
    assert kept and prompt.text.startswith(head + kept[1])


def test_documents_are_split_with_all_their_questions(rows_file):
    rows = [row(("one?", "A"), ("two?", "B"), document=f"document {number}") for number in range(30)]
    task = LEval("tpo", rows_file(*rows))
    search, test = ({example.document for example in task.examples(split, None, 0)} for split in ("search", "test"))
    assert search and test and not search & test and len(task.examples("all", None, 0)) == 60


@pytest.mark.parametrize(
    "subset, bad, message",
    [
        ("tpo", {"input": "x"}, "line 1: not an L-Eval row .*without instructions, outputs, evaluation"),
        ("tpo", {**row(("a", "B")), "outputs": []}, "line 1: not an L-Eval row .*as many outputs as instructions"),
        ("tpo", {**row(("a", "B")), "outputs": "B"}, "line 1: not an L-Eval row"),
        ("tpo", row(("a", "yes")), "line 1: the output 'yes' begins with no letter from A to D; is this a file of tpo"),
        ("tpo", row(("a", "")), "line 1: the output '' begins with no letter"),
        ("sci_fi", row(("a", "True")), "line 1: the output 'True' is not like 'True .fact: False.'"),
        ("news_summ", row(("a", "B")), "no row is measured by 'rouge', as rows of news_summ are; is it the right file"),
    ],
)
def test_bad_files_are_named(rows_file, subset, bad, message):
    with pytest.raises(UserError, match=message):
        LEval(subset, rows_file(bad)).examples("all", None, 0)


def test_an_unknown_subset(rows_file):
    with pytest.raises(UserError, match=f"--subset 'codeU' is not in L-Eval; its supported tasks are: {', '.join(SUBSETS)}"):
        LEval("codeU", rows_file(row(("a", "B"))))


@pytest.mark.parametrize("subset, questions", [("coursera", 172), ("quality", 202), ("scientific_qa", 160)])
def test_the_original_files(real, subset, questions):
    path = real(f"l_eval/{subset}.jsonl")
    task = LEval(subset, path, form="llama2")
    prompts = [task.prompt(example, 0) for example in task.examples("all", None, 0)]
    assert len(prompts) == len({prompt.example for prompt in prompts}) == questions
    number = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        original = json.loads(line)
        for instruction, output in zip(original["instructions"], original["outputs"], strict=True):
            if original["evaluation"] in ("exam", "f1"):
                asked = (
                    f"Document is as follows. {original['input']} Instruction: {instruction} \nAnswer this question with "
                    f"{len(output.split())} words.[/INST]"
                    if subset == "scientific_qa"
                    else f"Document is as follows. {original['input']} \nQuestion: {instruction}.  Please directly give the "
                    "answer without any additional output or explanation [/INST]\nAnswer:"
                )
                assert prompts[number].text.startswith("[INST]<<SYS>>\nNow you are given a very long document.")
                assert prompts[number].text.endswith(f"\n<</SYS>>\n\n{asked}")
                assert task.score(output, prompts[number])[task.metrics[0]] == pytest.approx(1)
                number += 1
    assert number == questions
    fitted = fit(prompts[::20], words, 4096, max_prompt_tokens=task.max_prompt_tokens, new_tokens=task.max_new_tokens)
    assert max(num_words(prompt.text) for prompt in fitted.prompts) <= 3584
    assert fitted.num_cut == sum(num_words(prompt.text) > 3584 for prompt in prompts[::20])
