"""`python -m benchmarks OP... --preset NAME`: every op against what JAX users write, side by side in one run."""
