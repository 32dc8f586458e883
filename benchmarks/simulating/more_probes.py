"""Further probes, where those that `calibration/probes.py` draws evenly are too few to fit figures by.
How probes are timed is in `calibration/measuring.py`, when in `measure_gpu.py`.
"""

from __future__ import annotations

from torchgraft.analysis.simulate.calibration.probes import Draw, Probe


def more_probes() -> list[Probe]:
    """Probes of the kinds of which the first ones, drawn evenly, have too few."""
    draw, found = Draw(seed=7), []

    def add(probe: Probe, *precisions: str) -> None:
        found.extend(Probe(probe.work, probe.shapes, precision, probe.options) for precision in precisions)

    for _ in range(70):  # large convolutions in fp32, where libraries change algorithms
        inner, outer, side = (
            draw.one_of(64, 96, 128, 256, 384, 512),
            draw.one_of(64, 128, 256, 512),
            draw.one_of(7, 14, 28, 56),
        )
        kernel, batch = draw.one_of(1, 3, 3, 3, 5), draw.one_of(1, 16, 64, 128)
        shapes = ((batch, inner, side, side), (outer, inner, kernel, kernel))
        add(
            Probe("convolution", shapes, options={"padding": kernel // 2, "stride": draw.one_of(1, 1, 1, 2)}),
            "fp32",
            "tf32",
            "fp16",
        )
    for _ in range(40):  # channels together in memory
        channels, side, batch = (
            draw.one_of(64, 96, 128, 192, 384, 768),
            draw.one_of(7, 14, 28, 56),
            draw.one_of(1, 16, 128),
        )
        grouped = draw.one_of(True, True, False)
        kernel = draw.one_of(3, 7) if grouped else draw.one_of(1, 2, 3)
        shapes = ((batch, channels, side, side), (channels, 1 if grouped else channels, kernel, kernel))
        options = {"padding": kernel // 2, "groups": channels if grouped else 1, "channels_last": True}
        add(Probe("convolution", shapes, options=options), "fp32", "tf32", "fp16")
    for _ in range(40):  # transposed ones, also small
        inner, outer, side = (
            draw.one_of(64, 100, 128, 256, 512, 1024),
            draw.one_of(3, 64, 128, 256, 512),
            draw.one_of(1, 4, 8, 16, 32),
        )
        kernel, stride, padding = draw.one_of((4, 2, 1), (4, 1, 0), (2, 2, 0), (3, 2, 1))
        shapes = ((draw.one_of(1, 16, 128), inner, side, side), (inner, outer, kernel, kernel))
        add(
            Probe("convolution", shapes, options={"stride": stride, "padding": padding, "transposed": True}),
            "fp32",
            "tf32",
            "fp16",
        )
    for _ in range(60):  # products with few rows
        width = (384, 512, 768, 1024, 2048, 2304, 3072, 4096)
        rows, columns, depth = (
            draw.one_of(16, 49, 77, 128, 196, 197, 256, 512),
            draw.one_of(*width),
            draw.one_of(*width),
        )
        add(Probe("linear", ((rows, depth), (columns, depth), (columns,))), "fp32", "tf32", "fp16")
    for _ in range(30):
        shape = (draw.batch(), draw.one_of(12, 49, 64, 197), draw.one_of(3, 12, 16, 64), draw.one_of(32, 64))
        add(Probe("transpose_copy", (shape,)), "fp32", "fp16")
    for _ in range(40):
        add(draw.attention(), "fp32", "fp16")
    for _ in range(16):
        add(draw.recurrent(), "fp32", "tf32", "fp16")
    for _ in range(30):
        add(draw.grouped(), "fp32", "tf32", "fp16")
    return found
