"""`python -m luthier.modalities.asr.demo FOLDER [--seed N]`: make the speech and the model of the demonstration."""

from __future__ import annotations

import argparse
import sys

from ....common.errors import LuthierError
from .prepare import prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m luthier.modalities.asr.demo", description=prepare.__doc__)
    parser.add_argument("folder", help="where speech/ and model/ are made")
    parser.add_argument("--seed", type=int, default=0, help="fixes the speech and the model's first weights")
    arguments = parser.parse_args()
    try:
        made = prepare(arguments.folder, arguments.seed)
    except LuthierError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.folder}: speech/ and model/ {'made' if made else 'are there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
