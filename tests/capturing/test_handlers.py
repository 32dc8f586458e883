"""Where a function goes on after an error, told from its code.
What becomes of a model that does is in `tests/traps/asked.py`.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from torchgraft.capturing.handlers import is_handled, recovering_frame, recovers


def _suppressed(call: Callable[[], Any]) -> Any:
    with contextlib.suppress(RuntimeError):
        return call()


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (KeyError, RuntimeError):
        return None


def _caught_bare(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except:  # noqa: E722
        return None


def _raised_again(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise ValueError("no") from error


def _cleaned_up(call: Callable[[], Any]) -> Any:
    try:
        return call()
    finally:
        print(end="")


def _other_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except KeyError:
        return None


def _installed(call: Callable[[], Any]) -> Any:
    try:
        import json

        return json.dumps(call() and 1)
    except Exception:
        return None


def _plain(call: Callable[[], Any]) -> Any:
    return call()


@pytest.mark.parametrize("function", [_suppressed, _caught, _caught_bare])
def test_functions_that_go_on(function: Callable[..., Any]) -> None:
    assert recovers(function.__code__)
    frames: list[FrameType | None] = []
    function(lambda: frames.append(recovering_frame(sys._getframe(1), test_functions_that_go_on.__code__)))
    assert frames[0] is not None and frames[0].f_code is function.__code__


@pytest.mark.parametrize("function", [_raised_again, _cleaned_up, _other_error, _installed, _plain])
def test_functions_that_do_not(function: Callable[..., Any]) -> None:
    assert not recovers(function.__code__)
    frames: list[FrameType | None] = []
    function(lambda: frames.append(recovering_frame(sys._getframe(1), test_functions_that_do_not.__code__)))
    assert frames == [None]


def test_only_what_is_inside_is_handled() -> None:
    calls = [item.offset for item in dis.get_instructions(_caught) if item.opname.startswith("CALL")]
    assert any(is_handled(_caught.__code__, offset) for offset in calls)
    assert not is_handled(_plain.__code__, 0) and not is_handled(None, 0)


def test_what_is_further_out_than_the_capture_is_no_business_of_the_model() -> None:
    def within() -> Any:
        return recovering_frame(sys._getframe(0), within.__code__)

    assert _caught(within) is None


def _missing_kernel(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except NotImplementedError:
        return None


def _missing_kernel_or_more(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except NotImplementedError:
        return None
    except RuntimeError:
        return 1


def _missing_kernel_inside(call: Callable[[], Any]) -> Any:
    try:
        return _missing_kernel(call)
    except (NotImplementedError, RuntimeError):
        return None


def test_what_torch_has_no_kernel_for_is_no_question_of_values() -> None:
    assert not recovers(_missing_kernel.__code__)
    assert recovers(_missing_kernel_or_more.__code__) and recovers(_missing_kernel_inside.__code__)
