// attention in tiles (FlashAttention-2): the same mathematics as attention.wgsl, 32 queries by 32 keys at a time.
//   forward   a workgroup keeps 32 queries and walks over the keys up to them; of the scores only this tile ever exists
// The backward pass stands in attention_backward_tile.wgsl, what both share in attention_parts.wgsl.
// 64 lanes: lane (y, x) scores queries y, y+8, y+16, y+24 against keys x, x+8, x+16, x+24 (rows that far apart lie in different banks) and owns
// column x (and x+8) of the results, in vec4s. Weights go from lane to lane through workgroup memory. Blocks of keys that the causal mask or
// the segments hide wholly are skipped; segment_start never falls within a row of the batch. Head sizes: multiples of four up to 64.
// A lane's sum of weights is its own until the end, since all lanes of a row scale it by the same factor.

struct Args { T: u32, C: u32, H: u32, blocks: u32, count: u32, scale: f32 } // blocks of a row, blocks of all heads, 1 / sqrt(D)

override VEC: u32 = 8u;        // vec4s a head
override PITCH: u32 = 9u;      // VEC + 1
override KEY_PITCH: u32 = 9u;  // that, or 9 where it is less: the weights of the forward pass take the keys' place

@group(0) @binding(0) var<storage, read_write> out: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> lse: array<f32>;
@group(0) @binding(2) var<storage, read> qkv: array<vec4f>;
@group(0) @binding(3) var<storage, read> segment_start: array<i32>;
@group(0) @binding(4) var<uniform> args: Args;

const LOWEST = -3.0e38;

var<workgroup> q_tile: array<vec4f, 32u * PITCH>;
var<workgroup> k_tile: array<vec4f, 32u * KEY_PITCH>;
var<workgroup> v_tile: array<vec4f, 32u * PITCH>;

fn largest(row: u32) -> f32 {
    let four = max(row_tile[row * 2u], row_tile[row * 2u + 1u]);
    return max(max(four.x, four.y), max(four.z, four.w));
}

@compute @workgroup_size(64)
fn attention_forward_tile(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = group.x + group.y * groups.x;
    if (index >= args.count) { return; }
    let block = args.blocks - 1u - index % args.blocks; // the longest first
    let bh = index / args.blocks;
    let head = bh % args.H;
    let n0 = bh / args.H * args.T;
    let y = lane / 8u;
    let x = lane % 8u;
    let t0 = block * 32u;
    let stride = 3u * args.C / 4u;
    for (var i = lane; i < 32u * VEC; i += 64u) {
        let row = i / VEC;
        let n = n0 + min(t0 + row, args.T - 1u);
        q_tile[row * PITCH + i % VEC] = qkv[n * stride + head * VEC + i % VEC] * args.scale;
    }
    let t = vec4u(t0 + y) + vec4u(0u, 8u, 16u, 24u);
    var start: vec4u;
    for (var i = 0u; i < 4u; i++) { start[i] = u32(segment_start[n0 + min(t[i], args.T - 1u)]); }
    let x0 = min(x, VEC - 1u);
    let x1 = min(x + 8u, VEC - 1u);
    var top = vec4f(LOWEST);
    var sum = vec4f(0.0);
    var o0 = vec4f(0.0); var o1 = vec4f(0.0); var o2 = vec4f(0.0); var o3 = vec4f(0.0);
    var e0 = vec4f(0.0); var e1 = vec4f(0.0); var e2 = vec4f(0.0); var e3 = vec4f(0.0); // the second column
    for (var s0 = u32(segment_start[n0 + t0]) / 32u * 32u; s0 <= t0; s0 += 32u) {
        workgroupBarrier();
        for (var i = lane; i < 32u * VEC; i += 64u) {
            let row = i / VEC;
            let at = (n0 + min(s0 + row, args.T - 1u)) * stride + args.C / 4u + head * VEC + i % VEC;
            k_tile[row * KEY_PITCH + i % VEC] = qkv[at];
            v_tile[row * PITCH + i % VEC] = qkv[at + args.C / 4u];
        }
        workgroupBarrier();
        var a0 = vec4f(0.0); var a1 = vec4f(0.0); var a2 = vec4f(0.0); var a3 = vec4f(0.0);
        for (var d = 0u; d < VEC; d++) {
            let k0 = k_tile[x * KEY_PITCH + d];
            let k1 = k_tile[(x + 8u) * KEY_PITCH + d];
            let k2 = k_tile[(x + 16u) * KEY_PITCH + d];
            let k3 = k_tile[(x + 24u) * KEY_PITCH + d];
            a0 = add_dots(a0, q_tile[y * PITCH + d], k0, k1, k2, k3);
            a1 = add_dots(a1, q_tile[(y + 8u) * PITCH + d], k0, k1, k2, k3);
            a2 = add_dots(a2, q_tile[(y + 16u) * PITCH + d], k0, k1, k2, k3);
            a3 = add_dots(a3, q_tile[(y + 24u) * PITCH + d], k0, k1, k2, k3);
        }
        let m0 = visible(t.x, start.x, s0, x);
        let m1 = visible(t.y, start.y, s0, x);
        let m2 = visible(t.z, start.z, s0, x);
        let m3 = visible(t.w, start.w, s0, x);
        a0 = select(vec4f(LOWEST), a0, m0);
        a1 = select(vec4f(LOWEST), a1, m1);
        a2 = select(vec4f(LOWEST), a2, m2);
        a3 = select(vec4f(LOWEST), a3, m3);
        row_tile[y * 2u + x / 4u][x % 4u] = max(max(a0.x, a0.y), max(a0.z, a0.w));
        row_tile[(y + 8u) * 2u + x / 4u][x % 4u] = max(max(a1.x, a1.y), max(a1.z, a1.w));
        row_tile[(y + 16u) * 2u + x / 4u][x % 4u] = max(max(a2.x, a2.y), max(a2.z, a2.w));
        row_tile[(y + 24u) * 2u + x / 4u][x % 4u] = max(max(a3.x, a3.y), max(a3.z, a3.w));
        workgroupBarrier();
        let higher = max(top, vec4f(largest(y), largest(y + 8u), largest(y + 16u), largest(y + 24u)));
        let factor = exp(top - higher);
        top = higher;
        a0 = select(vec4f(0.0), exp(a0 - top.x), m0);
        a1 = select(vec4f(0.0), exp(a1 - top.y), m1);
        a2 = select(vec4f(0.0), exp(a2 - top.z), m2);
        a3 = select(vec4f(0.0), exp(a3 - top.w), m3);
        let ones = vec4f(1.0);
        sum = sum * factor + vec4f(dot(a0, ones), dot(a1, ones), dot(a2, ones), dot(a3, ones));
        for (var j = 0u; j < 4u; j++) {
            let at = x / 4u + 2u * j;
            k_tile[y * KEY_PITCH + at][x % 4u] = a0[j];
            k_tile[(y + 8u) * KEY_PITCH + at][x % 4u] = a1[j];
            k_tile[(y + 16u) * KEY_PITCH + at][x % 4u] = a2[j];
            k_tile[(y + 24u) * KEY_PITCH + at][x % 4u] = a3[j];
        }
        workgroupBarrier();
        o0 *= factor.x; o1 *= factor.y; o2 *= factor.z; o3 *= factor.w;
        e0 *= factor.x; e1 *= factor.y; e2 *= factor.z; e3 *= factor.w;
        for (var k = 0u; k < 8u; k++) {
            let p0 = k_tile[y * KEY_PITCH + k];
            let p1 = k_tile[(y + 8u) * KEY_PITCH + k];
            let p2 = k_tile[(y + 16u) * KEY_PITCH + k];
            let p3 = k_tile[(y + 24u) * KEY_PITCH + k];
            let row = 4u * k * PITCH;
            let v0 = v_tile[row + x0];
            let v1 = v_tile[row + PITCH + x0];
            let v2 = v_tile[row + 2u * PITCH + x0];
            let v3 = v_tile[row + 3u * PITCH + x0];
            o0 = add_rows(o0, p0, v0, v1, v2, v3);
            o1 = add_rows(o1, p1, v0, v1, v2, v3);
            o2 = add_rows(o2, p2, v0, v1, v2, v3);
            o3 = add_rows(o3, p3, v0, v1, v2, v3);
            if (VEC > 8u) {
                let w0 = v_tile[row + x1];
                let w1 = v_tile[row + PITCH + x1];
                let w2 = v_tile[row + 2u * PITCH + x1];
                let w3 = v_tile[row + 3u * PITCH + x1];
                e0 = add_rows(e0, p0, w0, w1, w2, w3);
                e1 = add_rows(e1, p1, w0, w1, w2, w3);
                e2 = add_rows(e2, p2, w0, w1, w2, w3);
                e3 = add_rows(e3, p3, w0, w1, w2, w3);
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) { row_tile[(y + 8u * i) * 2u + x / 4u][x % 4u] = sum[i]; }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        if (t[i] >= args.T) { continue; }
        let all = total(y + 8u * i);
        let at = (n0 + t[i]) * (args.C / 4u) + head * VEC;
        var o = o0;
        var e = e0;
        if (i == 1u) { o = o1; e = e1; }
        if (i == 2u) { o = o2; e = e2; }
        if (i == 3u) { o = o3; e = e3; }
        if (x < VEC) { out[at + x] = o / all; }
        if (x + 8u < VEC) { out[at + x + 8u] = e / all; }
        if (x == 0u) { lse[bh * args.T + t[i]] = top[i] + log(all); }
    }
}
