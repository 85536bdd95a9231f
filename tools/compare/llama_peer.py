"""llama.cpp through its C interface. Every layer is on the device, and keys and values are in f16."""

import ctypes

import llama_cpp
import llama_cpp._ggml
import numpy as np

import peer


def smollm(work):
    # Without a device, llama.cpp computes on the processor, and does not say so.
    lib = llama_cpp._ggml.libggml
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_name.restype = ctypes.c_char_p
    devices = [ctypes.c_void_p(lib.ggml_backend_dev_get(n)) for n in range(lib.ggml_backend_dev_count())]
    if not any(lib.ggml_backend_dev_name(device).startswith(b"Vulkan") for device in devices):
        raise RuntimeError("llama.cpp sees no Vulkan device")
    model_settings = llama_cpp.llama_model_default_params()
    model_settings.n_gpu_layers = 999
    model = llama_cpp.llama_model_load_from_file(work["gguf"].encode(), model_settings)
    if not model:
        raise RuntimeError("llama.cpp cannot load the file")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = work["context"]
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def feed(tokens, had):
        if had == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocabulary,))

    return lambda: peer.answer(feed, work)


peer.serve({"smollm": smollm})
