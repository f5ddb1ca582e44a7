// gelu_parts: gelu and its slope on four numbers; gelu.wgsl says why they are written so.

override ERF: u32 = 0u;

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
