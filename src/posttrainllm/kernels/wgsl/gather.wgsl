// gather_forward: out[b] = x[rows[b]].
// One invocation an element of out. Rows come from the host and lie inside x.

struct Args { B: u32, C: u32 }

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> rows: array<i32>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(256)
fn gather_forward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= args.B * args.C) { return; }
    let row = i / args.C;
    out[i] = x[u32(rows[row]) * args.C + i % args.C];
}
