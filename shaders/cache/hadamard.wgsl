// The Walsh-Hadamard matrix: element i, j is −1 to the number of bits that i and j have in common.
// It is symmetric. Divided by the root of its size, it is its own inverse.
//
// Needs: nothing.
// Gives: hadamard_four, hadamard_sign.

// The sign of element i, j.
fn hadamard_sign(i: u32, j: u32) -> f32 {
    return select(1.0, -1.0, (countOneBits(i & j) & 1u) == 1u);
}

// The product of the matrix of size 4 and x.
fn hadamard_four(x: vec4<f32>) -> vec4<f32> {
    let y = vec4<f32>(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4<f32>(y.x + y.z, y.y + y.w, y.x - y.z, y.y - y.w);
}
