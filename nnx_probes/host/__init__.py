"""Floor 2: records, the optimizer's clock, rules and causes. NumPy only, so it also runs where jax is not installed."""
