"""The GPU benchmark's runner, without a GPU: its arithmetic, its verdicts, and what it does when a case goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.bounds import Bounds, datasheet_bandwidth
from benchmarks.gpu.case import GoalKind, GpuCase, Prepared
from benchmarks.gpu.discover import BrokenModule, find_cases
from benchmarks.gpu.main import Report, collect, start_worker
from benchmarks.gpu.result import CaseResult, measured, table
from benchmarks.gpu.timing import MAX_RUNS, MIN_RUNS, median_seconds, num_runs_for, poison
from benchmarks.gpu.worker import run_case, run_cases

ROOT = Path(__file__).parents[2]
H200 = Bounds("NVIDIA H200", 4.8e12, 4.3e12, 788e12, 2e-6)
UNLISTED = Bounds("Some GPU", None, 2.0e12, 100e12, 2e-6)


class FakeStopwatch:
    """Gives the times it was told, and counts the runs."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.asked: list[int] = []

    def seconds(self, run: Callable[[], None], num_runs: int) -> list[float]:
        self.asked.append(num_runs)
        run()
        return self.times

    def wall_seconds(self, run: Callable[[], None]) -> float:
        run()
        return 0.1


def _result(bounds: Bounds, goal: float, kind: GoalKind, seconds: float = 1e-3) -> CaseResult:
    return measured(
        "x", bounds, error=0.0, tolerance=0.0, seconds=seconds, bytes_moved=2_400_000_000, flops=394_000_000_000,
        goal=goal, goal_kind=kind, peer_seconds={"torch": 2e-3}, peer_failures={"vllm": "not importable"},
    )  # fmt: skip


def _case(prepare: Callable[[torch.Generator], Prepared], name: str = "x") -> GpuCase:
    return GpuCase(name, prepare, 0.5, "bandwidth")


@pytest.mark.parametrize(
    ("goal", "kind", "status"),
    [
        (0.50, "bandwidth", "reached"),
        (0.501, "bandwidth", "missed"),
        (0.50, "bf16_flops", "reached"),
        (0.501, "bf16_flops", "missed"),
        (1000.0, "microseconds", "reached"),
        (999.0, "microseconds", "missed"),
    ],
)
def test_a_goal_is_reached_or_missed(goal: float, kind: GoalKind, status: str) -> None:
    result = _result(H200, goal, kind)
    assert result.status == status
    assert result.datasheet_share == pytest.approx(0.5)
    assert result.copy_share == pytest.approx(2.4 / 4.3)
    assert result.bf16_share == pytest.approx(0.5)


def test_without_a_datasheet_the_measured_copy_is_the_bound() -> None:
    result = _result(UNLISTED, 1.1, "bandwidth")
    assert result.datasheet_share is None
    assert result.status == "reached"
    assert "measured copy" in result.detail


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA GH200 480GB", 4.0e12),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA GB200", None),
        ("AMD Instinct MI300X", 5.3e12),
        ("", None),
    ],
)
def test_datasheets_by_name(name: str, rate: float | None) -> None:
    assert datasheet_bandwidth(name) == rate


def test_the_median_of_cold_runs_after_a_warm_up() -> None:
    runs: list[int] = []
    stopwatch = FakeStopwatch([5.0, 1.0, 2.0])
    assert median_seconds(lambda: runs.append(1), stopwatch) == 2.0
    assert stopwatch.asked == [15]
    assert len(runs) == 5


def test_long_cases_run_less_often() -> None:
    assert num_runs_for(10.0) == MIN_RUNS
    assert num_runs_for(0.0) == MAX_RUNS
    assert num_runs_for(0.1, seconds_a_case=1.0) == 10


def test_poison_reaches_every_byte() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensor = torch.zeros(3, 5, dtype=dtype)
        poison(tensor.t())
        assert bool(torch.isnan(tensor.to(torch.float32)).all())
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        tensor = torch.zeros(3, 4, dtype=dtype)
        poison(tensor[:, 1:])
        assert bool((tensor[:, 1:].contiguous().view(torch.uint8) == 0xA5).all())
        assert bool((tensor[:, 0] == 0).all())


def test_a_kernel_that_writes_nothing_is_wrong() -> None:
    def prepare(generator: torch.Generator) -> Prepared:
        output = torch.zeros(4, device=generator.device)
        return Prepared(lambda: None, (output,), lambda: float(output.abs().max()), 1e-3, 100)

    result = run_case(_case(prepare), 1, "cpu", FakeStopwatch([1.0]), H200)
    assert result.status == "wrong"
    assert result.seconds is None
    assert "nan" in result.detail
    json.loads(json.dumps(result.__dict__, allow_nan=False))


def test_an_error_above_the_tolerance_is_wrong_and_is_not_timed() -> None:
    def prepare(generator: torch.Generator) -> Prepared:
        return Prepared(lambda: None, (), lambda: 0.5, 0.25, 100)

    result = run_case(_case(prepare), 1, "cpu", FakeStopwatch([1.0]), H200)
    assert (result.status, result.error, result.tolerance, result.seconds) == ("wrong", 0.5, 0.25, None)


def test_a_right_case_is_timed_beside_its_peers() -> None:
    seeds: list[int] = []

    def prepare(generator: torch.Generator) -> Prepared:
        seeds.append(generator.initial_seed())
        output = torch.zeros(4, device=generator.device)

        def run() -> None:
            output.fill_(1.0)

        def absent() -> None:
            raise ImportError("No module named 'vllm'")

        peers = {"torch": run, "vllm": absent}
        return Prepared(run, (output,), lambda: float((output - 1).abs().max()), 0.0, 48, 0, peers)

    result = run_case(_case(prepare), 7, "cpu", FakeStopwatch([2e-11]), H200)
    assert seeds == [7]
    assert (result.status, result.error, result.seconds) == ("reached", 0.0, 2e-11)
    assert result.bf16_share is None
    assert result.peer_seconds == {"torch": 2e-11}
    assert "vllm" in result.peer_failures["vllm"]


def _run_all(cases: list[GpuCase | BrokenModule], first: int = 0, **options: bool) -> tuple[bool, list[str]]:
    statuses: list[str] = []

    def run(case: GpuCase, number: int) -> CaseResult:
        if case.name == "raises":
            raise RuntimeError("out of\nmemory")
        return CaseResult(case.name, "reached")

    def emit(message: dict[str, object]) -> None:
        if isinstance(result := message.get("result"), dict):
            statuses.append(f"{result['name']} {result['status']} {result['detail']}".strip())

    whole = run_cases(cases, first, run, emit, lambda: options.get("time", True), lambda: options.get("works", True))
    return whole, statuses


def _unused(generator: torch.Generator) -> Prepared:
    pytest.fail("the run is faked: nothing prepares")


def test_a_case_that_raises_is_reported_and_the_rest_go_on() -> None:
    cases = [_case(_unused, "raises"), BrokenModule("cases_bad", "SyntaxError: x"), _case(_unused, "good")]
    whole, statuses = _run_all(cases)
    assert whole
    assert statuses == ["raises failed RuntimeError: out of memory", "cases_bad failed SyntaxError: x", "good reached"]
    assert _run_all(cases, first=2) == (True, ["good reached"])


def test_a_lost_device_ends_the_worker() -> None:
    assert _run_all([_case(_unused, "raises"), _case(_unused, "good")], works=False) == (
        False,
        ["raises failed RuntimeError: out of memory"],
    )


def test_after_the_limit_a_case_is_not_run() -> None:
    _, statuses = _run_all([_case(_unused, "good")], time=False)
    assert statuses == ["good not run the time limit was reached"]


def _line(**message: object) -> str:
    return json.dumps(message) + "\n"


def test_a_worker_that_dies_fails_its_case_and_is_started_again_behind_it() -> None:
    starts: list[int] = []

    def start(first: int) -> Iterator[str | int]:
        starts.append(first)
        yield _line(bounds=H200.__dict__)
        yield "a kernel printed this\n"
        for number in range(first, 4):
            yield _line(start=f"case{number}")
            if number == 1:
                yield -11
                return
            yield _line(result=CaseResult(f"case{number}", "failed" if number == 2 else "reached").__dict__)
            if number == 2:
                yield 3
                return
        yield 0

    report = collect(start)
    assert starts == [0, 2, 3]
    assert [result.status for result in report.results] == ["reached", "failed", "failed", "reached"]
    assert "signal 11" in report.results[1].detail
    assert report.bounds == H200


def test_a_worker_that_never_gets_to_a_case_ends_it() -> None:
    report = collect(lambda first: iter([1]))
    assert [(result.name, result.status) for result in report.results] == [("worker", "failed")]


def test_the_table_says_everything() -> None:
    results = [
        _result(H200, 0.6, "bandwidth"),
        CaseResult("broken", "wrong", error=0.5, tolerance=0.1),
        CaseResult("late", "not run", "the time limit was reached"),
    ]
    text = table(results, H200)
    assert "4.80 TB/s by its datasheet" in text
    assert "1000.0" in text
    assert "0.56  0.50" in text
    assert "torch 2000.0 us (2.00 of ours)" in text
    assert "vllm not run: not importable" in text
    assert "error 5.00e-01 > 1.0e-01" in text
    assert text.splitlines()[-1] == "1 missed, 1 wrong, 1 not run"
    assert table([], None).splitlines()[-1] == "no cases"


def test_broken_files_of_cases_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_gpu_cases"
    folder.mkdir()
    (folder / "cases_a.py").write_text("import no_such_module_at_all\n")
    (folder / "cases_b.py").write_text("def cases():\n    yield 'first'\n    raise ValueError('second')\n")
    (folder / "cases_c.py").write_text("def cases():\n    yield 'c'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(find_cases(folder, "some_gpu_cases"))
    assert [item if isinstance(item, str) else item.name for item in found] == ["cases_a", "cases_b", "c"]
    assert isinstance(found[0], BrokenModule)
    assert "no_such_module_at_all" in found[0].reason


def test_without_a_device_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-m", "benchmarks.gpu.main", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 9
    assert done.stderr.splitlines()[-1] == "not run: no CUDA device"
    assert not (tmp_path / "out.json").exists()


def test_lines_of_others_are_passed_over() -> None:
    report = Report()
    assert report.read(iter(["\n", "[1, 2]\n", "nonsense {\n", 5])) == 5
    assert report.results == []


def test_a_worker_without_a_device_is_a_failure_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = collect(lambda first: start_worker(first, 1, 5.0))
    assert [(result.name, result.status) for result in report.results] == [("worker", "failed")]
