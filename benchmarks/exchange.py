"""How fast do dispatch and combine cross NVLink? `make gpu-bench NAME=exchange`, on the GPUs of one host."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from imbrex.bench.exchange import command

RESULTS = Path(__file__).parent / "results" / "exchange.json"

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    sys.exit(command.run(parser.parse_args([f"--json={RESULTS}", *sys.argv[1:]])))
