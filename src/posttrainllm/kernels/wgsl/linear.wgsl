// linear: the three matrix products of a linear layer, and the bias's gradient.
//   forward    out = x W + bias                                   W is (I, O); with transposed it is stored (O, I)
//   derive     d out[n, o] / d x[n, i] = W[i, o];   d out[n, o] / d W[i, o] = x[n, i];   d out[n, o] / d bias[o] = 1
//   backward   dx (+)= dout W^T;   dW (+)= x^T dout;   dbias (+)= sum_n dout[n]
// All three products are one kernel, out (rows, columns) = left (rows, inner) right (inner, columns), with a flag a side for matrices that are
// stored the other way round. Tiles of left and right go through workgroup memory, inner index first; a lane keeps 4 x 4 (tile4) or 8 x 8
// (tile8) results in registers. Two stages: the next tile is on its way from memory while this one is multiplied. Products with few results
// and a long inner side are cut into slices of ``span`` along it, which go to workspace and are added in order by linear_sum_slices.
// linear_blocked takes any size, one result a lane: for sizes that are no multiple of four, and to read first.

struct Args { rows: u32, columns: u32, inner: u32, span: u32 }

override TILE: u32 = 64u;        // rows and columns of a workgroup
override DEPTH: u32 = 16u;       // inner indices at a time; a lane fetches one vec4 of either side: LANES = TILE DEPTH / 4
override LANES: u32 = 256u;
override LEFT_TURNED: u32 = 0u;  // left is stored (inner, rows)
override RIGHT_TURNED: u32 = 0u; // right is stored (columns, inner)
override BIAS: u32 = 0u;
override RESIDUAL: u32 = 0u;
override ACCUMULATE: u32 = 0u;   // 0 write, 1 add, 2 write where scalars.beta is 0 and add otherwise

@group(0) @binding(0) var<storage, read_write> out: array<vec4f>;
@group(0) @binding(1) var<storage, read> left: array<vec4f>;
@group(0) @binding(2) var<storage, read> right: array<vec4f>;
@group(0) @binding(3) var<storage, read> bias: array<vec4f>; // the bias, or scalars
@group(0) @binding(4) var<storage, read> residual: array<vec4f>; // added where RESIDUAL is set
@group(0) @binding(5) var<uniform> args: Args;

var<workgroup> left_tile: array<vec4f, 2u * TILE * DEPTH / 4u>;
var<workgroup> right_tile: array<vec4f, 2u * TILE * DEPTH / 4u>;

// Inner index k of a tile lies in row k; its vec4s change places by k, so that lanes that turn a vec4 into four rows hit different banks.
fn swizzle(k: u32) -> u32 { return (k / 4u) * (32u / DEPTH); }

fn fetch_left(lane: u32, row0: u32, k0: u32, end: u32) -> vec4f {
    if (LEFT_TURNED == 1u) {
        let k = k0 + lane / (TILE / 4u);
        let row = row0 + lane % (TILE / 4u) * 4u;
        let value = left[(min(k, end - 1u) * args.rows + min(row, args.rows - 4u)) / 4u];
        return select(vec4f(0.0), value, k < end && row < args.rows);
    }
    let row = row0 + lane / (DEPTH / 4u);
    let k = k0 + lane % (DEPTH / 4u) * 4u;
    let value = left[(min(row, args.rows - 1u) * args.inner + min(k, end - 4u)) / 4u];
    return select(vec4f(0.0), value, k < end && row < args.rows);
}

fn fetch_right(lane: u32, column0: u32, k0: u32, end: u32) -> vec4f {
    if (RIGHT_TURNED == 0u) {
        let k = k0 + lane / (TILE / 4u);
        let column = column0 + lane % (TILE / 4u) * 4u;
        let value = right[(min(k, end - 1u) * args.columns + min(column, args.columns - 4u)) / 4u];
        return select(vec4f(0.0), value, k < end && column < args.columns);
    }
    let column = column0 + lane / (DEPTH / 4u);
    let k = k0 + lane % (DEPTH / 4u) * 4u;
    let value = right[(min(column, args.columns - 1u) * args.inner + min(k, end - 4u)) / 4u];
    return select(vec4f(0.0), value, k < end && column < args.columns);
}

fn store_left(lane: u32, stage: u32, value: vec4f) {
    let base = stage * DEPTH;
    if (LEFT_TURNED == 1u) {
        let k = lane / (TILE / 4u);
        left_tile[(base + k) * (TILE / 4u) + ((lane % (TILE / 4u)) ^ swizzle(k))] = value;
        return;
    }
    let row = lane / (DEPTH / 4u);
    let k = lane % (DEPTH / 4u) * 4u;
    let at = (base + k) * (TILE / 4u) + ((row / 4u) ^ swizzle(k));
    left_tile[at][row % 4u] = value.x;
    left_tile[at + TILE / 4u][row % 4u] = value.y;
    left_tile[at + 2u * (TILE / 4u)][row % 4u] = value.z;
    left_tile[at + 3u * (TILE / 4u)][row % 4u] = value.w;
}

fn store_right(lane: u32, stage: u32, value: vec4f) {
    let base = stage * DEPTH;
    if (RIGHT_TURNED == 0u) {
        let k = lane / (TILE / 4u);
        right_tile[(base + k) * (TILE / 4u) + ((lane % (TILE / 4u)) ^ swizzle(k))] = value;
        return;
    }
    let column = lane / (DEPTH / 4u);
    let k = lane % (DEPTH / 4u) * 4u;
    let at = (base + k) * (TILE / 4u) + ((column / 4u) ^ swizzle(k));
    right_tile[at][column % 4u] = value.x;
    right_tile[at + TILE / 4u][column % 4u] = value.y;
    right_tile[at + 2u * (TILE / 4u)][column % 4u] = value.z;
    right_tile[at + 3u * (TILE / 4u)][column % 4u] = value.w;
}

// Write four results of one row, or add them to what is there.
fn put(slice: u32, row: u32, column: u32, sum: vec4f) {
    if (row >= args.rows || column >= args.columns) { return; }
    var value = sum;
    if (BIAS == 1u) { value += bias[column / 4u]; }
    let at = ((slice * args.rows + row) * args.columns + column) / 4u;
    if (RESIDUAL == 1u) { value += residual[at]; }
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && bias[0].y != 0.0)) { out[at] += value; } else { out[at] = value; }
}

// ---- 4 x 4 results a lane -------------------------------------------------------------------------------------------------------------

var<private> r0: vec4f; var<private> r1: vec4f; var<private> r2: vec4f; var<private> r3: vec4f;

fn step4(at: u32, k: u32, y: u32, x: u32) {
    let a = left_tile[at + k * (TILE / 4u) + (y ^ swizzle(k))];
    let b = right_tile[at + k * (TILE / 4u) + (x ^ swizzle(k))];
    r0 = fma(vec4f(a.x), b, r0);
    r1 = fma(vec4f(a.y), b, r1);
    r2 = fma(vec4f(a.z), b, r2);
    r3 = fma(vec4f(a.w), b, r3);
}

fn eight_steps4(at: u32, k: u32, y: u32, x: u32) {
    step4(at, k, y, x); step4(at, k + 1u, y, x); step4(at, k + 2u, y, x); step4(at, k + 3u, y, x);
    step4(at, k + 4u, y, x); step4(at, k + 5u, y, x); step4(at, k + 6u, y, x); step4(at, k + 7u, y, x);
}

@compute @workgroup_size(LANES)
fn linear_tile4(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    let y = lane / (TILE / 4u);
    let x = lane % (TILE / 4u);
    let row0 = group.y * TILE;
    let column0 = group.x * TILE;
    let end = min(args.inner, (group.z + 1u) * args.span);
    var k0 = group.z * args.span;
    var stage = 0u;
    store_left(lane, 0u, fetch_left(lane, row0, k0, end));
    store_right(lane, 0u, fetch_right(lane, column0, k0, end));
    workgroupBarrier();
    while (true) {
        let next = k0 + DEPTH;
        var a = vec4f(0.0);
        var b = vec4f(0.0);
        if (next < end) {
            a = fetch_left(lane, row0, next, end);
            b = fetch_right(lane, column0, next, end);
        }
        let at = stage * (TILE * DEPTH / 4u);
        eight_steps4(at, 0u, y, x);
        if (DEPTH == 16u) { eight_steps4(at, 8u, y, x); }
        if (next >= end) { break; }
        stage = 1u - stage;
        store_left(lane, stage, a);
        store_right(lane, stage, b);
        workgroupBarrier();
        k0 = next;
    }
    let row = row0 + y * 4u;
    let column = column0 + x * 4u;
    put(group.z, row, column, r0);
    put(group.z, row + 1u, column, r1);
    put(group.z, row + 2u, column, r2);
    put(group.z, row + 3u, column, r3);
}

// The same for a small tile: four groups of lanes share the inner indices of each tile between them, and their sums are added at the end.
// TILE 32, DEPTH 32, LANES 256: for products with few results, where a lane would wait for memory most of the time.
@compute @workgroup_size(LANES)
fn linear_tile4_shared(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    let share = lane / 64u;
    let y = lane % 64u / 8u;
    let x = lane % 8u;
    let row0 = group.y * TILE;
    let column0 = group.x * TILE;
    let end = min(args.inner, (group.z + 1u) * args.span);
    var k0 = group.z * args.span;
    var stage = 0u;
    store_left(lane, 0u, fetch_left(lane, row0, k0, end));
    store_right(lane, 0u, fetch_right(lane, column0, k0, end));
    workgroupBarrier();
    while (true) {
        let next = k0 + DEPTH;
        var a = vec4f(0.0);
        var b = vec4f(0.0);
        if (next < end) {
            a = fetch_left(lane, row0, next, end);
            b = fetch_right(lane, column0, next, end);
        }
        eight_steps4(stage * (TILE * DEPTH / 4u), share * 8u, y, x);
        if (next >= end) { break; }
        stage = 1u - stage;
        store_left(lane, stage, a);
        store_right(lane, stage, b);
        workgroupBarrier();
        k0 = next;
    }
    workgroupBarrier();
    // shares 0 and 1 lie in left_tile, 2 and 3 in right_tile: 256 vec4s each, in the order row * 8 + column / 4
    let at = share % 2u * 256u + y * 32u + x;
    if (share < 2u) {
        left_tile[at] = r0; left_tile[at + 8u] = r1; left_tile[at + 16u] = r2; left_tile[at + 24u] = r3;
    } else {
        right_tile[at] = r0; right_tile[at + 8u] = r1; right_tile[at + 16u] = r2; right_tile[at + 24u] = r3;
    }
    workgroupBarrier();
    let sum = (left_tile[lane] + left_tile[lane + 256u]) + (right_tile[lane] + right_tile[lane + 256u]);
    put(group.z, row0 + lane / 8u, column0 + lane % 8u * 4u, sum);
}

// ---- 8 x 8 results a lane: rows y*4 .. and TILE/2 + y*4 .., columns likewise ------------------------------------------------------------

var<private> s0: vec4f; var<private> s1: vec4f; var<private> s2: vec4f; var<private> s3: vec4f; // rows y*4 .., columns TILE/2 + x*4
var<private> t0: vec4f; var<private> t1: vec4f; var<private> t2: vec4f; var<private> t3: vec4f; // rows TILE/2 + y*4 .., columns x*4
var<private> u0: vec4f; var<private> u1: vec4f; var<private> u2: vec4f; var<private> u3: vec4f; // both

fn step8(at: u32, k: u32, y: u32, x: u32) {
    let base = at + k * (TILE / 4u);
    let a = left_tile[base + (y ^ swizzle(k))];
    let c = left_tile[base + (TILE / 8u) + (y ^ swizzle(k))];
    let b = right_tile[base + (x ^ swizzle(k))];
    let d = right_tile[base + (TILE / 8u) + (x ^ swizzle(k))];
    r0 = fma(vec4f(a.x), b, r0); s0 = fma(vec4f(a.x), d, s0);
    r1 = fma(vec4f(a.y), b, r1); s1 = fma(vec4f(a.y), d, s1);
    r2 = fma(vec4f(a.z), b, r2); s2 = fma(vec4f(a.z), d, s2);
    r3 = fma(vec4f(a.w), b, r3); s3 = fma(vec4f(a.w), d, s3);
    t0 = fma(vec4f(c.x), b, t0); u0 = fma(vec4f(c.x), d, u0);
    t1 = fma(vec4f(c.y), b, t1); u1 = fma(vec4f(c.y), d, u1);
    t2 = fma(vec4f(c.z), b, t2); u2 = fma(vec4f(c.z), d, u2);
    t3 = fma(vec4f(c.w), b, t3); u3 = fma(vec4f(c.w), d, u3);
}

@compute @workgroup_size(LANES)
fn linear_tile8(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    let y = lane / (TILE / 8u);
    let x = lane % (TILE / 8u);
    let row0 = group.y * TILE;
    let column0 = group.x * TILE;
    let end = min(args.inner, (group.z + 1u) * args.span);
    var k0 = group.z * args.span;
    var stage = 0u;
    store_left(lane, 0u, fetch_left(lane, row0, k0, end));
    store_right(lane, 0u, fetch_right(lane, column0, k0, end));
    workgroupBarrier();
    while (true) {
        let next = k0 + DEPTH;
        var a = vec4f(0.0);
        var b = vec4f(0.0);
        if (next < end) {
            a = fetch_left(lane, row0, next, end);
            b = fetch_right(lane, column0, next, end);
        }
        let at = stage * (TILE * DEPTH / 4u);
        step8(at, 0u, y, x); step8(at, 1u, y, x); step8(at, 2u, y, x); step8(at, 3u, y, x);
        step8(at, 4u, y, x); step8(at, 5u, y, x); step8(at, 6u, y, x); step8(at, 7u, y, x);
        if (next >= end) { break; }
        stage = 1u - stage;
        store_left(lane, stage, a);
        store_right(lane, stage, b);
        workgroupBarrier();
        k0 = next;
    }
    let row = row0 + y * 4u;
    let column = column0 + x * 4u;
    let half = TILE / 2u;
    let z = group.z;
    put(z, row, column, r0); put(z, row + 1u, column, r1); put(z, row + 2u, column, r2); put(z, row + 3u, column, r3);
    put(z, row, column + half, s0); put(z, row + 1u, column + half, s1);
    put(z, row + 2u, column + half, s2); put(z, row + 3u, column + half, s3);
    put(z, row + half, column, t0); put(z, row + half + 1u, column, t1);
    put(z, row + half + 2u, column, t2); put(z, row + half + 3u, column, t3);
    put(z, row + half, column + half, u0); put(z, row + half + 1u, column + half, u1);
    put(z, row + half + 2u, column + half, u2); put(z, row + half + 3u, column + half, u3);
}

// ---- slices, and any size -------------------------------------------------------------------------------------------------------------

struct SliceArgs { count: u32, slices: u32, columns: u32 }

@group(0) @binding(1) var<storage, read> slices: array<vec4f>; // (slices, rows, columns)
@group(0) @binding(2) var<storage, read> slice_bias: array<vec4f>; // the bias, or scalars
@group(0) @binding(3) var<storage, read> slice_residual: array<vec4f>;
@group(0) @binding(4) var<uniform> slice_args: SliceArgs;

// out (+)= sum of the slices, in order; four numbers an invocation, count is in vec4s.
@compute @workgroup_size(64)
fn linear_sum_slices(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 64u + lane;
    if (i >= slice_args.count) { return; }
    var sum = slices[i];
    for (var s = 1u; s < slice_args.slices; s++) { sum += slices[s * slice_args.count + i]; }
    if (BIAS == 1u) { sum += slice_bias[i % (slice_args.columns / 4u)]; }
    if (RESIDUAL == 1u) { sum += slice_residual[i]; }
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && slice_bias[0].y != 0.0)) { out[i] += sum; } else { out[i] = sum; }
}

@group(0) @binding(0) var<storage, read_write> any_out: array<f32>;
@group(0) @binding(1) var<storage, read> any_left: array<f32>;
@group(0) @binding(2) var<storage, read> any_right: array<f32>;
@group(0) @binding(3) var<storage, read> any_bias: array<f32>;
@group(0) @binding(4) var<storage, read> any_residual: array<f32>;

var<workgroup> left_block: array<array<f32, 17>, 16>;
var<workgroup> right_block: array<array<f32, 17>, 16>;

@compute @workgroup_size(16, 16)
fn linear_blocked(@builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u) {
    let row = group.y * 16u + local.y;
    let column = group.x * 16u + local.x;
    var sum = 0.0;
    for (var k0 = 0u; k0 < args.inner; k0 += 16u) {
        // lanes along x read neighbours: along inner where a side is stored with inner last, along rows or columns otherwise
        var a_row = group.y * 16u + local.y;
        var a_k = k0 + local.x;
        if (LEFT_TURNED == 1u) {
            a_row = group.y * 16u + local.x;
            a_k = k0 + local.y;
        }
        var a = 0.0;
        if (a_row < args.rows && a_k < args.inner) {
            a = any_left[select(a_row * args.inner + a_k, a_k * args.rows + a_row, LEFT_TURNED == 1u)];
        }
        left_block[a_k - k0][a_row - group.y * 16u] = a;
        var b_column = group.x * 16u + local.x;
        var b_k = k0 + local.y;
        if (RIGHT_TURNED == 1u) {
            b_column = group.x * 16u + local.y;
            b_k = k0 + local.x;
        }
        var b = 0.0;
        if (b_column < args.columns && b_k < args.inner) {
            b = any_right[select(b_k * args.columns + b_column, b_column * args.inner + b_k, RIGHT_TURNED == 1u)];
        }
        right_block[b_k - k0][b_column - group.x * 16u] = b;
        workgroupBarrier();
        for (var k = 0u; k < 16u; k++) { sum = fma(left_block[k][local.y], right_block[k][local.x], sum); }
        workgroupBarrier();
    }
    if (row >= args.rows || column >= args.columns) { return; }
    if (BIAS == 1u) { sum += any_bias[column]; }
    let at = row * args.columns + column;
    if (RESIDUAL == 1u) { sum += any_residual[at]; }
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && any_bias[1] != 0.0)) { any_out[at] += sum; } else { any_out[at] = sum; }
}

// ---- the bias's gradient --------------------------------------------------------------------------------------------------------------

struct ColumnArgs { N: u32, O: u32, rows: u32, slices: u32 }

@group(0) @binding(0) var<storage, read_write> dbias: array<f32>;
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(3) var<uniform> column_args: ColumnArgs;

var<workgroup> sums: array<array<f32, 16>, 16>;

// Column sums over a slice of rows: 16 columns a workgroup, 16 lanes a column; slice y goes to row y of dbias, which is workspace when there
// are several.
@compute @workgroup_size(16, 16)
fn linear_backward_bias(@builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u) {
    let o = group.x * 16u + local.x;
    var sum = 0.0;
    let end = min(column_args.N, (group.y + 1u) * column_args.rows);
    if (o < column_args.O) {
        for (var n = group.y * column_args.rows + local.y; n < end; n += 16u) { sum += dout[n * column_args.O + o]; }
    }
    sums[local.y][local.x] = sum;
    workgroupBarrier();
    if (local.y > 0u || o >= column_args.O) { return; }
    sum = 0.0;
    for (var i = 0u; i < 16u; i++) { sum += sums[i][local.x]; }
    let at = group.y * column_args.O + o;
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && scalars[1] != 0.0)) { dbias[at] += sum; } else { dbias[at] = sum; }
}
