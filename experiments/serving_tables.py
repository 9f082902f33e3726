"""The tables of docs/serving from the records in experiments/results/serving; `page_figures.py` puts them into the pages.

`make serve-test` writes the records of servers, and experiments/serve_llama_cpp.py those of whole models in llama.cpp.
Differences are in nats.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results/serving"
NOISE = "llama.cpp, as it is (its own noise)"
ROWS = {
    NOISE: "llama.cpp, the file as it is: the backend's own noise",
    "llama.cpp, patched": "llama.cpp, the patched file, against gains in the table",
    "lpes_jax, patched": "lpes_jax, the patched file, against gains in the table",
}


def transformers() -> str:
    """Exported folders in two versions of transformers."""
    servers = ["transformers4", "transformers5"]
    return "\n\n".join([*form_tables(servers), family_table(servers)])


def vllm() -> str:
    """Exported folders in vLLM."""
    return "\n\n".join(form_tables(["vllm"]))


def llama_cpp() -> str:
    """Patched files in llama.cpp."""
    return "\n\n".join(llama_cpp_tables())


def form_tables(servers: list[str]) -> list[str]:
    """Log-probabilities of self_test.json, and of the answers of held-out questions."""
    rows, held_out = [], []
    for server in servers:
        for form, record in _record(server)["forms"].items():
            if "off_most" not in record:
                continue
            tokens = f"{record['shortest']:,} to {record['longest']:,}"
            off, plain = (_most_and_mean(record, kind) for kind in ("off", "from_plain"))
            rows.append([_server(record), form, tokens, f"{record['log_probs']:,}", off, plain])
            if "held_out" in record:
                held_out.append([_server(record), form, *_held_out(record["held_out"])])
    head = [
        "server",
        "model",
        "tokens of prompts",
        "log-probabilities",
        "off by at most (mean)",
        "model without the factors (mean)",
    ]
    answers_head = [
        "server",
        "model",
        "prompts",
        "answer tokens",
        "off by at most (mean)",
        "without the gains (mean)",
        "greedy ids",
    ]
    tables = [_table(head, rows)]
    return [*tables, "Held-out key-value questions:", _table(answers_head, held_out)] if held_out else tables


def _held_out(found: dict[str, Any]) -> list[str]:
    low, high = found["tokens"]
    return [
        f"{found['prompts']}, of {low} to {high} tokens",
        str(found["answer_tokens"]),
        f"{found['off_most']:.1e} ({found['off_mean']:.1e})",
        f"({found['from_plain_mean']:.2g})",
        f"{found['new_tokens']} new ones equal for {found['same_greedy_ids']} of {found['prompts']} prompts",
    ]


def family_table(servers: list[str]) -> str:
    """Tiny random models of every family."""
    rows = []
    for server in servers:
        for record in _record(server)["forms"].values():
            for family, found in record.get("families", {}).items():
                errors = sorted({error for refused in found["without_trust"] for error in refused})
                rows.append(
                    [
                        _server(record),
                        family,
                        str(found["folders"]),
                        f"{found['off_most']:.1e}",
                        f"{found['from_plain_least']:.2g}",
                        f"{found['from_hook_most']:g} ({found['from_hook_with_gains_relative']:.1e})",
                        ", ".join(errors),
                    ]
                )
    head = ["server", "family", "folders", "logits off by at most", "model without the factors, at least"]
    head += ["off the hook's (with gains, by the largest logit)", "without trust"]
    return _table(head, rows)


def llama_cpp_tables() -> list[str]:
    """Whole models, unchanged and patched, then tiny ones."""
    records = _record("llama_cpp")
    accuracy, divergences, files = [], [], []
    for name, record in records.items():
        patch = record["patch"]
        rows = patch["relative_error_of_a_row"]
        files.append(
            [
                f"{name}, {record['factors']}",
                ", ".join(patch["tensors"]),
                f"{patch['bytes_changed_in_percent']:.2f} %",
                str(patch["bytes_changed_elsewhere"]),
                f"{rows['mean']:.2g}",
                f"{rows['largest']:.2g}",
                f"{patch['largest_error_by_largest_weight_of_its_tensor']:.2g}",
            ]
        )
        if "prompts" not in record:
            continue
        found, asked = record["accuracy"], record["prompts"]
        prompts = f"{name}, {asked['number']} prompts of {asked['tokens'][0]} to {asked['tokens'][1]} tokens"
        for server, patched in (("llama.cpp", "patched"), ("lpes_jax", "gains")):
            plain, ours = (100 * found[f"{server}, {kind}"] for kind in ("as it is", patched))
            accuracy.append([prompts, server, f"{plain:.0f}", f"{ours:.0f}", f"{100 * found['change'][server]:+.0f}"])
        difference = f"{100 * found['difference_of_changes']:+.0f} ± {100 * found['standard_error']:.1f}"
        accuracy.append([prompts, "difference of the changes ± standard error over prompts", "", "", difference])
        for kind, title in ROWS.items():
            following, answers = record["next_token"][kind], record["answers"][kind]
            likely = f"{answers['mean_log_likelihood']:.3f} and {answers['mean_log_likelihood_of_lpes_jax']:.3f}"
            divergences.append(
                [name, title, f"{following['mean_kl']:.2g}", likely, f"{answers['mean_absolute_difference_of_a_token']:.2g}"]
            )
        must = record["next_token"]["llama.cpp, as it is, against gains (must differ)"]["mean_kl"]
        divergences.append([name, "llama.cpp, the file as it is, against gains (must differ)", f"{must:.2g}", "", ""])
    tiny = [
        [
            form,
            f"{record['kl_most']:.1e}",
            f"{record['kl_of_plain_least']:.2g}",
            f"{record['answer_token_off_most']:.1e} ({record['answer_token_off_mean']:.1e})",
            record["date"],
        ]
        for form, record in _record("llama_cpp_tests")["forms"].items()
    ]
    tables = [
        _table(["accuracy in %", "", "as it is", "with the gains", "change"], accuracy),
        _table(
            [
                "model",
                "against lpes_jax",
                "mean KL, next token",
                "log-probability of an answer, and lpes_jax's",
                "mean off of a token",
            ],
            divergences,
        ),
        "Changes of the file by patching (rows: |row - row x gain| / |row x gain|):",
        _table(
            [
                "file",
                "query weights",
                "bytes changed",
                "elsewhere",
                "rows, mean",
                "rows, most",
                "largest error / largest weight",
            ],
            files,
        ),
    ]
    head = ["model", "KL at most", "KL of the file as it is, at least", "token of an answer off by at most (mean)", "date"]
    if tiny:
        tables += [
            "The tests of `make serve-test`, next token and answers (KL from lpes_jax with the factors):",
            _table(head, tiny),
        ]
    if told := _self_test_rows():
        head = ["model", "tokens of prompts", "log-probabilities", "off by at most (mean)", "the file as it is (mean)"]
        tables += ["`self_test.json` at the end of each of its prompts:", _table(head, told)]
    return tables


def _self_test_rows() -> list[list[str]]:
    """Rows of models whose patched file was asked for self_test.json in llama.cpp."""
    rows = []
    for form, record in _record("llama_cpp_tests")["forms"].items():
        if told := record.get("self_test"):
            off, plain = (_most_and_mean(told, kind) for kind in ("off", "from_plain"))
            rows.append([form, f"{told['shortest']:,} to {told['longest']:,}", str(told["log_probs"]), off, plain])
    return rows


def _record(server: str) -> dict[str, Any]:
    """The record of a server; one without forms if it has not run yet."""
    path = RESULTS / f"{server}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"forms": {}}


def _server(record: dict[str, Any]) -> str:
    """The versions of a server, and the date."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name not in ("torch", "python"))
    return f"{versions}, {record['date']}"


def _most_and_mean(record: dict[str, Any], kind: str) -> str:
    most, mean = record[f"{kind}_most"], record[f"{kind}_mean"]
    return f"{most:.1e} ({mean:.1e})" if kind == "off" else f"{most:.2g} ({mean:.2g})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {"transformers": transformers, "vllm": vllm, "llama_cpp": llama_cpp}
