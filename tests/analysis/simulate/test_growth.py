"""The work of simulating grows with the length of a program, not with its square: calls of functions are counted, not seconds."""

import cProfile
import pstats

import torch
from torch import nn

from torchgraft import Graph, GraphModule, simulate


def chain(length):
    graph = Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.add, (value, 1.0))
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def calls(length, machine):
    program, x = chain(length), torch.empty(8, 8, device="meta")
    profile = cProfile.Profile()
    profile.enable()
    found = simulate(program, x, machine=machine)
    profile.disable()
    assert len(found.kernels) == length
    return pstats.Stats(profile).total_calls


def test_twice_as_long_is_twice_the_work():
    for machine in ("h200", "epyc"):
        calls(10, machine)
        first, second, third = (calls(length, machine) for length in (200, 400, 800))
        assert third - second < 2.2 * (second - first)
