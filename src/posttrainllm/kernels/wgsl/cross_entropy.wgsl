// cross_entropy: the loss of each row of logits, and its gradient.
//   forward    lse[n] = log sum_v exp(z[n,v]);   row_loss[n] = lse[n] - z[n,y[n]], 0 where y[n] < 0;   saves lse
//   derive     d lse[n] / d z[n,v] = exp(z[n,v] - lse[n]);   d z[n,y[n]] / d z[n,v] = [v == y[n]]
//   backward   dz[n,v] = inv_count (exp(z[n,v] - lse[n]) - [v == y[n]]),  0 where y[n] < 0
//   loss       loss (+)= inv_count sum_n row_loss[n]
// Forward: a workgroup of LANES lanes a row; each lane keeps the largest logit so far and the sum of exponentials below it. exp's argument is
// <= 0 up to rounding everywhere, so it cannot overflow. Backward: one invocation an element (or four).

struct Args { N: u32, V: u32 }

override LANES: u32 = 64u;
override ACCUMULATE: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> row_loss: array<f32>;
@group(0) @binding(1) var<storage, read_write> lse: array<f32>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> targets: array<i32>;
@group(0) @binding(4) var<uniform> args: Args;

var<workgroup> lane_top: array<f32, LANES>;
var<workgroup> lane_sum: array<f32, LANES>;

// log sum_v exp(z[v]) of the row that begins at ``row``, the same in every lane.
fn log_sum(row: u32, V: u32, lane: u32) -> f32 {
    var top = logits[row + min(lane, V - 1u)];
    for (var v = lane + LANES; v < V; v += LANES) { top = max(top, logits[row + v]); }
    lane_top[lane] = top;
    workgroupBarrier();
    for (var i = 0u; i < LANES; i++) { top = max(top, lane_top[i]); }
    var sum = 0.0;
    for (var v = lane; v < V; v += LANES) { sum += exp(logits[row + v] - top); }
    lane_sum[lane] = sum;
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i < LANES; i++) { sum += lane_sum[i]; }
    return top + log(sum); // the largest term of the sum is 1
}

fn loss_of(row: u32, result: f32, picked: i32) -> f32 {
    return select(0.0, result - logits[row + u32(max(picked, 0))], picked >= 0);
}

@compute @workgroup_size(LANES)
fn cross_entropy_forward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let n = group.x + group.y * groups.x;
    let row = min(n, args.N - 1u) * args.V;
    let result = log_sum(row, args.V, lane);
    if (lane > 0u || n >= args.N) { return; }
    lse[n] = result;
    row_loss[n] = loss_of(row, result, targets[n]);
}

@group(0) @binding(0) var<storage, read_write> dlogits: array<f32>;
@group(0) @binding(1) var<storage, read> saved_logits: array<f32>;
@group(0) @binding(2) var<storage, read> saved_targets: array<i32>;
@group(0) @binding(3) var<storage, read> saved_lse: array<f32>;
@group(0) @binding(4) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(5) var<uniform> backward: Args;

@group(0) @binding(0) var<storage, read_write> dlogits4: array<vec4f>;
@group(0) @binding(1) var<storage, read> saved_logits4: array<vec4f>;

@compute @workgroup_size(256)
fn cross_entropy_backward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= backward.N * backward.V) { return; }
    let n = i / backward.V;
    let picked = saved_targets[n];
    var value = 0.0;
    if (picked >= 0) {
        value = exp(saved_logits[i] - saved_lse[n]);
        if (u32(picked) == i % backward.V) { value -= 1.0; }
        value *= scalars[0];
    }
    dlogits[i] = value;
}

@compute @workgroup_size(256)
fn cross_entropy_backward_vec4(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    let width = backward.V / 4u;
    if (i >= backward.N * width) { return; }
    let n = i / width;
    let picked = saved_targets[n];
    var value = vec4f(0.0);
    if (picked >= 0) {
        let v = vec4u(i % width * 4u) + vec4u(0u, 1u, 2u, 3u);
        value = exp(saved_logits4[i] - saved_lse[n]) - select(vec4f(0.0), vec4f(1.0), v == vec4u(u32(picked)));
        value *= scalars[0];
    }
    dlogits4[i] = value;
}

// Forward and backward of a row in one pass, where nobody else wants lse.
@group(0) @binding(1) var<storage, read_write> merged_dlogits: array<f32>;
@group(0) @binding(4) var<storage, read> merged_scalars: array<f32, 8>;
@group(0) @binding(5) var<uniform> merged: Args;

@compute @workgroup_size(LANES)
fn cross_entropy_merged(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let n = group.x + group.y * groups.x;
    let V = merged.V;
    let row = min(n, merged.N - 1u) * V;
    let result = log_sum(row, V, lane);
    if (n >= merged.N) { return; }
    let picked = targets[n];
    if (lane == 0u) { row_loss[n] = loss_of(row, result, picked); }
    for (var v = lane; v < V; v += LANES) {
        var value = 0.0;
        if (picked >= 0) {
            value = exp(logits[row + v] - result);
            if (u32(picked) == v) { value -= 1.0; }
            value *= merged_scalars[0];
        }
        merged_dlogits[row + v] = value;
    }
}

@group(0) @binding(0) var<storage, read_write> loss: array<f32>;
@group(0) @binding(1) var<storage, read> rows_to_sum: array<f32>;
@group(0) @binding(2) var<storage, read> loss_scalars: array<f32, 8>;
@group(0) @binding(3) var<uniform> loss_args: Args;

@compute @workgroup_size(256)
fn loss_sum(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var n = lane; n < loss_args.N; n += 256u) { sum += rows_to_sum[n]; }
    sum = sum_lanes(lane, sum) * loss_scalars[0];
    if (lane > 0u) { return; }
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && loss_scalars[1] != 0.0)) { loss[0] += sum; } else { loss[0] = sum; }
}
