"""record: values of nodes as they were, only what was asked for, as statistics, in a file, with gradients, and when it fails."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import torchgraft
from torchgraft import capture, record, symbolic_trace
from torchgraft.errors import GraftError, GuardError, RunError, UnknownNodeError, WriteError
from torchgraft.zoo.mlp import MLP


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def program() -> torchgraft.GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(MLP())


def watched_values(program, *args) -> dict[str, object]:
    """What torch.fx users do: an interpreter that copies every value at once."""

    class Copying(torchgraft.Interpreter):
        values: dict[str, object] = {}

        def run_node(self, n):
            result = super().run_node(n)
            self.values[n.name] = result.detach().clone() if isinstance(result, torch.Tensor) else copy.copy(result)
            return result

    run = Copying(program)
    run.values = {}
    run.run(*args)
    return run.values


# ---- every value ----


def test_every_node_by_name_and_by_node(program, x) -> None:
    recording = record(program, x)
    expected = watched_values(program, x)
    assert list(recording) == [node.name for node in program.graph.nodes] and recording.complete
    for node in program.graph.nodes:
        assert torch.equal(recording[node], expected[node.name]) and torch.equal(recording[node.name], recording[node])
        assert node in recording and node.name in recording and not recording[node].requires_grad
    assert torch.equal(recording.result, program(x))


def test_a_plain_model_is_captured_first(x) -> None:
    model = MLP()
    recording = record(model, x)
    assert torch.equal(recording["fc1"], model.fc1(x)) and torch.equal(recording.result, model(x))
    assert "linear" in record(model, x, level="function")


def test_an_exported_program(x) -> None:
    model = MLP()
    recording = record(torch.export.export(model, (x,)), x)
    assert torch.equal(recording.result, model(x)) and recording["relu"].min() >= 0


def test_a_torch_fx_program(x) -> None:
    model = MLP()
    recording = record(torch.fx.symbolic_trace(model), x)
    assert torch.equal(recording.result, model(x))


def test_against_torch_fx_interpreter(x) -> None:
    model = MLP()

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            self.values[n.name] = result
            return result

    theirs = Recorder(torch.fx.symbolic_trace(model))
    theirs.values = {}
    theirs.run(x)
    ours = record(symbolic_trace(model), x)
    assert list(ours) == list(theirs.values)
    assert all(torch.equal(ours[name], value) for name, value in theirs.values.items())


def test_tuples_dicts_and_other_values() -> None:
    def f(x, flag=True):
        values, indices = torch.max(x, 1)
        first, second = x.chunk(2, dim=1)
        return {"values": values, "pair": (first, [indices, x.shape[0]]), "none": None}

    recording = record(capture(f, (torch.arange(8.0).view(2, 4),)), torch.arange(8.0).view(2, 4))
    pair = recording["chunk"]
    assert type(pair) is tuple and torch.equal(pair[1], torch.tensor([[2.0, 3.0], [6.0, 7.0]]))
    assert type(recording["max_1"]).__name__ == "max" and torch.equal(recording["max_1"].indices, torch.tensor([3, 3]))
    assert type(recording.result) is dict and recording.result["pair"][1][1] == 2 and recording.result["none"] is None
    assert {"chunk[0]", "chunk[1]", "max_1[0]", "max_1[1]", "output['pair'][0]"} <= {
        row["key"] for row in recording.rows()
    }


def test_results_that_are_put_together_by_the_program() -> None:
    class Cache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    program = capture(lambda x: Cache(torch.exp(x)), (torch.ones(2),))
    recording = record(program, torch.zeros(2))
    assert type(recording.result) is Cache and recording["output"].keys.tolist() == [1.0, 1.0]
    assert all(recording[name] is not None for name in recording if "template" in name)


def test_inputs_by_keyword_with_defaults_and_in_containers() -> None:
    program = symbolic_trace(lambda a, b=2.0: a * b)
    assert record(program, torch.ones(2))["mul"].tolist() == [2.0, 2.0]
    assert record(program, kwargs={"b": 3.0, "a": torch.ones(2)})["mul"].tolist() == [3.0, 3.0]
    nested = capture(lambda d: d["x"] + d["y"][0], ({"x": torch.ones(2), "y": [torch.ones(2)]},))
    assert record(nested, ({"x": torch.ones(2), "y": [torch.zeros(2)]},)).result.tolist() == [1.0, 1.0]


def test_star_arguments() -> None:
    class Stars(torch.nn.Module):
        def forward(self, *values, **named):
            return values[0] + named["y"]

    x = torch.ones(2)
    program = symbolic_trace(Stars())
    assert record(program, (x, x * 5), {"y": x}).result.tolist() == program(x, x * 5, y=x).tolist() == [2.0, 2.0]


# ---- values stay what they were ----


def in_place(x):
    a = torch.exp(x)
    view = a.view(-1)
    b = torch.tanh(a)
    a.mul_(2)
    view.add_(1)
    c = a + b
    c[0] = 0
    a.data.zero_()
    d = a + 1
    x.add_(100)
    return c, d, x


@pytest.mark.parametrize("size", [2, 100, 700], ids=["small", "middle", "large"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_later_writes_change_nothing(size, mode) -> None:
    program = symbolic_trace(in_place)
    x = torch.randn(size, size)
    with mode():
        expected = watched_values(program, x.clone())
        recording = record(program, x.clone())
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(recording[name], value), name
    assert torch.equal(recording["output"][0], recording["add"].index_fill(0, torch.tensor([0]), 0.0))


def test_views_of_a_copy_share_its_memory() -> None:
    program = symbolic_trace(lambda x: torch.exp(x).view(-1).view(x.shape[0], -1).t())
    recording = record(program, torch.randn(600, 300))
    storages = {recording[name].untyped_storage().data_ptr() for name in ("exp", "view", "view_1", "t")}
    assert len(storages) == 1
    assert torch.equal(recording["t"], recording["exp"].t())


def test_strides_are_kept() -> None:
    program = symbolic_trace(lambda x: torch.exp(x).to(memory_format=torch.channels_last)[:, ::2].expand(3, 2, 40, 50))
    x = torch.randn(1, 4, 40, 50)
    expected = program(x)
    assert record(program, x)["expand"].stride() == expected.stride()
    assert torch.equal(record(program, x)["expand"], expected)


def test_parameters_are_borrowed_until_they_are_written() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3000))
            self.weight = torch.nn.Parameter(torch.ones(3000))

        def forward(self, x):
            before = self.count * 1
            self.count.add_(1)
            return before + self.count + self.weight + x

    model = Counts()
    recording = record(symbolic_trace(model), torch.zeros(3000))
    assert recording["count"].eq(0).all() and model.count.eq(1).all()
    assert recording["weight"].data_ptr() == model.weight.data_ptr()


def test_an_input_that_is_written_keeps_its_value() -> None:
    x = torch.ones(2000, 3000)  # more than is copied at once
    recording = record(symbolic_trace(lambda x: torch.neg(x.add_(1))), x)
    assert recording["x"].eq(1).all() and recording["add_"].eq(2).all() and x.eq(2).all()


def test_a_leaf_module_that_may_do_anything() -> None:
    store = []

    class Odd(torch.nn.Module):
        def forward(self, x):
            store.append(x)
            exec("store[0].mul_(3)", {"store": store})
            return x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()
            self.weight = torch.nn.Parameter(torch.ones(5), requires_grad=False)

        def forward(self, x):
            return self.odd(self.weight) + x

    class Whole(torchgraft.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, Odd)

    model = Model()
    program = torchgraft.GraphModule(model, Whole().trace(model))
    recording = record(program, torch.zeros(5))
    assert recording["weight"].eq(1).all() and recording["odd"].eq(3).all()


def test_regions_and_running_statistics() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            with torch.no_grad():
                y = self.norm(x)
            return y * 2

    model, x = Model().train(), torch.randn(4, 3, requires_grad=True)
    expected = copy.deepcopy(model)(x)
    recording = record(symbolic_trace(model), x)
    assert torch.equal(recording.result, expected) and not recording.result.requires_grad
    assert int(model.norm.num_batches_tracked) == 1 and torch.is_grad_enabled()


# ---- some nodes only ----


class Counting(torch.nn.Module):
    """Counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return x + 1


def test_one_node_runs_only_what_it_needs(x) -> None:
    program = symbolic_trace(MLP())
    called = []
    for name, module in program.named_children():
        module.register_forward_hook(lambda *args, name=name: called.append(name))
    recording = record(program, x, nodes="relu")
    assert list(recording) == ["relu"] and called == ["fc1", "relu"]
    assert recording.result is None and not recording.complete


def test_names_patterns_nodes_and_predicates(program, x) -> None:
    fc2 = program.graph.find_nodes(op="call_module", target="fc2")[0]
    assert list(record(program, x, nodes=["fc?", "x"])) == ["x", "fc1", "fc2"]
    assert list(record(program, x, nodes=fc2)) == ["fc2"]
    assert list(record(program, x, nodes=[fc2, "relu"])) == ["relu", "fc2"]
    assert list(record(program, x, nodes=lambda node: node.op == "call_module")) == ["fc1", "relu", "fc2"]
    assert list(record(program, x, nodes=[])) == []


def test_writes_before_a_node_are_respected() -> None:
    program = symbolic_trace(in_place)
    x = torch.randn(3, 3)
    everything = watched_values(program, x.clone())
    for name in ("tanh", "add_", "add", "add_1"):
        assert torch.equal(record(program, x.clone(), nodes=name)[name], everything[name]), name


def test_the_random_stream_is_right() -> None:
    def f(x):
        first = torch.rand(3)
        noise = torch.nn.functional.dropout(x, 0.5, True)
        last = torch.rand(3)
        return first, noise, last

    program, x = symbolic_trace(f), torch.ones(50)
    torch.manual_seed(3)
    everything = record(program, x)
    for name in ("rand", "dropout", "rand_1"):
        torch.manual_seed(3)
        assert torch.equal(record(program, x, nodes=name)[name], everything[name]), name


def test_draws_are_left_out_where_nothing_random_follows() -> None:
    def f(x):
        noise = torch.rand(3)
        y = torch.relu(x)
        return y + noise, torch.rand(2)

    program = symbolic_trace(f)
    before = torch.get_rng_state()
    record(program, torch.ones(3), nodes="relu")
    assert torch.equal(before, torch.get_rng_state())


def test_regions_are_left_when_the_program_is_stopped_inside() -> None:
    def f(x):
        with torch.no_grad():
            y = torch.exp(x)
            z = torch.tanh(y)
        return z * 2

    program = symbolic_trace(f)
    recording = record(program, torch.ones(3, requires_grad=True), nodes="exp")
    assert torch.is_grad_enabled() and list(recording) == ["exp"]


def test_guards_are_kept() -> None:
    program = capture(lambda x: torch.exp(x) if x.sum() > 0 else torch.tanh(x), (torch.ones(2),))
    with pytest.raises(GuardError):
        record(program, (-torch.ones(2),), nodes="exp")


# ---- statistics ----


def test_statistics(program, x) -> None:
    recording = record(program, x, reduce=True)
    values = record(program, x)
    measured = recording["relu"]
    assert measured["shape"] == (2, 32) and measured["dtype"] == "float32"
    assert measured["max"] == pytest.approx(float(values["relu"].max())) and measured["min"] == 0
    assert measured["zeros"] == int((values["relu"] == 0).sum()) and measured["nan"] == measured["inf"] == 0
    assert "histogram" not in measured
    assert {"node", "min", "std", "zeros"} <= recording.rows()[0].keys() and "std" in str(recording)


def test_chosen_statistics_and_functions(program, x) -> None:
    counts, low, high = record(program, x, reduce=["histogram"])["x"]["histogram"]
    assert sum(counts) == 32 and low == pytest.approx(float(x.min())) and high == pytest.approx(float(x.max()))
    recording = record(program, x, reduce=lambda tensor: tensor.abs().sum().item())
    assert recording["x"] == pytest.approx(float(x.abs().sum())) and "reduced" in str(recording)
    with pytest.raises(ValueError, match="there is no statistic 'maximum'; did you mean 'max'?"):
        record(program, x, reduce=["maximum"])


def test_statistics_hold_no_tensor(program, x) -> None:
    recording = record(program, x, reduce=True)
    recording.result = None
    assert not [item for entry in recording.entries.values() for item in entry.parts if isinstance(item, torch.Tensor)]


def test_a_function_that_fails_is_not_the_programs_fault(program, x) -> None:
    with pytest.raises(ZeroDivisionError):
        record(program, x, reduce=lambda tensor: 1 / 0)


# ---- files ----


def test_a_file_holds_what_memory_would(program, x, tmp_path) -> None:
    path = tmp_path / "values.safetensors"
    recording = record(program, x, to=path)
    expected = record(program, x)
    loaded = load_file(path)
    assert set(loaded) == set(expected)
    for name in expected:
        assert torch.equal(loaded[name], expected[name]) and torch.equal(recording[name], expected[name])
    assert [item.name for item in tmp_path.iterdir()] == ["values.safetensors"]
    assert str(path) in str(recording) and recording.path == path


def test_structures_and_other_values_in_a_file(tmp_path) -> None:
    def f(x):
        values, indices = torch.max(x, 1)
        return {"v": values, "i": [indices, x.shape[0]]}

    program, x = capture(f, (torch.randn(2, 3),)), torch.randn(2, 3)
    recording = record(program, x, to=tmp_path / "a.safetensors")
    expected = record(program, x)
    assert type(recording["max_1"]).__name__ == "max" and torch.equal(recording["max_1"][1], expected["max_1"][1])
    assert recording["output"] is not None and recording["output"]["i"][1] == 2
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["values"])["size"] == 2


def test_a_file_is_replaced_and_survives_a_failure(program, x, tmp_path) -> None:
    path = tmp_path / "values.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(RunError, match="no file was written"):
        record(program, torch.ones(2, 3), to=path)
    assert path.read_bytes() == b"old"
    record(program, x, to=path)
    assert set(load_file(path)) == {node.name for node in program.graph.nodes}
    assert list(tmp_path.iterdir()) == [path]


def test_streaming_holds_one_tensor_at_most(tmp_path) -> None:
    """Every value dies as soon as the program has no use for it: at each node the living ones are those of a plain run."""

    def f(x):
        for _ in range(10):
            x = torch.relu(x + 1)
        return x.sum()

    program, x = symbolic_trace(f), torch.ones(64, 64)

    def living(run) -> list[int]:
        counts, seen = [], []

        class Watching(torchgraft.Interpreter):
            pass

        def counted(self, n):
            result = original(self, n)
            seen.append(weakref.ref(result) if isinstance(result, torch.Tensor) else lambda: None)
            counts.append(sum(item() is not None for item in seen))
            return result

        original = torchgraft.Interpreter.run_node
        torchgraft.Interpreter.run_node = counted
        try:
            run()
        finally:
            torchgraft.Interpreter.run_node = original
        gc.collect()
        return counts

    plain = living(lambda: torchgraft.Interpreter(program).run(x))
    streamed = living(lambda: record(program, x, to=tmp_path / "a.safetensors"))
    assert max(streamed) <= max(plain) + 1 and max(plain) <= 3
    assert len(load_file(tmp_path / "a.safetensors")) == 23
    kept = record(program, x)
    assert len({kept[name].data_ptr() for name in kept}) > 20


@pytest.mark.parametrize("where", ["missing/a.safetensors", ".", "file/a.safetensors"])
def test_where_nothing_can_be_written(program, x, tmp_path, where) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write '.*': .*\ngive a path in a folder that exists") as error:
        record(program, x, to=tmp_path / where)
    assert isinstance(error.value, OSError) and isinstance(error.value, GraftError)
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_nothing(program, tmp_path, monkeypatch) -> None:
    from torchgraft.recording import tensor_file

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "_write_bytes", full)
    with pytest.raises(WriteError, match="No space left on device"):
        record(program, torch.ones(2, 16), to=tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_statistics_exclude_each_other(program, x, tmp_path) -> None:
    with pytest.raises(ValueError, match="give reduce or to, not both"):
        record(program, x, to=tmp_path / "a", reduce=True)


# ---- odd tensors ----


def odd_values(x):
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    numbers = torch.complex(x, x).conj()
    double = numbers.to(torch.complex128)
    truth = x > 0
    half = x.to(torch.bfloat16)
    empty = x[:0]
    bad = x / 0
    return sparse, quantized, numbers, double, truth, half, empty, bad, None, "text"


def odd_program():
    return capture(odd_values, (torch.tensor([1.0, -1.0, 0.0]),))


def test_odd_tensors_in_memory() -> None:
    program, x = odd_program(), torch.tensor([1.0, -1.0, 0.0])
    for found, expected in zip(record(program, x)["output"], odd_values(x), strict=True):
        if not isinstance(expected, torch.Tensor):
            assert found == expected
        else:
            assert found.dtype == expected.dtype and found.layout == expected.layout
            assert torch.equal(_dense(found).nan_to_num(), _dense(expected).nan_to_num())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.to(torch.float64)


def test_odd_tensors_in_a_file(tmp_path) -> None:
    program, x = odd_program(), torch.tensor([1.0, -1.0, 0.0])
    recording = record(program, x, to=tmp_path / "odd.safetensors", nodes="output")
    loaded = load_file(tmp_path / "odd.safetensors")
    values = odd_values(x)
    assert torch.equal(loaded["output[0]"], values[0].to_dense()) and torch.equal(
        loaded["output[2]"], values[2].resolve_conj()
    )
    assert torch.equal(loaded["output[1]"], values[1].dequantize())
    assert torch.equal(loaded["output[3]"], torch.view_as_real(values[3].resolve_conj()))
    assert loaded["output[4]"].dtype is torch.bool and loaded["output[5]"].dtype is torch.bfloat16
    assert loaded["output[6]"].shape == (0,) and bool(loaded["output[7]"].isnan().any())
    notes = {row["key"]: row["note"] for row in recording.rows() if row["note"]}
    assert notes == {
        "output[0]": "sparse_coo, stored dense",
        "output[1]": "qint8, stored dequantized",
        "output[3]": "complex128, stored as pairs of real numbers",
    }
    assert "stored dense" in str(recording)
    with safe_open(tmp_path / "odd.safetensors", "pt") as file:
        assert json.loads(file.metadata()["notes"]) == notes


def test_odd_tensors_as_statistics() -> None:
    rows = {row["key"]: row for row in record(odd_program(), torch.tensor([1.0, -1.0, 0.0]), reduce=True).rows()}
    assert rows["output[0]"]["zeros"] == 6 and rows["output[4]"]["max"] == 1.0
    assert rows["output[6]"]["min"] is None and rows["output[6]"]["zeros"] == 0
    assert (rows["output[7]"]["nan"], rows["output[7]"]["inf"], rows["output[7]"]["max"]) == (1, 2, None)


def test_tensors_without_values(tmp_path) -> None:
    program = symbolic_trace(lambda x: torch.exp(x))
    x = torch.ones(2, device="meta")
    assert record(program, x)["exp"].device.type == "meta" and record(program, x, reduce=True)["exp"] is not None
    record(program, x, to=tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["exp"].shape == (0,)


# ---- gradients ----


def test_gradients_at_nodes(program, x) -> None:
    x.requires_grad_()
    recording = record(program, x, gradients=True)
    hidden = program.fc1(x)
    hidden.retain_grad()
    program.fc2(program.relu(hidden)).sum().backward()
    assert torch.equal(recording.gradients["fc1"], hidden.grad) and torch.equal(recording.gradients["x"], x.grad)
    assert recording.gradients["output"].eq(1).all()


def test_gradients_leave_those_of_parameters_alone(program, x) -> None:
    before = program.fc1.weight.grad = torch.full_like(program.fc1.weight, 7.0)
    record(program, x, gradients=True)
    assert program.fc1.weight.grad is before and before.eq(7).all() and program.fc2.weight.grad is None


def test_gradients_of_a_loss_at_chosen_nodes(program, x) -> None:
    with torch.no_grad():
        recording = record(program, x, nodes="relu", gradients=lambda result: result.pow(2).mean())
    assert list(recording.gradients) == list(recording) == ["relu"] and recording.complete
    hidden = recording["relu"].clone().requires_grad_()
    program.fc2(hidden).pow(2).mean().backward()
    assert torch.allclose(recording.gradients["relu"], hidden.grad)


def test_gradients_of_attributes_and_of_what_is_written_later() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self, x):
            y = x * self.weight
            z = y * 1
            z.mul_(5)
            return z

    recording = record(symbolic_trace(Model()), torch.ones(2), gradients=True)
    assert recording.gradients["weight"].tolist() == [5.0, 5.0]
    assert recording.gradients["mul_1"].tolist() == [5.0, 5.0] and recording.gradients["mul_"].tolist() == [1.0, 1.0]
    assert "x" not in recording.gradients
    with pytest.raises(UnknownNodeError, match="there is no value for 'x': no gradient reached this node"):
        recording.gradients["x"]


def test_gradients_in_a_file_and_as_statistics(program, x, tmp_path) -> None:
    expected = record(program, x, gradients=True).gradients
    record(program, x, gradients=True, to=tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")
    assert torch.equal(loaded["gradient of fc1"], expected["fc1"]) and "fc1" in loaded
    measured = record(program, x, gradients=True, reduce=["norm"]).gradients["fc1"]
    assert measured["norm"] == pytest.approx(float(expected["fc1"].norm()))


def test_no_gradients_to_be_had(x) -> None:
    program = symbolic_trace(lambda x: x * 2)
    with pytest.raises(GraftError, match="nothing that the program returns depends on a tensor that requires grad"):
        record(program, x, gradients=True)
    with pytest.raises(GraftError, match=r"the loss must be one number, not a tensor of shape \(2, 16\)"):
        record(program, x.requires_grad_(), gradients=lambda result: result)


# ---- what goes wrong ----


def test_unknown_names(program, x) -> None:
    with pytest.raises(UnknownNodeError, match="there is no node 'fc3'; did you mean 'fc2', 'fc1'?"):
        record(program, x, nodes="fc3")
    with pytest.raises(UnknownNodeError, match=r"no node matches 'layer\*'; the program has 'x', 'fc1', 'relu'"):
        record(program, x, nodes=["fc1", "layer*"])
    with pytest.raises(UnknownNodeError, match="node 'relu' belongs to another program"):
        record(program, x, nodes=[symbolic_trace(MLP()).graph.find_nodes(op="call_module", target="relu")[0]])
    with pytest.raises(TypeError, match="nodes takes names, patterns, nodes or one predicate, not int"):
        record(program, x, nodes=[3])
    recording = record(program, x, nodes="fc1")
    with pytest.raises(UnknownNodeError, match="there is no node 'fc2'; did you mean 'fc1'?"):
        recording["fc2"]
    with pytest.raises(LookupError):
        recording["nothing like it"]
    assert recording.get("fc1") is not None


def test_a_program_that_fails_midway(program) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(5, 6))
    with pytest.raises(
        RunError, match="the program raised RuntimeError: .* in node '_2' at .*, after 3 recorded"
    ) as error:
        record(symbolic_trace(model), torch.ones(2, 3))
    partial = error.value.partial
    assert list(partial) == ["input_1", "_0", "_1"] and not partial.complete
    assert torch.equal(partial["_1"], model[:2](torch.ones(2, 3)))
    assert isinstance(error.value.__cause__, RuntimeError)


def test_wrong_inputs(program, x) -> None:
    with pytest.raises(
        TypeError, match=r"cannot be called with these inputs: missing a required argument: 'x'\nit takes"
    ):
        record(program)
    with pytest.raises(TypeError, match="there is nothing to run in a int"):
        record(3, x)


def test_an_edited_program_and_one_used_twice(program, x) -> None:
    shared = program.graph.find_nodes(op="call_module", target="relu")[0]
    with program.graph.inserting_after(shared):
        again = program.graph.call_module("relu", (shared,))
    recording = record(program, x)
    assert again.name in recording and torch.equal(recording[again], recording[shared])


# ---- how it is shown ----


def test_text_json_rows_and_html(program, x, tmp_path) -> None:
    recording = record(program, x, reduce=["min", "max"])
    lines = str(recording).splitlines()
    assert lines[0].split() == ["node", "op", "target", "value", "min", "max"] and lines[-1] == "5 nodes recorded"
    data = json.loads(recording.to_json(tmp_path / "a.json"))
    assert data["complete"] and [row["node"] for row in data["nodes"]] == list(recording)
    assert "<table>" in recording._repr_html_() and "5 nodes recorded" in repr(recording)


def test_nan_statistics_are_json() -> None:
    program = symbolic_trace(lambda x: x / 0)
    text = record(program, torch.tensor([0.0, 1.0]), reduce=True).to_json()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_memory_is_given_back() -> None:
    program, x = symbolic_trace(lambda x: torch.exp(x) + 1), torch.randn(1000, 1000)
    recording = record(program, x)
    kept = recording["exp"]
    expected = kept.clone()
    del recording
    for _ in range(3):  # other recordings must not get memory that is still referred to
        record(program, torch.zeros(1000, 1000))
    assert torch.equal(kept, expected)


def test_safetensors_missing(program, x, tmp_path, monkeypatch) -> None:
    import sys

    recording = record(program, x, to=tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(GraftError, match="the package safetensors is not installed\ninstall it with: pip install"):
        recording["fc1"]
    assert Path(tmp_path / "a.safetensors").exists()
