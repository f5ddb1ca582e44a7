// layernorm_parts: sums over the 32 lanes of a row, and dx of 8 rows, for layernorm.wgsl and layernorm_merged.wgsl. The operands have one name in
// both: dx, dout, saved_x, scale, saved_mean, saved_rstd, and args with N and C.

override ACCUMULATE: u32 = 0u; // 0 write, 1 add, 2 write where scalars.beta is 0 and add otherwise

var<workgroup> partial: array<array<vec4f, 8>, 8>;
var<workgroup> partial2: array<array<vec4f, 8>, 8>;

fn total(values: array<vec4f, 8>) -> f32 {
    let four = ((values[0] + values[1]) + (values[2] + values[3])) + ((values[4] + values[5]) + (values[6] + values[7]));
    return (four.x + four.y) + (four.z + four.w);
}

// dx of the rows from group * 8 on.
fn backward_rows(group: u32, local: vec2u) {
    let n = group * 8u + local.y;
    let at = min(n, args.N - 1u);
    let row = at * args.C;
    let m = saved_mean[at];
    let r = saved_rstd[at];
    var sum = 0.0;
    var along = 0.0;
    for (var c = local.x; c < args.C; c += 32u) {
        let g = dout[row + c] * scale[c];
        sum += g;
        along += g * ((saved_x[row + c] - m) * r);
    }
    partial[local.y][local.x / 4u][local.x % 4u] = sum;
    partial2[local.y][local.x / 4u][local.x % 4u] = along;
    workgroupBarrier();
    let mean_g = total(partial[local.y]) / f32(args.C);
    let mean_along = total(partial2[local.y]) / f32(args.C);
    if (n >= args.N) { return; }
    for (var c = local.x; c < args.C; c += 32u) {
        let g = dout[row + c] * scale[c];
        let value = (g - mean_g - (saved_x[row + c] - m) * r * mean_along) * r;
        if (ACCUMULATE == 1u) { dx[row + c] += value; } else { dx[row + c] = value; }
    }
}
