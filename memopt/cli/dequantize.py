"""`memopt dequantize`: a release becomes a plain BF16 checkpoint."""

from __future__ import annotations

import click

from memopt.cli.options import json_option, max_file_size_option, workers_option
from memopt.cli.output import refusals


@click.command("dequantize")
@click.argument("release", metavar="RELEASE")
@click.argument("out", metavar="OUT")
@max_file_size_option
@workers_option
@json_option
def dequantize_command(release: str, out: str, max_file_size: int | None, workers: int | None, as_json: bool) -> None:
    """Turn every INT4 and FP8 weight of RELEASE into BF16, in folder OUT: for engines without an INT4 kernel."""
    with refusals("dequantize", as_json=as_json):
        from memopt.cli.plan import build_options
        from memopt.cli.run import progress_display, report
        from memopt.compressor.api import dequantize

        with progress_display(quiet=as_json) as progress:
            result = dequantize(
                release,
                out,
                options=build_options(None, max_file_size, False, None),
                workers=workers,
                progress=progress,
                download=progress.download,
            )
        report("dequantize", result, f"memopt inspect {out}", as_json=as_json)
