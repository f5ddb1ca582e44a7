"""The kernels: C++ (later also WGSL) sources as package data, and the libraries built from them.

``cpp/`` holds one file a family of ops; it imports nothing of ours and is compiled unchanged for
every processor and for WebAssembly. ``lib/`` holds what the build made of it. ``build.py`` compiles
and finds the libraries. No Python code in here knows a model.
"""
