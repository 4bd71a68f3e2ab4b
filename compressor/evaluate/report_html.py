"""report.html: quality.json and the ledger's figures for people, in one file that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from memopt.compressor.evaluate.bootstrap import Interval
from memopt.compressor.evaluate.gate import GateCheck
from memopt.compressor.evaluate.ledger_figures import LedgerFigures
from memopt.compressor.evaluate.quality import Quality
from memopt.compressor.evaluate.svg_plot import Axes, Series, line_plot

REPORT_NAME = "report.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .5rem 0 } caption { text-align: left; color: #555 }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd;
  font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto; font-size: 11px; fill: #333 } .grid { stroke: #ddd }
.held { color: #00633f } .failed { color: #a30000; font-weight: 600 }
code { font-size: .9em; overflow-wrap: anywhere }
"""


def render_report(quality: Quality, ledger: LedgerFigures, gate: Sequence[GateCheck] = ()) -> bytes:
    """The page, the same bytes for the same figures; every text from outside is escaped."""
    conditions = quality.conditions
    sections = [
        f"<h1>Quality of {escape(quality.release.name)} against {escape(quality.base.name)}</h1>",
        _paragraph(
            f"{quality.num_tokens:,} predicted tokens of {quality.num_documents:,} documents in "
            f"{conditions.num_windows:,} windows of up to {conditions.window_tokens:,} tokens; activations "
            f"{conditions.compute}, KV cache {conditions.base_kv_cache} (base) and {conditions.kv_cache} (release). "
            f"Intervals: {quality.confidence:.0%}, {quality.num_resamples:,} bootstrap resamples of "
            f"{quality.num_resampled_units:,} whole {quality.resampled}s, seed {conditions.seed}."
        ),
        _figures(quality),
        _gate(gate),
        "<h2>KL by position</h2>",
        _kl_by_position(quality),
        _by_context(quality),
        "<h2>Weight error by layer and role</h2>",
        _errors(ledger),
        "<h2>Expert coverage in calibration</h2>",
        _coverage(ledger),
        _tasks(quality),
        _worst(quality),
        "<h2>What was measured</h2>",
        _table(
            ("", "name", "kind", "sha256"),
            [
                (label, model.name, model.kind, model.sha256)
                for label, model in (("base", quality.base), ("release", quality.release))
            ]
            + [("data", f"{quality.data.size_bytes:,} bytes", quality.data.kind, quality.data.sha256)],
        ),
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>Quality of {escape(quality.release.name)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *(section for section in sections if section), "</body></html>\n"]).encode()


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table of plain texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _interval(name: str, interval: Interval, digits: int) -> tuple[str, str, str, str]:
    return (name, f"{interval.value:.{digits}f}", f"{interval.low:.{digits}f}", f"{interval.high:.{digits}f}")


def _figures(quality: Quality) -> str:
    rows = [
        _interval("KL(base || release), nats a token", quality.kl, 5),
        _interval("top-1 agreement", quality.top1, 4),
        _interval("perplexity, base", quality.base_perplexity, 3),
        _interval("perplexity, release", quality.release_perplexity, 3),
        _interval("perplexity ratio", quality.perplexity_ratio, 4),
    ]
    tail = [(f"KL, percentile {rank:g}", f"{value:.5f}", "", "") for rank, value in quality.kl_percentiles]
    return _table(("figure", "value", "low", "high"), [*rows, *tail, ("KL, largest", f"{quality.kl_max:.4f}", "", "")])


def _gate(gate: Sequence[GateCheck]) -> str:
    if not gate:
        return _paragraph("The recipe sets no quality gate.")
    items = "".join(
        f'<li class="{"held" if check.holds else "failed"}">{"holds" if check.holds else "FAILS"}: '
        f"{escape(check.describe())}</li>"
        for check in gate
    )
    return f"<h2>Gate</h2><ul>{items}</ul>"


def _kl_by_position(quality: Quality) -> str:
    points = tuple(((entry.first + entry.last) / 2, entry.kl) for entry in quality.by_position)
    axes = Axes("Mean KL by tokens of context", "tokens of context", "KL, nats a token")
    return line_plot(axes, [Series("KL", points)])


def _by_context(quality: Quality) -> str:
    rows = [
        (
            f"{entry.first:,} to {entry.last:,}",
            f"{entry.num_tokens:,}",
            f"{entry.kl:.5f}",
            f"{entry.top1:.4f}",
            f"{entry.base_perplexity:.3f}",
            f"{entry.release_perplexity:.3f}",
        )
        for entry in quality.by_context
    ]
    header = ("tokens of context", "predictions", "KL", "top-1", "perplexity, base", "release")
    return _table(header, rows, "By length of context")


def _errors(ledger: LedgerFigures) -> str:
    roles = sorted({entry.role for entry in ledger.errors})
    series = [
        Series(role, tuple((float(e.layer), e.relative_mse) for e in ledger.errors if e.role == role)) for role in roles
    ]
    axes = Axes("Relative squared error of quantized weights", "layer", "relative squared error", is_log=True)
    return line_plot(axes, series)


def _coverage(ledger: LedgerFigures) -> str:
    if not ledger.coverage:
        return _paragraph("No expert was calibrated: plain rounding needs no data.")
    series = [
        Series("most", tuple((float(entry.layer), float(entry.most_tokens)) for entry in ledger.coverage)),
        Series("median", tuple((float(entry.layer), float(entry.median_tokens)) for entry in ledger.coverage)),
        Series("fewest", tuple((float(entry.layer), float(entry.fewest_tokens)) for entry in ledger.coverage)),
    ]
    num_experts = sum(entry.num_experts for entry in ledger.coverage)
    fallbacks = sum(entry.num_fallbacks for entry in ledger.coverage)
    plot = line_plot(Axes("Tokens an expert saw", "layer", "tokens", is_log=True), series)
    return plot + _paragraph(
        f"Of {num_experts:,} experts {fallbacks:,} have a weight of a lesser method than asked for."
    )


def _tasks(quality: Quality) -> str:
    rows = [
        (
            score.task,
            score.metric,
            f"{score.num_samples:,}",
            f"{score.base:.2f} ± {score.base_error:.2f}",
            f"{score.release:.2f} ± {score.release_error:.2f}",
            f"{score.drop:+.2f}",
        )
        for score in quality.tasks
    ]
    header = ("task", "metric", "samples", "base, points", "release, points", "drop")
    return "<h2>Tasks</h2>" + _table(header, rows) if rows else ""


def _worst(quality: Quality) -> str:
    rows = [
        (
            f"{token.document:,}",
            f"{token.position:,}",
            f"{token.context:,}",
            f"{token.kl:.4f}",
            f"{token.base_surprise:.3f}",
            f"{token.release_surprise:.3f}",
        )
        for token in quality.worst
    ]
    header = ("document", "token", "context", "KL", "surprise, base", "release")
    return "<h2>Largest KL</h2>" + _table(header, rows, "Documents and tokens are counted from 0 in the data file")
