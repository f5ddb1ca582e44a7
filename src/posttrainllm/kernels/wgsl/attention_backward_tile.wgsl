// attention_backward in tiles (FlashAttention-2): the mathematics of attention.wgsl, the layout of attention_tile.wgsl; what both tiles
// share stands in attention_parts.wgsl.
//   query_block   keeps 32 queries, walks over the keys up to them: dq
//   key_block     keeps 32 keys, walks over the queries from them on: dk and dv. No atomics, a fixed order of sums
// Both run in one dispatch, a workgroup each in turns. delta[t] = dout[t] . out[t] is computed wherever a block of queries is read: keeping it
// would cost a dispatch more.
// Scores are computed again from q, k and the saved lse. Blocks that the causal mask or the segments hide wholly are skipped.

struct Args { T: u32, C: u32, H: u32, blocks: u32, count: u32, scale: f32 } // blocks of a row, blocks of all heads, 1 / sqrt(D)

override VEC: u32 = 8u;   // vec4s a head
override PITCH: u32 = 9u; // VEC + 1

@group(0) @binding(2) var<storage, read> qkv: array<vec4f>;

var<workgroup> q_tile: array<vec4f, 32u * PITCH>;
var<workgroup> k_tile: array<vec4f, 32u * PITCH>;
var<workgroup> v_tile: array<vec4f, 32u * PITCH>;
var<workgroup> o_tile: array<vec4f, 32u * PITCH>; // dout
var<workgroup> p_tile: array<vec4f, 32u * 9u>;    // weights: a row a query
var<workgroup> s_tile: array<vec4f, 32u * 9u>;    // gradients of scores

@group(0) @binding(0) var<storage, read_write> dqkv: array<vec4f>;
@group(0) @binding(1) var<storage, read> dout: array<vec4f>;
@group(0) @binding(3) var<storage, read> saved_lse: array<f32>;
@group(0) @binding(4) var<storage, read> starts: array<i32>;
@group(0) @binding(5) var<storage, read> saved_out: array<vec4f>;
@group(0) @binding(6) var<uniform> args: Args;

@compute @workgroup_size(64)
fn attention_backward_tile(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = group.x + group.y * groups.x;
    if (index >= 2u * args.count) { return; }
    if (index % 2u == 0u) { key_block(lane, index / 2u); } else { query_block(lane, index / 2u); }
}

// Leave this lane's parts of delta of queries t0 + y, + 8, + 16, + 24 in row_tile; their dout lies in o_tile.
fn put_delta_parts(y: u32, x: u32, t0: u32, n0: u32, head: u32) {
    for (var i = 0u; i < 4u; i++) {
        let row = y + 8u * i;
        let at = (n0 + min(t0 + row, args.T - 1u)) * (args.C / 4u) + head * VEC;
        var part = 0.0;
        for (var d = x; d < VEC; d += 8u) { part += dot(o_tile[row * PITCH + d], saved_out[at + d]); }
        row_tile[row * 2u + x / 4u][x % 4u] = part;
    }
}

fn query_block(lane: u32, index: u32) {
    let block = args.blocks - 1u - index % args.blocks;
    let bh = index / args.blocks;
    let head = bh % args.H;
    let n0 = bh / args.H * args.T;
    let y = lane / 8u;
    let x = lane % 8u;
    let t0 = block * 32u;
    let stride = 3u * args.C / 4u;
    let width = args.C / 4u;
    for (var i = lane; i < 32u * VEC; i += 64u) {
        let row = i / VEC;
        let n = n0 + min(t0 + row, args.T - 1u);
        q_tile[row * PITCH + i % VEC] = qkv[n * stride + head * VEC + i % VEC] * args.scale;
        o_tile[row * PITCH + i % VEC] = dout[n * width + head * VEC + i % VEC];
    }
    let t = vec4u(t0 + y) + vec4u(0u, 8u, 16u, 24u);
    var start: vec4u;
    var log_sum: vec4f;
    for (var i = 0u; i < 4u; i++) {
        let at = min(t[i], args.T - 1u);
        start[i] = u32(starts[n0 + at]);
        log_sum[i] = saved_lse[bh * args.T + at];
    }
    workgroupBarrier();
    put_delta_parts(y, x, t0, n0, head);
    workgroupBarrier();
    let row_dot = vec4f(total(y), total(y + 8u), total(y + 16u), total(y + 24u));
    let x0 = min(x, VEC - 1u);
    let x1 = min(x + 8u, VEC - 1u);
    var o0 = vec4f(0.0); var o1 = vec4f(0.0); var o2 = vec4f(0.0); var o3 = vec4f(0.0);
    var e0 = vec4f(0.0); var e1 = vec4f(0.0); var e2 = vec4f(0.0); var e3 = vec4f(0.0);
    for (var s0 = u32(starts[n0 + t0]) / 32u * 32u; s0 <= t0; s0 += 32u) {
        workgroupBarrier();
        for (var i = lane; i < 32u * VEC; i += 64u) {
            let row = i / VEC;
            let at = (n0 + min(s0 + row, args.T - 1u)) * stride + width + head * VEC + i % VEC;
            k_tile[row * PITCH + i % VEC] = qkv[at];
            v_tile[row * PITCH + i % VEC] = qkv[at + width];
        }
        workgroupBarrier();
        var a0 = vec4f(0.0); var a1 = vec4f(0.0); var a2 = vec4f(0.0); var a3 = vec4f(0.0); // scores
        var b0 = vec4f(0.0); var b1 = vec4f(0.0); var b2 = vec4f(0.0); var b3 = vec4f(0.0); // dP
        for (var d = 0u; d < VEC; d++) {
            let k0 = k_tile[x * PITCH + d];
            let k1 = k_tile[(x + 8u) * PITCH + d];
            let k2 = k_tile[(x + 16u) * PITCH + d];
            let k3 = k_tile[(x + 24u) * PITCH + d];
            a0 = add_dots(a0, q_tile[y * PITCH + d], k0, k1, k2, k3);
            a1 = add_dots(a1, q_tile[(y + 8u) * PITCH + d], k0, k1, k2, k3);
            a2 = add_dots(a2, q_tile[(y + 16u) * PITCH + d], k0, k1, k2, k3);
            a3 = add_dots(a3, q_tile[(y + 24u) * PITCH + d], k0, k1, k2, k3);
            let v0 = v_tile[x * PITCH + d];
            let v1 = v_tile[(x + 8u) * PITCH + d];
            let v2 = v_tile[(x + 16u) * PITCH + d];
            let v3 = v_tile[(x + 24u) * PITCH + d];
            b0 = add_dots(b0, o_tile[y * PITCH + d], v0, v1, v2, v3);
            b1 = add_dots(b1, o_tile[(y + 8u) * PITCH + d], v0, v1, v2, v3);
            b2 = add_dots(b2, o_tile[(y + 16u) * PITCH + d], v0, v1, v2, v3);
            b3 = add_dots(b3, o_tile[(y + 24u) * PITCH + d], v0, v1, v2, v3);
        }
        a0 = select(vec4f(0.0), exp(a0 - log_sum.x) * (b0 - row_dot.x), visible(t.x, start.x, s0, x));
        a1 = select(vec4f(0.0), exp(a1 - log_sum.y) * (b1 - row_dot.y), visible(t.y, start.y, s0, x));
        a2 = select(vec4f(0.0), exp(a2 - log_sum.z) * (b2 - row_dot.z), visible(t.z, start.z, s0, x));
        a3 = select(vec4f(0.0), exp(a3 - log_sum.w) * (b3 - row_dot.w), visible(t.w, start.w, s0, x));
        for (var j = 0u; j < 4u; j++) {
            let at = x / 4u + 2u * j;
            s_tile[y * 9u + at][x % 4u] = a0[j];
            s_tile[(y + 8u) * 9u + at][x % 4u] = a1[j];
            s_tile[(y + 16u) * 9u + at][x % 4u] = a2[j];
            s_tile[(y + 24u) * 9u + at][x % 4u] = a3[j];
        }
        workgroupBarrier();
        for (var k = 0u; k < 8u; k++) {
            let p0 = s_tile[y * 9u + k];
            let p1 = s_tile[(y + 8u) * 9u + k];
            let p2 = s_tile[(y + 16u) * 9u + k];
            let p3 = s_tile[(y + 24u) * 9u + k];
            let row = 4u * k * PITCH;
            let v0 = k_tile[row + x0];
            let v1 = k_tile[row + PITCH + x0];
            let v2 = k_tile[row + 2u * PITCH + x0];
            let v3 = k_tile[row + 3u * PITCH + x0];
            o0 = add_rows(o0, p0, v0, v1, v2, v3);
            o1 = add_rows(o1, p1, v0, v1, v2, v3);
            o2 = add_rows(o2, p2, v0, v1, v2, v3);
            o3 = add_rows(o3, p3, v0, v1, v2, v3);
            if (VEC > 8u) {
                let w0 = k_tile[row + x1];
                let w1 = k_tile[row + PITCH + x1];
                let w2 = k_tile[row + 2u * PITCH + x1];
                let w3 = k_tile[row + 3u * PITCH + x1];
                e0 = add_rows(e0, p0, w0, w1, w2, w3);
                e1 = add_rows(e1, p1, w0, w1, w2, w3);
                e2 = add_rows(e2, p2, w0, w1, w2, w3);
                e3 = add_rows(e3, p3, w0, w1, w2, w3);
            }
        }
    }
    let c = args.scale;
    put_row(t.x < args.T, (n0 + t.x) * stride + head * VEC, x, o0 * c, e0 * c);
    put_row(t.y < args.T, (n0 + t.y) * stride + head * VEC, x, o1 * c, e1 * c);
    put_row(t.z < args.T, (n0 + t.z) * stride + head * VEC, x, o2 * c, e2 * c);
    put_row(t.w < args.T, (n0 + t.w) * stride + head * VEC, x, o3 * c, e3 * c);
}

// Write one row's columns x and x + 8; first is where the row's part begins.
fn put_row(inside: bool, first: u32, x: u32, a: vec4f, b: vec4f) {
    if (!inside) { return; }
    let at = first + x;
    if (x < VEC) { dqkv[at] = a; }
    if (x + 8u < VEC) { dqkv[at + 8u] = b; }
}

fn key_block(lane: u32, index: u32) {
    let s0 = index % args.blocks * 32u; // the first keys have most queries: the longest first
    let bh = index / args.blocks;
    let head = bh % args.H;
    let T = args.T;
    let n0 = bh / args.H * T;
    let y = lane / 8u;
    let x = lane % 8u;
    let stride = 3u * args.C / 4u;
    let width = args.C / 4u;
    for (var i = lane; i < 32u * VEC; i += 64u) {
        let row = i / VEC;
        let at = (n0 + min(s0 + row, T - 1u)) * stride + width + head * VEC + i % VEC;
        k_tile[row * PITCH + i % VEC] = qkv[at];
        v_tile[row * PITCH + i % VEC] = qkv[at + width];
    }
    let x0 = min(x, VEC - 1u);
    let x1 = min(x + 8u, VEC - 1u);
    // this lane's keys are y * 4 .. y * 4 + 3: dk and dv in columns x and x + 8
    var k0 = vec4f(0.0); var k1 = vec4f(0.0); var k2 = vec4f(0.0); var k3 = vec4f(0.0);
    var v0 = vec4f(0.0); var v1 = vec4f(0.0); var v2 = vec4f(0.0); var v3 = vec4f(0.0);
    var l0 = vec4f(0.0); var l1 = vec4f(0.0); var l2 = vec4f(0.0); var l3 = vec4f(0.0);
    var w0 = vec4f(0.0); var w1 = vec4f(0.0); var w2 = vec4f(0.0); var w3 = vec4f(0.0);
    for (var t0 = s0; t0 < T; t0 += 32u) {
        if (u32(starts[n0 + t0]) > s0 + 31u) { break; } // these queries, and all after them, are in later segments
        workgroupBarrier();
        for (var i = lane; i < 32u * VEC; i += 64u) {
            let row = i / VEC;
            let n = n0 + min(t0 + row, T - 1u);
            q_tile[row * PITCH + i % VEC] = qkv[n * stride + head * VEC + i % VEC] * args.scale;
            o_tile[row * PITCH + i % VEC] = dout[n * width + head * VEC + i % VEC];
        }
        workgroupBarrier();
        put_delta_parts(y, x, t0, n0, head);
        // zeroed by hand: wgpu 0.32 (naga) zeroes a variable without a value once, not at every turn of the loop
        var a = array<vec4f, 4>(vec4f(0.0), vec4f(0.0), vec4f(0.0), vec4f(0.0)); // scores
        var b = array<vec4f, 4>(vec4f(0.0), vec4f(0.0), vec4f(0.0), vec4f(0.0)); // dP
        for (var d = 0u; d < VEC; d++) {
            let c0 = k_tile[x * PITCH + d];
            let c1 = k_tile[(x + 8u) * PITCH + d];
            let c2 = k_tile[(x + 16u) * PITCH + d];
            let c3 = k_tile[(x + 24u) * PITCH + d];
            a[0] = add_dots(a[0], q_tile[y * PITCH + d], c0, c1, c2, c3);
            a[1] = add_dots(a[1], q_tile[(y + 8u) * PITCH + d], c0, c1, c2, c3);
            a[2] = add_dots(a[2], q_tile[(y + 16u) * PITCH + d], c0, c1, c2, c3);
            a[3] = add_dots(a[3], q_tile[(y + 24u) * PITCH + d], c0, c1, c2, c3);
            let d0 = v_tile[x * PITCH + d];
            let d1 = v_tile[(x + 8u) * PITCH + d];
            let d2 = v_tile[(x + 16u) * PITCH + d];
            let d3 = v_tile[(x + 24u) * PITCH + d];
            b[0] = add_dots(b[0], o_tile[y * PITCH + d], d0, d1, d2, d3);
            b[1] = add_dots(b[1], o_tile[(y + 8u) * PITCH + d], d0, d1, d2, d3);
            b[2] = add_dots(b[2], o_tile[(y + 16u) * PITCH + d], d0, d1, d2, d3);
            b[3] = add_dots(b[3], o_tile[(y + 24u) * PITCH + d], d0, d1, d2, d3);
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i++) {
            let t = t0 + y + 8u * i;
            let at = min(t, T - 1u);
            let seen = visible(t, u32(starts[n0 + at]), s0, x) & vec4<bool>(t < T);
            let p = select(vec4f(0.0), exp(a[i] - saved_lse[bh * T + at]), seen);
            let ds = p * (b[i] - total(y + 8u * i));
            for (var j = 0u; j < 4u; j++) {
                p_tile[(y + 8u * i) * 9u + x / 4u + 2u * j][x % 4u] = p[j];
                s_tile[(y + 8u * i) * 9u + x / 4u + 2u * j][x % 4u] = ds[j];
            }
        }
        workgroupBarrier();
        for (var q = 0u; q < 32u; q++) {
            let p = p_tile[q * 9u + y];
            let s = s_tile[q * 9u + y];
            let o = o_tile[q * PITCH + x0];
            let c = q_tile[q * PITCH + x0];
            v0 = fma(vec4f(p.x), o, v0); k0 = fma(vec4f(s.x), c, k0);
            v1 = fma(vec4f(p.y), o, v1); k1 = fma(vec4f(s.y), c, k1);
            v2 = fma(vec4f(p.z), o, v2); k2 = fma(vec4f(s.z), c, k2);
            v3 = fma(vec4f(p.w), o, v3); k3 = fma(vec4f(s.w), c, k3);
            if (VEC > 8u) {
                let r = o_tile[q * PITCH + x1];
                let u = q_tile[q * PITCH + x1];
                w0 = fma(vec4f(p.x), r, w0); l0 = fma(vec4f(s.x), u, l0);
                w1 = fma(vec4f(p.y), r, w1); l1 = fma(vec4f(s.y), u, l1);
                w2 = fma(vec4f(p.z), r, w2); l2 = fma(vec4f(s.z), u, l2);
                w3 = fma(vec4f(p.w), r, w3); l3 = fma(vec4f(s.w), u, l3);
            }
        }
    }
    let row = s0 + y * 4u;
    let at = (n0 + row) * stride + width + head * VEC;
    put_row(row < T, at, x, k0, l0);
    put_row(row + 1u < T, at + stride, x, k1, l1);
    put_row(row + 2u < T, at + 2u * stride, x, k2, l2);
    put_row(row + 3u < T, at + 3u * stride, x, k3, l3);
    put_row(row < T, at + width, x, v0, w0);
    put_row(row + 1u < T, at + stride + width, x, v1, w1);
    put_row(row + 2u < T, at + 2u * stride + width, x, v2, w2);
    put_row(row + 3u < T, at + 3u * stride + width, x, v3, w3);
}
