"""The same model as an nn.Module with autograd: the witness in the tests, and the engine for CUDA."""
