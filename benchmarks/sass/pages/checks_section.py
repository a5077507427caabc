"""Section of the results page: correctness of results and of the measuring itself, on a GPU."""

from __future__ import annotations

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FOLDER = results("sass")


def checks_section() -> str:
    """Random walks, broken kernels, measurement checks, several GPUs."""
    parts = ["## Correctness on a GPU", _walks(), _soaks(), "## The measuring itself", _measuring()]
    return "\n\n".join([*parts, _clocks(), _nulls(), _farm(), _overlap()])


def _walks() -> str:
    path = FOLDER / "random_walks_on_gpu.json"
    record = load(path)
    tried = [kernel for kernel in record["kernels"] if kernel.get("walks")]
    gpu = tried[0]["about"]["gpu"]
    return wrapped(
        f"**Random walks.** On {gpu} the ends of {record['walks']} random walks of legal moves "
        f"over {len(tried)} kernels were executed on random inputs and compared bit by bit with "
        f"the original: {record['wrong']} differed. {len(record['kernels']) - len(tried)} further "
        "kernels could not be tried, because they are not deterministic or leave parts of an "
        f"output unwritten. (`python -m benchmarks run sass.random_walks_on_gpu`, {link(path)}) "
        f"The moves were those that the tables and in-order rules of {record['date'][:16]} UTC "
        "permitted; rules that changed since permit other moves, which have not run."
    )


def _soaks() -> str:
    head = ("file", "GPU", "kernels", "search minutes", "legal candidates", "broken kernels",
            "faults", "wrong outputs", "wrong kernels accepted", "results lost")  # fmt: skip
    rows = []
    for name in ("soak", "soak_more"):
        path = FOLDER / f"{name}.json"
        record = load(path)
        fates = record["fates"]
        rows.append([
            link(path), record["gpu"]["gpu"], str(record["kernels"]),
            f"{record['search_minutes']:.1f}", f"{record['legal_candidates']:,}",
            str(record["broken_kernels"]), str(fates.get("fault", 0)), str(fates.get("wrong", 0)),
            str(record["wrong_kernels_accepted"]), str(record["lost_results"]),
        ])  # fmt: skip
    intro = wrapped(
        "**Broken on purpose.** Searches with illegal moves among the legal ones (`python -m "
        "benchmarks run sass.soak`). A broken kernel may run without effect, give wrong outputs, "
        "or fault the context; a fault costs a restart of the worker process."
    )
    return f"{intro}\n\n{table(head, rows)}"


def _measuring() -> str:
    path = FOLDER / "measurement_checks.json"
    record = load(path)
    parts = record["parts"]
    equal = parts["inputs"]["inputs_equal"]
    rates = [part for name, part in parts.items() if name.startswith("throughput")]
    alone = [part["one by one"]["per_s"] for part in rates]
    overlapped = [part["overlapped"]["per_s"] for part in rates]
    samples = [part["samples_per_s"] for name, part in parts.items() if name.startswith("samples")]
    return wrapped(
        f"On {record['about']['gpu']} (`python -m benchmarks run sass.measurement_checks`, "
        f"{link(path)}): inputs made on the device equal numpy's bit for bit in "
        f"{sum(equal.values())} of {len(equal)} types. A search tries {min(alone):.0f} to "
        f"{max(alone):.0f} candidates a second one by one and {min(overlapped):.0f} to "
        f"{max(overlapped):.0f} with patching overlapped. {min(samples):,.0f} to "
        f"{max(samples):,.0f} random inputs a second are compared."
    )


def _clocks() -> str:
    parts = load(FOLDER / "measurement_checks.json")["parts"]
    kernels = {n.removeprefix("clocks "): p for n, p in parts.items() if n.startswith("clocks ")}
    head = ("`--timing`, L2 cache", *(f"{kernel}, us" for kernel in kernels))
    clocks = [name for name in next(iter(kernels.values())) if "," in name]
    rows = [[clock, *(f"{part[clock]['us']:.1f}" for part in kernels.values())] for clock in clocks]
    return table(head, rows)


def _nulls() -> str:
    parts = load(FOLDER / "measurement_checks.json")["parts"]
    nulls = {n.removeprefix("nulls "): p for n, p in parts.items() if n.startswith("nulls ")}
    rows = [
        [kernel, loads.split()[0], str(part[loads]["intervals"]), str(part[loads]["without_1"]),
         str(part[loads]["verdicts_not_same"])]
        for kernel, part in nulls.items()
        for loads in part
        if loads.endswith("loads")
    ]  # fmt: skip
    head = ("kernel beside itself", "times loaded", "comparisons", "intervals without 1",
            "called a gain or a loss")  # fmt: skip
    return table(head, rows)


def _farm() -> str:
    path = FOLDER / "farm_throughput.json"
    record = load(path)
    rates = ", ".join(f"{run['gpus']}: {run['per_second']:.0f}" for run in record["runs"])
    return wrapped(
        f"Candidates a second by number of GPUs, {record['runs'][0]['gpu']['gpu']}, "
        f"{record['runs'][0]['kernel']}: {rates} (`python -m benchmarks run sass.farm_throughput`, "
        f"{link(path)})."
    )


def _overlap() -> str:
    path = FOLDER / "load_overlap.json"
    (kernel,) = load(path)["kernels"]
    head = ("loading", "candidates a second", "share of the time that loading takes")
    rows = [
        [
            "overlaps timing" if search["ahead"] else "before timing",
            f"{search['per_second']:.0f}",
            f"{100 * search['shares']['load']:.1f} %",
        ]
        for search in kernel["searches"]
    ]
    intro = wrapped(
        f"Modules loaded while the GPU is timing, {kernel['kernel']} (`python -m benchmarks run "
        f"sass.load_overlap`, {link(path)}). The first pair also had to compile:"
    )
    return f"{intro}\n\n{table(head, rows)}"
