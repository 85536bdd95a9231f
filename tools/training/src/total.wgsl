// Writes the sums of all rows' losses and hits to the step's slot. Each invocation adds every
// STRIPS-th row, then the first invocation adds the partial sums.

@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> totals: array<vec2<f32>>;

const STRIPS = 64u;
var<workgroup> strips: array<vec2<f32>, STRIPS>;

@compute @workgroup_size(STRIPS)
fn main(@builtin(local_invocation_index) lane: u32) {
    var sum = vec2<f32>();
    for (var row = lane; row < ROWS; row += STRIPS) {
        sum += losses[row];
    }
    strips[lane] = sum;
    workgroupBarrier();
    if lane == 0u {
        for (var s = 1u; s < STRIPS; s++) {
            sum += strips[s];
        }
        totals[step.slot] = sum;
    }
}
