"""Alias: the names that code written for torch.fx imports from `torch.fx.immutable_collections`."""

from torchgraft.ir.arguments import immutable_dict as immutable_dict
from torchgraft.ir.arguments import immutable_list as immutable_list
