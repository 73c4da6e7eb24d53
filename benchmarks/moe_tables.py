"""The tables of layers of routed experts, and of whole MoE layers."""

from benchmarks import floors, moe, moe_layers
from benchmarks.figures import Row, fastest_us, told_mode
from benchmarks.markdown import number, table
from benchmarks.moe_cases import FLOOR_TBPS, FLOOR_TFLOPS, MODELS
from benchmarks.moe_peers import PEERS
from benchmarks.pages import Results, listed, page, times_without_rest, told, told_by
from benchmarks.peers import OURS
from benchmarks.session import titles_of


def moe_tables(results: Results) -> str:
    rows, titles = results["rows"], titles_of(PEERS, results["rows"])
    errors, of_fp8 = (listed(moe.worst_of(rows, key), ".1e") for key in ("error", "fp8_error"))
    return page(
        results,
        "moe",
        speedups=_moe_speedups(rows, titles),
        told=f"Routed experts of whole layers on one {results['gpu']}, the router's choice given, "
        "BF16 in and out. The floor is what takes longer: reading the weights of all experts "
        f"that have a token once at {FLOOR_TBPS:g} TB/s, as an H200 copies, or all products at "
        f"{FLOOR_TFLOPS:g} TFLOP/s. {floors.below_the_floor(rows)}{told_by(rows)}"
        f"The mega-kernel is {_mega_kernel(results)}'s. Error against an FP32 layer with the same "
        f"FP8 weights, worst case: {errors}. Against FP8 activations with FP32 sums: {of_fp8}.",
        plot="Layers of routed experts",
        cases="cases",
        how="Device time / stream time of one eager call from an idle start / replay of a CUDA "
        "graph, us, L2 flushed before every call; what overlaps counts once.",
        times=_moe_times(rows, titles),
        without_rest=times_without_rest(
            rows,
            ("model", "tokens"),
            lambda row: [MODELS[row["model"]].title, str(row["tokens"])],
            titles,
        ),
    )


def _mega_kernel(results: Results) -> str:
    return str(results.get("mega_kernel", results["deep_gemm"]))


def _moe_speedups(rows: list[Row], titles: dict[str, str]) -> str:
    others = {name: title for name, title in titles.items() if name != OURS}
    lines = []
    for row in rows:
        ours = fastest_us(row, (OURS,), told_mode(row))
        cells = [MODELS[row["model"]].title, str(row["tokens"]), f"{row['floor_us']:.1f}"]
        ratios = [told(row, (name,), 2) for name in others]
        lines.append([*cells, f"{ours:.1f}", *ratios])
    head = "model", "tokens", "floor, us", "moefp8, us"
    return table([*head, *(f"times as fast as {title}" for title in others.values())], lines)


def _moe_times(rows: list[Row], titles: dict[str, str]) -> str:
    def cell(found: Row) -> str:
        times = [found.get(key) for key in ("us", "eager_us", "graph_us")]
        return " / ".join(number(us, 1) for us in times) if times[0] else "-"

    lines = []
    for row in rows:
        about = MODELS[row["model"]].title, str(row["tokens"]), str(row["active"])
        lines.append([*about, *(cell(row["peers"].get(name, {})) for name in titles)])
    return table(["model", "tokens", "active experts", *titles.values()], lines)


def layers_tables(results: Results) -> str:
    """How many times as fast as each peer whole layers and routers are, and all times."""
    rows = results["rows"]
    tables = []
    for what, about in (
        (moe_layers.LAYER, "whole layer"),
        (moe_layers.ROUTER, "router alone"),
    ):
        ran = [row for row in rows if row["what"] == what]
        titles = titles_of(moe_layers.PEERS[what], ran)
        if ran:
            tables.append(_layer_table(ran, about, titles))
    where = (
        "Device time / stream time of one eager call from an idle start / replay of a CUDA graph, "
        f"us, L2 flushed before every call; then without rest, where that was timed. "
        f"{told_by(rows)}"
        f"{results['gpu']}, torch {results['torch']}, mega-kernel of {results['mega_kernel']}; "
        f"{results['date'][:10]}, commit {results['commit']}."
    )
    return "\n\n".join([*tables, where])


def _layer_table(rows: list[Row], about: str, titles: dict[str, str]) -> str:
    def cell(found: Row) -> str:
        if "us" not in found:
            return "-"
        times = [found.get(key) for key in moe_layers.FIGURES]
        times += [found["without_rest"]["us"]] if "without_rest" in found else []
        return " / ".join(number(us, 1) for us in times)

    others = [name for name in titles if name != OURS]
    lines = []
    for row in rows:
        cells = [MODELS[row["model"]].title, str(row["tokens"])]
        cells += [cell(row["peers"].get(name, {})) for name in titles]
        lines.append([*cells, *(told(row, (name,), 2) for name in others)])
    ratios = (f"times as fast as {titles[name]}" for name in others)
    return table([f"{about}, us", "tokens", *titles.values(), *ratios], lines)
