"""The tables of the grouped GEMMs."""

from benchmarks.figures import Row, fastest_us, ratio
from benchmarks.grouped import by_setting, errors_of, shape_of
from benchmarks.grouped_peers import PADDED, PEERS
from benchmarks.markdown import number, table
from benchmarks.pages import Results, listed, page, times_without_rest, told, told_by
from benchmarks.peers import DEEP_GEMM, OURS
from benchmarks.session import titles_of


def grouped_tables(results: Results) -> str:
    rows = results["rows"]
    return page(
        results,
        "grouped",
        speedups=_grouped_speedups(rows),
        told=f"`m_grouped_fp8_gemm_nt_contiguous` and `_masked` on one {results['gpu']}: how many "
        "times as fast as DeepGEMM, for each N x K. A case is so many groups x so many tokens "
        "of one: 0.7 to 1.3 times their mean, or by Zipf's law, or any number from a to b. "
        "`63 lopsided` is 30 empty groups, one of 3000 and 32 of 7. DeepGEMM's contiguous form "
        "takes padded groups, ours does not, but can: by `grouped_layout`. "
        f"{told_by(rows)}Worst row against "
        f"FP64 sums of the same operands: {listed(errors_of(rows), '.1e')}.",
        plot="Grouped GEMMs",
        cases="cases",
        how="Device time in us, L2 flushed before every call. TFLOP/s and GB/s are moefp8's, and "
        "padding is no work. `moefp8 (padded rows)` multiplies rows that are padded for "
        "DeepGEMM, by `grouped_layout`.",
        times=_grouped_times(rows),
        without_rest=times_without_rest(
            rows,
            ("case", "N x K"),
            lambda row: [f"{row['form']} {row['loads']}", shape_of(row)],
            titles_of(PEERS, rows),
        ),
    )


def _grouped_speedups(rows: list[Row]) -> str:
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    lines = []
    for name, what in ((OURS, ""), (PADDED, ", `grouped_layout`")):
        for setting, of_setting in by_setting(rows).items():
            ran = {shape_of(row): row for row in of_setting if ratio(row, (DEEP_GEMM,), of=name)}
            if ran:
                cells = [told(ran[x], (DEEP_GEMM,), 3, name) if x in ran else "" for x in shapes]
                lines.append([f"{setting}{what}", *cells])
    return table(["case", *shapes], lines)


def _grouped_times(rows: list[Row]) -> str:
    titles = titles_of(PEERS, rows)
    ours_title = titles.pop(OURS)
    lines = []
    for setting, of_setting in by_setting(rows).items():
        for row in of_setting:
            ours = row["peers"][OURS]
            figures = f"{ours['us']:.1f}", f"{ours['tflops']:.0f}", f"{ours['gbps']:.0f}"
            others = [number(fastest_us(row, (name,)), 1) for name in titles]
            lines.append([setting, str(row["tokens"]), shape_of(row), *figures, *others])
    head = "case", "tokens", "N x K", ours_title, "TFLOP/s", "GB/s", *titles.values()
    return table(head, lines)
