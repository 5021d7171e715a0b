"""The symbolic proof that a model's cut over a layout loses and doubles nothing.

`prove` works from a config.json alone: interval arithmetic on coordinates, no weights, no process
group, no torch. It asks the very functions that loading and exporting use (`Placement.place`,
`holdings`, `Weight.pieces`, `Weight.to_megatron`, `Placement.owners`) and assumes nothing of how
they cut: that boxes are disjoint and fill a tensor is computed. It checks that

- each element of each HuggingFace tensor has one home, a set of ranks that are replicas of each
  other, and that all of them hold it in the same place;
- each element of each rank's tensor is filled by one HuggingFace element, or is padding of the
  vocabulary;
- export takes each home's part from one rank of it, and returns each element to where it was
  loaded from;
- pipeline stages hold each layer once and in order, expert parallel ranks each expert once, and no
  two parameters of a rank have one name.

What it cannot see:

- Two tensors of one shape that a table swaps, keys and values say, or an axis whose order differs
  from Megatron's: every element still has one home. Tests of the families against transformers'
  logits see that.
- A tensor that a table leaves out. Give `prove` the checkpoint's ``shapes`` to see it; loading
  refuses a checkpoint with an unknown tensor.
- An expert that a data parallel replica holds, and no rank with the same other coordinates and a
  lower number does.
"""

from megatron_bridge.proof.problems import Problem
from megatron_bridge.proof.prove import prove
from megatron_bridge.proof.report import Report, Stage

__all__ = ["Problem", "Report", "Stage", "prove"]
