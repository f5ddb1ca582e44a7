// gelu: x Phi(x), in GPT-2's tanh form (erf = 0) or with the exact Phi (erf = 1).
//   forward    0.5 (1 + tanh u) = 1 / (1 + exp(-2u)),  u = sqrt(2/pi) (x + 0.044715 x^3);   out = x s,  s = sigmoid(2u)
//   derive     d s / dx = 2 s (1 - s) u',  u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)
//   backward   dx = dout (s + 2 x s (1 - s) u')
//   erf form   Phi = 0.5 (1 + erf(x / sqrt 2));   dx = dout (Phi + x exp(-x^2/2) / sqrt(2 pi))
// x is clamped before it is cubed and u to +-40, so that nothing overflows: s is 0 or 1 there, to the last bit of float32. tanh itself is
// not used: WGSL allows it an error of 1e-5. erf is Abramowitz and Stegun 7.1.26, whose error of 1.5e-7 is one rounding of float32.
// The two functions stand in gelu_parts.wgsl. One invocation an element (or four: the vec4 variants).

struct Args { count: u32 }

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
