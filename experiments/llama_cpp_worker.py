"""Ask llama.cpp by token ids: one line of JSON in, one line of JSON out. Needs an environment with `xllamacpp`.

    python llama_cpp_worker.py model.gguf CONTEXT THREADS

In: {"ids": prompt, "answer": token ids, "vocabulary": size}. Out: "next", the log-probabilities of the whole vocabulary after
the prompt; "answer", those of the answer's tokens, each after the prompt and the answer so far; "is_best", which of these are
the most likely tokens. llama.cpp reports log-probabilities only when it generates, so each token of the answer is generated, by
a bias on it that its log-probabilities do not include. The prompt before it is cached.

In: {"prefill": prompt}. Out: "seconds" of reading the prompt, with nothing cached, and of sampling the next token.
"""

import importlib.metadata
import json
import os
import sys
import time

import xllamacpp  # pyright: ignore[reportMissingImports]

MANY = 100  # log-probabilities requested at first for each token of an answer


def main(path: str, context: int, threads: int) -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for llama.cpp's own output
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = context, 1, False
    for cpu in (parameters.cpuparams, parameters.cpuparams_batch):
        cpu.n_threads, cpu.poll = threads, 0  # waiting threads use no CPU time
    server = xllamacpp.Server(parameters)

    def likely(ids: list[int], token: int, count: int, cached: bool = True) -> list[dict]:
        """The `count` most likely tokens after the ids, when `token` is generated."""
        asked = {"prompt": ids, "max_tokens": 1, "logprobs": count, "cache_prompt": cached, "temperature": 0}
        reply = server.handle_completions(asked | {"ignore_eos": True, "logit_bias": [[token, 1000]]})
        return reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]

    print(json.dumps({"xllamacpp": importlib.metadata.version("xllamacpp")}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "prefill" in request:
            start = time.perf_counter()
            asked = {"prompt": request["prefill"], "max_tokens": 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
            server.handle_completions(asked)
            print(json.dumps({"seconds": time.perf_counter() - start}), file=replies, flush=True)
            continue
        ids, answer, size = request["ids"], request["answer"], request["vocabulary"]
        found = {candidate["id"]: candidate["logprob"] for candidate in likely(ids, answer[0], size, cached=False)}
        log_probs, is_best = [], []
        for number, token in enumerate(answer):
            for count in (MANY, size):
                best = likely(ids + answer[:number], token, count)
                log_prob_by_token = {candidate["id"]: candidate["logprob"] for candidate in best}
                if token in log_prob_by_token:
                    break
            log_probs.append(log_prob_by_token[token])
            is_best.append(best[0]["id"] == token)
        reply = {"next": [found.get(token) for token in range(size)], "answer": log_probs, "is_best": is_best}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
