// The gradient of a table of embeddings. The gradient of a table row is scale · the sum of d_out
// over all rows with its id. The order of the sum is batch entry by batch entry, row by row.
//
// d_out [batch, 1, length, dim]   ids [batch, 1, length, 1]   order [batch, 1, 1, length]
// d_table [1, 1, rows, dim]
//
// `order` is the result of a stable sort of each batch entry's ids by the bits of ID_MASK. Ids
// outside the table also have other bits, and are skipped. A workgroup computes LANES · 4 channels
// of a table row. It searches for the first place of its id, and adds from this place on.
//
// Bindings (declared by the host): d_out, ids, order, d_table. `IN_FOURS`: d_out and d_table are
// accessed as vec4. ACCUMULATES: the gradient is added to d_table.
// Bytes: reads d_out once and writes d_table once. In addition, it reads log2(length) ids for each
// row of the table and batch entry.

fn row_at(b: u32, place: u32) -> u32 {
    return order_at(b * p.length + place);
}

fn id_at(b: u32, i: u32) -> u32 {
    return ids_at(view_at(p.ids, b, 0u, i, 0u));
}

// The first place whose id, masked by id_mask, is not below `id`.
fn place_of(b: u32, id: u32) -> u32 {
    var low = 0u;
    var high = p.length;
    while low < high {
        let middle = (low + high) / 2u;
        if (id_at(b, row_at(b, middle)) & p.id_mask) < id {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    return low;
}

fn store4(row: u32, d: u32, gradient: vec4<f32>) {
    let o = view_at(p.d_table, 0u, 0u, row, d);
    let step = p.d_table.strides.w;
    var sum = gradient;
    if ACCUMULATES {
        sum += d_table_at4(o, step, p.dim - d);
    }
    if IN_FOURS {
        d_table_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, p.dim - d); c++) {
            d_table_store(o + c * step, component(sum, c));
        }
    }
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let d = (group.y * LANES + lane) * 4u;
    if d >= p.dim {
        return;
    }
    for (var row = group.x; row < p.rows; row += p.step) {
        var sum = vec4<f32>();
        var any = false;
        for (var b = 0u; b < p.batch; b++) {
            for (var place = place_of(b, row); place < p.length; place++) {
                let i = row_at(b, place);
                let id = id_at(b, i);
                if (id & p.id_mask) != row {
                    break;
                }
                if id == row {
                    sum += d_out_at4(view_at(p.d_out, b, 0u, i, d), p.d_out.strides.w, p.dim - d);
                    any = true;
                }
            }
        }
        if !ACCUMULATES || any {
            store4(row, d, p.scale * sum);
        }
    }
}
