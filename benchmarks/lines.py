"""What benchmarks of GEMMs print of their rows, in both modes."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import WITHOUT_REST, Row, fastest_us, of_peer, ratio, tflops
from benchmarks.peers import OURS


def lines_of_shapes(rows: Sequence[Row], titles: Mapping[str, str]) -> Iterator[str]:
    """Our figures in full; the others' times, and how many times as long as ours they are."""
    peers = [name for name in titles if name != OURS]
    yield f"{'N x K':>13}  {'moefp8, us':>10} {'TFLOP/s':>8} {'GB/s':>6} {'error':>8}" + "".join(
        f"  {titles[name]:>21}" for name in peers
    )
    for row in rows:
        ours = row["peers"][OURS]
        line = f"{row['n']:>5} x {row['k']:<5}  {ours['us']:10.1f} {ours['tflops']:8.0f} "
        line += f"{ours['gbps']:6.0f} {ours['error']:8.1e}"
        for name in peers:
            times, us = ratio(row, (name,)), fastest_us(row, (name,))
            line += f"  {f'{us:.1f} x{times:.2f}' if us else '-':>21}"
        yield line
    yield from lines_without_rest(rows, titles)


def lines_without_rest(rows: Sequence[Row], titles: Mapping[str, str]) -> Iterator[str]:
    """The same without rest, with the spread of ratios, clock and power, where that was timed."""
    rows = [row for row in rows if of_peer(row, OURS, WITHOUT_REST)]
    if not rows:
        return
    peers = [name for name in titles if name != OURS]
    yield f"{'without rest':>13}  {'moefp8, us':>10} {'TFLOP/s':>8} {'MHz, W':>9}" + "".join(
        f"  {titles[name]:>38}" for name in peers
    )
    for row in rows:
        us, speed = fastest_us(row, (OURS,), WITHOUT_REST), tflops(row, OURS, WITHOUT_REST)
        line = f"{row['n']:>5} x {row['k']:<5}  {us or 0:10.1f} {speed or 0:8.0f} "
        line += f"{sensed(row, OURS):>9}"
        yield line + "".join(f"  {without_rest(row, name):>38}" for name in peers)


def sensed(row: Row, name: str) -> str:
    """Clock and power without rest, where they could be read."""
    found = of_peer(row, name, WITHOUT_REST)
    return f"{found['mhz']} {found['watts']}" if "mhz" in found else "-"


def without_rest(row: Row, name: str) -> str:
    """A peer's time, how many times as long as ours it is, the spread, clock and power."""
    found = of_peer(row, name, WITHOUT_REST)
    if "ratio" not in found:
        return "-"
    spread = f"({found['least']:.3f} to {found['most']:.3f})"
    return f"{found['us']:.1f} x{found['ratio']:.3f} {spread} {sensed(row, name)}"
