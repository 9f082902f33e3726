"""llama.cpp, asked by token ids: a line of JSON in, a line of JSON out. For the Python of an environment that has `xllamacpp`.

    python llama_cpp_worker.py model.gguf CONTEXT THREADS

In: {"ids": prompt, "answer": token ids, "vocabulary": size}. Out: "next", the log-probabilities of the whole vocabulary behind
the prompt; "answer", those of the answer's tokens, each behind the prompt and the answer so far; "is_best", which of these are
the most likely ones. llama.cpp gives log-probabilities where it generates: the answer is generated greedily, and where that
leaves it, begun again behind the right token.
"""

import importlib.metadata
import json
import os
import sys

import xllamacpp  # pyright: ignore[reportMissingImports]

MANY = 100  # log-probabilities asked for at first at each token of an answer


def main(path: str, context: int, threads: int) -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = context, 1, False
    for cpu in (parameters.cpuparams, parameters.cpuparams_batch):
        cpu.n_threads, cpu.poll = threads, 0  # threads that wait take no time from others
    server = xllamacpp.Server(parameters)

    def complete(ids: list[int], tokens: int, count: int, cached: bool = True) -> list[dict]:
        asked = {"prompt": ids, "max_tokens": tokens, "logprobs": count, "cache_prompt": cached}
        reply = server.handle_completions(asked | {"temperature": 0, "ignore_eos": True})
        return [token["top_logprobs"] for token in reply["choices"][0]["logprobs"]["content"]]

    print(json.dumps({"xllamacpp": importlib.metadata.version("xllamacpp")}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids, answer, size = request["ids"], request["answer"], request["vocabulary"]
        found = {token["id"]: token["logprob"] for token in complete(ids, 1, size, cached=False)[0]}
        log_probs, is_best = [], []
        while len(log_probs) < len(answer):
            for best in complete(ids + answer[: len(log_probs)], len(answer) - len(log_probs), MANY):
                right = answer[len(log_probs)]
                of_tokens = {token["id"]: token["logprob"] for token in best}
                if right not in of_tokens:
                    everything = complete(ids + answer[: len(log_probs)], 1, size)[0]
                    of_tokens = {token["id"]: token["logprob"] for token in everything}
                log_probs.append(of_tokens[right])
                is_best.append(best[0]["id"] == right)
                if not is_best[-1]:
                    break
        reply = {"next": [found.get(token) for token in range(size)], "answer": log_probs, "is_best": is_best}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
