"""HFTracer of transformers 4: a tracer and proxies with nearly everything overridden, over small random models."""

# ruff: noqa: C408 (the names are those of the options of configurations)

import pickle

import torch
import torch.fx

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

import_torchvision()
import transformers  # noqa: E402
from transformers.utils import fx as hf  # noqa: E402

SMALL = {
    **dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99),
    **dict(max_position_embeddings=64, attn_implementation="eager"),
}
GPT = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, attn_implementation="eager")
T5 = dict(
    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, decoder_start_token_id=0, pad_token_id=0
)
VISION = {
    **dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    ),
    **dict(attn_implementation="eager"),
}

# Of each family: the part of the names of its classes, what its configuration is given, and the classes.
TEXT = {
    "Bert": (
        SMALL,
        ("Model", "ForPreTraining", "ForNextSentencePrediction", "ForMaskedLM", "ForSequenceClassification",
         "ForQuestionAnswering", "ForTokenClassification"),
    ),
    "Albert": ({**SMALL, "embedding_size": 16}, ("Model", "ForPreTraining", "ForMaskedLM", "ForTokenClassification")),
    "DistilBert": (
        dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99, attn_implementation="eager"),
        ("Model", "ForMaskedLM"),
    ),
    "Electra": ({**SMALL, "embedding_size": 16}, ("Model", "ForMaskedLM", "ForSequenceClassification")),
    "Roberta": (SMALL, ("Model", "ForMaskedLM", "ForCausalLM")),
    "MegatronBert": (SMALL, ("Model", "ForMaskedLM", "ForCausalLM")),
    "MobileBert": (
        {**SMALL, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        ("Model", "ForMaskedLM"),
    ),
    "GPTNeo": (
        dict(hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, vocab_size=99),
        ("Model", "ForCausalLM"),
    ),
    "GPTJ": ({**GPT, "rotary_dim": 4}, ("Model", "ForCausalLM")),
    "Bloom": (dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=99), ("Model", "ForCausalLM")),
    "XGLM": (
        {**dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, vocab_size=99, max_position_embeddings=64)},
        ("Model", "ForCausalLM"),
    ),
}  # fmt: skip
TO_TEXT = {
    "T5": (T5, ("Model", "ForConditionalGeneration")),
    "MT5": (T5, ("Model",)),
}
IMAGES = {
    "ConvNext": (dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32), ("Model",)),
    "ResNet": (dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), ("Model", "ForImageClassification")),
    "Swin": (
        dict(embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, image_size=32, patch_size=2),
        ("Model", "ForImageClassification"),
    ),
    "Segformer": (
        {**dict(depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[8, 16], num_attention_heads=[1, 2], sr_ratios=[2, 1]),
         **dict(patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16)},
        ("Model", "ForImageClassification"),
    ),
}  # fmt: skip


# These ask whether a mask or weight is a tensor. A proxy of torch.fx is none: it records a branch that eager does not take.
OTHER_BRANCH = ("GPTNeo", "GPTJ", "Bloom", "T5", "MT5")


def classes(families):
    return {
        f"{family}{head}": (family, options, head) for family, (options, heads) in families.items() for head in heads
    }


def made(family, options, head):
    config = getattr(transformers, f"{family}Config")(**options)
    # Outputs that are containers of their own are not what is measured here.
    config.use_cache = False
    return getattr(transformers, f"{family}{head}")(config).eval()


def tokens():
    return torch.randint(3, 99, (2, 8))


def compared(model, inputs):
    """The same outputs as the model's, and the graph."""
    traced = hf.symbolic_trace(model, input_names=list(inputs))
    with torch.no_grad():
        expected, got = model(**inputs), traced(**inputs)
    keys = [key for key in expected if key in got and torch.is_tensor(expected[key])]
    same([got[key] for key in keys], [expected[key] for key in keys])
    assert keys
    return [type(traced).__name__, keys, [] if type(model).__name__.startswith(OTHER_BRANCH) else nodes(traced.graph)]


@each(**classes(TEXT))
def case_text(case):
    return compared(made(*case), {"input_ids": tokens(), "attention_mask": torch.ones(2, 8, dtype=torch.long)})


@each(**classes(TO_TEXT))
def case_text_to_text(case):
    inputs = {
        "input_ids": tokens(),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "decoder_input_ids": tokens(),
    }
    return compared(made(*case), inputs)


@each(**classes(IMAGES))
def case_images(case):
    return compared(made(*case), {"pixel_values": torch.randn(2, 3, 32, 32)})


@each("CLIPTextModel", "CLIPTextModelWithProjection")
def case_clip_text(name):
    config = transformers.CLIPTextConfig(**{**SMALL, "projection_dim": 16, "eos_token_id": 2})
    model = getattr(transformers, name)(config).eval()
    return compared(model, {"input_ids": tokens(), "attention_mask": torch.ones(2, 8, dtype=torch.long)})


@each("CLIPVisionModel", "CLIPVisionModelWithProjection")
def case_clip_vision(name):
    model = getattr(transformers, name)(transformers.CLIPVisionConfig(**{**VISION, "projection_dim": 16})).eval()
    return compared(model, {"pixel_values": torch.randn(2, 3, 32, 32)})


@each("BertForTokenClassification", "ElectraForSequenceClassification", "T5ForConditionalGeneration")
def case_labels(name):
    everything = {**classes(TEXT), **classes(TO_TEXT)}
    model = made(*everything[name])
    model.config.problem_type = "single_label_classification"
    shape = (2,) if "Sequence" in name else (2, 8)
    inputs = {"input_ids": tokens(), "labels": torch.randint(0, 2, shape)}
    return compared(model, inputs)


@each("BertModel", "RobertaModel", "GPTJModel", "BloomModel")
def case_other_sizes(name):
    model = made(*classes(TEXT)[name])
    traced = hf.symbolic_trace(model, input_names=["input_ids", "attention_mask"])
    inputs = {"input_ids": torch.randint(3, 99, (3, 11)), "attention_mask": torch.ones(3, 11, dtype=torch.long)}
    with torch.no_grad():
        same(traced(**inputs)["last_hidden_state"], model(**inputs)["last_hidden_state"])


@each("BertModel", "GPTNeoModel", "GPTJForCausalLM")
def case_torchscript(name):
    model = made(*classes(TEXT)[name])
    traced = hf.symbolic_trace(model, input_names=["input_ids", "attention_mask"])
    ids, mask = tokens(), torch.ones(2, 8, dtype=torch.long)
    script = torch.jit.trace(traced, (ids, mask), strict=False)
    with torch.no_grad():
        same(script(ids, mask), traced(ids, mask))


@each("BertModel", "BloomForCausalLM")
def case_pickle(name):
    model = made(*classes(TEXT)[name])
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    traced = hf.symbolic_trace(model, input_names=list(inputs))
    again = pickle.loads(pickle.dumps(traced))
    with torch.no_grad():
        same(dict(again(**inputs)), dict(traced(**inputs)))
    return [traced.class_for_deserialization.__name__, traced.config is model.config]


@each("BertModel", "AlbertModel", "GPTJModel", "BloomModel")
def case_training_with_dropout(name):
    model = made(*classes(TEXT)[name]).train()
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    traced = hf.symbolic_trace(model, input_names=list(inputs))
    traced(**inputs)["last_hidden_state"].sum().backward()
    return sorted(name for name, parameter in traced.named_parameters() if parameter.grad is not None)


def case_unsupported_model():
    try:
        hf.symbolic_trace(torch.nn.Linear(2, 2))
    except Exception as error:
        return str(error)[:80]


@each("Linear", "BatchNorm2d", "Conv2d")
def case_plain_modules(name):
    layers = {"Linear": (torch.nn.Linear(4, 4), (2, 4)), "BatchNorm2d": (torch.nn.BatchNorm2d(3), (2, 3, 4, 4))}
    layer, shape = layers.get(name, (torch.nn.Conv2d(3, 4, 3), (2, 3, 8, 8)))
    model = torch.nn.Sequential(layer, torch.nn.ReLU()).eval()
    x = torch.randn(*shape)
    graph = hf.HFTracer().trace(model, dummy_inputs={"input": x})
    same(torch.fx.GraphModule(model, graph)(x), model(x))
    return nodes(graph)
