// layernorm: normalize each row to zero mean and unit variance, then scale and shift.
//   forward    xhat = (x - mean) rstd;   out = xhat weight + bias;   rstd = 1 / sqrt(mean((x - mean)^2) + eps);   saves mean, rstd
//   derive     g = dout weight is the gradient of xhat; mean and rstd depend on every x of the row, which takes out of g its mean and
//              its part along xhat
//   backward   dx (+)= rstd (g - mean(g) - xhat mean(g xhat));   dweight (+)= sum_n dout xhat;   dbias (+)= sum_n dout
// Rows: 32 lanes a row, 8 rows a workgroup. Each lane leaves its partial sum in workgroup memory and then adds all 32 itself, so that a sum
// costs one barrier and every lane gets the same bits (layernorm_parts.wgsl). Columns: 16 columns a workgroup, 16 lanes a column; tall inputs
// in slices of rows whose partial sums go through workspace.

struct Args { N: u32, C: u32, eps: f32 }

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read_write> mean: array<f32>;
@group(0) @binding(2) var<storage, read_write> rstd: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> weight: array<f32>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<uniform> args: Args;

@compute @workgroup_size(32, 8)
fn layernorm_forward(
    @builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let n = (group.x + group.y * groups.x) * 8u + local.y;
    let row = min(n, args.N - 1u) * args.C;
    var sum = 0.0;
    for (var c = local.x; c < args.C; c += 32u) { sum += x[row + c]; }
    partial[local.y][local.x / 4u][local.x % 4u] = sum;
    workgroupBarrier();
    let m = total(partial[local.y]) / f32(args.C);
    var squares = 0.0;
    for (var c = local.x; c < args.C; c += 32u) {
        let centred = x[row + c] - m;
        squares += centred * centred;
    }
    partial2[local.y][local.x / 4u][local.x % 4u] = squares;
    workgroupBarrier();
    let r = 1.0 / sqrt(total(partial2[local.y]) / f32(args.C) + args.eps);
    if (n >= args.N) { return; }
    if (local.x == 0u) {
        mean[n] = m;
        rstd[n] = r;
    }
    for (var c = local.x; c < args.C; c += 32u) { out[row + c] = (x[row + c] - m) * r * weight[c] + bias[c]; }
}

@group(0) @binding(0) var<storage, read_write> dx: array<f32>;
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> saved_x: array<f32>;
@group(0) @binding(3) var<storage, read> scale: array<f32>;
@group(0) @binding(4) var<storage, read> saved_mean: array<f32>;
@group(0) @binding(5) var<storage, read> saved_rstd: array<f32>;

@compute @workgroup_size(32, 8)
fn layernorm_backward_input(
    @builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    backward_rows(group.x + group.y * groups.x, local.xy);
}

struct ColumnArgs { N: u32, C: u32, rows: u32, slices: u32 }

@group(0) @binding(0) var<storage, read_write> dweight: array<f32>;
@group(0) @binding(1) var<storage, read_write> dbias: array<f32>;
@group(0) @binding(2) var<storage, read> column_dout: array<f32>;
@group(0) @binding(3) var<storage, read> column_x: array<f32>;
@group(0) @binding(4) var<storage, read> column_mean: array<f32>;
@group(0) @binding(5) var<storage, read> column_rstd: array<f32>;
@group(0) @binding(6) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(7) var<uniform> columns: ColumnArgs;

var<workgroup> sums: array<array<vec2f, 16>, 16>;

// Sums over this workgroup's 16 columns of a slice of rows: dweight in x, dbias in y; the same for all lanes of a column.
fn sum_columns(local: vec3u, c: u32, slice: u32) -> vec2f {
    var sum = vec2f(0.0);
    let end = min(columns.N, (slice + 1u) * columns.rows);
    if (c < columns.C) {
        for (var n = slice * columns.rows + local.y; n < end; n += 16u) {
            let d = column_dout[n * columns.C + c];
            sum += vec2f(d * ((column_x[n * columns.C + c] - column_mean[n]) * column_rstd[n]), d);
        }
    }
    sums[local.y][local.x] = sum;
    workgroupBarrier();
    sum = vec2f(0.0);
    for (var i = 0u; i < 16u; i++) { sum += sums[i][local.x]; }
    return sum;
}

fn put(c: u32, sum: vec2f) {
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && scalars[1] != 0.0)) {
        dweight[c] += sum.x;
        dbias[c] += sum.y;
    } else {
        dweight[c] = sum.x;
        dbias[c] = sum.y;
    }
}

@compute @workgroup_size(16, 16)
fn layernorm_backward_weight(@builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u) {
    let c = group.x * 16u + local.x;
    let sum = sum_columns(local, c, 0u);
    if (local.y == 0u && c < columns.C) { put(c, sum); }
}

@group(0) @binding(0) var<storage, read_write> slice_sums: array<vec2f>; // (slices, C)
@group(0) @binding(2) var<storage, read> all_sums: array<vec2f>;

@compute @workgroup_size(16, 16)
fn layernorm_backward_weight_slices(@builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u) {
    let c = group.x * 16u + local.x;
    let sum = sum_columns(local, c, group.y);
    if (local.y == 0u && c < columns.C) { slice_sums[group.y * columns.C + c] = sum; }
}

@compute @workgroup_size(64)
fn layernorm_backward_weight_sum(@builtin(global_invocation_id) id: vec3u) {
    let c = id.x;
    if (c >= columns.C) { return; }
    var sum = vec2f(0.0);
    for (var i = 0u; i < columns.slices; i++) { sum += all_sums[i * columns.C + c]; }
    put(c, sum);
}
