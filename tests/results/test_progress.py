"""Progress: nested stages reach the one who follows, and nothing else changes."""

import threading

import pytest
import torch

import torchgraft
from torchgraft.results.progress import Progress, Stage, follow_progress, stage


def texts(work):
    seen = []
    with follow_progress(lambda progress: seen.append(str(progress))):
        work()
    return seen


def test_stages_are_nested():
    def work():
        with stage("one", 1, 2):
            with stage("inner"):
                pass
        with stage("two", 2, 2):
            pass

    assert texts(work) == ["one (1 of 2)", "one (1 of 2): inner", "one (1 of 2)", "", "two (2 of 2)", ""]


def test_what_a_follower_is_given():
    seen = []
    with follow_progress(seen.append), stage("a"), stage("b", 1, 3):
        pass
    assert seen[1] == Progress([Stage("a"), Stage("b", 1, 3)]) and seen[1][-1].total == 3 and seen[-1] == ()


def test_a_stage_that_raises_ends():
    def work():
        with pytest.raises(ValueError), stage("one"):
            raise ValueError
        with stage("two"):
            pass

    assert texts(work) == ["one", "", "two", ""]


def test_a_follower_that_raises_stops_the_work_and_leaves_no_stage():
    def stop(progress):
        if progress:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), follow_progress(stop), stage("one"):
        raise AssertionError("not reached")
    assert texts(lambda: stage("two").__enter__())[0] == "two"


def test_followers_end_with_their_block_and_inner_ones_win():
    outer, inner = [], []
    with follow_progress(outer.append):
        with follow_progress(inner.append), stage("inner"):
            pass
        with stage("outer"):
            pass
    with stage("nobody"):
        pass
    assert [str(item) for item in outer] == ["outer", ""] and [str(item) for item in inner] == ["inner", ""]


def test_threads_have_followers_of_their_own():
    def elsewhere():
        with stage("elsewhere"):
            pass

    def work():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    assert texts(work) == []


def test_what_the_library_says():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    assert texts(lambda: torchgraft.capture(model, x))[::2] == [
        "watching the model run",
        "watching the model run a second time",
    ]
    assert "lowering to core_aten" in texts(lambda: torchgraft.capture(model, x, level="core_aten"))
    assert "lowering forward and backward" in texts(lambda: torchgraft.capture(model, x, level="joint"))
    program = torchgraft.capture(model, x)
    assert texts(lambda: torchgraft.compare(program, program, x)) == [
        "running (1 of 2)",
        "running (1 of 2): recording 5 nodes",
        "running (1 of 2)",
        "",
        "running (2 of 2)",
        "running (2 of 2): recording 5 nodes",
        "running (2 of 2)",
        "",
        "lining up and comparing values",
        "",
    ]
    steps = texts(lambda: torchgraft.passes.Pipeline("merge-common, remove-dead-code")(program))
    assert steps[::2] == ["running merge-common (1 of 2)", "running remove-dead-code (2 of 2)"]
    doctor = [step for step in texts(lambda: torchgraft.doctor(model, x)) if step]
    assert doctor[0] == "tracing symbolically (1 of 4)"
    assert "checking the captured program (3 of 4): verifying on fresh values (2 of 7)" in doctor
    assert "counting FLOPs (2 of 2)" in texts(lambda: torchgraft.summary(model, x))


def test_following_changes_no_program():
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    alone = torchgraft.capture(model, x).code
    with follow_progress(lambda progress: torch.randn(3)):
        assert torchgraft.capture(model, x).code == alone
