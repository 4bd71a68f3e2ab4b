"""Quality's figures, quality.json there and back, the gate's verdicts, the report's escaping."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from evaluate_scores import made_quality, made_scores
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.compressor.calibration_figures import CalibrationFigures
from memopt.compressor.evaluate.bootstrap import Interval
from memopt.compressor.evaluate.gate import check_gate, require_gate
from memopt.compressor.evaluate.ledger_figures import ExpertCoverage, LayerError, LedgerFigures, ledger_figures
from memopt.compressor.evaluate.quality import Quality, measure_quality
from memopt.compressor.evaluate.quality_file import figure_text, parse_quality, render_quality
from memopt.compressor.evaluate.report_html import render_report
from memopt.compressor.evaluate.svg_plot import Axes, Series, line_plot
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.compressor.ledger import ledger_line
from memopt.compressor.quality_gate import QualityGate
from memopt.errors import DataFileError, ExitCode, LedgerError, QualityFileError, QualityGateError

TASK = TaskScore("gsm8k", "exact_match,strict-match", 200, 71.5, 3.2, 70.9, 3.2)


def test_figures_are_those_of_the_scores() -> None:
    scores, quality = made_scores(), made_quality()
    np.testing.assert_allclose(quality.kl.value, scores.kl.mean())
    np.testing.assert_allclose(quality.base_perplexity.value, np.exp(scores.base_surprise.mean()))
    np.testing.assert_allclose(
        quality.perplexity_ratio.value, np.exp((scores.release_surprise - scores.base_surprise).mean())
    )
    assert quality.worst[0].kl == quality.kl_max == scores.kl.max()
    assert [token.kl for token in quality.worst] == sorted((token.kl for token in quality.worst), reverse=True)
    assert [(part.first, part.last, part.num_tokens) for part in quality.by_context] == [(1, 31, 248), (32, 40, 72)]
    assert sum(part.num_tokens for part in quality.by_position) == len(scores)
    assert (quality.resampled, quality.num_documents, quality.num_resampled_units) == ("document", 8, 8)


def test_few_documents_are_resampled_by_windows() -> None:
    scores, quality = made_scores(num_documents=2), made_quality()
    found = measure_quality(
        scores,
        np.arange(len(scores)) // 10,
        base=quality.base,
        release=quality.release,
        data=quality.data,
        conditions=quality.conditions,
    )
    assert (found.resampled, found.num_documents, found.num_resampled_units) == ("window", 2, 8)
    assert found.kl.low < found.kl.value < found.kl.high


def test_no_prediction_is_refused() -> None:
    quality = made_quality()
    empty = made_scores(num_documents=0)
    with pytest.raises(DataFileError, match="no token was predicted"):
        measure_quality(
            empty,
            empty.document,
            base=quality.base,
            release=quality.release,
            data=quality.data,
            conditions=quality.conditions,
        )


def test_quality_json_comes_back_as_it_went() -> None:
    raw = render_quality(made_quality(tasks=(TASK,)))
    parsed = parse_quality(raw)
    assert render_quality(parsed) == raw
    assert parsed.tasks[0].task == "gsm8k"
    assert raw == render_quality(made_quality(tasks=(TASK,)))
    table = json.loads(raw)
    assert table["format"] == "memopt.quality/1"
    assert f'"kl":{{"high":{made_quality().kl.high:.6e}' in raw.decode()


@given(st.floats())
@settings(deadline=None)
def test_a_figure_is_a_json_number_of_known_form(value: float) -> None:
    text = figure_text(value)
    again = json.loads(text)
    assert figure_text(float(again)) == text
    if np.isfinite(value) and 1e-90 < abs(value) < 1e90:
        assert abs(again - value) <= 1e-6 * abs(value)


GOOD = render_quality(made_quality())


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
@settings(deadline=None)
def test_a_changed_byte_is_refused_or_gives_the_same_spelling(position: int, byte: int) -> None:
    raw = bytearray(GOOD)
    raw[position] = byte
    try:
        quality = parse_quality(bytes(raw))
    except QualityFileError:
        return
    assert render_quality(quality) == bytes(raw)


def changed(**fields: object) -> bytes:
    return (json.dumps(json.loads(GOOD) | fields, sort_keys=True, separators=(",", ":")) + "\n").encode()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(extra=1), "extra is missing or unknown"),
        (changed(kl_max="[" * 9), "quality.kl_max is '"),
        (changed(kl_max=[[[]]]), "quality.kl_max is list"),
        (changed(base=None), "quality.base: not a table"),
        (b'{"format":"memopt.quality/1","kl":' + b"[" * 100_000, "nesting is too deep"),
        (GOOD.replace(b'"kl_max":', b'"kl_max":NaN,"x":', 1), "NaN is not JSON"),
        (GOOD.replace(b'"name":"base"', b'"name":"\\ud800"'), "unpaired surrogate"),
        (GOOD + b"\n", "not spelled canonically"),
        (GOOD[:-1], "not spelled canonically"),
        (b"\xef\xbb\xbf" + GOOD, "not strict JSON"),
        (GOOD + b" " * 2**22, "at most 4,194,304"),
        (changed(format="memopt.quality/2"), "format is not"),
        (changed(kl=3), "quality.kl: not a table"),
        (changed(num_tokens=True), "quality.num_tokens is True"),
        (changed(worst={}), "quality.worst is"),
        (changed(num_resamples=10), "not spelled canonically"),
        (b"[]", "a JSON object is needed"),
        (b" " + GOOD, "not spelled canonically"),
    ],
)
def test_another_form_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(QualityFileError, match=words):
        parse_quality(raw)


def quality_with(kl: Interval, top1: Interval) -> Quality:
    return replace(made_quality(), kl=kl, top1=top1, perplexity_ratio=Interval(1.01, 1.0, 1.03))


def test_the_gate_holds_the_worse_end_of_the_interval() -> None:
    quality = quality_with(Interval(0.04, 0.03, 0.05), Interval(0.9, 0.88, 0.92))
    assert [check.holds for check in check_gate(QualityGate(kl_max=0.05, top1_min=0.88), quality)] == [True, True]
    assert [check.holds for check in check_gate(QualityGate(kl_max=0.049, top1_min=0.881), quality)] == [False, False]
    assert not check_gate(QualityGate(perplexity_ratio_max=1.02), quality)[0].holds


@pytest.mark.parametrize("kind", ["checkpoint", "release"])
def test_figures_against_anything_but_the_source_do_not_count(kind: str) -> None:
    """Against itself a release loses nothing: that must not sign it."""
    gate = QualityGate(kl_max=100, top1_min=0, perplexity_ratio_max=100)
    quality = made_quality()
    require_gate(gate, quality)
    other = replace(quality, base=replace(quality.base, kind=kind))
    assert [check.holds for check in check_gate(gate, other)] == [False, False, False]
    with pytest.raises(QualityGateError, match="not measured against the checkpoint that the release was made from"):
        require_gate(gate, other)


@pytest.mark.parametrize(("num_windows", "holds"), [(1, False), (4, False), (5, True)])
def test_an_interval_of_a_few_windows_holds_for_nothing(num_windows: int, holds: bool) -> None:
    scores, quality = made_scores(num_documents=1), made_quality()
    found = measure_quality(
        scores,
        np.arange(len(scores)) * num_windows // len(scores),
        base=quality.base,
        release=quality.release,
        data=quality.data,
        conditions=quality.conditions,
    )
    (check,) = check_gate(QualityGate(kl_max=100), found)
    assert check.holds == holds
    assert ("not measured on 5 windows or more" in check.describe()) != holds


def test_scores_are_held_by_the_worst_task_and_must_be_measured() -> None:
    gate = QualityGate(score_drop_max_points=0.8)
    better = replace(TASK, task="arc", release=72.0)
    assert check_gate(gate, replace(made_quality(), tasks=(better, TASK)))[0].holds
    worse = replace(TASK, release=70.6)
    assert not check_gate(gate, replace(made_quality(), tasks=(better, worse)))[0].holds
    with pytest.raises(QualityGateError, match=r"not measured, must be at most 0\.8") as refused:
        require_gate(gate, made_quality())
    assert refused.value.exit_code == ExitCode.POLICY == 5


def weight_line(layer: int, expert: int, tokens: int, fallback: str, part: str = "up_proj") -> bytes:
    """A line as compressor/ledger.py writes it for a calibrated weight."""
    figures = CalibrationFigures(tokens, 0, "gptq", 0.01, 4.0, 2.0, 1.0, 8, 0, fallback)
    row = {
        "tensor": f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
        "role": "routed_expert",
        "layer": layer,
        "error": {"relative_mse": 0.25 * (expert + 1), **figures.ledger_figures()},
    }
    return ledger_line(row)


def test_the_ledger_is_summed_by_layer_role_and_expert() -> None:
    lines = [weight_line(3, 0, 10, ""), weight_line(3, 0, 10, "", "down_proj"), weight_line(3, 1, 2, "too few tokens")]
    plain = {"tensor": "model.layers.0.x.weight", "role": "attention", "layer": 0, "error": {"relative_mse": 0.5}}
    kept = {"tensor": "model.layers.0.norm.weight", "role": "norm", "layer": 0}
    found = ledger_figures(
        [*lines, ledger_line(plain), ledger_line(kept), ledger_line({"tensor": "lm_head.weight", "layer": None})]
    )
    assert found.errors == (LayerError(0, "attention", 1, 0.5), LayerError(3, "routed_expert", 3, 1.0 / 3))
    assert found.coverage == (ExpertCoverage(3, 2, 2, 10, 10, 1),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[]", "a JSON object is needed"),
        (b"{", "not strict JSON"),
        (b'{"layer": 1, "error": {"relative_mse": "x"}}', "no figure"),
        (b'{"layer": 1, "error": {"relative_mse": -1}}', "no figure"),
        (b'{"layer": 1, "error": {"relative_mse": true}}', "no figure"),
        (b'{"layer": 1, "error": {"relative_mse": Infinity}}', "Infinity is not JSON"),
        (b'{"layer": 1, "error": {"relative_mse": 1e999}}', "no figure"),
        (b'{"layer": 1, "error": {"relative_mse": 1' + b"0" * 400 + b"}}", "too many digits"),
        (b'{"layer": 1' + b"0" * 400 + b', "error": {"relative_mse": 1}}', "layer or error"),
        (b'{"layer": -1, "error": {"relative_mse": 1}}', "layer or error"),
        (b'{"layer": 1, "error": []}', "layer or error"),
        (b'{"layer": 1, "role": "\\ud800", "error": {"relative_mse": 1}}', "unpaired surrogate"),
        (b'{"layer": 1, "role": "routed_expert", "error": {"relative_mse": 1, "tokens": 1}}', "'None' is no figure"),
    ],
)
def test_a_line_that_is_none_of_a_ledger_is_refused(line: bytes, words: str) -> None:
    with pytest.raises(LedgerError, match=words):
        ledger_figures([line])


class _Tags(HTMLParser):
    """Tags and attributes of a page, and whether every tag that needs it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


HOSTILE = "\"><script>alert('x')</script><img src=x onerror=y>]]></svg>\x00\u202e"


def test_the_report_is_one_closed_page_that_loads_and_runs_nothing() -> None:
    quality = made_quality(tasks=(replace(TASK, task=HOSTILE),), name=HOSTILE)
    ledger = LedgerFigures(
        (LayerError(0, HOSTILE, 1, 1e-3), LayerError(1, HOSTILE, 1, 0.0)), (ExpertCoverage(0, 8, 0, 5, 9, 1),)
    )
    gate = check_gate(QualityGate(kl_max=1e-6, top1_min=0.1), quality)
    page = render_report(quality, ledger, gate)
    parser = _Tags()
    parser.feed(page.decode())
    assert parser.open == []
    assert not {"script", "img", "link", "iframe", "object", "form", "a", "base"} & set(parser.tags)
    assert not [name for name, _ in parser.attributes if name.startswith("on") or name in ("src", "href")]
    assert parser.tags.count("svg") == 3
    assert "FAILS" in page.decode()
    assert "holds" in page.decode()
    assert page == render_report(quality, ledger, gate)


def test_the_report_says_what_was_not_measured() -> None:
    page = render_report(made_quality(), LedgerFigures((), ())).decode()
    for words in ("sets no quality gate", "nothing was measured", "No expert was calibrated"):
        assert words in page


POINTS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e300)), max_size=5)


@given(st.lists(POINTS, max_size=4), st.booleans(), st.text(max_size=20))
@settings(deadline=None)
def test_a_plot_is_well_formed_and_stays_inside(
    lines: list[list[tuple[float, float]]], is_log: bool, name: str
) -> None:
    series = [Series("".join(c for c in name if c.isprintable()), tuple(points)) for points in lines]
    text = line_plot(Axes('<t> & "q"', "x", "y", is_log), series)
    root = ElementTree.fromstring(text)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cx", "-1")) <= 720
        assert 0 <= float(circle.get("cy", "-1")) <= 280
    assert len(list(root.iter("circle"))) == sum(len(points) for points in lines)
