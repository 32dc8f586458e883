"""`from_export`: exported programs, called as the exported models were, with the same results, effects and gradients."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.fx import GraphModule as TheirGraphModule

import torchgraft
from tests.bridge.comparison import assert_same_module, assert_same_outcome, outcome
from tests.bridge.models import SMALL, small
from torchgraft import BridgeError, from_export, from_fx, to_fx

X = torch.randn(4, 6)


def assert_faithful(program, args, kwargs=None, gradients=True):
    """The converted program does what the exported one does, also after copying, saving, and crossing to torch.fx."""
    module = from_export(program)
    module.graph.lint()
    expected = outcome(program.module(), args, kwargs, gradients)
    assert_same_outcome(outcome(module, args, kwargs, gradients), expected)
    assert_same_outcome(outcome(copy.deepcopy(module), args, kwargs, gradients), expected)
    assert_same_outcome(outcome(to_fx(module, nested=True), args, kwargs, gradients), expected)
    assert_same_module(from_fx(to_fx(module, nested=True), nested=True), module)
    assert_names_and_metadata_kept(module, program)
    module.print_readable(print_output=False)
    return module


def assert_names_and_metadata_kept(module, program):
    ours = {node.name: node for node in module.graph.nodes}
    for theirs in program.graph.nodes:
        mine = ours[theirs.name if theirs.name != "input" else "input_1"]
        assert mine.meta.keys() == theirs.meta.keys()
        for key in ("val", "stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            assert mine.meta.get(key) is theirs.meta.get(key)


def both_forms(model, args, kwargs=None, **options):
    """The program as exported, and decomposed into core ATen, where nothing is changed in place."""
    program = export(model, args, kwargs, **options)
    return [program, program.run_decompositions()]


# ---- whole models ----


@pytest.mark.zoo
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", SMALL)
def test_zoo_models(name, mode):
    model, inputs = small(name)
    model.train(mode == "train")
    module = assert_faithful(export(model, inputs), inputs)
    assert type(module).__name__ == type(model).__name__
    eager = outcome(model, inputs)
    assert_same_outcome({"result": outcome(module, inputs)["result"]}, {"result": eager["result"]})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_dropout_and_batch_norm(mode, strict):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5)).train(mode == "train")
    for program, decomposed in zip(both_forms(model, (X,), strict=strict), (False, True), strict=True):
        # Decomposed, the write to the running mean comes after the layer has saved it for backward; torch.export's own
        # module raises there as well.
        module = assert_faithful(program, (X,), gradients=mode == "eval" or not decomposed)
        before = module.get_buffer("1.running_mean").clone()
        torch.manual_seed(0)
        result = module(X)
        assert torch.equal(before, module.get_buffer("1.running_mean")) == (mode == "eval")
        torch.manual_seed(0)
        assert (result == 0).any() if mode == "train" else result.shape == (4, 5)
        model[1].reset_running_stats()


def test_state_is_shared_with_the_exported_program():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    program = export(model, (X,))
    module = from_export(program)
    state = module.state_dict(keep_vars=True)
    assert state.keys() == program.state_dict.keys()
    assert all(state[name] is value for name, value in program.state_dict.items())
    assert isinstance(module.get_parameter("0.weight"), nn.Parameter)
    assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(X).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].bias, module.get_parameter("0.bias"))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("count", torch.zeros(1))
        self.inner.register_buffer("cache", torch.zeros(6), persistent=False)
        self.inner.table = torch.arange(6.0)

    def forward(self, x):
        self.inner.count += 1
        self.inner.cache.copy_(x[0])
        return x * self.inner.count + self.inner.cache + self.inner.table + torch.tensor(3.0)


def test_buffers_and_constants():
    for program in both_forms(Stateful(), (X,)):
        module = assert_faithful(program, (X,))
        assert list(module.state_dict()) == ["inner.count"]
        buffers = dict(module.named_buffers())
        assert {"inner.count", "inner.cache", "inner.table"} < buffers.keys()
        assert not dict(module.named_parameters())
        module.double()
        assert module.inner.table.dtype == torch.float64
        module.float()
        count = module.inner.count.item()
        first, second = module(X), module(X)
        assert module.inner.count.item() == count + 2
        assert torch.equal(module.inner.cache, X[0])
        torch.testing.assert_close(second - first, X)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.same = self.one
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.same(self.two(self.one(x)))


def test_tied_and_unused_parameters():
    for program in both_forms(Tied(), (X,)):
        module = assert_faithful(program, (X,))
        assert module.state_dict().keys() == program.module().state_dict().keys()


# ---- inputs and outputs ----


class Trees(nn.Module):
    def forward(self, x, pair, *, options, scale=2, nothing=None):
        options["b"].mul_(2)
        return {"y": x * scale + pair[0], "z": (options["a"] + options["b"], None, 5, [pair[1]])}


def test_trees_keywords_constants_and_changed_inputs():
    args = (torch.randn(3), (torch.randn(3), torch.randn(3)))
    kwargs = {"options": {"a": torch.randn(3), "b": torch.randn(3)}, "scale": 3}
    for program in both_forms(Trees(), args, kwargs):
        module = assert_faithful(program, args, kwargs)
        shuffled = {"scale": 3, "options": dict(reversed(kwargs["options"].items()))}
        assert_same_outcome(outcome(module, args, kwargs), {"result": outcome(module, args, shuffled)["result"]})
        assert list(module(*args, **copy.deepcopy(kwargs))) == ["y", "z"]
        with pytest.raises(ValueError, match="does not have the structure"):
            module(args[0], list(args[1]), **kwargs)
        torch.testing.assert_close(
            torchgraft.Interpreter(module).run(*args, *copy.deepcopy(list(kwargs.values()))),
            module(*args, **copy.deepcopy(kwargs)),
        )


@pytest.mark.parametrize(
    ("forward", "args"),
    [
        (lambda self, x, unused: x + 1, (X, torch.ones(2))),
        (lambda self, x, n, text, nothing, f, flag: x + n if flag else x, (X, 7, "a", None, 1.5, True)),
        (lambda self, *values: values[0] - values[1], (X, torch.ones(4, 6))),
        (lambda self: torch.ones(3) * 2, ()),
        (lambda self, x: (x, [x]), (X,)),
        (lambda self, x: x.add_(1), (X.clone(),)),
        (lambda self, x: x + torch.rand_like(x), (X,)),
        (lambda self, input: input + 1, (X,)),
    ],
    ids=["unused", "constants", "varargs", "no inputs", "returned input", "changed input", "random", "builtin name"],
)
def test_signatures(forward, args):
    model = type("Model", (nn.Module,), {"forward": forward})()
    for program in both_forms(model, args):
        assert_faithful(program, args)


def test_dynamic_batch_runs_at_other_sizes():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Flatten())
    for program in both_forms(model, (X,), dynamic_shapes={"input": {0: Dim("batch")}}):
        for size in (1, 3, 4, 9):
            assert_faithful(program, (torch.randn(size, 6, requires_grad=True),))


class Symbolic(nn.Module):
    def forward(self, x, n):
        rows = x.shape[0]
        return x.view(rows * 2, -1) + n, torch.arange(rows), rows * n


def test_symbolic_sizes_and_integers():
    shapes = {"x": {0: Dim.AUTO}, "n": Dim.DYNAMIC}
    for program in both_forms(Symbolic(), (X, 3), dynamic_shapes=shapes):
        module = assert_faithful(program, (X, 3))
        result = module(torch.ones(8, 6), 5)
        assert result[0].shape == (16, 3) and len(result[1]) == 8 and result[2] == 40


def item(self, x, k):
    size = k.item()
    torch._check(size >= 2)
    torch._check(size < 10)
    return x.new_zeros(size) + x.sum()


def test_assertions_about_values_are_kept():
    model = type("Model", (nn.Module,), {"forward": item})()
    for program in both_forms(model, (X, torch.tensor(3))):
        module = assert_faithful(program, (X, torch.tensor(3)))
        assert module(X, torch.tensor(5)).shape == (5,)
        module.graph.eliminate_dead_code()
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            module(X, torch.tensor(20))


# ---- programs in programs ----


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x.cos(), (x,))


def test_branches():
    for program in both_forms(Branching(), (X,)):
        for shift in (-100, 100):
            module = assert_faithful(program, (X + shift,))
        assert isinstance(module.true_graph_0, torchgraft.GraphModule)
        assert "class true_graph_0" in module.print_readable(print_output=False)


class Regions(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = x @ x.t()
        return (x * y).sum() + z.sum()


def test_regions():
    for program in both_forms(Regions(), (X,)):
        assert_faithful(program, (X.clone().requires_grad_(),))


def test_effects_in_order():
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    with torch.library._scoped_library("torchgraft_bridge", "FRAGMENT") as library:
        library.define("note(Tensor x) -> Tensor")
        library.impl("note", lambda x: x.clone(), "CompositeExplicitAutograd")
        _register_effectful_op(torch.ops.torchgraft_bridge.note.default, _EffectType.ORDERED)
        model = type("Model", (nn.Module,), {"forward": lambda self, x: torch.ops.torchgraft_bridge.note(x) * 2})()
        module = from_export(export(model, (X,)).run_decompositions())
        assert torch.equal(module(X), X * 2)


def test_the_call_graph_of_modules_is_kept():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.ReLU())
    program = export(model, (X,), preserve_module_call_signature=("0",))
    module = from_export(program)
    assert module.meta["module_call_graph"] == program.module_call_graph
    assert module.meta["graph_signature"] is program.graph_signature
    assert module.meta["graph_signature"].inputs_to_parameters["p_0_0_weight"] == "0.0.weight"
    assert module.meta["range_constraints"] == program.range_constraints


# ---- what can be done with the result ----


def test_it_can_be_saved():
    program = export(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,))
    module = from_export(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(module))
        copy.deepcopy(module)
    node = again.graph.output_node().prev
    assert node.meta["val"].shape == (4, 6) and node.meta["tensor_meta"].shape == (4, 6)
    assert again.meta["module_call_graph"] == module.meta["module_call_graph"]
    assert torch.equal(again(X), module(X)) and again.code == module.code
    with pytest.raises(torchgraft.GuardError):
        again(torch.ones(5, 6))


def test_a_program_that_was_saved_by_torch_export():
    program = export(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = from_export(torch.export.load(file))
    assert module.code == from_export(program).code
    assert torch.equal(module(X), from_export(program)(X))


def test_it_prints_shapes_and_source_lines():
    text = from_export(export(nn.Sequential(nn.Linear(6, 3)), (X,))).print_readable(print_output=False)
    assert "linear = torch.ops.aten.linear.default(input_1, p_0_weight, p_0_bias)" in text
    assert "# f32[4, 3]" in text and "return F.linear(input, self.weight, self.bias)" in text


def test_it_can_be_transformed():
    module = from_export(export(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,)))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.ops.aten.neg.default
    assert torch.equal(
        module(X), -nn.functional.linear(X, module.get_parameter("0.weight"), module.get_parameter("0.bias"))
    )
    assert torch.equal(torchgraft.Transformer(module).transform()(X), module(X))


def test_it_can_be_exported_again():
    program = export(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,))
    again = export(from_export(program), (X,))
    assert torch.equal(from_export(again)(X), from_export(program)(X))
    assert again.state_dict.keys() == program.state_dict.keys()


def test_it_can_be_traced_again():
    module = from_export(export(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,)))
    again = torchgraft.symbolic_trace(module)
    assert torch.equal(again(X), module(X))
    with pytest.raises(AssertionError, match=r"input_1.size\(\)\[0\] == 4 does not hold"):
        again(torch.ones(5, 6))


def test_the_module_of_an_exported_program_crosses_by_itself(recwarn):
    theirs = export(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,)).module()
    ours = from_fx(theirs)
    assert torch.equal(ours(X), theirs(X))
    with pytest.raises(AssertionError, match="Guard failed"):
        ours(torch.ones(5, 6))
    with pytest.raises(NotImplementedError):
        ours.eval()
    assert_same_module(to_fx(ours), theirs)


def test_the_exported_program_is_left_as_it_was():
    program = export(Stateful(), (X,))
    text, metadata = str(program), [dict(node.meta) for node in program.graph.nodes]
    module = from_export(program)
    module.graph.output_node().meta["mine"] = 1
    module.meta["mine"] = 1
    assert str(program) == text
    assert [dict(node.meta) for node in program.graph.nodes] == metadata
    assert isinstance(program.graph_module, TheirGraphModule) and "mine" not in program.graph_module.meta


def test_other_things_are_refused():
    with pytest.raises(
        BridgeError, match="from_export takes a torch.export.ExportedProgram, not a torch.nn.modules.*ReLU"
    ):
        from_export(nn.ReLU())
