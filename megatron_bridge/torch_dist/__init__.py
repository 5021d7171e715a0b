"""Megatron's ``torch_dist`` checkpoints, read and written by any process, without Megatron.

Such a folder holds ``metadata.json`` (its kind), ``.metadata`` (a pickle: every tensor's shape,
dtype and chunks, and where each chunk lies), ``*.distcp`` (the chunks, each what ``torch.save``
writes) and ``common.pt`` (what is not cut: arguments, iteration). ``reader`` and ``writer`` are
the two ends; neither needs a process group, and neither runs what a file contains.
"""
