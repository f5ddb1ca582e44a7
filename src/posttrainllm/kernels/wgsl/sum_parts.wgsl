// sum_parts: the sum over a workgroup of 256 lanes, in a fixed order.

var<workgroup> sums: array<f32, 256>;

// The sum over a workgroup of 256 lanes, right in lane 0.
fn sum_lanes(lane: u32, value: f32) -> f32 {
    var sum = value;
    sums[lane] = sum;
    workgroupBarrier();
    if (lane < 16u) {
        sum = 0.0;
        for (var i = 0u; i < 16u; i++) { sum += sums[lane + i * 16u]; }
    }
    workgroupBarrier();
    if (lane < 16u) { sums[lane] = sum; }
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i < 16u; i++) { sum += sums[i]; }
    return sum;
}
