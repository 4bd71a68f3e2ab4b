"""Statistics of a module's inputs: sums against float64, however tokens were batched; shrinkage by its formula."""

from __future__ import annotations

import pytest
import torch
from calibration_problems import make_offsets, make_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.compressor.calibrate.module_statistics import ModuleStatistics, StatisticsCollector, shrink_statistics
from memopt.errors import ContentError, ShapeError, UsageError

SIZE = 24


def _collect(batches: list[list[Tensor]], *, with_hessian: bool = True, chunk_tokens: int = 8) -> ModuleStatistics:
    """Statistics of batches, each with a tensor of tokens an expert."""
    collector = StatisticsCollector(len(batches[0]), SIZE, with_hessian=with_hessian, chunk_tokens=chunk_tokens)
    for batch in batches:
        collector.add(torch.cat(batch), make_offsets(*(part.shape[0] for part in batch)))
    return collector.finish()


def _equal(left: ModuleStatistics, right: ModuleStatistics) -> bool:
    assert left.hessian is not None
    assert right.hessian is not None
    return (
        torch.equal(left.num_tokens, right.num_tokens)
        and torch.equal(left.second_moment, right.second_moment)
        and torch.equal(left.hessian, right.hessian)
    )


def test_means_over_an_experts_tokens() -> None:
    experts = [make_tokens(37, SIZE, 1), make_tokens(0, SIZE, 2), make_tokens(5, SIZE, 3)]
    found = _collect([experts])
    assert found.num_tokens.tolist() == [37, 0, 5]
    assert found.hessian is not None
    for expert, tokens in enumerate(experts):
        exact = tokens.double().T @ tokens.double() / max(tokens.shape[0], 1)
        torch.testing.assert_close(found.hessian[expert].double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.second_moment[expert].double(), exact.diagonal(), rtol=1e-6, atol=0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_batches_do_not_change_a_bit(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    experts = [make_tokens(count, SIZE, seed) for seed, count in enumerate(counts)]
    num_cuts = data.draw(st.integers(0, 4))
    cuts = [sorted(data.draw(st.integers(0, count)) for _ in range(num_cuts)) for count in counts]
    edges = [[0, *cut, count] for cut, count in zip(cuts, counts, strict=True)]
    batches = [
        [tokens[edge[i] : edge[i + 1]] for tokens, edge in zip(experts, edges, strict=True)]
        for i in range(num_cuts + 1)
    ]
    assert _equal(_collect(batches), _collect([experts]))


def test_an_expert_among_others_has_the_bits_that_it_has_alone() -> None:
    experts = [make_tokens(21, SIZE, 1), make_tokens(90, SIZE, 2)]
    together = _collect([experts])
    for expert, tokens in enumerate(experts):
        assert _equal(together.of_expert(expert), _collect([[tokens]]))


def test_second_moments_alone_are_the_same_and_hold_no_hessian() -> None:
    experts = [make_tokens(21, SIZE, 1), make_tokens(90, SIZE, 2)]
    light = _collect([experts], with_hessian=False)
    assert light.hessian is None
    assert light.of_expert(1).hessian is None
    assert torch.equal(light.second_moment, _collect([experts]).second_moment)


def test_a_dense_module_needs_no_offsets() -> None:
    collector = StatisticsCollector(1, SIZE, with_hessian=True)
    collector.add(make_tokens(10, SIZE))
    assert collector.num_tokens.tolist() == [10]
    assert _equal(collector.finish(), _collect([[make_tokens(10, SIZE)]], chunk_tokens=1024))


def test_shrinkage_follows_its_formula() -> None:
    statistics = _collect([[make_tokens(6, SIZE, 1), make_tokens(0, SIZE, 2)]])
    layer = _collect([[make_tokens(200, SIZE, 3)]])
    assert layer.hessian is not None
    for expert, count in enumerate((6, 0)):
        own = statistics.of_expert(expert)
        found = shrink_statistics(own, 4.0, layer)
        assert found.hessian is not None
        assert own.hessian is not None
        expected = (count * own.hessian + 4 * layer.hessian) / (count + 4)
        torch.testing.assert_close(found.hessian, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.second_moment, expected.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=0)
        assert (found.num_tokens.tolist(), found.shrinkage_tokens) == ([count], 4.0)
    own = statistics.of_expert(0)
    assert own.hessian is not None
    alone = shrink_statistics(own, 2.0)
    assert alone.hessian is not None
    mean = own.second_moment.mean()
    torch.testing.assert_close(alone.hessian[0], (6 * own.hessian[0] + 2 * mean * torch.eye(SIZE)) / 8)
    assert torch.equal(shrink_statistics(own, 0.0, layer).second_moment, own.second_moment)


def test_refusals() -> None:
    collector = StatisticsCollector(2, SIZE, with_hessian=False)
    tokens = make_tokens(4, SIZE)
    with pytest.raises(UsageError, match="offsets"):
        collector.add(tokens)
    with pytest.raises(ShapeError, match="tokens"):
        collector.add(make_tokens(4, SIZE + 1), make_offsets(2, 2))
    with pytest.raises(ShapeError, match="bfloat16"):
        collector.add(tokens.float(), make_offsets(2, 2))
    with pytest.raises(UsageError, match="from 0 to 3"):
        collector.add(tokens, make_offsets(2, 1))
    with pytest.raises(ShapeError, match="expert_offsets"):
        collector.add(tokens, make_offsets(2, 1, 1))
    bad = tokens.clone()
    bad[2, 3] = torch.inf
    with pytest.raises(ContentError, match="NaN or infinite"):
        collector.add(bad, make_offsets(2, 2))
    assert collector.num_tokens.tolist() == [0, 0]
    found = collector.finish()
    with pytest.raises(UsageError, match="finished"):
        collector.finish()
    with pytest.raises(UsageError, match="finished"):
        collector.add(tokens, make_offsets(2, 2))
    with pytest.raises(UsageError, match="-1"):
        shrink_statistics(found.of_expert(0), -1.0)
    with pytest.raises(ShapeError, match="one expert at a time"):
        shrink_statistics(found, 1.0)
    with pytest.raises(UsageError, match="0 experts"):
        StatisticsCollector(0, SIZE, with_hessian=False)
