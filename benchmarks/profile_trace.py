"""The command `python -m benchmarks.profile_trace MODEL`: where the time of a trace goes, function by function.
The profiler makes small functions look dearer than they are; `python -m benchmarks` has the true times.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
from collections.abc import Sequence

from benchmarks.models import MixedChain, zoo_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_trace")
    parser.add_argument(
        "model", nargs="?", default="resnet50", help="a name of the zoo, or a number: a chain of that length"
    )
    parser.add_argument("--library", default="torchgraft", help="torchgraft or torch.fx")
    parser.add_argument("--repeat", metavar="N", type=int, default=20)
    parser.add_argument("--sort", default="tottime", help="tottime, cumulative or ncalls")
    parser.add_argument("--lines", type=int, default=30)
    parser.add_argument("--module", action="store_true", help="symbolic_trace and its code, not only the trace")
    parser.add_argument("--save", metavar="FILE", help="write the profile for another viewer")
    options = parser.parse_args(arguments)

    library = importlib.import_module(options.library)
    model = MixedChain(int(options.model)) if options.model.isdigit() else zoo_model(options.model)

    def run() -> int:
        if not options.module:
            return len(library.Tracer().trace(model).nodes)
        module = library.symbolic_trace(model)
        _ = module.forward, module.code
        return len(module.graph.nodes)

    nodes = run()
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(options.repeat):
            run()
    statistics = pstats.Stats(profiler)
    total = statistics.total_tt / options.repeat  # type: ignore[attr-defined]
    print(f"{nodes} nodes, {total * 1e3:.2f} ms a trace under the profiler, {total / nodes * 1e6:.1f} µs a node")
    statistics.sort_stats(options.sort).print_stats(options.lines)
    if options.save:
        statistics.dump_stats(options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
