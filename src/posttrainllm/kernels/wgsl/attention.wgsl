// attention: causal self-attention over segments, a head at a time, without a T x T buffer. Any head size up to 256.
//   forward    score[t,s] = q[t] . k[s] / sqrt(D) for segment_start[t] <= s <= t;   lse[t] = log sum_s exp(score[t,s])
//              out[t] = sum_s exp(score[t,s] - lse[t]) v[s];   saves lse
//   derive     P = exp(score - lse);   dP[t,s] = dout[t] . v[s];   d score[t,s] = P[t,s] (dP[t,s] - delta[t]),
//              delta[t] = sum_s P[t,s] dP[t,s] = dout[t] . out[t]
//   backward   dq[t] = sum_s dscore[t,s] k[s] / sqrt(D);   dk[s] = sum_t dscore[t,s] q[t] / sqrt(D);   dv[s] = sum_t P[t,s] dout[t]
// qkv is (B*T, 3 C): q, k and v of all heads, side by side. A workgroup of 64 lanes takes one row of one head: a lane scores every 64th key
// and owns columns lane, lane + 64, ... of the result. The largest score so far and the sum below it move along (online softmax), so exp's
// argument is never above 0, up to rounding. Backward: delta first, then dq by rows of queries and dk, dv by rows of keys: no atomics, a fixed order.
// These take any shape and are the decoding kernels; attention_tile.wgsl has the fast ones. Source: Dao 2023, FlashAttention-2.

struct Args { T: u32, C: u32, H: u32, D: u32, S: u32, count: u32 } // count: rows of all heads

override CACHED: u32 = 0u; // keys and values lie in the cache, and ids are positions; otherwise in qkv, and ids are segment_start

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read_write> lse: array<f32>;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> source: array<f32>;
@group(0) @binding(4) var<storage, read> ids: array<i32>;
@group(0) @binding(5) var<uniform> args: Args;

const LOWEST = -3.0e38; // below every score, and its distance to one is still finite

var<workgroup> query: array<f32, 256>;
var<workgroup> second: array<f32, 256>;
var<workgroup> scores: array<f32, 64>;
var<workgroup> weights: array<f32, 64>;

@compute @workgroup_size(64)
fn attention_forward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = min(group.x + group.y * groups.x, args.count - 1u); // workgroups past the end repeat the last row
    let n = index / args.H;
    let head = index % args.H;
    let b = n / args.T;
    let D = args.D;
    for (var d = lane; d < D; d += 64u) { query[d] = qkv[n * 3u * args.C + head * D + d]; }
    workgroupBarrier();
    // where key s of this row's head begins, and its value
    var key0 = b * args.T * 3u * args.C + args.C + head * D;
    var value0 = key0 + args.C;
    var stride = 3u * args.C;
    var begin = u32(ids[n]);
    var end = n % args.T + 1u;
    if (CACHED == 1u) {
        key0 = b * args.S * args.C + head * D;
        value0 = key0 + args.count / (args.T * args.H) * args.S * args.C;
        stride = args.C;
        begin = 0u;
        end = u32(ids[n]) + 1u;
    }
    let scale = 1.0 / sqrt(f32(D));
    var top = LOWEST;
    var sum = 0.0;
    var acc = vec4f(0.0);
    for (var s0 = begin; s0 < end; s0 += 64u) {
        var score = LOWEST;
        if (s0 + lane < end) {
            score = 0.0;
            for (var d = 0u; d < D; d++) { score = fma(query[d], source[key0 + (s0 + lane) * stride + d], score); }
            score *= scale;
        }
        scores[lane] = score;
        workgroupBarrier();
        var higher = top;
        for (var i = 0u; i < 64u; i++) { higher = max(higher, scores[i]); }
        weights[lane] = exp(score - higher);
        workgroupBarrier();
        let factor = exp(top - higher);
        top = higher;
        sum *= factor;
        acc *= factor;
        for (var i = 0u; i < min(64u, end - s0); i++) {
            sum += weights[i];
            let at = value0 + (s0 + i) * stride;
            if (lane < D) { acc.x = fma(weights[i], source[at + lane], acc.x); }
            if (lane + 64u < D) { acc.y = fma(weights[i], source[at + lane + 64u], acc.y); }
            if (lane + 128u < D) { acc.z = fma(weights[i], source[at + lane + 128u], acc.z); }
            if (lane + 192u < D) { acc.w = fma(weights[i], source[at + lane + 192u], acc.w); }
        }
    }
    acc /= sum;
    let at = n * args.C + head * D + lane;
    if (lane < D) { out[at] = acc.x; }
    if (lane + 64u < D) { out[at + 64u] = acc.y; }
    if (lane + 128u < D) { out[at + 128u] = acc.z; }
    if (lane + 192u < D) { out[at + 192u] = acc.w; }
    if (lane == 0u) { lse[(b * args.H + head) * args.T + n % args.T] = top + log(sum); }
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

@group(0) @binding(0) var<storage, read_write> new_delta: array<f32>; // (B, H, T)
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> saved_out: array<f32>;
@group(0) @binding(3) var<uniform> delta_args: Args;

@compute @workgroup_size(64)
fn attention_backward_delta(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = (group.x + group.y * groups.x) * 64u + lane;
    if (index >= delta_args.count) { return; }
    let n = index / delta_args.H;
    let head = index % delta_args.H;
    var sum = 0.0;
    let at = n * delta_args.C + head * delta_args.D;
    for (var d = 0u; d < delta_args.D; d++) { sum = fma(dout[at + d], saved_out[at + d], sum); }
    new_delta[(n / delta_args.T * delta_args.H + head) * delta_args.T + n % delta_args.T] = sum;
}

@group(0) @binding(0) var<storage, read_write> dqkv: array<f32>;
@group(0) @binding(3) var<storage, read> saved_lse: array<f32>;
@group(0) @binding(4) var<storage, read> segment_start: array<i32>;
@group(0) @binding(5) var<storage, read> delta: array<f32>;
@group(0) @binding(6) var<uniform> backward: Args;

// dq of one row: the loop of the forward pass, with weights known.
@compute @workgroup_size(64)
fn attention_backward_query(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = min(group.x + group.y * groups.x, backward.count - 1u);
    let n = index / backward.H;
    let head = index % backward.H;
    let D = backward.D;
    let stride = 3u * backward.C;
    for (var d = lane; d < D; d += 64u) {
        query[d] = qkv[n * stride + head * D + d];
        second[d] = dout[n * backward.C + head * D + d];
    }
    workgroupBarrier();
    let t = n % backward.T;
    let row = (n / backward.T * backward.H + head) * backward.T + t;
    let key0 = n / backward.T * backward.T * stride + backward.C + head * D;
    let scale = 1.0 / sqrt(f32(D));
    var acc = vec4f(0.0);
    for (var s0 = u32(segment_start[n]); s0 <= t; s0 += 64u) {
        var ds = 0.0;
        if (s0 + lane <= t) {
            let at = key0 + (s0 + lane) * stride;
            var score = 0.0;
            var dp = 0.0;
            for (var d = 0u; d < D; d++) {
                score = fma(query[d], qkv[at + d], score);
                dp = fma(second[d], qkv[at + backward.C + d], dp);
            }
            ds = exp(score * scale - saved_lse[row]) * (dp - delta[row]) * scale;
        }
        scores[lane] = ds;
        workgroupBarrier();
        for (var i = 0u; i < min(64u, t + 1u - s0); i++) {
            let at = key0 + (s0 + i) * stride + lane;
            if (lane < D) { acc.x = fma(scores[i], qkv[at], acc.x); }
            if (lane + 64u < D) { acc.y = fma(scores[i], qkv[at + 64u], acc.y); }
            if (lane + 128u < D) { acc.z = fma(scores[i], qkv[at + 128u], acc.z); }
            if (lane + 192u < D) { acc.w = fma(scores[i], qkv[at + 192u], acc.w); }
        }
        workgroupBarrier();
    }
    let at = n * stride + head * D + lane;
    if (lane < D) { dqkv[at] = acc.x; }
    if (lane + 64u < D) { dqkv[at + 64u] = acc.y; }
    if (lane + 128u < D) { dqkv[at + 128u] = acc.z; }
    if (lane + 192u < D) { dqkv[at + 192u] = acc.w; }
}

// dk and dv of one row of keys: over all later queries that may look at it.
@compute @workgroup_size(64)
fn attention_backward_key(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let index = min(group.x + group.y * groups.x, backward.count - 1u);
    let n = index / backward.H;
    let head = index % backward.H;
    let D = backward.D;
    let stride = 3u * backward.C;
    for (var d = lane; d < D; d += 64u) {
        query[d] = qkv[n * stride + backward.C + head * D + d];       // k
        second[d] = qkv[n * stride + 2u * backward.C + head * D + d]; // v
    }
    workgroupBarrier();
    let s = n % backward.T;
    let n0 = n - s;
    let row0 = (n / backward.T * backward.H + head) * backward.T;
    let scale = 1.0 / sqrt(f32(D));
    var dk = vec4f(0.0);
    var dv = vec4f(0.0);
    for (var t0 = s; t0 < backward.T; t0 += 64u) {
        let t = t0 + lane;
        var p = 0.0;
        var ds = 0.0;
        if (t < backward.T && u32(segment_start[n0 + min(t, backward.T - 1u)]) <= s) {
            var score = 0.0;
            var dp = 0.0;
            for (var d = 0u; d < D; d++) {
                score = fma(query[d], qkv[(n0 + t) * stride + head * D + d], score);
                dp = fma(second[d], dout[(n0 + t) * backward.C + head * D + d], dp);
            }
            p = exp(score * scale - saved_lse[row0 + t]);
            ds = p * (dp - delta[row0 + t]) * scale;
        }
        weights[lane] = p;
        scores[lane] = ds;
        workgroupBarrier();
        for (var i = 0u; i < min(64u, backward.T - t0); i++) {
            let q_at = (n0 + t0 + i) * stride + head * D + lane;
            let o_at = (n0 + t0 + i) * backward.C + head * D + lane;
            if (lane < D) {
                dk.x = fma(scores[i], qkv[q_at], dk.x);
                dv.x = fma(weights[i], dout[o_at], dv.x);
            }
            if (lane + 64u < D) {
                dk.y = fma(scores[i], qkv[q_at + 64u], dk.y);
                dv.y = fma(weights[i], dout[o_at + 64u], dv.y);
            }
            if (lane + 128u < D) {
                dk.z = fma(scores[i], qkv[q_at + 128u], dk.z);
                dv.z = fma(weights[i], dout[o_at + 128u], dv.z);
            }
            if (lane + 192u < D) {
                dk.w = fma(scores[i], qkv[q_at + 192u], dk.w);
                dv.w = fma(weights[i], dout[o_at + 192u], dv.w);
            }
        }
        workgroupBarrier();
    }
    let at = n * stride + backward.C + head * D + lane;
    if (lane < D) {
        dqkv[at] = dk.x;
        dqkv[at + backward.C] = dv.x;
    }
    if (lane + 64u < D) {
        dqkv[at + 64u] = dk.y;
        dqkv[at + backward.C + 64u] = dv.y;
    }
    if (lane + 128u < D) {
        dqkv[at + 128u] = dk.z;
        dqkv[at + backward.C + 128u] = dv.z;
    }
    if (lane + 192u < D) {
        dqkv[at + 192u] = dk.w;
        dqkv[at + backward.C + 192u] = dv.w;
    }
}

// ---- the cache ------------------------------------------------------------------------------------------------------------------------

@group(0) @binding(0) var<storage, read_write> cache: array<f32>; // (2, B, S, C)
@group(0) @binding(1) var<storage, read> fresh: array<f32>;       // qkv
@group(0) @binding(2) var<storage, read> positions: array<i32>;
@group(0) @binding(3) var<uniform> append: Args;                  // count: B*T

// cache[0, b, positions[b, t]] = k[b, t];  cache[1, b, positions[b, t]] = v[b, t]; one invocation an element of k and v.
@compute @workgroup_size(256)
fn attention_append(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= append.count * 2u * append.C) { return; }
    let n = i / (2u * append.C);
    let c = i % (2u * append.C);
    let part = c / append.C * (append.count / append.T);
    let row = (part + n / append.T) * append.S + u32(positions[n]);
    cache[row * append.C + c % append.C] = fresh[n * 3u * append.C + append.C + c];
}
