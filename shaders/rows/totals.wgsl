// Totals over the invocations of a workgroup, always in the same order.
//
// Needs: WORKGROUP.
// Gives: largest, total.

var<workgroup> shares: array<f32, WORKGROUP>;

fn total(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    shares[lane] = x;
    for (var n = WORKGROUP / 2u; n > 0u; n /= 2u) {
        workgroupBarrier();
        if lane < n {
            shares[lane] += shares[lane + n];
        }
    }
    workgroupBarrier();
    return shares[0];
}

fn largest(lane: u32, x: f32) -> f32 {
    workgroupBarrier();
    shares[lane] = x;
    for (var n = WORKGROUP / 2u; n > 0u; n /= 2u) {
        workgroupBarrier();
        if lane < n {
            shares[lane] = max(shares[lane], shares[lane + n]);
        }
    }
    workgroupBarrier();
    return shares[0];
}
