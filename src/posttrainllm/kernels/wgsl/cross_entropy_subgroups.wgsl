// cross_entropy_subgroups: cross_entropy.wgsl's row sums by subgroup instruction, forward alone and forward with backward.
//   forward    lse[n] = log sum_v exp(z[n,v]);   row_loss[n] = lse[n] - z[n,y[n]], 0 where y[n] < 0;   saves lse
//   backward   dz[n,v] = inv_count (exp(z[n,v] - lse[n]) - [v == y[n]]),  0 where y[n] < 0
// A workgroup of LANES lanes a row; a subgroup's first lane leaves its maximum and its sum in workgroup memory (lanes lie in subgroups in
// order: see layernorm_subgroups.wgsl). exp's argument is <= 0 up to rounding, so it cannot overflow.
// A browser's host puts ``enable subgroups;`` in front; wgpu takes the functions without and does not know the line.

struct Args { N: u32, V: u32 }

override LANES: u32 = 64u;

@group(0) @binding(0) var<storage, read_write> row_loss: array<f32>;
@group(0) @binding(1) var<storage, read_write> lse: array<f32>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> targets: array<i32>;
@group(0) @binding(4) var<uniform> args: Args;

@group(0) @binding(1) var<storage, read_write> dlogits: array<f32>;
@group(0) @binding(4) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(5) var<uniform> merged: Args;

var<workgroup> tops: array<f32, LANES>;
var<workgroup> sums: array<f32, LANES>;

// log sum_v exp(z[v]) of the row that begins at ``row``, the same in every lane.
fn log_sum(row: u32, V: u32, lane: u32, size: u32) -> f32 {
    var top = logits[row + min(lane, V - 1u)];
    for (var v = lane + LANES; v < V; v += LANES) { top = max(top, logits[row + v]); }
    top = subgroupMax(top);
    if (lane % size == 0u) { tops[lane / size] = top; }
    workgroupBarrier();
    for (var i = 0u; i * size < LANES; i++) { top = max(top, tops[i]); }
    var sum = 0.0;
    for (var v = lane; v < V; v += LANES) { sum += exp(logits[row + v] - top); }
    sum = subgroupAdd(sum);
    if (lane % size == 0u) { sums[lane / size] = sum; }
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i * size < LANES; i++) { sum += sums[i]; }
    return top + log(sum); // the largest term of the sum is 1
}

fn loss_of(row: u32, result: f32, picked: i32) -> f32 {
    return select(0.0, result - logits[row + u32(max(picked, 0))], picked >= 0);
}

@compute @workgroup_size(LANES)
fn cross_entropy_forward_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
    @builtin(subgroup_size) size: u32
) {
    let n = group.x + group.y * groups.x;
    let row = min(n, args.N - 1u) * args.V;
    let result = log_sum(row, args.V, lane, size);
    if (lane > 0u || n >= args.N) { return; }
    lse[n] = result;
    row_loss[n] = loss_of(row, result, targets[n]);
}

// Forward and backward of a row in one pass, where nobody else wants lse.
@compute @workgroup_size(LANES)
fn cross_entropy_merged_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
    @builtin(subgroup_size) size: u32
) {
    let n = group.x + group.y * groups.x;
    let V = merged.V;
    let row = min(n, merged.N - 1u) * V;
    let result = log_sum(row, V, lane, size);
    if (n >= merged.N) { return; }
    let picked = targets[n];
    if (lane == 0u) { row_loss[n] = loss_of(row, result, picked); }
    for (var v = lane; v < V; v += LANES) {
        let value = (exp(logits[row + v] - result) - select(0.0, 1.0, u32(max(picked, 0)) == v)) * scalars[0];
        dlogits[row + v] = select(0.0, value, picked >= 0);
    }
}
