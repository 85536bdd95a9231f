"""Runs the programs in turns, and compares their results with f64. Writes the page and the picture.

`scripts/compare` starts it.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import tomllib

import numpy as np

import page
import weights

LIMIT_S = 900  # of a round; a program that takes longer is ended
HERE = os.path.dirname(os.path.abspath(__file__))


class Program:
    """A process that answers each line with a line. If it ended, `failed` has the reason."""

    def __init__(self, command, log, environment=()):
        self.failed, self.log = None, log
        environment = {**os.environ, **dict(environment)}
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=open(log, "w"), text=True, env=environment)
        except OSError as error:
            self.process, self.failed = None, str(error)

    def send(self, line):
        if self.failed:
            return
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # It ended, as `read` finds out.

    def read(self):
        if self.failed:
            return {"error": self.failed}
        timer = threading.Timer(LIMIT_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            status = self.process.wait()
            with open(self.log, errors="replace") as file:
                last = (file.read().strip().splitlines() or ["no message"])[-1]
            self.failed = f"no answer in {LIMIT_S} s" if status == -9 else f"exit status {status}, {last}"
        return json.loads(line) if line else {"error": self.failed}

    def end(self):
        if self.process:
            self.process.kill()

    def ask(self, line):
        self.send(line)
        return self.read()


def truths(work, cached):
    """The results in f64, stored for the next run."""
    said = json.dumps({k: work[k] for k in ("long", "short", "steps", "sentences")})
    with open(weights.__file__, "rb") as file:
        key = hashlib.sha256(said.encode() + file.read()).hexdigest()
    if os.path.exists(cached):
        found = dict(np.load(cached))
        if str(found["key"]) == key:
            return found
    print("computing the results in f64 ...", file=sys.stderr)
    model = weights.SmolLM(work["gguf"])
    logits = model.truth()(work["long"], 0)
    feed = model.truth()
    rows = [feed(work["short"], 0)]
    for n in range(work["steps"]):
        rows.append(feed([int(np.argmax(rows[-1]))], len(work["short"]) + n))
    vectors = weights.minilm_truth(work["minilm"], work["sentences"])
    found = {"key": key, "logits": logits, "rows": np.array(rows), "vectors": vectors}
    np.savez(cached, **found)
    return found


def burn_version():
    with open(f"{HERE}/burn/Cargo.toml", "rb") as file:
        return tomllib.load(file)["dependencies"]["burn"]["version"].strip("=")


def check_smollm(answer, truth):
    """Adds the error of logits and the number of equal tokens. Returns what is beyond a limit."""
    rows, tokens = truth["rows"], np.array(answer["tokens"])
    wrong = []
    answer["error_of_logits"] = error = float(np.abs(np.array(answer["logits"]) - truth["logits"]).max())
    if not error <= page.logit_limit(truth):
        wrong.append(f"logits differ by {error:.2g}")
    differs = np.flatnonzero(tokens != rows.argmax(1))
    answer["same"] = same = int(differs[0]) if len(differs) else len(tokens)
    if same < len(tokens):
        # Errors of two logits can close a gap of twice their size.
        answer["gap"] = gap = float(rows[same].max() - rows[same][tokens[same]])
        if not gap <= 2 * error:
            wrong.append(f"token {same + 1} is another, with a gap of {gap:.2g}")
    return wrong


def check_minilm(answer, truth):
    """Adds the largest of 1 − cosine. Returns what is beyond the limit."""
    vectors = np.array(answer["vectors"]).reshape(truth["vectors"].shape)
    cosines = (vectors * truth["vectors"]).sum(1) / np.linalg.norm(vectors, axis=1)
    answer["off"] = off = float((1 - cosines).max())
    return [] if off <= page.COSINE_LIMIT else [f"1 - cosine is {off:.2g}"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--at")
    parser.add_argument("--ours")
    parser.add_argument("--llama")
    parser.add_argument("--ort")
    parser.add_argument("--burn")
    a = parser.parse_args()
    chosen = a.only.split(",") if a.only else list(page.COLOURS)
    if unknown := set(chosen) - set(page.COLOURS):
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(page.COLOURS)}")
    runner = [os.environ["WGPU_ATTENTION_RUNNER"]] if os.environ.get("WGPU_ATTENTION_RUNNER") else []

    # It also prints the work of the others.
    ours = Program([*runner, a.ours], f"{a.at}/ours.log")
    work = ours.read()
    if ours.failed:
        sys.exit(f"scripts/compare: our program: {ours.failed}; {a.at}/ours.log has the reason")
    truth = truths(work, f"{a.at}/truth.npz")

    # A wrapper that runs programs with a driver needs the interpreter itself, not a link to it.
    packages = [p for p in sys.path if p.endswith("site-packages")]
    programs = {"ours": ours}
    environment = {"PYTHONPATH": os.pathsep.join([*packages, a.llama]), **page.llama_settings(work)}
    for name in set(chosen) - {"ours"}:
        command, asked = [*runner, os.path.realpath(sys.executable), f"{HERE}/{name}_peer.py"], work
        if name == "burn":
            command, asked = [*runner, a.burn], {**work, **weights.in_f32(work, a.at)}
        programs[name] = Program(command, f"{a.at}/{name}.log", environment)
        programs[name].send(json.dumps(asked))

    results, failures = {}, []
    for model, times, check in (
        ("smollm", ("forward", "first", "generate"), check_smollm),
        ("minilm", ("embed",), check_minilm),
    ):
        # The first round compiles kernels, and does not count.
        for n in range(a.rounds + 1):
            for name in [name for name in chosen if (model, name) not in page.NOT_RUN]:
                before = results.get((model, name), {})
                if "error" in before:
                    continue
                answer = programs[name].ask(model)
                if "error" not in answer:
                    wrong = check(answer, truth)
                    failures += [f"{name}, {model}: {w}" for w in wrong if n == 0]
                    answer["beyond"] = bool(wrong)
                    if n > 1:
                        answer.update({t: min(answer[t], before[t]) for t in times})
                    print(f"{model} {name:<6}", *(f"{t} {answer[t]:.3f} s" for t in times), file=sys.stderr)
                else:
                    print(f"{model} {name:<6} {answer['error']}", file=sys.stderr)
                    failures += [f"{name}, {model}: {answer['error']}"] * (name == "ours")
                results[model, name] = answer
    for program in programs.values():
        program.end()

    versions = {"ort": a.ort, "llama": os.path.basename(a.llama).split("-")[-1], "burn": burn_version()}
    text = page.markdown(work, truth, results, versions, a.rounds)
    if a.only:
        print(text)
    else:
        docs = os.path.join(HERE, "..", "..", "docs")
        for name, content in (("comparison.md", text), ("comparison.svg", page.svg(work, results))):
            with open(os.path.join(docs, name), "w", encoding="utf-8") as file:
                file.write(content)
    for failure in failures:
        print(f"wrong: {failure}", file=sys.stderr)
    sys.exit(bool(failures))


main()
