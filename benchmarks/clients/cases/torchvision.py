"""torchvision's feature extraction: names of nodes, features by name, what is kept of the model, in both modes."""

import copy
import pickle

import torch
import torch.fx
from torch import nn

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

torchvision = import_torchvision()
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names  # noqa: E402

MODELS = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("mnasnet0_5", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_400mf"),
    *(
        "regnet_y_400mf",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnext50_32x4d",
        "shufflenet_v2_x0_5",
        "shufflenet_v2_x1_0",
    ),
    *("squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_32", "wide_resnet50_2"),
    *("maxvit_t",),
)
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")


def model_and_images(name: str) -> tuple[nn.Module, torch.Tensor]:
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **options)
    side = {"inception_v3": 96, "maxvit_t": 224, "vit_b_32": 224}.get(name, 64)
    return model, torch.randn(2, 3, side, side)


@each(*MODELS, *SEGMENTATION)
def case_names_of_nodes(name):
    model, _ = model_and_images(name) if name in MODELS else segmentation(name)
    train, evaluation = get_graph_node_names(model, suppress_diff_warning=True)
    return [train, evaluation]


@each(*MODELS)
def case_features_in_eval_mode(name):
    model, images = model_and_images(name)
    model.eval()
    names = get_graph_node_names(model, suppress_diff_warning=True)[1]
    chosen = [names[len(names) // 4], names[len(names) // 2], names[-1]]
    extractor = create_feature_extractor(model, chosen, suppress_diff_warning=True).eval()
    with torch.no_grad():
        features = extractor(images)
        expected = model(images)
    same(features[chosen[-1]], expected)
    numbers = [
        f"{value.float().mean().item():.4f}" if torch.is_tensor(value) else str(value) for value in features.values()
    ]
    return [chosen, numbers, len(list(extractor.parameters())), nodes(extractor.graph)]


@each("resnet18", "mobilenet_v2", "vgg11_bn", "regnet_y_400mf", "densenet121")
def case_only_what_is_needed_is_kept(name):
    model, images = model_and_images(name)
    model.eval()
    names = get_graph_node_names(model, suppress_diff_warning=True)[1]
    chosen = names[len(names) // 5]
    extractor = create_feature_extractor(model, {chosen: "x"}, suppress_diff_warning=True).eval()
    return [
        nodes(extractor.graph),
        [name for name, _ in extractor.named_parameters()],
        list(extractor(images)["x"].shape),
    ]


@each("resnet18", "vgg11", "mobilenet_v3_small", "shufflenet_v2_x0_5")
def case_training(name):
    model, images = model_and_images(name)
    last = get_graph_node_names(model, suppress_diff_warning=True)[0][-1]
    extractor = create_feature_extractor(model, {last: "x"}, suppress_diff_warning=True).train()
    extractor(images)["x"].mean().backward()
    return sorted(name for name, parameter in extractor.named_parameters() if parameter.grad is not None)


@each("bn1", "conv1", "layer1.0.bn1", "layer1.0.bn2", "layer1.0.add")
def case_value_before_an_in_place_relu(node):
    model, images = model_and_images("resnet18")
    model.eval()
    seen = {}
    if node != "layer1.0.add":
        # The layer's own value, before the in-place ReLU that comes next writes over it.
        model.get_submodule(node).register_forward_hook(lambda _, __, value: seen.update(x=value.clone()))
        with torch.no_grad():
            model(images)
        model, _ = copy.deepcopy(model), model.get_submodule(node)._forward_hooks.clear()
        model.get_submodule(node)._forward_hooks.clear()
    extractor = create_feature_extractor(model, {node: "x"}).eval()
    with torch.no_grad():
        value = extractor(images)["x"]
    if seen:
        same(value, seen["x"])
    return [f"{value.mean().item():.4f}", len(list(extractor.graph.nodes)), len(list(extractor.parameters()))]


@each("resnet18", "densenet121")
def case_copies_and_files(name):
    model, images = model_and_images(name)
    model.eval()
    last = get_graph_node_names(model, suppress_diff_warning=True)[1][-1]
    extractor = create_feature_extractor(model, {last: "x"}).eval()
    twin = copy.deepcopy(extractor).eval()
    same(twin(images), extractor(images))
    return [type(twin).__name__, twin.training, nodes(twin.eval().graph)]


def case_state_is_shared_with_the_model():
    model, _ = model_and_images("resnet18")
    extractor = create_feature_extractor(model, ["layer4"])
    return [extractor.layer1 is not None, len(extractor.state_dict()), extractor.conv1.weight is model.conv1.weight]


def case_pickle():
    model, images = model_and_images("resnet18")
    model.eval()
    extractor = create_feature_extractor(model, {"layer1": "x"}).eval()
    again = pickle.loads(pickle.dumps(torch.fx.GraphModule(extractor, extractor.graph)))
    same(again(images), extractor(images))
    return sorted(again.state_dict())


def case_return_nodes_by_mode():
    model, images = model_and_images("resnet18")
    extractor = create_feature_extractor(model, train_return_nodes={"layer1": "a"}, eval_return_nodes={"layer2": "b"})
    return [list(extractor.train()(images)), list(extractor.eval()(images))]


def case_unknown_node():
    model, _ = model_and_images("resnet18")
    try:
        create_feature_extractor(model, ["layer9"])
    except ValueError as error:
        return str(error)


def case_leaf_modules():
    model, _ = model_and_images("resnet18")
    leaves = {"leaf_modules": [torchvision.models.resnet.BasicBlock]}
    return get_graph_node_names(model, tracer_kwargs=leaves)[1]


def case_wrapped_functions():
    model, _ = model_and_images("resnet18")
    return get_graph_node_names(model, tracer_kwargs={"autowrap_functions": [torch.flatten]})[1]


def case_concrete_arguments():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, double: bool = False):
            x = self.layer(x)
            return x * 2 if double else x

    model = Scaled().eval()
    extractor = create_feature_extractor(model, {"mul": "x"}, concrete_args={"double": True})
    x = torch.randn(2, 4)
    same(extractor(x, True)["x"], model(x, True))
    return nodes(extractor.graph)


def case_torchscript():
    model, images = model_and_images("resnet18")
    model.eval()
    extractor = create_feature_extractor(model, {"layer1": "x"}).eval()
    same(torch.jit.script(extractor)(images), extractor(images))


@each("resnet18", "vit_b_32", "swin_t")
def case_torch_compile(name):
    model, images = model_and_images(name)
    model.eval()
    last = get_graph_node_names(model, suppress_diff_warning=True)[1][-1]
    extractor = create_feature_extractor(model, {last: "x"}, suppress_diff_warning=True).eval()
    with torch.no_grad():
        same(torch.compile(extractor, backend="eager", fullgraph=True)(images)["x"], model(images))


def segmentation(name: str) -> tuple[nn.Module, torch.Tensor]:
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None)
    return model, torch.randn(2, 3, 64, 64)


@each(*SEGMENTATION)
def case_segmentation(name):
    model, images = segmentation(name)
    model.eval()
    names = get_graph_node_names(model, suppress_diff_warning=True)[1]
    extractor = create_feature_extractor(model, {names[-1]: "x"}, suppress_diff_warning=True).eval()
    with torch.no_grad():
        same(extractor(images)["x"], model(images)["out"])
    return nodes(extractor.graph)


@each("fasterrcnn_mobilenet_v3_large_fpn", "ssdlite320_mobilenet_v3_large")
def case_backbone_of_a_detector(name):
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None).eval()
    names = get_graph_node_names(model.backbone, suppress_diff_warning=True)[1]
    extractor = create_feature_extractor(model.backbone, [names[len(names) // 2]]).eval()
    return [names, [list(value.shape) for value in extractor(torch.randn(1, 3, 64, 64)).values()]]
