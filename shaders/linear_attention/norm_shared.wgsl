// The norm in workgroup memory, one for all columns of a head's state.
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

// By what a query's sum is multiplied; 0 where nothing was seen.
fn result_factor(b: u32, h: u32, t: u32) -> f32 {
    var norm = 0.0;
    for (var f = 0u; f < p.features; f++) {
        norm += query(b, h, t, f) * norms[f];
    }
    return select(1.0 / (norm + p.eps), 0.0, norm == 0.0);
}

// Before the next token's norm.
fn end_token() {
    workgroupBarrier();
}

fn end_norm(b: u32, kv: u32, index: u32) {
    for (var f = index; f < p.features; f += WORKGROUP) {
        norm_store(view_at(p.norm, b, kv, f, 0u), norms[f]);
    }
}
