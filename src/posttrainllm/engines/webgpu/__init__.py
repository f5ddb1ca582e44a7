"""The WGSL kernels hosted through wgpu: dispatch as data, recorded once, replayed every step."""
