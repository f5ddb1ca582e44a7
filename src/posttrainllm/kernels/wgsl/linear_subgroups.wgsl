// linear_subgroups: the product of linear.wgsl where lanes of a subgroup hand each other the numbers of left, without workgroup memory.
//   out (rows, columns) = left (rows, inner) right (inner, columns), with the flags of linear.wgsl
// A workgroup computes 8 rows of 64 columns, a column a lane. A lane loads left at its own inner index, one number a row; then each of the
// subgroup's inner indices in turn is shuffled to all lanes and meets the lane's own column of right. The order of additions is that of inner,
// whatever the subgroup's size. Chosen by name or by measurement only: the register tiles read right eight times less often.
// A browser's host puts ``enable subgroups;`` in front; wgpu takes the functions without and does not know the line.

struct Args { rows: u32, columns: u32, inner: u32, span: u32 }

override LEFT_TURNED: u32 = 0u;  // left is stored (inner, rows)
override RIGHT_TURNED: u32 = 0u; // right is stored (columns, inner)
override BIAS: u32 = 0u;
override RESIDUAL: u32 = 0u;
override ACCUMULATE: u32 = 0u;   // 0 write, 1 add, 2 write where scalars.beta is 0 and add otherwise

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> left: array<f32>;
@group(0) @binding(2) var<storage, read> right: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>; // the bias, or scalars
@group(0) @binding(4) var<storage, read> residual: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

fn left_at(row: u32, k: u32) -> f32 {
    let at_row = min(row, args.rows - 1u);
    let at_k = min(k, args.inner - 1u);
    let value = left[select(at_row * args.inner + at_k, at_k * args.rows + at_row, LEFT_TURNED == 1u)];
    return select(0.0, value, k < args.inner); // rows beyond the end are computed and not written
}

fn put(row: u32, column: u32, sum: f32) {
    if (row >= args.rows || column >= args.columns) { return; }
    var value = sum;
    if (BIAS == 1u) { value += bias[column]; }
    let at = row * args.columns + column;
    if (RESIDUAL == 1u) { value += residual[at]; }
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && bias[1] != 0.0)) { out[at] += value; } else { out[at] = value; }
}

@compute @workgroup_size(64)
fn linear_subgroups(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u,
    @builtin(subgroup_invocation_id) mine: u32, @builtin(subgroup_size) size: u32
) {
    let row = group.y * 8u;
    let column = group.x * 64u + lane;
    let at_column = min(column, args.columns - 1u);
    var low = vec4f(0.0);  // rows row .. row + 3
    var high = vec4f(0.0); // rows row + 4 .. row + 7
    for (var k0 = 0u; k0 < args.inner; k0 += size) {
        let k = k0 + mine;
        let a = vec4f(left_at(row, k), left_at(row + 1u, k), left_at(row + 2u, k), left_at(row + 3u, k));
        let b = vec4f(left_at(row + 4u, k), left_at(row + 5u, k), left_at(row + 6u, k), left_at(row + 7u, k));
        for (var i = 0u; i < size; i++) {
            let at_k = min(k0 + i, args.inner - 1u); // beyond the end left gave zeros
            let value = right[select(at_k * args.columns + at_column, at_column * args.inner + at_k, RIGHT_TURNED == 1u)];
            low = fma(subgroupShuffle(a, i), vec4f(value), low);
            high = fma(subgroupShuffle(b, i), vec4f(value), high);
        }
    }
    put(row, column, low.x);
    put(row + 1u, column, low.y);
    put(row + 2u, column, low.z);
    put(row + 3u, column, low.w);
    put(row + 4u, column, high.x);
    put(row + 5u, column, high.y);
    put(row + 6u, column, high.z);
    put(row + 7u, column, high.w);
}
