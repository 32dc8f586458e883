"""Tests of how configurations are made small, with configurations of our own: transformers is not needed."""

from __future__ import annotations

from typing import Any

from benchmarks.coverage.shrinking import FIELDS, FIRST_MARKER, smaller


class Configuration:
    """Derives fields in its constructor, as those of transformers do."""

    attribute_map: dict[str, str] = {}
    model_type = ""

    def __init__(
        self,
        hidden_size: int = 4096,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 32,
        layer_types: list[str] | None = None,
        moe_layers: list[int] | None = None,
        use_cache: bool = True,
        head_dim: int | None = None,
        eos_token_id: Any = 99,
        image_token_id: int = 50_000,
        rope_theta: float = 10_000.0,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.layer_types = layer_types or ["sliding", "sliding", "full"] * 2
        self.moe_layers = moe_layers or list(range(num_hidden_layers))
        self.use_cache = use_cache
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.eos_token_id = eos_token_id
        self.image_token_id = image_token_id
        self.rope_theta = rope_theta
        self.extra = kwargs


class Wrapper:
    attribute_map: dict[str, str] = {}
    model_type = ""

    def __init__(self, text_config: Configuration | None = None, projection: int = 7) -> None:
        self.text_config = text_config or Configuration()
        self.projection = projection


class Latent(Configuration):
    def __init__(self, kv_lora_rank: int = 512, num_key_value_heads: int = 32, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kv_lora_rank = kv_lora_rank
        self.num_key_value_heads = num_key_value_heads


def test_known_names_become_small_and_the_rest_stays() -> None:
    small = smaller(Configuration())
    assert (small.hidden_size, small.num_attention_heads) == (FIELDS["hidden_size"], FIELDS["num_attention_heads"])
    assert small.head_dim == small.hidden_size // small.num_attention_heads
    assert small.rope_theta == 10_000.0
    assert small.use_cache is True, "a flag is no number"
    assert small.extra == {}


def test_one_layer_of_every_kind_is_left() -> None:
    small = smaller(Configuration())
    assert small.layer_types == ["sliding", "full"]
    assert small.num_hidden_layers == 2


def test_layers_of_one_kind_are_cut_to_the_usual_number() -> None:
    assert smaller(Configuration(layer_types=["full"] * 6)).layer_types == ["full"] * FIELDS["num_hidden_layers"]


def test_lists_of_indices_are_made_anew_by_the_constructor() -> None:
    assert smaller(Configuration()).moe_layers == [0, 1]


def test_special_tokens_lie_in_the_vocabulary_and_markers_behind_every_word() -> None:
    small = smaller(Configuration())
    assert small.eos_token_id == FIELDS["eos_token_id"]
    assert FIRST_MARKER <= small.image_token_id < FIELDS["vocab_size"]


def test_what_is_chosen_overrides_the_names_also_inside() -> None:
    small = smaller(Wrapper(), text_config={"hidden_size": 64})
    assert small.text_config.hidden_size == 64
    assert small.text_config.num_hidden_layers == 2
    assert small.projection == 7
    assert smaller(Configuration(), num_attention_heads=2).num_attention_heads == 2


def test_latent_attention_has_as_many_keys_as_heads() -> None:
    assert smaller(Latent()).num_key_value_heads == FIELDS["num_attention_heads"]


class Rotating:
    """A configuration with a width of heads that each layer has of its own."""

    model_type = ""

    def __init__(self, head_dim=128, rope_parameters=None):
        self.head_dim, self.rope_parameters = head_dim, dict(rope_parameters or {"rope_type": "default"})

    def __getattribute__(self, name):
        if name == "head_dim":
            raise ValueError("each layer has its own")
        return super().__getattribute__(name)


def test_parts_of_a_head_that_rotate_fit_a_small_head():
    assert smaller(Rotating()).rope_parameters["mrope_section"] == [2, 1, 1]
    half = {"rope_type": "default", "partial_rotary_factor": 0.5}
    assert smaller(Rotating(), rope_parameters=half).rope_parameters["mrope_section"] == [2, 0, 0]
