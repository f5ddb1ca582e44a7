// embedding: rows of two tables, added.
//   forward    out[n] = token_table[tokens[n]] + position_table[positions[n]]
//   derive     d out[n, c] / d table[k, c] = [k == index[n]], so a table's row collects the gradients of the places that used it
//   backward   dtable[rows[j]] (+)= sum of dout[order[s]] for s in starts[j] .. starts[j+1]; rows that nobody used get 0 or stay
// The host sorts the places by row (rows used in rising order, padded with -1), so that no two workgroups write one row and the order
// of a sum is fixed: no atomics.
// A workgroup takes 16 columns of one row: 16 lanes a column each sum every 16th place, then their sums are added in order.

struct Args { N: u32, C: u32, K: u32 }

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> tokens: array<i32>;
@group(0) @binding(2) var<storage, read> positions: array<i32>;
@group(0) @binding(3) var<storage, read> token_table: array<f32>;
@group(0) @binding(4) var<storage, read> position_table: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

@compute @workgroup_size(256)
fn embedding_forward(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if (i >= args.N * args.C) { return; }
    let n = i / args.C;
    let c = i % args.C;
    out[i] = token_table[u32(tokens[n]) * args.C + c] + position_table[u32(positions[n]) * args.C + c];
}

override ACCUMULATE: u32 = 0u; // 0 write, 1 add, 2 write where scalars.beta is 0 and add otherwise

@group(0) @binding(0) var<storage, read_write> dtable: array<f32>;
@group(0) @binding(1) var<storage, read> dout: array<f32>;
@group(0) @binding(2) var<storage, read> rows: array<i32>;
@group(0) @binding(3) var<storage, read> starts: array<i32>;
@group(0) @binding(4) var<storage, read> order: array<i32>;
@group(0) @binding(5) var<storage, read> scalars: array<f32, 8>;
@group(0) @binding(6) var<uniform> backward: Args;

var<workgroup> sums: array<array<f32, 16>, 16>;

// The place of a row in rows, or N: a search by halves; the padding of -1 counts as the largest number.
fn find(row: u32) -> u32 {
    var low = 0u;
    var high = backward.N;
    while (low < high) {
        let middle = (low + high) / 2u;
        if (bitcast<u32>(rows[middle]) < row) { low = middle + 1u; } else { high = middle; }
    }
    if (low < backward.N && bitcast<u32>(rows[min(low, backward.N - 1u)]) == row) { return low; }
    return backward.N;
}

// Sum the places of entry j (none when j is N) in this lane's share; all lanes of the workgroup must come here.
fn sum_places(j: u32, c: u32, share: u32, column: u32) -> f32 {
    var total = 0.0;
    if (j < backward.N && c < backward.C) {
        let begin = u32(starts[j]);
        var end = backward.N;
        if (j + 1u < backward.N) { end = u32(starts[j + 1u]); }
        for (var s = begin + share; s < end; s += 16u) { total += dout[u32(order[s]) * backward.C + c]; }
    }
    sums[share][column] = total;
    workgroupBarrier();
    total = 0.0;
    for (var i = 0u; i < 16u; i++) { total += sums[i][column]; }
    return total;
}

// A workgroup for every row of the table: also clears the rows that nobody used.
@compute @workgroup_size(256)
fn embedding_backward_weight(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let blocks = (backward.C + 15u) / 16u;
    let index = group.x + group.y * groups.x;
    let row = index / blocks;
    let c = index % blocks * 16u + lane % 16u;
    let total = sum_places(find(row), c, lane / 16u, lane % 16u);
    if (lane >= 16u || row >= backward.K || c >= backward.C) { return; }
    let at = row * backward.C + c;
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && scalars[1] != 0.0)) { dtable[at] += total; } else { dtable[at] = total; }
}

// A workgroup for every row used: only adds.
@compute @workgroup_size(256)
fn embedding_backward_weight_add(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let blocks = (backward.C + 15u) / 16u;
    let index = group.x + group.y * groups.x;
    let entry = min(index / blocks, backward.N - 1u);
    let c = index % blocks * 16u + lane % 16u;
    let row = rows[entry];
    if (row < 0) { return; }
    let total = sum_places(entry, c, lane / 16u, lane % 16u);
    if (lane >= 16u || index / blocks >= backward.N || c >= backward.C) { return; }
    dtable[u32(row) * backward.C + c] += total;
}

// A lane for every number of the table, without workgroup memory: chosen by name, for adapters on which a barrier costs more than a search.
@compute @workgroup_size(64)
fn embedding_backward_weight_lanes(
    @builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u
) {
    let at = (group.x + group.y * groups.x) * 64u + lane;
    if (at >= backward.K * backward.C) { return; }
    let j = find(at / backward.C);
    var total = 0.0;
    if (j < backward.N) {
        var end = backward.N;
        if (j + 1u < backward.N) { end = u32(starts[j + 1u]); }
        for (var s = u32(starts[j]); s < end; s++) { total += dout[u32(order[s]) * backward.C + at % backward.C]; }
    }
    if (ACCUMULATE == 1u || (ACCUMULATE == 2u && scalars[1] != 0.0)) { dtable[at] += total; } else { dtable[at] = total; }
}
