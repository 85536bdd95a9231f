// A workgroup owns several rows, with ROW_LANES neighbouring invocations each. The results of a
// row's invocations are combined in a fixed order.
//
// Needs: ROW_LANES, WORKGROUP.
// Gives: row_first, row_sums.

var<workgroup> lane_parts: array<vec2<f32>, WORKGROUP>;

// The first invocation of this invocation's row.
var<private> row_first: u32;

// Computes two sums at once. `lane` counts from row_first.
fn row_sums(a: vec4<f32>, b: vec4<f32>, lane: u32) -> vec2<f32> {
    let place = row_first + lane;
    lane_parts[place] = vec2<f32>((a.x + a.y) + (a.z + a.w), (b.x + b.y) + (b.z + b.w));
    workgroupBarrier();
    for (var n = ROW_LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            lane_parts[place] += lane_parts[place + n];
        }
        workgroupBarrier();
    }
    let sum = lane_parts[row_first];
    // All invocations must read it before the next sum starts.
    workgroupBarrier();
    return sum;
}
