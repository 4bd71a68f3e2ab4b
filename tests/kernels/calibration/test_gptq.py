"""GPTQ: the codes of the float64 textbook, and what must hold for any Hessian."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from calibration_problems import Problem, losses, make_problem, plain_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.errors import AlignmentError, ContentError, MemoptError, NonFiniteError, ShapeError, UsageError
from memopt.kernels.calibration.gptq import gptq_solve
from memopt.kernels.calibration.gptq_factor import factorize_hessians
from memopt.kernels.calibration.gptq_options import GptqOptions, GptqResult
from memopt.kernels.calibration.gptq_reference import gptq_reference


def _textbook(problem: Problem, *, act_order: bool) -> Tensor:
    parts = zip(problem.weight, problem.hessian, problem.scale, strict=True)
    return torch.stack([gptq_reference(w, h, s, act_order=act_order) for w, h, s in parts])


def _solve(problem: Problem, options: GptqOptions | None = None) -> GptqResult:
    return gptq_solve(problem.weight, problem.hessian, problem.scale, options)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("counts", "num_rows", "size", "group"),
    [
        ((300, 64, 1), 40, 128, 32),  # more tokens than columns, fewer, one
        ((500,), 70, 320, 64),  # ragged blocks of columns and of rows
        ((90, 0), 24, 96, 96),  # an expert without tokens; whole rows share a scale
        ((20,), 1, 32, 32),
    ],
)
def test_the_codes_of_the_textbook(
    counts: tuple[int, ...], num_rows: int, size: int, group: int, act_order: bool
) -> None:
    problem = make_problem(counts, num_rows, size, group)
    found = _solve(problem, GptqOptions(act_order=act_order, keep_better=False))
    assert torch.equal(found.codes, _textbook(problem, act_order=act_order))


@pytest.mark.parametrize("block_columns", [1, 24, 4096])
def test_blocks_do_not_change_what_is_computed(block_columns: int) -> None:
    problem = make_problem((200,), 32, 128)
    found = _solve(problem, GptqOptions(block_columns=block_columns, keep_better=False))
    assert torch.equal(found.codes, _textbook(problem, act_order=False))


def test_it_serves_the_inputs_better_than_rounding_and_act_order_better_still() -> None:
    problem = make_problem((400, 150), 64, 256)
    found, ordered = _solve(problem), _solve(problem, GptqOptions(act_order=True))
    assert found.plain_loss is not None
    assert float(found.loss.sum() / found.plain_loss.sum()) < 0.3
    assert float(ordered.loss.sum() / found.loss.sum()) < 0.9
    assert found.num_plain_rows.tolist() == [0, 0]


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(0, 60),
    size=st.sampled_from([8, 32, 40]),
    act_order=st.booleans(),
    block_columns=st.sampled_from([7, 128]),
    seed=st.integers(0, 10_000),
    dead=st.sets(st.integers(0, 7)),
    twins=st.booleans(),
)
def test_losses_are_true_and_never_above_plain_rounding(
    num_tokens: int, size: int, act_order: bool, block_columns: int, seed: int, dead: set[int], twins: bool
) -> None:
    problem = make_problem((num_tokens, 5), 9, size, group=8, seed=seed)
    if twins:
        problem.hessian[:, 1] = problem.hessian[:, 0]
        problem.hessian[:, :, 1] = problem.hessian[:, :, 0]
        problem.hessian[:, 1, 1] = problem.hessian[:, 0, 0]
    for column in dead:
        problem.hessian[:, column] = 0.0
        problem.hessian[:, :, column] = 0.0
    found = _solve(problem, GptqOptions(act_order=act_order, block_columns=block_columns))
    true_loss = losses(problem.weight, found.codes, problem.scale, problem.hessian, found.damping)
    plain = plain_codes(problem.weight, problem.scale)
    plain_loss = losses(problem.weight, plain, problem.scale, problem.hessian, found.damping)
    torch.testing.assert_close(found.loss.double(), true_loss, rtol=1e-3, atol=1e-9)
    assert found.plain_loss is not None
    torch.testing.assert_close(found.plain_loss.double(), plain_loss, rtol=1e-3, atol=1e-9)
    assert bool((found.loss <= found.plain_loss).all())
    for column in dead:
        assert torch.equal(found.codes[:, :, column], plain[:, :, column])
    assert bool((found.num_dead_columns >= len(dead)).all())


def test_rows_that_rounding_serves_better_keep_their_plain_codes() -> None:
    # Act-order off and a strong last column whose error nothing behind it can take up: some rows lose by correction.
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(64, 8, generator=generator)
    tokens[:, 7] = tokens[:, :7].sum(dim=1) * 3
    weight = torch.randn(1, 400, 8, generator=generator) * 0.02
    problem = Problem(weight, (tokens.T @ tokens)[None], torch.full((1, 400, 1), 0.004, dtype=torch.bfloat16))
    kept, solved = _solve(problem), _solve(problem, GptqOptions(keep_better=False))
    plain = plain_codes(problem.weight, problem.scale)
    assert kept.plain_loss is not None
    is_plain = kept.plain_loss[0] < solved.loss[0]
    assert 0 < int(kept.num_plain_rows) == int(is_plain.sum()) < 400
    assert torch.equal(kept.codes[0, is_plain], plain[0, is_plain])
    assert torch.equal(kept.codes[0, ~is_plain], solved.codes[0, ~is_plain])
    assert solved.plain_loss is None
    assert int(solved.num_plain_rows) == 0


def test_no_tokens_give_plain_rounding() -> None:
    problem = make_problem((0,), 16, 64)
    found = _solve(problem)
    assert torch.equal(found.codes, plain_codes(problem.weight, problem.scale))
    assert found.num_dead_columns.tolist() == [64]


@pytest.mark.parametrize("factor", [4.0**-20, 4.0**20])
def test_a_factor_of_the_hessian_does_not_count(factor: float) -> None:
    problem = make_problem((100,), 16, 64)
    problem.hessian[:, 5:40] = 0.0
    problem.hessian[:, :, 5:40] = 0.0
    found = _solve(problem)
    scaled = _solve(dataclasses.replace(problem, hessian=problem.hessian * factor))
    assert found.num_dead_columns.tolist() == [35]
    assert torch.equal(found.codes, scaled.codes)
    # Dead columns too: their share of a loss would otherwise hide the choice between a row's two sets of codes.
    torch.testing.assert_close(scaled.loss, found.loss * factor, rtol=1e-5, atol=0.0)


def test_an_expert_has_the_same_codes_alone_and_among_others() -> None:
    problem = make_problem((100, 30, 70), 20, 64)
    together = _solve(problem)
    alone = gptq_solve(problem.weight[1:2], problem.hessian[1:2], problem.scale[1:2])
    assert torch.equal(together.codes[1:2], alone.codes)


def test_rows_do_not_depend_on_each_other() -> None:
    problem = make_problem((100,), 70, 64)
    some = gptq_solve(problem.weight[:, 10:17].contiguous(), problem.hessian, problem.scale[:, 10:17].contiguous())
    assert torch.equal(_solve(problem).codes[:, 10:17], some.codes)


def test_columns_permuted_within_their_groups_permute_the_codes_under_act_order() -> None:
    problem = make_problem((200,), 20, 64)
    order = torch.cat([torch.randperm(32, generator=torch.Generator().manual_seed(1)) + 32 * g for g in range(2)])
    hessian = problem.hessian[:, order][:, :, order].contiguous()
    moved = Problem(problem.weight[:, :, order].contiguous(), hessian, problem.scale)
    options = GptqOptions(act_order=True)
    assert torch.equal(_solve(moved, options).codes, _solve(problem, options).codes[:, :, order])


def test_negative_scales() -> None:
    problem = make_problem((100,), 24, 64)
    problem.scale[:, ::2] *= -1.0
    found = _solve(problem, GptqOptions(keep_better=False))
    assert torch.equal(found.codes, _textbook(problem, act_order=False))


def test_inputs_stay_as_they_are_and_a_setting_for_fast_products_does_not_count() -> None:
    problem = make_problem((300,), 64, 256)
    copies = tuple(tensor.clone() for tensor in (problem.weight, problem.hessian, problem.scale))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        fast = _solve(problem)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(fast.codes, _solve(problem).codes)
    for tensor, copy in zip((problem.weight, problem.hessian, problem.scale), copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32), (2, 4, 0)])
@pytest.mark.parametrize("keep_better", [False, True])
def test_nothing_to_solve(shape: tuple[int, int, int], keep_better: bool) -> None:
    experts, rows, size = shape
    scale = torch.ones(experts, rows, size // 32, dtype=torch.bfloat16)
    found = gptq_solve(
        torch.zeros(shape), torch.zeros(experts, size, size), scale, GptqOptions(keep_better=keep_better)
    )
    assert found.codes.shape == shape
    assert found.codes.dtype == torch.int8
    assert found.loss.shape == (experts, rows)
    assert (found.plain_loss is not None) == keep_better
    assert found.damping.shape == found.num_dead_columns.shape == found.num_plain_rows.shape == (experts,)


def _with(name: str, place: tuple[int, ...], value: float) -> dict[str, Tensor]:
    problem = make_problem((40, 40), 4, 32, group=8)
    tensor = getattr(problem, name)
    tensor[place] = value
    return {name: tensor}


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"weight": torch.zeros(2, 4, 32, dtype=torch.bfloat16)}, ShapeError, "weight.*bfloat16, but float32"),
        ({"weight": torch.zeros(2, 32, 4).mT}, ShapeError, "weight.*strides"),
        ({"hessian": torch.zeros(2, 32, 31)}, ShapeError, r"hessian is \[2, 32, 31\], but \[2, 32, 32\]"),
        ({"hessian": torch.zeros(1, 32, 32)}, ShapeError, r"hessian is \[1, 32, 32\], but \[2, 32, 32\]"),
        ({"scale": torch.ones(2, 5, 4, dtype=torch.bfloat16)}, ShapeError, r"scale is \[2, 5, 4\]"),
        ({"scale": torch.ones(2, 4, 4)}, ShapeError, "scale.*float32, but bfloat16"),
        ({"scale": torch.ones(2, 4, 5, dtype=torch.bfloat16)}, AlignmentError, "5 scales a row do not divide its 32"),
        ({"scale": torch.ones(2, 4, 0, dtype=torch.bfloat16)}, AlignmentError, "0 scales"),
        (_with("weight", (1, 2, 3), float("nan")), NonFiniteError, "weight of expert 1"),
        (_with("hessian", (0, 2, 3), float("inf")), NonFiniteError, "hessian of expert 0"),
        (_with("scale", (1, 2, 3), float("inf")), NonFiniteError, "scale of expert 1"),
        (_with("scale", (1, 2, 3), 0.0), ContentError, "scale of expert 1 is zero"),
        (_with("hessian", (1, 3, 3), -1e9), ContentError, "Hessian of expert 1"),
    ],
)
def test_refusals(changed: dict[str, Tensor], kind: type[MemoptError], words: str) -> None:
    problem = dataclasses.replace(make_problem((40, 40), 4, 32, group=8), **changed)
    with pytest.raises(kind, match=words):
        _solve(problem)


@pytest.mark.parametrize("options", [{"damping": -0.1}, {"damping": float("nan")}, {"block_columns": 0}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="damping is"):
        _solve(make_problem((40,), 4, 32), GptqOptions(**options))  # type: ignore[arg-type]


def test_factors_that_the_caller_has_change_nothing() -> None:
    problem = make_problem((90, 30), 8, 64)
    options = GptqOptions(act_order=True)
    factors = factorize_hessians(problem.hessian, options, with_roots=True)
    given_factors = gptq_solve(problem.weight, problem.hessian, problem.scale, options, factors=factors)
    own = _solve(problem, options)
    assert torch.equal(given_factors.codes, own.codes)
    assert torch.equal(given_factors.loss, own.loss)
    without = factorize_hessians(problem.hessian, options, with_roots=False)
    with pytest.raises(ShapeError, match="0 roots"):
        gptq_solve(problem.weight, problem.hessian, problem.scale, options, factors=without)
    small = factorize_hessians(problem.hessian[:, :32, :32].contiguous(), options, with_roots=True)
    with pytest.raises(ShapeError, match="2, 32, 32"):
        gptq_solve(problem.weight, problem.hessian, problem.scale, options, factors=small)
