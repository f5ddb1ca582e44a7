// optimizer_subgroups: the sums of squares of optimizer.wgsl by subgroup instruction.
//   sum_squares    out = sum_p x[p]^2: a slice a workgroup into workspace; optimizer.wgsl adds the slices in order
// A subgroup's first lane leaves its sum in workgroup memory (lanes lie in subgroups in order: see layernorm_subgroups.wgsl).
// A browser's host puts ``enable subgroups;`` in front; wgpu takes the functions without and does not know the line.

struct SquaresArgs { P: u32, span: u32, first: u32, slices: u32 }

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> squares: SquaresArgs;

var<workgroup> sums: array<f32, 256>;

// The sum over a workgroup of 256 lanes, the same in every lane.
fn sum_lanes(lane: u32, size: u32, value: f32) -> f32 {
    let part = subgroupAdd(value);
    if (lane % size == 0u) { sums[lane / size] = part; }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i * size < 256u; i++) { sum += sums[i]; }
    return sum;
}

// Sum of squares of slice group.x, ``span`` numbers long, into out[first + group.x].
@compute @workgroup_size(256)
fn sum_squares_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(subgroup_size) size: u32
) {
    let end = min(squares.P, (group.x + 1u) * squares.span);
    var sum = 0.0;
    for (var p = group.x * squares.span + lane; p < end; p += 256u) { sum = fma(x[p], x[p], sum); }
    sum = sum_lanes(lane, size, sum);
    if (lane == 0u) { out[squares.first + group.x] = sum; }
}

// Both parts of the gradients in one dispatch.
struct BothArgs { decayed: u32, plain: u32, span: u32, decayed_slices: u32, slices: u32, clip_norm: f32 }

@group(0) @binding(1) var<storage, read> decayed_grad: array<f32>;
@group(0) @binding(2) var<storage, read> plain_grad: array<f32>;
@group(0) @binding(3) var<uniform> both: BothArgs;

@compute @workgroup_size(256)
fn sum_squares_merged_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(subgroup_size) size: u32
) {
    var sum = 0.0;
    if (group.x < both.decayed_slices) {
        let end = min(both.decayed, (group.x + 1u) * both.span);
        for (var p = group.x * both.span + lane; p < end; p += 256u) { sum = fma(decayed_grad[p], decayed_grad[p], sum); }
    } else {
        let slice = group.x - both.decayed_slices;
        let end = min(both.plain, (slice + 1u) * both.span);
        for (var p = slice * both.span + lane; p < end; p += 256u) { sum = fma(plain_grad[p], plain_grad[p], sum); }
    }
    sum = sum_lanes(lane, size, sum);
    if (lane == 0u) { out[group.x] = sum; }
}
