"""GraphModule among other nn.Modules: state, modes, devices, hooks, optimisers, nesting, copies, pickles, TorchScript.

How one is made and edited is examined in test_graph_module.
"""

import copy
import importlib
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x - self.mean)) * self.scale


def through_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


DUPLICATORS = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


@pytest.fixture(params=DUPLICATORS.values(), ids=DUPLICATORS.keys())
def duplicate(request: pytest.FixtureRequest) -> Callable[[nn.Module], nn.Module]:
    return request.param


def test_state_dict_is_that_of_the_original(fx: ModuleType) -> None:
    model = Classifier()
    traced = fx.symbolic_trace(model)
    assert set(traced.state_dict()) == set(model.state_dict())
    other = fx.symbolic_trace(Classifier())
    other.load_state_dict(traced.state_dict())
    other.eval(), traced.eval()
    x = torch.rand(3, 4)
    assert torch.equal(other(x), traced(x))


def test_named_parameters_and_buffers(fx: ModuleType) -> None:
    model = Classifier()
    traced = fx.symbolic_trace(model)
    assert dict(traced.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert [name for name, _ in traced.named_buffers()] == ["mean"]
    assert traced.get_parameter("head.weight") is model.head.weight


def test_train_and_eval_reach_leaf_modules(fx: ModuleType) -> None:
    model = Classifier()
    traced = fx.symbolic_trace(model)
    traced.eval()
    assert not traced.body.get_submodule("2").training
    x = torch.rand(3, 4)
    assert torch.equal(traced(x), traced(x))
    traced.train()
    assert traced.body.get_submodule("2").training


def test_conversion_of_types(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    assert traced.double()(torch.rand(1, 4, dtype=torch.float64)).dtype is torch.float64
    assert traced.half().head.weight.dtype is torch.float16
    assert traced.to(torch.float32)(torch.rand(1, 4)).dtype is torch.float32
    assert traced.to("cpu") is traced
    assert traced.to("meta").head.weight.device.type == "meta"


def test_gradients_and_optimisers(fx: ModuleType) -> None:
    model = Classifier().eval()
    traced = fx.symbolic_trace(model)
    optimiser = torch.optim.SGD(traced.parameters(), lr=0.1)
    x = torch.rand(5, 4)
    before = traced(x).pow(2).mean()
    before.backward()
    assert all(parameter.grad is not None for parameter in traced.parameters())
    optimiser.step()
    assert traced(x).pow(2).mean() < before
    traced.zero_grad()


def test_forward_hooks_run(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    seen = []
    before = traced.register_forward_pre_hook(lambda module, args: seen.append("before"))
    after = traced.register_forward_hook(lambda module, args, output: output * 0)
    leaf = traced.head.register_forward_hook(lambda module, args, output: seen.append("leaf"))
    assert traced(torch.rand(1, 4)).abs().sum() == 0
    assert seen == ["before", "leaf"]
    before.remove(), after.remove(), leaf.remove()
    assert traced(torch.rand(1, 4)).abs().sum() > 0
    assert seen == ["before", "leaf"]


def test_backward_hooks_run(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    seen = []
    traced.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append("backward"))
    traced(torch.rand(1, 4, requires_grad=True)).sum().backward()
    assert seen == ["backward"]


def test_nesting_in_containers(fx: ModuleType) -> None:
    one = fx.symbolic_trace(lambda x: x + 1)
    two = fx.symbolic_trace(Classifier()).eval()
    sequence = nn.Sequential(one, two)
    assert sequence(torch.rand(1, 4)).shape == (1, 2)
    assert "1.head.weight" in sequence.state_dict()
    listed = nn.ModuleList([one, two])
    assert listed[0](1) == 2
    again = fx.symbolic_trace(sequence)
    assert again.eval()(torch.rand(1, 4)).shape == (1, 2)


def test_nested_graph_module_as_a_leaf(fx: ModuleType) -> None:
    inner = fx.symbolic_trace(Classifier()).eval()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return True

    model = Outer()
    traced = fx.GraphModule(model, Leaves().trace(model))
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["inner"]
    x = torch.rand(1, 4)
    assert torch.equal(traced(x), model(x))
    (node,) = inner.graph.find_nodes(op="call_module", target="head")
    node.replace_all_uses_with(node.args[0])
    inner.graph.erase_node(node)
    inner.recompile()
    traced.recompile()


def test_duplicates_compute_the_same_apart_from_the_original(fx: ModuleType, duplicate) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    other = duplicate(traced)
    x = torch.rand(2, 4)
    assert isinstance(other, fx.GraphModule)
    assert torch.equal(other(x), traced(x))
    assert other.code == traced.code
    assert str(other.graph) == str(traced.graph)
    assert other.head.weight is not traced.head.weight
    with torch.no_grad():
        other.head.weight.zero_()
    assert traced.head.weight.abs().sum() > 0
    assert other.graph is not traced.graph
    assert other.graph.owning_module is other


def test_duplicates_keep_modes(fx: ModuleType, duplicate) -> None:
    assert duplicate(fx.symbolic_trace(Classifier()).eval()).training is False
    assert duplicate(fx.symbolic_trace(Classifier()).train()).training is True


def test_duplicates_can_be_edited(fx: ModuleType, duplicate) -> None:
    traced = fx.symbolic_trace(Negating())
    other = duplicate(traced)
    (node,) = other.graph.find_nodes(op="call_function", target=torch.neg)
    node.target = torch.abs
    other.graph.lint()
    other.recompile()
    assert other(torch.tensor(-2.0)).item() == 2.0
    assert traced(torch.tensor(-2.0)).item() == 2.0 and "torch.neg" in traced.code


class Negating(nn.Module):
    def forward(self, x):
        return torch.neg(x)


def test_long_programs_can_be_duplicated(fx: ModuleType, duplicate) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(2000):
        value = graph.call_function(torch.neg, (value,))
    graph.output(value)
    other = duplicate(fx.GraphModule({}, graph))
    assert len(other.graph.nodes) == 2002
    assert other(torch.tensor(2.0)).item() == 2.0


def test_pickle_is_read_by_another_process(fx: ModuleType, tmp_path: Path) -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).eval()
    path = tmp_path / "module.pickle"
    path.write_bytes(pickle.dumps(traced))
    source = str(Path(importlib.import_module("torchgraft").__file__).parent.parent)
    program = (
        f"import pickle, sys, torch; sys.path.insert(0, {source!r}); "
        f"module = pickle.load(open({str(path)!r}, 'rb')); print(module(torch.ones(1, 2)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(traced(torch.ones(1, 2)).tolist())


def test_shared_submodules_stay_shared(fx: ModuleType, duplicate) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.two = nn.Linear(2, 2)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    other = duplicate(fx.symbolic_trace(Tied()))
    assert other.one.weight is other.two.weight


def test_deepcopy_keeps_graph_metadata(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Negating())
    (node,) = traced.graph.find_nodes(op="call_function", target=torch.neg)
    node.meta["note"] = [1, 2]
    traced.meta["whole"] = "text"
    other = copy.deepcopy(traced)
    (copied,) = other.graph.find_nodes(op="call_function", target=torch.neg)
    assert copied.meta["note"] == [1, 2]
    assert other.meta == {"whole": "text"}


def test_deepcopy_inside_a_container(fx: ModuleType) -> None:
    holder = nn.Sequential(fx.symbolic_trace(Classifier()).eval())
    other = copy.deepcopy(holder)
    x = torch.rand(1, 4)
    assert torch.equal(other(x), holder(x))
    assert other[0].head.weight is not holder[0].head.weight


def test_deepcopy_keeps_state_dict_hooks(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier())

    def add_key(module, state, prefix, local_metadata):
        state[prefix + "added"] = torch.ones(1)

    traced._register_state_dict_hook(add_key)
    assert "added" in copy.deepcopy(traced).state_dict()


def test_deepcopy_hooks(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Negating())
    seen = []
    traced._register_deepcopy_hook(seen.append)
    other = copy.deepcopy(traced)
    assert seen == [other]


def test_shallow_copy_shares_parameters(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier())
    other = copy.copy(traced)
    assert other.head.weight is traced.head.weight
    assert isinstance(other, fx.GraphModule)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_of_a_graph_module(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    scripted = torch.jit.script(traced)
    x = torch.rand(2, 4)
    assert torch.equal(scripted(x), traced(x))


@pytest.mark.filterwarnings("ignore")
def test_torchscript_of_a_function_with_structures(fx: ModuleType) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([x, y], dim=0), x[:, 1:].sum(dim=-1)

    traced = fx.symbolic_trace(forward)
    scripted = torch.jit.script(traced)
    x = torch.rand(2, 4)
    assert all(torch.equal(a, b) for a, b in zip(scripted(x, x), traced(x, x), strict=True))


def test_apply_and_children_walk_as_usual(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier())
    kinds = []
    traced.apply(lambda module: kinds.append(type(module).__name__))
    assert "Linear" in kinds and kinds[-1] == "Classifier"
    assert [name for name, _ in traced.named_children()] == ["body", "head"]


def test_requires_grad_can_be_switched(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in traced.parameters())


def test_functional_call(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    zeros = {name: torch.zeros_like(value) for name, value in traced.state_dict().items()}
    assert torch.func.functional_call(traced, zeros, (torch.rand(1, 4),)).abs().sum() == 0


def test_keyword_call(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    x = torch.rand(1, 4)
    assert torch.equal(traced(x=x), traced(x))


def test_missing_argument_is_a_type_error(fx: ModuleType) -> None:
    with pytest.raises(TypeError):
        fx.symbolic_trace(Classifier())()


def test_replicas_of_data_parallel_kind(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    replica = traced._replicate_for_data_parallel()
    x = torch.rand(1, 4)
    assert torch.equal(replica(x), traced(x))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_takes_a_graph_module(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(Classifier()).eval()
    compiled = torch.compile(traced, backend="eager")
    x = torch.rand(2, 4)
    torch.testing.assert_close(compiled(x), traced(x))
