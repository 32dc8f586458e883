"""torch.fx's first pass manager, beside torch.fx's own."""

import importlib
import logging

import pytest


@pytest.fixture(params=["torch.fx", "torchgraft"])
def manager(request):
    return importlib.import_module(f"{request.param}.passes.pass_manager")


def add_one(x):
    return [*x, 1]


def add_two(x):
    return [*x, 2]


def append_three(x):
    x.append(3)
    return True


def test_passes_run_in_their_order(manager):
    passes = manager.PassManager.build_from_passlist([add_one, manager.inplace_wrapper(append_three)])
    passes.add_pass(add_two)
    assert passes([]) == [1, 3, 2]
    passes.remove_pass(["append_three"])
    passes.replace_pass(add_two, add_one)
    assert passes([0]) == [0, 1, 1]


def test_loops(manager):
    assert manager.loop_pass(add_one, n_iter=3)([]) == [1, 1, 1]
    assert manager.loop_pass(add_one, predicate=lambda x: len(x) < 2)([]) == [1, 1]
    with pytest.raises(AssertionError, match="Exactly one of"):
        manager.loop_pass(add_one)


def test_constraints(manager):
    loops = [manager.loop_pass(add_two, 1), manager.loop_pass(add_one, 1)]
    passes = manager.PassManager(loops, [manager.these_before_those_pass_constraint(add_one, add_two)])
    with pytest.raises(RuntimeError, match="pass schedule constraint violated"):
        passes([])
    assert manager.PassManager(loops[::-1], passes.constraints)([]) == [1, 2]
    direct = manager.PassManager([add_two, add_one])
    direct.add_constraint(manager.this_before_that_pass_constraint(add_one, add_two))
    with pytest.raises(RuntimeError, match="pass schedule constraint violated"):
        direct.validate()


def test_results_are_logged(manager, caplog):
    manager.logger.addHandler(caplog.handler)  # torch's loggers hand nothing on
    try:
        assert manager.log_hook(add_one, logging.ERROR)([]) == [1]
    finally:
        manager.logger.removeHandler(caplog.handler)
    assert "Return value: [1]" in caplog.text
