"""Flax ports of model families (`llama`) and checkpoints to run them on (`zoo`)."""
