"""The kernels: C++ and WGSL sources as package data, and the libraries built from the former.

``cpp/`` holds one file a family of ops; it imports nothing of ours and is compiled unchanged for
every processor and for WebAssembly. ``lib/`` holds what the build made of it. ``build.py`` compiles
and finds the libraries. ``wgsl/`` holds the same families for GPUs, with the table
``dispatch.json`` that says what runs for which sizes; hosts read both as they are. No Python code
in here knows a model.
"""
