// AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization"), for all parameters
// at once.

@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> gradients: array<f32>;
@group(0) @binding(2) var<storage, read_write> parameters: array<f32>;
@group(0) @binding(3) var<storage, read_write> means: array<f32>;
@group(0) @binding(4) var<storage, read_write> squares: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let n = id.x;
    let g = gradients[n];
    means[n] = mix(g, means[n], KEEP_MEAN);
    squares[n] = mix(g * g, squares[n], KEEP_SQUARE);
    // The means start at 0; the factors correct that bias.
    let change = step.unbias_mean * means[n] / (sqrt(step.unbias_square * squares[n]) + EPSILON);
    let rate = step.rate * select(1.0, BIAS_RATE, n >= BIASES);
    parameters[n] -= rate * (change + DECAY * parameters[n]);
}
