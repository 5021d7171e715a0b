"""HuggingFace folders: weights read part by part, dequantised or with an adapter merged; written.

Import from the modules: ``folder`` (reading), ``quantized``, ``adapter``, ``write``.
"""
