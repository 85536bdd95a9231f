// Reads keys and values of a range of positions from a cache that cache_append.wgsl wrote.
//
// k [batch, kv_heads, rows, head_dim]   v [batch, kv_heads, rows, value_dim]
//
// Rows are zeros if the sequence does not have their position, or if a ring has overwritten it. An
// invocation reads four channels of a row. With HADAMARD, the product with the Walsh-Hadamard
// matrix is undone (`hadamard.wgsl`).
//
// Floor: every word is read once, with HADAMARD p.hadamard_block / 4 times from caches. Every
// channel is written once.
//
// Bindings (declared by the host): k, v, cache_k, cache_v, sequence_table; positions if
// HAS_POSITIONS.

// Returns four stored channels of a key or a value from d on. Floats keep their bits.
fn stored_four(is_key: bool, s: Source, row: u32, d: u32) -> vec4<f32> {
    if is_key && K_SCALED {
        return k_four(s, row, d);
    } else if is_key {
        return unpacked(K_STORAGE, k_word(s, row, d / K_CHANNELS), d / 4u % K_VECTORS);
    } else if V_SCALED {
        return v_four(s, row, d);
    } else {
        return unpacked(V_STORAGE, v_word(s, row, d / V_CHANNELS), d / 4u % V_VECTORS);
    }
}

// Returns four channels of a key or a value from d on.
fn four(is_key: bool, s: Source, row: u32, d: u32) -> vec4<f32> {
    if HADAMARD {
        let start = d - d % p.hadamard_block;
        var sum = vec4<f32>();
        for (var e = 0u; e < p.hadamard_block; e += 4u) {
            sum += hadamard_sign(d - start, e) * stored_four(is_key, s, row, start + e);
        }
        return hadamard_four(sum) * p.hadamard_scale;
    } else {
        return stored_four(is_key, s, row, d);
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let i = group.y;
    let units = p.k_units + p.v_units;
    let n = group.x * 64u + lane;
    let h = n / units;
    if h >= p.cache.kv_heads {
        return;
    }
    let j = position_of(p.at, b, 0u, i);
    let kept = is_kept(b, h, j);
    let unit = n % units;
    var x = vec4<f32>();
    if unit < p.k_units {
        let d = unit * 4u;
        if kept {
            let s = k_source(b, h);
            x = four(true, s, row_at(b, h, s.rows, j), d);
        }
        for (var c = 0u; c < min(4u, p.head_dim - d); c++) {
            k_store(view_at(p.k, b, h, i, d + c), component(x, c));
        }
    } else {
        let d = (unit - p.k_units) * 4u;
        if kept {
            let s = v_source(b, h, 0u);
            x = four(false, s, row_at(b, h, s.rows, j), d);
        }
        for (var c = 0u; c < min(4u, p.value_dim - d); c++) {
            v_store(view_at(p.v, b, h, i, d + c), component(x, c));
        }
    }
}
