"""llama.cpp through its C interface. Every layer is on the device, and keys and values are in f16."""

import llama_cpp
import numpy as np

import peer


def smollm(work):
    model_settings = llama_cpp.llama_model_default_params()
    model_settings.n_gpu_layers = 999
    model = llama_cpp.llama_model_load_from_file(work["gguf"].encode(), model_settings)
    if not model:
        raise RuntimeError("llama.cpp cannot load the file")
    if not llama_cpp.llama_supports_gpu_offload():
        raise RuntimeError("llama.cpp sees no Vulkan device")
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
