// attention_parts: small products, the mask and sums of rows for the tiles of attention_tile.wgsl and attention_backward_tile.wgsl.

var<workgroup> row_tile: array<vec4f, 32u * 2u>; // eight numbers a row, one from each lane that shares it

// s + q . k for four keys
fn add_dots(s: vec4f, q: vec4f, k0: vec4f, k1: vec4f, k2: vec4f, k3: vec4f) -> vec4f {
    var sum = fma(vec4f(q.x), vec4f(k0.x, k1.x, k2.x, k3.x), s);
    sum = fma(vec4f(q.y), vec4f(k0.y, k1.y, k2.y, k3.y), sum);
    sum = fma(vec4f(q.z), vec4f(k0.z, k1.z, k2.z, k3.z), sum);
    return fma(vec4f(q.w), vec4f(k0.w, k1.w, k2.w, k3.w), sum);
}

// o + sum_j p[j] v[j]
fn add_rows(o: vec4f, p: vec4f, v0: vec4f, v1: vec4f, v2: vec4f, v3: vec4f) -> vec4f {
    return fma(vec4f(p.w), v3, fma(vec4f(p.z), v2, fma(vec4f(p.y), v1, fma(vec4f(p.x), v0, o))));
}

// Which of the keys s0 + x, + 8, + 16, + 24 query t may see.
fn visible(t: u32, start: u32, s0: u32, x: u32) -> vec4<bool> {
    let s = vec4u(s0 + x) + vec4u(0u, 8u, 16u, 24u);
    return (s <= vec4u(t)) & (s >= vec4u(start));
}

fn total(row: u32) -> f32 {
    let four = row_tile[row * 2u] + row_tile[row * 2u + 1u];
    return (four.x + four.y) + (four.z + four.w);
}
