// The place of a row, from its number among all rows.
//
// Needs: p.heads, p.length.
// Gives: Place; place_of.

struct Place {
    b: u32,
    h: u32,
    i: u32,
}

fn place_of(row: u32) -> Place {
    let plane = row / p.length;
    return Place(plane / p.heads, plane % p.heads, row - plane * p.length);
}
