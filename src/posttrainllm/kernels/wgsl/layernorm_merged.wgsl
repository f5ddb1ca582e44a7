// layernorm_merged: both halves of layernorm's backward pass in one dispatch; the mathematics stands in layernorm.wgsl.
//   rows      dx (+)= rstd (g - mean(g) - xhat mean(g xhat)),  g = dout weight: 32 lanes a row, 8 rows a workgroup (layernorm_parts.wgsl)
//   columns   sums of dout xhat and dout over a slice of rows into workspace: 16 columns a workgroup, 16 lanes a column
// The first ``split`` workgroups take rows, the others columns; layernorm_backward_weight_sum adds the slices in order.

struct Args { N: u32, C: u32, rows: u32, split: u32 } // rows of a slice

@group(0) @binding(0) var<storage, read_write> dx: array<f32>;
@group(0) @binding(1) var<storage, read_write> slice_sums: array<vec2f>; // (slices, C)
@group(0) @binding(2) var<storage, read> dout: array<f32>;
@group(0) @binding(3) var<storage, read> saved_x: array<f32>;
@group(0) @binding(4) var<storage, read> scale: array<f32>;
@group(0) @binding(5) var<storage, read> saved_mean: array<f32>;
@group(0) @binding(6) var<storage, read> saved_rstd: array<f32>;
@group(0) @binding(7) var<uniform> args: Args;

var<workgroup> sums: array<array<vec2f, 16>, 16>;

fn columns(group: u32, local: vec2u) {
    let blocks = (args.C + 15u) / 16u;
    let c = group % blocks * 16u + local.x;
    let slice = group / blocks;
    let end = min(args.N, (slice + 1u) * args.rows);
    var sum = vec2f(0.0);
    if (c < args.C) {
        for (var n = slice * args.rows + local.y; n < end; n += 16u) {
            let d = dout[n * args.C + c];
            sum += vec2f(d * ((saved_x[n * args.C + c] - saved_mean[n]) * saved_rstd[n]), d);
        }
    }
    sums[local.y][local.x] = sum;
    workgroupBarrier();
    if (local.y > 0u || c >= args.C) { return; }
    sum = vec2f(0.0);
    for (var i = 0u; i < 16u; i++) { sum += sums[i][local.x]; }
    slice_sums[slice * args.C + c] = sum;
}

@compute @workgroup_size(256)
fn layernorm_merged(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = group.x + group.y * groups.x;
    if (index < args.split) {
        backward_rows(index, vec2u(lane % 32u, lane / 32u));
    } else {
        columns(index - args.split, vec2u(lane % 16u, lane / 16u));
    }
}
