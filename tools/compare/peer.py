"""What the programs in Python have in common: the measured work, and lines for compare.py."""

import json
import os
import sys
import time

import numpy as np


def say(value):
    print(json.dumps(value, default=lambda x: x.tolist()), flush=True)


def answer(feed, work):
    """A round of SmolLM2. `feed(tokens, had)` appends tokens after `had` others.

    It returns the logits after the last one.
    """
    started = time.perf_counter()
    logits = np.array(feed(work["long"], 0))
    forward = time.perf_counter() - started

    started = time.perf_counter()
    tokens = [int(np.argmax(feed(work["short"], 0)))]
    first = time.perf_counter() - started
    had = len(work["short"])
    started = time.perf_counter()
    for n in range(work["steps"]):
        tokens.append(int(np.argmax(feed(tokens[-1:], had + n))))
    generate = time.perf_counter() - started
    return {"forward": forward, "first": first, "generate": generate, "logits": logits, "tokens": tokens}


def embed(vectors, work):
    """A round of MiniLM. `vectors(sentences)` returns their unit vectors."""
    started = time.perf_counter()
    found = vectors(work["sentences"])
    return {"embed": time.perf_counter() - started, "vectors": found.ravel()}


def serve(load):
    """`load` has a function for each model, which loads it and returns the function of a round.

    The first round of a model loads it. An error is an answer too, so that the other model runs.
    """
    # Libraries write to standard output: their lines go to standard error.
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(answers, "w")
    work = json.loads(sys.stdin.readline())
    rounds = {}
    for line in sys.stdin:
        model = line.strip()
        try:
            if model not in rounds:
                rounds[model] = load[model](work)
            say(rounds[model]())
        except Exception as e:
            say({"error": " ".join(f"{type(e).__name__}: {e}".split())[:300]})
    sys.stdout.flush()
    # Sessions of ONNX Runtime's WebGPU provider crash at exit in some versions.
    os._exit(0)
