"""The compatibility exam: what torch.fx's public interface promises, asked of torch.fx and of torchgraft alike.

Each test first proves on torch.fx that it states the real behaviour; tests of torchgraft itself live elsewhere.
"""
