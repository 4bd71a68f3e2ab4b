"""`memopt compress`: a checkpoint becomes a release."""

from __future__ import annotations

from typing import Any

import click

from memopt.cli.calibration_options import CalibrationArguments, build_calibration, calibration_options
from memopt.cli.options import json_option, plan_options, recipe_option, workers_option
from memopt.cli.output import refusals
from memopt.cli.signing_options import (
    SigningArguments,
    build_sign_options,
    is_signing_asked,
    load_signers,
    signing_options,
)


@click.command("compress")
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT")
@recipe_option
@plan_options
@workers_option
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where rounding runs (same bytes)."
)
@calibration_options
@signing_options
@json_option
def compress_command(
    source: str,
    out: str,
    recipe: str | None,
    tensor_parallel: int | None,
    expert_parallel: int | None,
    layout: str | None,
    max_file_size: int | None,
    allow_code: bool,
    release_name: str | None,
    workers: int | None,
    device: str,
    calibration: str | None,
    samples: int | None,
    seq_len: int | None,
    calibration_memory: int | None,
    calibration_device: str | None,
    coverage_tokens: int | None,
    as_json: bool,
    **signing: Any,
) -> None:
    """Compress checkpoint SRC (a folder or org/name@revision) into folder OUT.

    Streams: host memory stays small whatever the checkpoint's size. Run the same command again after an interruption
    and it goes on where it stopped; the result is the same to the byte. --tp N or --ep N add a folder of files for
    every rank, written in the same pass. With --key it is signed at the end, as by `memopt sign`. A recipe with method
    weighted or gptq needs --calibration: layers then run over that data first (docs/calibration.md).
    """
    from memopt.compressor.run_ranks import is_first_process

    # torchrun mixes what its processes print: rank 0 alone gives the verdict.
    with refusals("compress", as_json=as_json and is_first_process()):
        from memopt.cli.plan import build_options
        from memopt.cli.run import progress_display, report
        from memopt.compressor.api import compress

        calibration_data = build_calibration(
            CalibrationArguments(calibration, samples, seq_len, calibration_memory, calibration_device, coverage_tokens)
        )
        arguments = SigningArguments(**signing)
        # A wrong passphrase is said now, not after hours of work.
        signers = load_signers(arguments) if is_signing_asked(arguments) else ()
        sign_options = build_sign_options(arguments, workers) if signers else None
        with progress_display(quiet=as_json) as progress:
            result = compress(
                source,
                out,
                recipe=recipe,
                options=build_options(
                    tensor_parallel,
                    max_file_size,
                    allow_code,
                    release_name,
                    expert_parallel=expert_parallel,
                    layout=layout,
                ),
                workers=workers,
                device=device,  # type: ignore[arg-type]  # click.Choice gives one of the three
                progress=progress,
                download=progress.download,
                signers=signers,
                sign_options=sign_options,
                calibration=calibration_data,
            )
        if not is_first_process():
            return
        next_step = f"memopt verify {out} --key release.pub" if signers else f"memopt sign {out} --key release.pem"
        report("compress", result, next_step, as_json=as_json)
