"""The page and the picture of the comparison."""

import os

import numpy as np

NAMES = {
    "ours": "wgpu-attention",
    "llama": "llama.cpp, Vulkan",
    "ort": "ONNX Runtime, WebGPU",
    "burn": "Burn, wgpu",
}
WEIGHTS = {
    "ours": "the file's blocks, Q4_1 and Q8_0",
    "llama": "the file's blocks, Q4_1 and Q8_0",
    "ort": "the file's 4 and 8 bits, as MatMulNBits and a MatMul of the blocks' constants",
    "burn": "f32, from the file's blocks",
}
COLOURS = {"ours": "#2b6cb0", "llama": "#c05621", "ort": "#4a7c3f", "burn": "#6b46a1"}
# Rounding the numbers of a vector to f16 turns it by at most 2^-11. Then 1 - cosine is half the
# square of that, at most.
COSINE_LIMIT = 2.0**-23
NOT_RUN = {
    ("minilm", "llama"): "not run, because it reads only GGUF files, and this model's file is another",
}


def logit_limit(truth):
    """Half the median gap of the two largest logits. A larger error can change every second token."""
    largest = np.sort(truth["rows"], 1)
    return float(np.median(largest[:, -1] - largest[:, -2])) / 2


def llama_settings(work):
    """The environment of llama.cpp. It skips software drivers by default, and is slow with f16."""
    if "llvmpipe" not in work["device"]:
        return {}
    return {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_F16": "1", "GGML_VK_DISABLE_COOPMAT": "1"}


def row(model, name, results, cells, columns):
    reason = NOT_RUN.get((model, name))
    answer = results.get((model, name))
    if reason is None:
        reason = "not chosen" if answer is None else answer.get("error") and f"failed: {answer['error']}"
    shown = [NAMES[name]] + (cells(answer) if not reason else [reason.replace("|", "/")] + ["–"] * (columns - 2))
    return "| " + " | ".join(shown) + " |"


def table(model, titles, cells, results):
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "--:|" * (len(titles) - 2)]
    return "\n".join(lines + [row(model, name, results, lambda a: cells(name, a), len(titles)) for name in NAMES])


def markdown(work, truth, results, versions, rounds):
    steps, limit = work["steps"], logit_limit(truth)
    long, short, count = len(work["long"]), len(work["short"]), len(work["sentences"])
    mark = lambda a: ", beyond the limit" if a["beyond"] else ""
    gap = lambda a: f" (gap {a['gap']:.2g})" if "gap" in a else ""
    smollm = table("smollm", [
        "program", "weights", f"prompt of {long}, tokens/s", f"first token after {short}, ms", "generation, tokens/s",
        "largest error of logits", "same tokens",
    ], lambda name, a: [
        WEIGHTS[name], f"{long / a['forward']:.1f}", f"{1e3 * a['first']:.0f}", f"{steps / a['generate']:.2f}",
        f"{a['error_of_logits']:.2g}{mark(a)}", f"{a['same']} of {steps + 1}{gap(a)}",
    ], results)
    minilm = table("minilm", ["program", "weights", "sentences/s", "largest 1 − cosine"], lambda name, a: [
        "f32", f"{count / a['embed']:.1f}", f"{a['off']:.1g}{mark(a)}",
    ], results)
    settings = " ".join(f"{k}={v}" for k, v in llama_settings(work).items())
    software = "" if "llvmpipe" not in work["device"] else f"""
This device is a software driver on {os.cpu_count()} cores, which other programs may have used at the same time.
The figures are ratios between programs on one such driver. They say nothing about a GPU.
"""
    return f"""<!-- Written by `scripts/compare`. -->
# Whole models in several programs

`scripts/compare` runs two models in several programs on one device, compares their results, and writes this page.
It fetches and builds the other programs itself. `scripts/compare --help` has the details.

The device is {work["device"]}, with the driver {work["driver"]}.
{software}
![Bars of the tables below](comparison.svg)

## SmolLM2-135M-Instruct

The file is the GGUF file of [the chat example](../examples/chat). The prompt of {long} tokens is the beginning of a licence.
The prompt of {short} tokens is a question, and {steps} more tokens follow it.
[The example's page](../examples/chat/README.md#how-fast) has times from another machine. Compare times within one table only.

{smollm}

## all-MiniLM-L6-v2

The {count} sentences have {min(map(len, work["sentences"]))} to {max(map(len, work["sentences"]))} tokens.
The time is from tokens to unit vectors on the host.

{minilm}

`examples/embed/peers.py` compares this model with programs on the processor.

## How it was measured

Each time is the least of {rounds} rounds. All programs run in each round, one after the other. A first round compiles kernels, and does not count.
All programs get the same tokens. After each step, they read all logits and choose the likeliest token on the host.

| program | version | settings |
|---|---|---|
| wgpu-attention | this repository | the whole prompt in one step, keys and values in f16, all sentences in one packed batch without padding |
| llama.cpp | llama-cpp-python {versions["llama"]} | all layers on the device, the whole prompt in one step, keys and values in f16{", " * bool(settings)}{settings and f"`{settings}`"} |
| ONNX Runtime | onnxruntime-webgpu {versions["ort"]} | {ORT_SETTINGS} |
| Burn | burn {versions["burn"]} | {BURN_SETTINGS} |

## Checks

The truth is the same model in f64, in NumPy, from the same file.

- The logits after the last token of the long prompt, all {len(truth["logits"])}. The limit is {limit:.2g}.
  It is half the median gap between the two largest logits of the {steps + 1} steps. Larger errors can change every second token.
- The {steps + 1} tokens after the short prompt. A token may differ if the truth's gap between the two tokens is small.
  The limit of this gap is twice the error of the logits. Later tokens have other inputs, and are not compared.
- The cosine of each sentence's vector with the truth. The limit of 1 − cosine is {COSINE_LIMIT:.1g}, the effect of rounding a vector to f16.
"""


ORT_SETTINGS = (
    "graphs from `tools/compare/ort_peer.py`, the whole prompt in one step, keys and values in f32 on the device, "
    "sentences in sorted and padded batches of 8, no fallback to the processor; "
    "`tools/compare/mend_ort.py` corrects a fault of its attention kernel"
)


BURN_SETTINGS = (
    "the models in `tools/compare/burn`, features `autotune` and `fusion`, the whole prompt in one step, weights, keys and "
    "values in f32, because Burn has no type for blocks with a minimum, sentences in sorted and padded batches of 8"
)


def svg(work, results):
    steps, long, short, count = work["steps"], len(work["long"]), len(work["short"]), len(work["sentences"])
    panels = [
        ("smollm", f"SmolLM2, prompt of {long}", "tokens/s", lambda a: long / a["forward"]),
        ("smollm", f"SmolLM2, first token after {short}", "ms, less is better", lambda a: 1e3 * a["first"]),
        ("smollm", "SmolLM2, generation", "tokens/s", lambda a: steps / a["generate"]),
        ("minilm", f"MiniLM, {count} sentences", "sentences/s", lambda a: count / a["embed"]),
    ]
    height = 30 * len(COLOURS) + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {2 * height + 50}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Two models in several programs</title>",
        f'<rect width="960" height="{2 * height + 50}" fill="#fff"/>',
    ]
    text = lambda x, y, s, more="": lines.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="#333"{more}>{s}</text>')
    for n, (model, title, unit, figure) in enumerate(panels):
        left, top = 20 + 470 * (n % 2), 30 + height * (n // 2)
        text(left, top, f'{title} <tspan font-weight="400" fill="#666">({unit})</tspan>', ' font-weight="600"')
        answers = {name: results.get((model, name), {"error": "not run"}) for name in COLOURS}
        figures = {name: figure(a) for name, a in answers.items() if "error" not in a}
        for at, name in enumerate(COLOURS):
            y = top + 14 + 30 * at
            text(left, y + 15, NAMES[name])
            if name not in figures:
                text(left + 170, y + 15, "not run" if (model, name) in NOT_RUN else "failed", ' font-style="italic"')
                continue
            width = 210 * figures[name] / max(figures.values())
            lines.append(f'<rect x="{left + 170}" y="{y}" width="{width:.1f}" height="20" rx="2" fill="{COLOURS[name]}"/>')
            value = figures[name]
            text(left + 176 + width, y + 15, f"{value:.0f}" if value >= 100 else f"{value:.1f}")
    text(20, 2 * height + 35, f"{work['device']}: {work['driver']}", ' font-size="12"')
    return "\n".join(lines) + "\n</svg>\n"
