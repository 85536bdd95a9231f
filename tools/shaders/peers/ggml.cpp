// ggml f32|f16 QUERIES KEYS HEAD_DIM: one call of ggml-vulkan's flash attention, 8 heads; keys and values of that type.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const ggml_type type = strcmp(argv[1], "f16") ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const int64_t queries = atoi(argv[2]), keys = atoi(argv[3]), head_dim = atoi(argv[4]);
    ggml_backend_load_all();
    ggml_backend_t backend = nullptr;
    for (size_t i = 0; i < ggml_backend_dev_count() && !backend; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (strcmp(ggml_backend_dev_name(device), "CPU")) backend = ggml_backend_dev_init(device, nullptr);
    }
    if (!backend) {
        fprintf(stderr, "no Vulkan device\n");
        return 1;
    }
    ggml_context *c = ggml_init({ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true});
    ggml_tensor *q = ggml_new_tensor_4d(c, GGML_TYPE_F32, head_dim, queries, 8, 1);
    ggml_tensor *k = ggml_new_tensor_4d(c, type, head_dim, keys, 8, 1);
    ggml_tensor *v = ggml_new_tensor_4d(c, type, head_dim, keys, 8, 1);
    ggml_tensor *y = ggml_flash_attn_ext(c, q, k, v, nullptr, 1.0f / sqrtf((float)head_dim), 0.0f, 0.0f);
    ggml_prec_set_acc(y, GGML_PREC_F32);
    ggml_cgraph *graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, y);
    if (!ggml_backend_supports_op(backend, y)) {
        fprintf(stderr, "not supported\n");
        return 1;
    }
    ggml_backend_alloc_ctx_tensors(c, backend);
    ggml_backend_graph_compute(backend, graph);
    // Whatever is left may wait for a GPU.
    _Exit(0);
}
