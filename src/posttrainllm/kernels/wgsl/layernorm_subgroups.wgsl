// layernorm_subgroups: layernorm.wgsl's forward and input gradient with sums by subgroup instruction: LANES lanes a row, one row a workgroup.
//   forward    xhat = (x - mean) rstd;   out = xhat weight + bias;   rstd = 1 / sqrt(mean((x - mean)^2) + eps);   saves mean, rstd
//   backward   g = dout weight;   dx (+)= rstd (g - mean(g) - xhat mean(g xhat))
// A subgroup's first lane leaves its sum in workgroup memory, and every lane adds those up. Lanes are taken to lie in subgroups in order, as
// every driver lays a workgroup of one dimension; one that did not would fail the check at an adapter's first use.
// A browser's host puts ``enable subgroups;`` in front; wgpu takes the functions without and does not know the line.

struct Args { N: u32, C: u32, eps: f32 }

override LANES: u32 = 64u;
override ACCUMULATE: u32 = 0u; // 0 write, 1 add

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read_write> mean: array<f32>;
@group(0) @binding(2) var<storage, read_write> rstd: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> weight: array<f32>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<uniform> args: Args;

var<workgroup> parts: array<vec2f, LANES>;
var<workgroup> parts2: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn layernorm_forward_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
    @builtin(subgroup_size) size: u32
) {
    let n = group.x + group.y * groups.x;
    let row = min(n, args.N - 1u) * args.C;
    var sum = 0.0;
    for (var c = lane; c < args.C; c += LANES) { sum += x[row + c]; }
    sum = subgroupAdd(sum);
    if (lane % size == 0u) { parts[lane / size].x = sum; }
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i * size < LANES; i++) { sum += parts[i].x; }
    let m = sum / f32(args.C);
    var squares = 0.0;
    for (var c = lane; c < args.C; c += LANES) {
        let centred = x[row + c] - m;
        squares += centred * centred;
    }
    squares = subgroupAdd(squares);
    if (lane % size == 0u) { parts2[lane / size] = squares; }
    workgroupBarrier();
    squares = 0.0;
    for (var i = 0u; i * size < LANES; i++) { squares += parts2[i]; }
    let r = 1.0 / sqrt(squares / f32(args.C) + args.eps);
    if (n >= args.N) { return; }
    if (lane == 0u) {
        mean[n] = m;
        rstd[n] = r;
    }
    for (var c = lane; c < args.C; c += LANES) { out[row + c] = (x[row + c] - m) * r * weight[c] + bias[c]; }
}

@group(0) @binding(0) var<storage, read_write> dx: array<f32>;
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> saved_x: array<f32>;
@group(0) @binding(3) var<storage, read> scale: array<f32>;
@group(0) @binding(4) var<storage, read> saved_mean: array<f32>;
@group(0) @binding(5) var<storage, read> saved_rstd: array<f32>;

@compute @workgroup_size(LANES)
fn layernorm_backward_input_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
    @builtin(subgroup_size) size: u32
) {
    let n = group.x + group.y * groups.x;
    let at = min(n, args.N - 1u);
    let row = at * args.C;
    let m = saved_mean[at];
    let r = saved_rstd[at];
    var sums = vec2f(0.0); // of g, and of g along xhat
    for (var c = lane; c < args.C; c += LANES) {
        let g = dout[row + c] * scale[c];
        sums += g * vec2f(1.0, (saved_x[row + c] - m) * r);
    }
    sums = subgroupAdd(sums);
    if (lane % size == 0u) { parts[lane / size] = sums; }
    workgroupBarrier();
    sums = vec2f(0.0);
    for (var i = 0u; i * size < LANES; i++) { sums += parts[i]; }
    sums /= f32(args.C);
    if (n >= args.N) { return; }
    for (var c = lane; c < args.C; c += LANES) {
        let g = dout[row + c] * scale[c];
        let value = (g - sums.x - (saved_x[row + c] - m) * r * sums.y) * r;
        if (ACCUMULATE == 1u) { dx[row + c] += value; } else { dx[row + c] = value; }
    }
}
