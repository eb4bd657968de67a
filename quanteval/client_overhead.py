"""What the load client adds to its own figures on this machine, measured against the mock server."""

from __future__ import annotations

from collections.abc import Iterator

from quanteval.bench.overhead import ClientOverhead, OverheadPoint, measure_overhead
from quanteval.engines.fake import ByteTokenizer
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote
from quanteval.server.mock import MockServer, MockSettings

PACED_STREAMS = (1, 16, 64, 256)
FLOODED_STREAMS = (16, 64)
ITL_S = 0.02


def client_overhead() -> ClientOverhead:
    """Measure at rising numbers of streams, with gaps of 20 ms between tokens and with none; takes about 20 s."""
    return ClientOverhead(
        paced=_against(MockSettings(itl_s=ITL_S), PACED_STREAMS),
        flooded=_against(MockSettings(), FLOODED_STREAMS),
    )


def _against(settings: MockSettings, streams: tuple[int, ...]) -> tuple[OverheadPoint, ...]:
    with (
        MockServer(settings, subprocess=True) as mock,
        HTTPSession(Remote(mock.base_url), ByteTokenizer()) as session,
    ):
        return measure_overhead(session, mock.truth, loads=streams)


def overhead_lines(overhead: ClientOverhead) -> Iterator[str]:
    """Yield what `quanteval doctor --load-client` prints."""
    yield "load client against the mock server: time added to each token, way through the sockets included"
    yield "streams  gap ms  added p50 ms  added p99 ms  tokens/s  CPU of a core       n  note"
    for gap, points in ((1000 * ITL_S, overhead.paced), (0.0, overhead.flooded)):
        for point in points:
            note = f"saturated: {point.saturated}" if point.saturated else ""
            yield (
                f"{point.streams:7d}  {gap:6.0f}  {1000 * point.added_p50_s:12.2f}  "
                f"{1000 * point.added_p99_s:12.2f}  {point.tokens_per_s:8.0f}  "
                f"{point.cpu_share:13.2f}  {point.tokens:6d}  {note}"
            ).rstrip()
    yield f"most that went through: {overhead.most_tokens_per_s:.0f} tokens/s"
