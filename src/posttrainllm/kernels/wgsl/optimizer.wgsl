// optimizer: sum of squares, clipping by the global norm, AdamW with decoupled decay.
//   sum_squares    out = sum_p x[p]^2: a slice a workgroup into workspace, then one workgroup adds the slices in order
//   gradient_clip  norm = sqrt(decayed + plain);   scale = clip_norm / norm where norm > clip_norm > 0, else 1;   nonfinite is sticky
//   adamw_step     g = grad scale;   m = beta1 m + (1-beta1) g;   v = beta2 v + (1-beta2) g^2
//                  param -= lr (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay param);   nothing where nonfinite is set
// A square that overflows or a NaN shows in the exponent bits of the sum; comparing numbers would not do, since WGSL may assume that all
// are finite. One invocation an element (or four). Source: Loshchilov and Hutter 2019; Pascanu et al. 2013.

struct SquaresArgs { P: u32, span: u32, first: u32, slices: u32 }

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> squares: SquaresArgs;

// Sum of squares of slice group.x, ``span`` numbers long, into out[first + group.x].
@compute @workgroup_size(256)
fn sum_squares(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    let end = min(squares.P, (group.x + 1u) * squares.span);
    var sum = 0.0;
    for (var p = group.x * squares.span + lane; p < end; p += 256u) { sum = fma(x[p], x[p], sum); }
    sum = sum_lanes(lane, sum);
    if (lane == 0u) { out[squares.first + group.x] = sum; }
}

@compute @workgroup_size(256)
fn sum_squares_slices(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var i = lane; i < squares.slices; i += 256u) { sum += x[i]; }
    sum = sum_lanes(lane, sum);
    if (lane == 0u) { out[0] = sum; }
}

struct ClipArgs { clip_norm: f32 }

@group(0) @binding(0) var<storage, read_write> clip: array<f32, 4>;
@group(0) @binding(1) var<storage, read> decayed: array<f32>;
@group(0) @binding(2) var<storage, read> plain: array<f32>;
@group(0) @binding(3) var<uniform> clip_args: ClipArgs;

fn clip_by(sum: f32, clip_norm: f32) {
    let infinite = (bitcast<u32>(sum) & 0x7f800000u) == 0x7f800000u;
    if (infinite) {
        let overflowed = (bitcast<u32>(sum) & 0x007fffffu) == 0u; // clip_norm / infinity is 0
        clip[0] = sum;
        clip[1] = select(1.0, 0.0, overflowed && clip_norm > 0.0);
        clip[2] = 1.0;
        return;
    }
    let norm = sqrt(sum);
    clip[0] = norm;
    if (clip_norm > 0.0 && norm > clip_norm) { clip[1] = clip_norm / norm; } else { clip[1] = 1.0; }
}

@compute @workgroup_size(1)
fn gradient_clip() { clip_by(decayed[0] + plain[0], clip_args.clip_norm); }

// Both parts of the gradients in one dispatch, then their sums and the clip in another.
struct BothArgs { decayed: u32, plain: u32, span: u32, decayed_slices: u32, slices: u32, clip_norm: f32 }

@group(0) @binding(1) var<storage, read> decayed_grad: array<f32>;
@group(0) @binding(2) var<storage, read> plain_grad: array<f32>;
@group(0) @binding(3) var<uniform> both: BothArgs;

@compute @workgroup_size(256)
fn sum_squares_merged(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u) {
    var sum = 0.0;
    if (group.x < both.decayed_slices) {
        let end = min(both.decayed, (group.x + 1u) * both.span);
        for (var p = group.x * both.span + lane; p < end; p += 256u) { sum = fma(decayed_grad[p], decayed_grad[p], sum); }
    } else {
        let slice = group.x - both.decayed_slices;
        let end = min(both.plain, (slice + 1u) * both.span);
        for (var p = slice * both.span + lane; p < end; p += 256u) { sum = fma(plain_grad[p], plain_grad[p], sum); }
    }
    sum = sum_lanes(lane, sum);
    if (lane == 0u) { out[group.x] = sum; }
}

@group(0) @binding(1) var<storage, read> both_sums: array<f32>;
@group(0) @binding(2) var<uniform> clip_both: BothArgs;

@compute @workgroup_size(256)
fn gradient_clip_merged(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var i = lane; i < clip_both.slices; i += 256u) { sum += both_sums[i]; }
    sum = sum_lanes(lane, sum);
    if (lane == 0u) { clip_by(sum, clip_both.clip_norm); }
}

struct AdamArgs { P: u32, beta1: f32, rest1: f32, beta2: f32, rest2: f32, eps: f32, weight_decay: f32 } // rest = 1 - beta

@group(0) @binding(0) var<storage, read_write> param: array<f32>;
@group(0) @binding(1) var<storage, read_write> m: array<f32>;
@group(0) @binding(2) var<storage, read_write> v: array<f32>;
@group(0) @binding(3) var<storage, read> grad: array<f32>;
@group(0) @binding(4) var<storage, read> state: array<f32, 4>;
@group(0) @binding(5) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(6) var<uniform> adam: AdamArgs;

@group(0) @binding(0) var<storage, read_write> param4: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> m4: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> v4: array<vec4f>;
@group(0) @binding(3) var<storage, read> grad4: array<vec4f>;

struct Moved { param: vec4f, m: vec4f, v: vec4f }

fn step(param: vec4f, m: vec4f, v: vec4f, grad: vec4f) -> Moved {
    let g = grad * state[1];
    let new_m = adam.beta1 * m + adam.rest1 * g;
    let new_v = adam.beta2 * v + adam.rest2 * g * g;
    let change = new_m / scalars[3] / (sqrt(new_v / scalars[4]) + adam.eps) + adam.weight_decay * param;
    return Moved(param - scalars[2] * change, new_m, new_v);
}

@compute @workgroup_size(256)
fn adamw_step(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let p = (group.x + group.y * groups.x) * 256u + lane;
    if (p >= adam.P || state[2] != 0.0) { return; }
    let moved = step(vec4f(param[p]), vec4f(m[p]), vec4f(v[p]), vec4f(grad[p]));
    param[p] = moved.param.x;
    m[p] = moved.m.x;
    v[p] = moved.v.x;
}

@compute @workgroup_size(256)
fn adamw_step_vec4(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let p = (group.x + group.y * groups.x) * 256u + lane;
    if (p >= adam.P / 4u || state[2] != 0.0) { return; }
    let moved = step(param4[p], m4[p], v4[p], grad4[p]);
    param4[p] = moved.param;
    m4[p] = moved.m;
    v4[p] = moved.v;
}
