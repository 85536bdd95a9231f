// The norm in workgroup memory, shared by all columns of the state of a head.
//
// Needs: WORKGROUP, NORM_FEATURES; key, kept, norm_at, norm_store, query, rate, view_at; p.eps,
// p.features, p.has_state, p.norm.
// Gives: add_to_norm, begin_norm, end_norm, end_token, norms, result_factor.

var<workgroup> norms: array<f32, NORM_FEATURES>;

fn begin_norm(b: u32, kv: u32, index: u32) {
    for (var f = index; f < p.features; f += WORKGROUP) {
        norms[f] = 0.0;
        if p.has_state != 0u {
            norms[f] = norm_at(view_at(p.norm, b, kv, f, 0u));
        }
    }
}

fn add_to_norm(b: u32, kv: u32, t: u32, index: u32) {
    for (var f = index; f < p.features; f += WORKGROUP) {
        norms[f] = norms[f] * kept(b, kv, t, f) + key(b, kv, t, f) * rate(b, kv, t);
    }
    workgroupBarrier();
}

// Returns the factor of the sum of a query, or 0 if the norm is 0.
fn result_factor(b: u32, h: u32, t: u32) -> f32 {
    var norm = 0.0;
    for (var f = 0u; f < p.features; f++) {
        norm += query(b, h, t, f) * norms[f];
    }
    return select(1.0 / (norm + p.eps), 0.0, norm == 0.0);
}

// All invocations finish with this token's norm before they change it.
fn end_token() {
    workgroupBarrier();
}

fn end_norm(b: u32, kv: u32, index: u32) {
    for (var f = index; f < p.features; f += WORKGROUP) {
        norm_store(view_at(p.norm, b, kv, f, 0u), norms[f]);
    }
}
