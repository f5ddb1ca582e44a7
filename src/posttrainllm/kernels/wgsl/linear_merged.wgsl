// linear_merged: products of a linear layer that share a dispatch, and what follows them.
//   backward   dW = x^T dout and dbias = sum_n dout, in slices along n into workspace;   dx = dout W^T, times gelu's slope where one follows,
//              likewise in slices along o where its tiles are few
//   forward    pre = x W + bias;   out = gelu(pre)
// The mathematics and the tiles are those of linear.wgsl, gelu is that of gelu_parts.wgsl. A workgroup belongs to one product; on a GPU that one of them would leave half
// empty they run side by side, and a step has fewer dispatches. linear_sum_merged adds the slices in order; the row after the last of dW
// is dbias, and dx comes last. Shapes: 0 a tile of 64 with 4 x 4 results a lane, 1 a tile of 32 whose inner indices four groups of lanes share, 2 a tile of
// 128 with 8 x 8. I and O are multiples of four.

struct Args { N: u32, I: u32, O: u32, span: u32, slices: u32, dx_span: u32, dx_slices: u32 } // slices of dW along n, of dx along o

override SHAPE: u32 = 0u;
override TILE: u32 = 64u;
override DEPTH: u32 = 16u;   // LANES = TILE DEPTH / 4
override LANES: u32 = 256u;
override FORWARD: u32 = 0u;
override TURNED: u32 = 0u;   // W is stored (O, I)
override BIAS: u32 = 0u;     // backward: dbias too
override GELU: u32 = 0u;     // backward: dx *= gelu'(extra)

@group(0) @binding(0) var<storage, read_write> first: array<vec4f>;  // workspace: (slices, rows + bias, columns) of dW, (dx_slices, N, I); or gelu's result
@group(0) @binding(1) var<storage, read_write> second: array<vec4f>; // dx, or pre
@group(0) @binding(2) var<storage, read> x: array<vec4f>;
@group(0) @binding(3) var<storage, read> dout: array<vec4f>;
@group(0) @binding(4) var<storage, read> weight: array<vec4f>;
@group(0) @binding(5) var<storage, read> extra: array<vec4f>;        // the bias, or what gelu was given
@group(0) @binding(6) var<uniform> args: Args;

const PRODUCT = 0u; // out = x W
const WEIGHT = 1u;  // dW = x^T dout
const INPUT = 2u;   // dx = dout W^T

var<workgroup> left_tile: array<vec4f, 2u * TILE * DEPTH / 4u>;
var<workgroup> right_tile: array<vec4f, 2u * TILE * DEPTH / 4u>;

// ---- tiles ----------------------------------------------------------------------------------------------------------------------------

fn rows_of(part: u32) -> u32 { if (part == WEIGHT) { return select(args.I, args.O, TURNED == 1u); } return args.N; }

fn columns_of(part: u32) -> u32 {
    if (part == PRODUCT) { return args.O; }
    if (part == INPUT) { return args.I; }
    return select(args.O, args.I, TURNED == 1u);
}

fn swizzle(k: u32) -> u32 { return (k / 4u) * (32u / DEPTH); }

// Whether a side is stored with the inner index first.
fn left_turned(part: u32) -> bool { return part == WEIGHT; }
fn right_turned(part: u32) -> bool { return part == INPUT && TURNED == 0u; }

fn fetch_left(part: u32, lane: u32, row0: u32, k0: u32, end: u32) -> vec4f {
    var value: vec4f;
    if (left_turned(part)) {
        let rows = rows_of(part);
        let k = k0 + lane / (TILE / 4u);
        let row = row0 + lane % (TILE / 4u) * 4u;
        let at = (min(k, end - 1u) * rows + min(row, rows - 4u)) / 4u;
        if (TURNED == 1u) { value = dout[at]; } else { value = x[at]; }
        return select(vec4f(0.0), value, k < end && row < rows);
    }
    let row = row0 + lane / (DEPTH / 4u);
    let k = k0 + lane % (DEPTH / 4u) * 4u;
    if (part == INPUT) {
        value = dout[(min(row, args.N - 1u) * args.O + min(k, end - 4u)) / 4u];
    } else {
        value = x[(min(row, args.N - 1u) * args.I + min(k, end - 4u)) / 4u];
    }
    return select(vec4f(0.0), value, k < end && row < args.N);
}

fn fetch_right(part: u32, lane: u32, column0: u32, k0: u32, end: u32) -> vec4f {
    let columns = columns_of(part);
    var value: vec4f;
    if (right_turned(part)) {
        let column = column0 + lane / (DEPTH / 4u);
        let k = k0 + lane % (DEPTH / 4u) * 4u;
        value = weight[(min(column, columns - 1u) * args.O + min(k, end - 4u)) / 4u];
        return select(vec4f(0.0), value, k < end && column < columns);
    }
    let k = k0 + lane / (TILE / 4u);
    let column = column0 + lane % (TILE / 4u) * 4u;
    let at = (min(k, end - 1u) * columns + min(column, columns - 4u)) / 4u;
    if (part == WEIGHT) {
        if (TURNED == 1u) { value = x[at]; } else { value = dout[at]; }
    } else {
        value = weight[at];
    }
    return select(vec4f(0.0), value, k < end && column < columns);
}

fn store_left(part: u32, lane: u32, stage: u32, value: vec4f) {
    let base = stage * DEPTH;
    if (left_turned(part)) {
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

fn store_right(part: u32, lane: u32, stage: u32, value: vec4f) {
    let base = stage * DEPTH;
    if (!right_turned(part)) {
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

// ---- results in registers: 4 x 4 (r), or 8 x 8 (r, s, t, u), as in linear.wgsl -----------------------------------------------------------

var<private> r0: vec4f; var<private> r1: vec4f; var<private> r2: vec4f; var<private> r3: vec4f;
var<private> s0: vec4f; var<private> s1: vec4f; var<private> s2: vec4f; var<private> s3: vec4f;
var<private> t0: vec4f; var<private> t1: vec4f; var<private> t2: vec4f; var<private> t3: vec4f;
var<private> u0: vec4f; var<private> u1: vec4f; var<private> u2: vec4f; var<private> u3: vec4f;

fn step(at: u32, k: u32, y: u32, x: u32) {
    let base = at + k * (TILE / 4u);
    let a = left_tile[base + (y ^ swizzle(k))];
    let b = right_tile[base + (x ^ swizzle(k))];
    r0 = fma(vec4f(a.x), b, r0);
    r1 = fma(vec4f(a.y), b, r1);
    r2 = fma(vec4f(a.z), b, r2);
    r3 = fma(vec4f(a.w), b, r3);
    if (SHAPE == 2u) {
        let c = left_tile[base + TILE / 8u + (y ^ swizzle(k))];
        let d = right_tile[base + TILE / 8u + (x ^ swizzle(k))];
        s0 = fma(vec4f(a.x), d, s0); t0 = fma(vec4f(c.x), b, t0); u0 = fma(vec4f(c.x), d, u0);
        s1 = fma(vec4f(a.y), d, s1); t1 = fma(vec4f(c.y), b, t1); u1 = fma(vec4f(c.y), d, u1);
        s2 = fma(vec4f(a.z), d, s2); t2 = fma(vec4f(c.z), b, t2); u2 = fma(vec4f(c.z), d, u2);
        s3 = fma(vec4f(a.w), d, s3); t3 = fma(vec4f(c.w), b, t3); u3 = fma(vec4f(c.w), d, u3);
    }
}

fn eight_steps(at: u32, k: u32, y: u32, x: u32) {
    step(at, k, y, x); step(at, k + 1u, y, x); step(at, k + 2u, y, x); step(at, k + 3u, y, x);
    step(at, k + 4u, y, x); step(at, k + 5u, y, x); step(at, k + 6u, y, x); step(at, k + 7u, y, x);
}

fn put(part: u32, slice: u32, row: u32, column: u32, sum: vec4f) {
    let columns = columns_of(part);
    if (row >= rows_of(part) || column >= columns) { return; }
    if (part == WEIGHT) {
        first[((slice * (rows_of(part) + BIAS) + row) * columns + column) / 4u] = sum;
        return;
    }
    let at = (row * columns + column) / 4u;
    if (part == INPUT && args.dx_slices > 1u) {
        let partials = args.slices * (rows_of(WEIGHT) + BIAS) * columns_of(WEIGHT);
        first[(partials + slice * args.N * args.I) / 4u + at] = sum;
        return;
    }
    var value = sum;
    if (part == PRODUCT) {
        value += extra[column / 4u];
        first[at] = gelu(value);
    } else if (GELU == 1u) {
        value *= slope(extra[at]);
    }
    second[at] = value;
}

fn put_all(part: u32, slice: u32, lane: u32, row0: u32, column0: u32, y: u32, x: u32) {
    if (SHAPE == 1u) {
        let share = lane / 64u;
        let at = share % 2u * 256u + y * 32u + x;
        workgroupBarrier();
        if (share < 2u) {
            left_tile[at] = r0; left_tile[at + 8u] = r1; left_tile[at + 16u] = r2; left_tile[at + 24u] = r3;
        } else {
            right_tile[at] = r0; right_tile[at + 8u] = r1; right_tile[at + 16u] = r2; right_tile[at + 24u] = r3;
        }
        workgroupBarrier();
        let sum = (left_tile[lane] + left_tile[lane + 256u]) + (right_tile[lane] + right_tile[lane + 256u]);
        put(part, slice, row0 + lane / 8u, column0 + lane % 8u * 4u, sum);
        return;
    }
    let row = row0 + y * 4u;
    let column = column0 + x * 4u;
    put(part, slice, row, column, r0); put(part, slice, row + 1u, column, r1);
    put(part, slice, row + 2u, column, r2); put(part, slice, row + 3u, column, r3);
    if (SHAPE == 2u) {
        let half = TILE / 2u;
        put(part, slice, row, column + half, s0); put(part, slice, row + 1u, column + half, s1);
        put(part, slice, row + 2u, column + half, s2); put(part, slice, row + 3u, column + half, s3);
        put(part, slice, row + half, column, t0); put(part, slice, row + half + 1u, column, t1);
        put(part, slice, row + half + 2u, column, t2); put(part, slice, row + half + 3u, column, t3);
        put(part, slice, row + half, column + half, u0); put(part, slice, row + half + 1u, column + half, u1);
        put(part, slice, row + half + 2u, column + half, u2); put(part, slice, row + half + 3u, column + half, u3);
    }
}

fn product(part: u32, lane: u32, index: u32) {
    let across = (columns_of(part) + TILE - 1u) / TILE;
    let down = (rows_of(part) + TILE - 1u) / TILE;
    let column0 = index % across * TILE;
    let row0 = index / across % down * TILE;
    let slice = index / (across * down);
    var k0 = 0u;
    var end = args.I;
    if (part == WEIGHT) {
        k0 = slice * args.span;
        end = min(args.N, k0 + args.span);
    }
    if (part == INPUT) {
        k0 = slice * args.dx_span;
        end = min(args.O, k0 + args.dx_span);
    }
    var width = TILE / 4u; // lanes across the tile, and the place of this one
    if (SHAPE == 2u) { width = TILE / 8u; }
    let y = select(lane / width, lane % 64u / 8u, SHAPE == 1u);
    let x = select(lane % width, lane % 8u, SHAPE == 1u);
    var stage = 0u;
    var a = fetch_left(part, lane, row0, k0, end);
    var b = fetch_right(part, lane, column0, k0, end);
    var bias_sum = b;
    store_left(part, lane, 0u, a);
    store_right(part, lane, 0u, b);
    workgroupBarrier();
    while (true) {
        let next = k0 + DEPTH;
        a = vec4f(0.0);
        b = vec4f(0.0);
        if (next < end) {
            a = fetch_left(part, lane, row0, next, end);
            b = fetch_right(part, lane, column0, next, end);
        }
        let at = stage * (TILE * DEPTH / 4u);
        eight_steps(at, select(0u, lane / 64u * 8u, SHAPE == 1u), y, x);
        if (SHAPE == 0u) { eight_steps(at, 8u, y, x); }
        if (next >= end) { break; }
        if (BIAS == 1u) { bias_sum += b; }
        stage = 1u - stage;
        store_left(part, lane, stage, a);
        store_right(part, lane, stage, b);
        workgroupBarrier();
        k0 = next;
    }
    put_all(part, slice, lane, row0, column0, y, x);
    if (BIAS == 1u && part == WEIGHT && row0 == 0u) { // a lane has summed every DEPTH-th row of dout in its four columns
        workgroupBarrier();
        left_tile[lane] = bias_sum;
        workgroupBarrier();
        let column = column0 + lane * 4u;
        if (lane < TILE / 4u && column < args.O) {
            var sum = vec4f(0.0);
            for (var k = 0u; k < DEPTH; k++) { sum += left_tile[k * (TILE / 4u) + lane]; }
            first[((slice * (args.I + 1u) + args.I) * args.O + column) / 4u] = sum;
        }
    }
}

@compute @workgroup_size(LANES)
fn linear_merged(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = group.x + group.y * groups.x;
    if (FORWARD == 1u) {
        product(PRODUCT, lane, index);
        return;
    }
    let inputs = args.dx_slices * ((args.I + TILE - 1u) / TILE) * ((args.N + TILE - 1u) / TILE);
    if (index < inputs) {
        product(INPUT, lane, index);
        return;
    }
    let tiles = ((columns_of(WEIGHT) + TILE - 1u) / TILE) * ((rows_of(WEIGHT) + TILE - 1u) / TILE);
    if (index < inputs + args.slices * tiles) { product(WEIGHT, lane, index - inputs); }
}

// ---- the sum of the slices ------------------------------------------------------------------------------------------------------------

struct SumArgs { weights: u32, count: u32, slices: u32, inputs: u32, dx_slices: u32 } // vec4s of dW, of dW and dbias; of dx, 0 where it is done

override ACCUMULATE: u32 = 0u; // 0 write, 1 add, 2 write where scalars.beta is 0 and add otherwise

@group(0) @binding(0) var<storage, read_write> dweight: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> dx: array<vec4f>;
@group(0) @binding(2) var<storage, read> slices: array<vec4f>;
@group(0) @binding(3) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(4) var<storage, read> pre: array<vec4f>;
@group(0) @binding(5) var<storage, read_write> dbias: array<vec4f>;
@group(0) @binding(6) var<uniform> sum_args: SumArgs;

@group(0) @binding(5) var<uniform> weights_args: SumArgs;

fn sum_of(base: u32, stride: u32, count: u32) -> vec4f {
    var sum = slices[base];
    for (var s = 1u; s < count; s++) { sum += slices[base + s * stride]; }
    return sum;
}

fn put_dx(at: u32, sum: vec4f) {
    if (GELU == 1u) { dx[at] = sum * slope(pre[at]); } else { dx[at] = sum; }
}

@compute @workgroup_size(64)
fn linear_sum_merged(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 64u + lane;
    let count = sum_args.count;
    if (i >= count + sum_args.inputs) { return; }
    if (i >= count) {
        put_dx(i - count, sum_of(sum_args.slices * count + i - count, sum_args.inputs, sum_args.dx_slices));
        return;
    }
    let sum = sum_of(i, count, sum_args.slices);
    let add = ACCUMULATE == 1u || (ACCUMULATE == 2u && scalars[1] != 0.0);
    if (i < sum_args.weights) {
        if (add) { dweight[i] += sum; } else { dweight[i] = sum; }
    } else {
        let at = i - sum_args.weights;
        if (add) { dbias[at] += sum; } else { dbias[at] = sum; }
    }
}

// The same without dbias.
@compute @workgroup_size(64)
fn linear_sum_weights(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 64u + lane;
    let count = weights_args.count;
    if (i >= count + weights_args.inputs) { return; }
    if (i >= count) {
        put_dx(i - count, sum_of(weights_args.slices * count + i - count, weights_args.inputs, weights_args.dx_slices));
        return;
    }
    let sum = sum_of(i, count, weights_args.slices);
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && scalars[1] != 0.0)) { dweight[i] += sum; } else { dweight[i] = sum; }
}
