"""Floor 1: what runs on the device. jax only; nothing here knows records, rules or files."""
