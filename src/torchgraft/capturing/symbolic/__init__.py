"""Symbolic tracing: a forward runs with proxies, and what is done with them becomes a program.
What symbolic and watched capture share (proxies, the making of nodes, patches) is one folder up."""
