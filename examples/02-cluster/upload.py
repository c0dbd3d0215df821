"""Puts a model folder and held-out puzzles where run.yaml looks for them.

    AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... python examples/02-cluster/upload.py examples/02-cluster/run.yaml \
        --model FOLDER --puzzles held_out.csv [--endpoint-url URL]

The model is plain files under ``spec.model.uri``: any tool that copies to S3 does as well. The puzzles become a folder
of the run's store, which has a manifest, so that the evaluation can verify what it reads.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import yaml

from prodrl.config import StoreConfig
from prodrl.lab.suite import FILE
from prodrl.store import open_store
from prodrl.store.folders import write_folder
from prodrl.store.port import Store


def main() -> None:
    """Upload both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the ProdRLRun")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--puzzles", type=Path, required=True, help="CSV in Lichess's format")
    parser.add_argument("--endpoint-url", help="instead of the run's, which is reachable inside the cluster only")
    options = parser.parse_args()
    spec = yaml.safe_load(options.run.read_text(encoding="utf-8"))["spec"]
    storage = spec["storage"]
    endpoint = options.endpoint_url or storage.get("endpointUrl")

    def store(uri: str) -> Store:
        return open_store(StoreConfig(uri=uri, endpoint_url=endpoint, region=storage.get("region")))

    model = store(spec["model"]["uri"])
    for path in sorted(path for path in options.model.rglob("*") if path.is_file()):
        model.put_file(str(path.relative_to(options.model)), path)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(options.puzzles, Path(folder, FILE))
        for evaluation in spec["gate"]["evaluations"]:
            write_folder(
                store(storage["uri"]), evaluation["suiteUri"], Path(folder), "suite", {"suite": "chess-puzzles"}
            )


if __name__ == "__main__":
    main()
