// add_forward: out = a + b, element by element.
//   backward: none of its own; the gradient of a sum is that of its terms, and the program uses it twice.
// One invocation an element (or four: the vec4 variant, where the count allows it).

struct Args { count: u32 }

@group(0) @binding(3) var<uniform> args: Args;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;

@group(0) @binding(0) var<storage, read_write> out4: array<vec4f>;
@group(0) @binding(1) var<storage, read> a4: array<vec4f>;
@group(0) @binding(2) var<storage, read> b4: array<vec4f>;

@compute @workgroup_size(256)
fn add_forward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= args.count) { return; }
    out[i] = a[i] + b[i];
}

@compute @workgroup_size(256)
fn add_forward_vec4(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= args.count) { return; }
    out4[i] = a4[i] + b4[i];
}
