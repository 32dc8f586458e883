"""Programs as users of torch.fx's passes write them. `FX` in them is the package; each leaves what it found in `result`.
They are run against torch.fx and against torchgraft in `test_same_programs.py`.
"""

# ruff: noqa: E501 (users write long lines)
from __future__ import annotations

PRELUDE = """
import operator
import torch
from torch import nn
import FX as fx
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return torch.relu(self.linear(x)) + 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
    def forward(self, x):
        x = self.first(x)
        y = torch.sin(x) * self.scale
        return self.second(y), torch.cos(y)

model = Net()
x = torch.randn(2, 4)
def same(a, b):
    return all(torch.allclose(p, q) for p, q in zip(a, b))
"""

PROGRAMS: dict[str, str] = {
    "split_module": """
from FX.passes.split_module import split_module
part = {}
def callback(node):
    return part.setdefault(node.name, len(part) // 3)
names = {}
split = split_module(fx.symbolic_trace(model), model, callback, qualname_map=names)
result = [n for n, _ in split.named_children()], split.code.strip(), names, same(split(x), model(x))
""",
    "split_by_tags": """
from FX.passes.split_utils import split_by_tags, getattr_recursive, setattr_recursive
traced = fx.symbolic_trace(model)
for node in traced.graph.nodes:
    node.tag = "left" if node.name.startswith("first") or node.name in ("relu", "add") else "right"
split, names = split_by_tags(traced, ["left", "right"], return_fqn_mapping=True)
result = [n for n, _ in split.named_children()], split.code.strip(), same(split(x), model(x)), getattr_recursive(model, "first.linear.in_features"), getattr_recursive(model, "first.nothing")
""",
    "partitioner": """
from FX.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from FX.passes.operator_support import OperatorSupport, create_op_support, chain
class Supports(OperatorSupport):
    def is_node_supported(self, submodules, node):
        return node.op == "call_function" and node.target in {torch.relu, operator.add, torch.sin, operator.mul}
traced = fx.symbolic_trace(model)
partitioner = CapabilityBasedPartitioner(traced, Supports(), allows_single_node_partition=True)
partitions = partitioner.propose_partitions()
found = sorted(sorted(n.name for n in p.nodes) for p in partitions)
fused = partitioner.fuse_partitions(partitions)
result = found, sorted(n.target for n in fused.graph.nodes if n.op == "call_module" and "fused" in n.target), same(fused(x), model(x))
""",
    "operator_support": """
from FX.passes.operator_support import OperatorSupport, OpSupports, chain, any_chain, create_op_support, OperatorSupportBase
from FX.passes.shape_prop import ShapeProp
traced = fx.symbolic_trace(model)
ShapeProp(traced).propagate(x)
modules = dict(traced.named_modules())
table = OperatorSupport({"torch.relu": (((torch.float32,),), {}), "torch.nn.modules.linear.Linear": None, "torch.sin": (((torch.float64,),), {})})
nothing = OpSupports.decline_if_input_dtype(torch.float32)
named = chain(table, OpSupports.decline_if_node_in_names({"relu"}))
calls = [n for n in traced.graph.nodes if n.op.startswith("call")]
result = [[s.is_node_supported(modules, n) for n in calls] for s in (table, nothing, named, any_chain(table, named))]
""",
    "fuser_utils": """
from FX.passes.utils.fuser_utils import fuse_by_partitions, validate_partition, topo_sort
traced = fx.symbolic_trace(model)
nodes = {n.name: n for n in traced.graph.nodes}
group = [nodes["sin"], nodes["mul"]]
valid = validate_partition(group), validate_partition([nodes["sin"], nodes["cos"]])
order = [n.name for n in topo_sort([nodes["mul"], nodes["sin"]])]
fused = fuse_by_partitions(traced, [dict.fromkeys(group)])
result = valid, order, fused.code.strip(), fused.fused_0.code.strip(), same(fused(x), model(x))
""",
    "passes": """
from FX.passes.infra.pass_base import PassBase, PassResult
from FX.passes.infra.pass_manager import PassManager, this_before_that_pass_constraint, pass_result_wrapper
class Swap(PassBase):
    def __init__(self, old, new):
        self.old, self.new = old, new
    def requires(self, gm):
        gm.graph.lint()
    def call(self, gm):
        found = [n for n in gm.graph.nodes if n.target is self.old]
        for n in found:
            n.target = self.new
        gm.recompile()
        return PassResult(gm, bool(found))
def nothing(gm):
    return None
checked = []
first, second = Swap(torch.sin, torch.tan), Swap(torch.tan, torch.tanh)
manager = PassManager(passes=[second, first, pass_result_wrapper(nothing)], constraints=[this_before_that_pass_constraint(first, second)],
                      steps=1, run_checks_after_each_pass=True)
manager.add_checks(lambda gm: checked.append(len(gm.graph.nodes)))
out = manager(fx.symbolic_trace(model))
try:
    PassManager(passes=[first, second], constraints=[this_before_that_pass_constraint(first, second), this_before_that_pass_constraint(second, first)])(out.graph_module)
    circular = False
except RuntimeError as error:
    circular = "Circular dependency" in str(error)
class Bad(PassBase):
    def call(self, gm):
        raise ValueError("no")
try:
    PassManager(passes=[first, Bad()])(out.graph_module)
    message = ""
except Exception as error:
    message = str(error), type(error.__cause__).__name__
result = out.modified, [n.target for n in out.graph_module.graph.nodes if n.op == "call_function"], checked, circular, message
""",
    "matcher": """
from FX.passes.utils.matcher_utils import SubgraphMatcher, InternalMatch
pattern = fx.symbolic_trace(lambda a: torch.relu(a) + 1).graph
graph = fx.symbolic_trace(model).graph
matches = SubgraphMatcher(pattern).match(graph)
found = [([n.name for n in m.placeholder_nodes], [n.name for n in m.returning_nodes], sorted((k.name, v.name) for k, v in m.nodes_map.items())) for m in matches]
anything = SubgraphMatcher(fx.symbolic_trace(lambda a: torch.relu(a) + 5).graph, ignore_literals=True).match(graph)
chain = fx.symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x)))).graph
two = fx.symbolic_trace(lambda x: torch.relu(torch.relu(x))).graph
whole = SubgraphMatcher(two, match_output=True, match_placeholder=True)
def named(matches):
    return [([n.name for n in m.anchors], sorted((k.name, str(v)) for k, v in m.nodes_map.items()), [str(v) for v in m.placeholder_nodes]) for m in matches]
plus = fx.symbolic_trace(lambda a, b: torch.add(a, b)).graph
inputs = SubgraphMatcher(plus, match_placeholder=True)
plus_three = fx.symbolic_trace(lambda x: torch.add(x, 3)).graph
doubled = fx.symbolic_trace(lambda x: torch.add(x, x)).graph
details = named(whole.match(two)), named(inputs.match(plus_three)), named(inputs.match(doubled)), named(SubgraphMatcher(plus, match_output=True).match(plus_three))
result = details, found, len(anything), len(SubgraphMatcher(two).match(chain)), len(SubgraphMatcher(two, remove_overlapping_matches=False).match(chain)), len(whole.match(chain)), len(whole.match(fx.symbolic_trace(lambda y: torch.relu(torch.relu(y))).graph))
""",
    "source_partitions": """
from FX.passes.utils.source_matcher_utils import get_source_partitions, check_subgraphs_connected, SourcePartition
graph = fx.symbolic_trace(model).graph
found = get_source_partitions(graph, [Block])
parts = found[Block]
result = [[n.name for n in p.nodes] for p in parts], [[n.name for n in p.output_nodes] for p in parts], check_subgraphs_connected(parts[0], parts[1]), list(get_source_partitions(graph, [Block], lambda n: False)[Block])
""",
    "cse": """
from FX.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops
def f(a):
    b = torch.sin(a)
    return torch.mul(b, torch.sin(a)) + torch.rand(2) * 0
traced = fx.symbolic_trace(f)
out = CSEPass()(traced)
again = CSEPass()(out.graph_module)
result = out.modified, len([n for n in out.graph_module.graph.nodes if n.target is torch.sin]), again.modified, len([n for n in traced.graph.nodes if n.target is torch.sin]), torch.ops.aten.rand in get_CSE_banned_ops()
""",
    "cse_of_operators": """
from FX.passes.dialect.common.cse_pass import CSEPass
programs = [lambda a: a * a + a * a, lambda a: (a + 1) * (a + 1), lambda a: -a - -a, lambda a, b=2.0: (a - b) / (a - b) @ a]
found = [CSEPass()(fx.symbolic_trace(program)) for program in programs]
result = [(out.modified, [node.name for node in out.graph_module.graph.nodes]) for out in found]
""",
    "tools": """
from FX.passes.tools_common import get_node_target, get_acc_ops_name, legalize_graph, stable_topological_sort, is_node_output_tensor, CALLABLE_NODE_OPS, FxNetAccFusionsFinder
from FX.passes.shape_prop import ShapeProp
traced = fx.symbolic_trace(model)
names = [get_node_target(dict(traced.named_modules()), n) for n in traced.graph.nodes if n.op in CALLABLE_NODE_OPS]
nodes = list(traced.graph.nodes)
nodes[2].prepend(nodes[5])
stable_topological_sort(traced)
order = [n.name for n in traced.graph.nodes]
traced = legalize_graph(traced)
traced.graph.lint()
ShapeProp(traced).propagate(x)
sizes = fx.symbolic_trace(lambda x: x.view(x.size(0) * x.size(1)) + 1)
ShapeProp(sizes).propagate(x)
acc = {n for n in sizes.graph.nodes if n.op in CALLABLE_NODE_OPS}
groups = FxNetAccFusionsFinder(sizes, acc)()
result = names, order, [is_node_output_tensor(n) for n in sizes.graph.nodes if n.op != "output"], sorted((k.name, sorted(n.name for n in v)) for k, v in groups.items()), get_acc_ops_name(nn.Linear), same(traced(x), model(x))
""",
    "splitter": """
from FX.passes.splitter_base import _SplitterBase, _SplitterSettingBase, SplitResult
from FX.passes.operator_support import create_op_support
support = create_op_support(lambda modules, node: node.op == "call_function" and node.target in {torch.relu, operator.add, torch.sin, torch.cos, operator.mul})
settings = _SplitterSettingBase(min_acc_module_size=2)
splitter = _SplitterBase(fx.symbolic_trace(model), (x,), support, settings)
out = splitter.generate_split_results()
result = [n for n, _ in out.split_module.named_children()], same(out.split_module(x), model(x)), sorted(out.submodule_inputs), out.non_acc_submodule_prefix
""",
    "minimizer": """
import contextlib, io
from FX.passes.net_min_base import _MinimizerBase, _MinimizerSettingBase, FxNetMinimizerResultMismatchError
class Minimizer(_MinimizerBase):
    def run_a(self, mod, inputs, report_idx=-1):
        return mod(*inputs)
    def run_b(self, mod, inputs, report_idx=-1):
        out = mod(*inputs)
        if any(n.target is torch.sin for n in mod.graph.nodes):
            out = out + 1 if isinstance(out, torch.Tensor) else tuple(o + 1 for o in out)
        return out
def compare(a, b, names):
    ok = all(torch.allclose(p, q) for p, q in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,)))
    return 0.0, ok
found = []
with contextlib.redirect_stdout(io.StringIO()):
    for method in ("sequential", "binary"):
        minimizer = Minimizer(fx.symbolic_trace(model), (x,), compare, _MinimizerSettingBase(traverse_method=method))
        found.append(sorted(n.name for n in minimizer.minimize()))
    minimizer = Minimizer(fx.symbolic_trace(model), (x,), compare, _MinimizerSettingBase())
    try:
        minimizer.run_nodes("sin", "mul")
        raised = False
    except FxNetMinimizerResultMismatchError:
        raised = True
result = found, raised
""",
    "minimizer_methods": """
import contextlib, io
from FX.passes.net_min_base import _MinimizerBase, _MinimizerSettingBase
class Minimizer(_MinimizerBase):
    def run_a(self, mod, inputs, report_idx=-1):
        return mod(*inputs)
    def run_b(self, mod, inputs, report_idx=-1):
        out = mod(*inputs)
        called = {n.target for n in mod.graph.nodes}
        if {torch.sin, torch.tanh} <= called:
            out = out + 1
        return out
def chain(x):
    return torch.cos(torch.tanh(torch.exp(torch.sin(torch.neg(torch.abs(x))))))
def compare(a, b, names):
    a, b = (v if isinstance(v, tuple) else (v,) for v in (a, b))
    return 0.0, all(torch.allclose(p, q) for p, q in zip(a, b))
seen = []
def exclude(nodes, start, end):
    seen.append(len(nodes))
    nodes[:] = [n for n in nodes if n.target is not torch.abs]
def minimize(method, exclusion=None, settings=(), **options):
    with contextlib.redirect_stdout(io.StringIO()):
        setting = _MinimizerSettingBase(traverse_method=method, **dict(settings))
        minimizer = Minimizer(fx.symbolic_trace(chain), (x,), compare, setting, exclusion_fn=exclusion)
        return sorted(n.name for n in minimizer.minimize(**options))
result = [
    minimize("block"), minimize("block", find_last_node=True), minimize("block", find_last_node=False),
    minimize("block", start="exp"), minimize("accumulate"), minimize("accumulate", start="neg"),
    minimize("skip", skip_nodes=["abs_1"]), minimize("skip", skip_nodes=["exp"]), minimize("sequential"),
    minimize("binary", exclude), minimize("sequential", exclude), minimize("accumulate", end="exp"), bool(seen),
]
""",
    "finder": """
from FX.passes.splitter_base import FxNetAccNodesFinder, Subgraph
from FX.passes.split_utils import move_non_tensor_nodes_on_boundary
from FX.passes.operator_support import create_op_support
from FX.passes.shape_prop import ShapeProp
from FX.passes.split_module import split_module_simple
import contextlib, io
def sizes(x):
    n = x.size(0)
    m = n + 1
    y = torch.relu(x)
    return torch.sin(y.reshape(n, -1)) * m + torch.cos(x).size(1)
traced = fx.symbolic_trace(sizes)
ShapeProp(traced).propagate(x)
nodes = {n.name: n for n in traced.graph.nodes}
found = []
for names in ({"size", "add", "relu"}, {"relu", "reshape", "sin", "mul"}, {"size", "add", "mul", "cos", "size_1"}, set(nodes)):
    support = create_op_support(lambda modules, node: node.name in names)
    found.append(sorted(n.name for n in FxNetAccNodesFinder(traced, support, False)()))
    found.append(sorted(n.name for n in FxNetAccNodesFinder(traced, support, True)()))
    finder = FxNetAccNodesFinder(traced, support, False)
    finder.acc_nodes = {nodes[name] for name in names if nodes[name].op not in ("placeholder", "output")}
    finder.reduce_acc_nodes_non_tensor_input()
    found.append(sorted(n.name for n in finder.acc_nodes))
for first in (["size", "add", "relu"], ["size", "relu", "reshape"], ["relu", "cos", "size_1"], ["size", "add"]):
    rest = [n.name for n in traced.graph.nodes if n.op not in ("placeholder", "output") and n.name not in first]
    parts = [Subgraph(True, [nodes[name] for name in first]), Subgraph(False, [nodes[name] for name in rest])]
    with contextlib.redirect_stdout(io.StringIO()):
        move_non_tensor_nodes_on_boundary(parts)
    found.append([sorted(n.name for n in part.nodes) for part in parts])
chain = fx.symbolic_trace(lambda x: torch.cos(torch.relu(torch.sin(x))))
_, sin, relu, cos, _ = chain.graph.nodes
simple = split_module_simple(chain, {sin: 0, relu: 0, cos: 1}, partition_affix="part")
result = found, [n for n, _ in simple.named_children()], same(simple(x), chain(x))
""",
    "const_fold": """
from FX.experimental.const_fold import split_const_subgraphs, FoldedGraphModule, get_unique_attr_name_in_module
class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    def forward(self, x):
        return x @ (self.w + self.v).t() + torch.exp(self.v)
model = Folds()
folded = split_const_subgraphs(model)
before = folded.has_folding_been_run
out = folded(x)
plain = split_const_subgraphs(nn.Sequential(nn.ReLU()))
result = before, folded.has_folding_been_run, torch.allclose(out, model(x)), type(getattr(folded, folded.fx_const_folded_attrs_name)).__name__, plain.const_subgraph_module is None, torch.equal(plain(x), torch.relu(x)), len(list(folded.const_subgraph_module.graph.nodes)), get_unique_attr_name_in_module(model, "w"), isinstance(folded, fx.GraphModule)
""",
    "normalize": """
from FX.experimental.normalize import NormalizeArgs, NormalizeOperators
traced = fx.symbolic_trace(lambda x: torch.nn.functional.softmax(torch.nn.functional.relu(x), dim=1) + torch.add(x, x))
args = NormalizeArgs(traced).transform()
operators = NormalizeOperators(fx.symbolic_trace(lambda x: torch.add(x, torch.mul(x, 2)))).transform()
result = [(n.name, sorted(n.kwargs)) for n in args.graph.nodes if n.target is torch.nn.functional.relu], torch.equal(args(x), traced(x)), [n.target for n in operators.graph.nodes if n.op == "call_function"]
""",
    "optimization": """
from FX.experimental.optimization import fuse, remove_dropout, matches_module_pattern, replace_node_module
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout()).eval()
model[1].running_mean.fill_(0.5)
image = torch.randn(1, 1, 5, 5)
fused = fuse(model)
without = remove_dropout(model)
traced = fx.symbolic_trace(model)
pairs = [matches_module_pattern((nn.Conv2d, nn.BatchNorm2d), n, dict(traced.named_modules())) for n in traced.graph.nodes]
result = [type(m).__name__ for m in fused.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))] , torch.allclose(fused(image), model(image), atol=1e-6), torch.allclose(without(image), model(image)), pairs, model[1].running_mean[0].item()
""",
    "tensor_type": """
from FX.tensor_type import TensorType, Dyn, is_consistent, is_more_precise
t = TensorType((1, Dyn, 3))
result = str(Dyn), [str(size) for size in t.dims], is_consistent(t, TensorType((1, 2, 3))), is_consistent(t, TensorType((2, 2, 3))), is_more_precise(TensorType((1, 2, 3)), t), t == TensorType((1, Dyn, 3)), is_consistent(t, Dyn)
""",
    "operator_schemas": """
from FX.operator_schemas import normalize_function, normalize_module, get_signature_for_torch_op, create_type_hint, type_matches
result = normalize_function(torch.nn.functional.relu, (x,), normalize_to_only_use_kwargs=True).kwargs["inplace"], len(get_signature_for_torch_op(torch.relu)) > 0, normalize_module(model.first, "linear", (x,), normalize_to_only_use_kwargs=True).kwargs.keys() == {"input"}, type_matches(int, bool)
""",
    "shape_prop": """
from FX.passes.shape_prop import ShapeProp, TensorMetadata
from FX.passes.fake_tensor_prop import FakeTensorProp
traced = fx.symbolic_trace(model)
ShapeProp(traced).propagate(x)
shapes = [tuple(n.meta["tensor_meta"].shape) for n in traced.graph.nodes if n.op.startswith("call")]
plain = fx.symbolic_trace(lambda x: torch.relu(x).t())
FakeTensorProp(plain).propagate(x)
result = shapes, [tuple(n.meta["val"].shape) for n in plain.graph.nodes if n.op.startswith("call")]
""",
}  # fmt: skip
