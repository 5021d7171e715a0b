"""``python -m hybridflow``, which ``torchrun -m hybridflow`` runs on every rank."""

import sys

from hybridflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
