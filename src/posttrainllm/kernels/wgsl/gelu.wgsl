// gelu: x Phi(x), in GPT-2's tanh form (erf = 0) or with the exact Phi (erf = 1).
//   forward    0.5 (1 + tanh u) = 1 / (1 + exp(-2u)),  u = sqrt(2/pi) (x + 0.044715 x^3);   out = x s,  s = sigmoid(2u)
//   derive     d s / dx = 2 s (1 - s) u',  u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)
//   backward   dx = dout (s + 2 x s (1 - s) u')
//   erf form   Phi = 0.5 (1 + erf(x / sqrt 2));   dx = dout (Phi + x exp(-x^2/2) / sqrt(2 pi))
// x is clamped before it is cubed and u to +-40, so that nothing overflows: s is 0 or 1 there, to the last bit of float32. tanh itself is
// not used: WGSL allows it an error of 1e-5. erf is Abramowitz and Stegun 7.1.26, whose error of 1.5e-7 is one rounding of float32.
// One invocation an element (or four: the vec4 variants).

struct Args { count: u32 }

override ERF: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<uniform> args: Args;

@group(0) @binding(0) var<storage, read_write> out4: array<vec4f>;
@group(0) @binding(1) var<storage, read> x4: array<vec4f>;

@group(0) @binding(0) var<storage, read_write> dx: array<f32>;
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> saved: array<f32>;
@group(0) @binding(3) var<uniform> backward: Args;

@group(0) @binding(0) var<storage, read_write> dx4: array<vec4f>;
@group(0) @binding(1) var<storage, read> dout4: array<vec4f>;
@group(0) @binding(2) var<storage, read> saved4: array<vec4f>;

const SCALE = 0.7978845608028654; // sqrt(2/pi)
const CUBIC = 0.044715;

fn sigmoid_of(x: vec4f) -> vec4f {
    let near = clamp(x, vec4f(-20.0), vec4f(20.0));
    let u = clamp(SCALE * (near + CUBIC * near * near * near), vec4f(-40.0), vec4f(40.0));
    return 1.0 / (1.0 + exp(-2.0 * u));
}

fn phi(x: vec4f) -> vec4f {
    let z = min(abs(x) * 0.7071067811865476, vec4f(9.0));
    let t = 1.0 / (1.0 + 0.3275911 * z);
    let series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    let upper = 0.5 * series * exp(-z * z); // 1 - Phi(|x|)
    return select(1.0 - upper, upper, x < vec4f(0.0));
}

fn gelu(x: vec4f) -> vec4f {
    if (ERF == 1u) { return x * phi(x); }
    return x * sigmoid_of(x);
}

// Clamps swallow a NaN; a bad x has to reach the gradient's norm.
fn keep_nan(value: vec4f, x: vec4f) -> vec4f {
    return select(value, x, (bitcast<vec4u>(x) & vec4u(0x7fffffffu)) > vec4u(0x7f800000u));
}

fn slope(x: vec4f) -> vec4f {
    let near = clamp(x, vec4f(-20.0), vec4f(20.0)); // beyond, the second term is 0
    if (ERF == 1u) { return keep_nan(phi(x) + near * exp(-0.5 * near * near) * 0.3989422804014327, x); }
    let s = sigmoid_of(x);
    return keep_nan(s + 2.0 * near * s * (1.0 - s) * SCALE * (1.0 + 3.0 * CUBIC * near * near), x);
}

@compute @workgroup_size(256)
fn gelu_forward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= args.count) { return; }
    out[i] = gelu(vec4f(x[i])).x;
}

@compute @workgroup_size(256)
fn gelu_forward_vec4(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= args.count) { return; }
    out4[i] = gelu(x4[i]);
}

@compute @workgroup_size(256)
fn gelu_backward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= backward.count) { return; }
    dx[i] = dout[i] * slope(vec4f(saved[i])).x;
}

@compute @workgroup_size(256)
fn gelu_backward_vec4(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= backward.count) { return; }
    dx4[i] = dout4[i] * slope(saved4[i]);
}
