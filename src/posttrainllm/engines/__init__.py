"""The engines: each runs the ops of a program; none of them contains the model."""
