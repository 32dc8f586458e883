"""Guards: the check that a program runs in the mode it was captured in.
Which reads of `self.training` become guards is in tests/capturing/test_module_patches.py.
"""

import pytest

from torchgraft import GraftError, GuardError
from torchgraft.ir import guards
from torchgraft.ir.guards import are_different, check_training, is_guard


@pytest.mark.parametrize("mode", [True, False])
def test_the_same_mode_passes(mode: bool) -> None:
    assert check_training(mode, mode, "model.py:3") is None


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (True, False, ["captured in evaluation mode", "is now in training mode", ".eval()"]),
        (False, True, ["captured in training mode", "is now in evaluation mode", ".train()"]),
    ],
)
def test_another_mode_raises_with_the_users_line_and_the_remedy(found: bool, expected: bool, words: list[str]) -> None:
    with pytest.raises(GuardError) as caught:
        check_training(found, expected, 'model.py:3 "if self.training:"')
    message = str(caught.value)
    for word in [*words, 'model.py:3 "if self.training:"', "capture the model again"]:
        assert word in message


def test_the_error_has_the_common_root_and_is_a_runtime_error() -> None:
    assert issubclass(GuardError, GraftError)
    assert issubclass(GuardError, RuntimeError)


def test_guards_are_told_by_their_mark() -> None:
    checks = [getattr(guards, name) for name in dir(guards) if name.startswith("check_")]
    assert len(checks) > 5 and all(map(is_guard, checks))
    assert not is_guard(are_different)  # what it answers is checked; it is no check itself
    assert not is_guard("check_value") and not is_guard(guards.Guard)
