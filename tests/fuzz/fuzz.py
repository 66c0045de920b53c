"""`make fuzz`: one target under atheris, from nothing but the seeds in targets.py.

    fuzz.py TARGET RUNS

A child process of `run`; libFuzzer ends it, with status 77 and the input on stderr when a
target let an error escape.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]
with atheris.instrument_imports(include=["vsrtune"]):
    import targets


def main(name: str, runs: str) -> None:
    """Never returns."""
    target = targets.TARGETS[name]
    for seed in targets.SEEDS[name]:
        target(seed)  # loads what is loaded when first used

    def one(data: bytes) -> None:
        with targets.guarded():
            target(data)

    with tempfile.TemporaryDirectory() as place:
        for number, seed in enumerate(targets.SEEDS[name]):
            Path(place, str(number)).write_bytes(seed)
        atheris.Setup(
            [
                sys.argv[0], f"-runs={runs}", "-max_len=65536", "-timeout=20", "-rss_limit_mb=2048",
                "-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={place}/", place,
            ],
            one,
        )  # fmt: skip
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
