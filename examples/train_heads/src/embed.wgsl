// x[row] = table[token]: the embeddings of the letters, which start the residual stream.

@group(0) @binding(0) var<storage, read> tokens: array<u32>;
@group(0) @binding(1) var<storage, read> parameters: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(workgroup_id) row: vec3<u32>, @builtin(local_invocation_index) column: u32) {
    x[row.x * WIDTH + column] = parameters[EMBED + tokens[row.x] * WIDTH + column];
}
