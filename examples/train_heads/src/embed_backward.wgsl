// d_table[token] = Σ d_x[row] over the rows with the token, in ascending order.

@group(0) @binding(0) var<storage, read> tokens: array<u32>;
@group(0) @binding(1) var<storage, read> d_x: array<f32>;
@group(0) @binding(2) var<storage, read_write> gradients: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(workgroup_id) token: vec3<u32>, @builtin(local_invocation_index) column: u32) {
    var sum = 0.0;
    for (var row = 0u; row < ROWS; row++) {
        if tokens[row] == token.x {
            sum += d_x[row * WIDTH + column];
        }
    }
    gradients[EMBED + token.x * WIDTH + column] = sum;
}
