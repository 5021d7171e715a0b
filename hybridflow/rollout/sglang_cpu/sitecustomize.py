"""Lets `import torchvision` succeed beside a CPU build of torch; Python loads this at start.

PyPI's torchvision links CUDA libraries, so beside a CPU torch its operators are never declared and
its import fails when it registers their shapes. Declaring the two of them just before the import
mends that. Lazy: a process that never imports torchvision pays nothing.
"""

import sys


class _DeclareOperators:
    """A finder that finds nothing: it only acts when torchvision is first looked for."""

    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls.library is None:
            import torch

            cls.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                cls.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _DeclareOperators)
