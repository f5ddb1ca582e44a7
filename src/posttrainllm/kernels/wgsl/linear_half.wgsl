// linear_half: the product of linear.wgsl with half-precision tiles, an option for the forward pass (f32 everywhere else).
//   out (rows, columns) = left (rows, inner) right (inner, columns), with the flags of linear.wgsl
// Both sides are rounded to f16 on their way into workgroup memory. A lane multiplies and adds 8 inner indices in f16 and then adds that sum
// to its f32 results, so that rounding does not grow with inner: about 2^-11 of the absolute product. Only forward products take it: the
// gradients of a mean loss are too small for f16. Tiles and stages are linear.wgsl's: tile4 keeps 4 x 4 results a lane, tile8 8 x 8.

struct Args { rows: u32, columns: u32, inner: u32, span: u32 }

override TILE: u32 = 64u;
override DEPTH: u32 = 16u;       // LANES = TILE DEPTH / 4
override LANES: u32 = 256u;
override RIGHT_TURNED: u32 = 0u; // right is stored (columns, inner)
override BIAS: u32 = 0u;
override RESIDUAL: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> out: array<vec4f>;
@group(0) @binding(1) var<storage, read> left: array<vec4f>;
@group(0) @binding(2) var<storage, read> right: array<vec4f>;
@group(0) @binding(3) var<storage, read> bias: array<vec4f>;
@group(0) @binding(4) var<storage, read> residual: array<vec4f>;
@group(0) @binding(5) var<uniform> args: Args;

var<workgroup> left_tile: array<vec4<f16>, 2u * TILE * DEPTH / 4u>;
var<workgroup> right_tile: array<vec4<f16>, 2u * TILE * DEPTH / 4u>;

// f16 ends at 65504: what lies beyond would become infinite, which WGSL may take for impossible.
fn half4(value: vec4f) -> vec4<f16> { return vec4<f16>(clamp(value, vec4f(-65504.0), vec4f(65504.0))); }

fn fetch_left(lane: u32, row0: u32, k0: u32) -> vec4<f16> {
    let row = row0 + lane / (DEPTH / 4u);
    let k = k0 + lane % (DEPTH / 4u) * 4u;
    let value = left[(min(row, args.rows - 1u) * args.inner + min(k, args.inner - 4u)) / 4u];
    return half4(select(vec4f(0.0), value, k < args.inner && row < args.rows));
}

fn fetch_right(lane: u32, column0: u32, k0: u32) -> vec4<f16> {
    if (RIGHT_TURNED == 0u) {
        let k = k0 + lane / (TILE / 4u);
        let column = column0 + lane % (TILE / 4u) * 4u;
        let value = right[(min(k, args.inner - 1u) * args.columns + min(column, args.columns - 4u)) / 4u];
        return half4(select(vec4f(0.0), value, k < args.inner && column < args.columns));
    }
    let column = column0 + lane / (DEPTH / 4u);
    let k = k0 + lane % (DEPTH / 4u) * 4u;
    let value = right[(min(column, args.columns - 1u) * args.inner + min(k, args.inner - 4u)) / 4u];
    return half4(select(vec4f(0.0), value, k < args.inner && column < args.columns));
}

fn store_left(lane: u32, stage: u32, value: vec4<f16>) {
    let row = lane / (DEPTH / 4u);
    let at = (stage * DEPTH + lane % (DEPTH / 4u) * 4u) * (TILE / 4u) + row / 4u;
    left_tile[at][row % 4u] = value.x;
    left_tile[at + TILE / 4u][row % 4u] = value.y;
    left_tile[at + 2u * (TILE / 4u)][row % 4u] = value.z;
    left_tile[at + 3u * (TILE / 4u)][row % 4u] = value.w;
}

fn store_right(lane: u32, stage: u32, value: vec4<f16>) {
    if (RIGHT_TURNED == 0u) {
        right_tile[(stage * DEPTH + lane / (TILE / 4u)) * (TILE / 4u) + lane % (TILE / 4u)] = value;
        return;
    }
    let column = lane / (DEPTH / 4u);
    let at = (stage * DEPTH + lane % (DEPTH / 4u) * 4u) * (TILE / 4u) + column / 4u;
    right_tile[at][column % 4u] = value.x;
    right_tile[at + TILE / 4u][column % 4u] = value.y;
    right_tile[at + 2u * (TILE / 4u)][column % 4u] = value.z;
    right_tile[at + 3u * (TILE / 4u)][column % 4u] = value.w;
}

fn put(row: u32, column: u32, sum: vec4f) {
    if (row >= args.rows || column >= args.columns) { return; }
    var value = sum;
    if (BIAS == 1u) { value += bias[column / 4u]; }
    let at = (row * args.columns + column) / 4u;
    if (RESIDUAL == 1u) { value += residual[at]; }
    out[at] = value;
}

// A 4 x 4 corner of results over the 8 inner indices from k on: rows from vec4 y of left's rows, columns from vec4 x of right's.
struct Corner { r0: vec4f, r1: vec4f, r2: vec4f, r3: vec4f }

fn eight_steps(corner: ptr<function, Corner>, at: u32, k: u32, y: u32, x: u32) {
    var h0 = vec4<f16>();
    var h1 = vec4<f16>();
    var h2 = vec4<f16>();
    var h3 = vec4<f16>();
    for (var i = 0u; i < 8u; i++) {
        let a = left_tile[at + (k + i) * (TILE / 4u) + y];
        let b = right_tile[at + (k + i) * (TILE / 4u) + x];
        h0 = fma(vec4<f16>(a.x), b, h0);
        h1 = fma(vec4<f16>(a.y), b, h1);
        h2 = fma(vec4<f16>(a.z), b, h2);
        h3 = fma(vec4<f16>(a.w), b, h3);
    }
    (*corner).r0 += vec4f(h0);
    (*corner).r1 += vec4f(h1);
    (*corner).r2 += vec4f(h2);
    (*corner).r3 += vec4f(h3);
}

fn put_corner(corner: Corner, row: u32, column: u32) {
    put(row, column, corner.r0);
    put(row + 1u, column, corner.r1);
    put(row + 2u, column, corner.r2);
    put(row + 3u, column, corner.r3);
}

@compute @workgroup_size(LANES)
fn linear_half4(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    let y = lane / (TILE / 4u);
    let x = lane % (TILE / 4u);
    let row0 = group.y * TILE;
    let column0 = group.x * TILE;
    var sums = Corner();
    var stage = 0u;
    store_left(lane, 0u, fetch_left(lane, row0, 0u));
    store_right(lane, 0u, fetch_right(lane, column0, 0u));
    workgroupBarrier();
    for (var next = DEPTH; ; next += DEPTH) {
        var a = vec4<f16>();
        var b = vec4<f16>();
        if (next < args.inner) {
            a = fetch_left(lane, row0, next);
            b = fetch_right(lane, column0, next);
        }
        let at = stage * (TILE * DEPTH / 4u);
        for (var k = 0u; k < DEPTH; k += 8u) { eight_steps(&sums, at, k, y, x); }
        if (next >= args.inner) { break; }
        stage = 1u - stage;
        store_left(lane, stage, a);
        store_right(lane, stage, b);
        workgroupBarrier();
    }
    put_corner(sums, row0 + y * 4u, column0 + x * 4u);
}

// 8 x 8 results a lane: rows y*4 .. and TILE/2 + y*4 .., columns likewise.
@compute @workgroup_size(LANES)
fn linear_half8(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    let y = lane / (TILE / 8u);
    let x = lane % (TILE / 8u);
    let row0 = group.y * TILE;
    let column0 = group.x * TILE;
    var near = Corner();
    var right_of = Corner();
    var below = Corner();
    var far = Corner();
    var stage = 0u;
    store_left(lane, 0u, fetch_left(lane, row0, 0u));
    store_right(lane, 0u, fetch_right(lane, column0, 0u));
    workgroupBarrier();
    for (var next = DEPTH; ; next += DEPTH) {
        var a = vec4<f16>();
        var b = vec4<f16>();
        if (next < args.inner) {
            a = fetch_left(lane, row0, next);
            b = fetch_right(lane, column0, next);
        }
        let at = stage * (TILE * DEPTH / 4u);
        for (var k = 0u; k < DEPTH; k += 8u) {
            eight_steps(&near, at, k, y, x);
            eight_steps(&right_of, at, k, y, x + TILE / 8u);
            eight_steps(&below, at, k, y + TILE / 8u, x);
            eight_steps(&far, at, k, y + TILE / 8u, x + TILE / 8u);
        }
        if (next >= args.inner) { break; }
        stage = 1u - stage;
        store_left(lane, stage, a);
        store_right(lane, stage, b);
        workgroupBarrier();
    }
    let row = row0 + y * 4u;
    let column = column0 + x * 4u;
    put_corner(near, row, column);
    put_corner(right_of, row, column + TILE / 2u);
    put_corner(below, row + TILE / 2u, column);
    put_corner(far, row + TILE / 2u, column + TILE / 2u);
}
