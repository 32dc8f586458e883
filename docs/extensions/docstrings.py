"""How docstrings become the API reference: examples are shown as code, and a function is found where its file has the same name.
Nothing here changes what is said; pages and their order are in docs/reference.
"""

import re
from typing import Any

import griffe

# From a line with a prompt to the next empty line, as doctest reads it.
EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\g<indent>```pycon\n\g<0>\n\g<indent>```", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **options: Any) -> None:
        """`from package import liveness` means the function, and griffe takes the file of that name for it."""
        for name, member in list(pkg.members.items()):
            if member.is_alias and re.fullmatch(rf"torchgraft\..+\.{name}", member.target_path):
                found = pkg.modules_collection[member.target_path]
                if found.is_module and name in found.members:
                    pkg.set_member(name, griffe.Alias(name, f"{member.target_path}.{name}", parent=pkg))
