"""The demo behind ``nnx-probes demo``: a small language model, whole or with one known fault.

The text is the reference documentation that comes with every Python, so nothing is downloaded.
"""
