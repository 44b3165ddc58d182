"""YAML text → documents, within limits, with the line of whatever is wrong.

Separate from reading files because `--set` values are YAML, too. A few bytes of YAML can stand for any amount of
memory: by nesting, by aliases of aliases, by an alias inside of what it stands for. All are refused while the text is
composed, before a value is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml

MAX_DEPTH: Final = 64
"""Levels of lists and maps; a PDDeployment has about ten."""
MAX_NODES: Final = 20_000
"""Values, keys included, with every alias counted as what it stands for; a PDDeployment has some thousands at most."""
MAX_NUMBER: Final = 64
"""Characters of a number or date. Python refuses integers of 4301 digits, and YAML's base 60 costs their square."""
_NUMBERS: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_MERGE: Final = "tag:yaml.org,2002:merge"
_WRONG_VALUE: Final = (ValueError, LookupError, ArithmeticError, AttributeError, TypeError)
"""What PyYAML's constructors raise for an impossible date, `!!bool x`, `!!int ''` and their like."""


class YamlTextError(ValueError):
    """Text that is no YAML, or beyond the limits. ``line`` and ``column`` count from 1; None where nobody knows."""

    def __init__(self, what: str, line: int | None = None, column: int | None = None) -> None:
        self.what = what
        self.line = line
        self.column = column
        super().__init__(what if line is None else f"line {line}, column {column}: {what}")


def read_yaml(text: str) -> list[Any]:
    """Every document of a text; an empty one is None.

    Raises:
        YamlTextError: not YAML, a key that stands twice, or more than the limits allow.
    """
    try:
        return list(_documents(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = str(error.problem or error.context)
        raise YamlTextError(what, *((mark.line + 1, mark.column + 1) if mark else ())) from error
    except yaml.YAMLError as error:
        raise YamlTextError(str(error).splitlines()[0]) from error


def _documents(text: str) -> Iterator[Any]:
    loader = _Loader(text)
    while True:
        try:
            if not loader.check_node():
                return
            document = loader.get_data()
        except _WRONG_VALUE as error:
            # From the scanner, such as an escape beyond Unicode: it has no mark of its own.
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=loader.get_mark()) from error
        yield document


class _Loader(yaml.SafeLoader):
    """SafeLoader with limits. It also refuses a key that stands twice: YAML would keep the last one and say nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[str, int] = {}
        self._open: set[str] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise _refusal(f"the alias *{event.anchor} lies within what it stands for", event)
            self._count(self._sizes.get(str(event.anchor), 0), event)
            return super().compose_node(parent, index)
        before, anchor = self._nodes, event.anchor
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refusal(f"nested more than {MAX_DEPTH} levels deep", event)
        if anchor is not None:
            self._open.add(anchor)
        node = super().compose_node(parent, index)
        if anchor is not None:
            self._open.discard(anchor)
            self._sizes[anchor] = self._nodes - before
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            # Compared as it will be read: `1` and `0x1`, `yes` and `true` are one key each.
            read = str(self.construct_object(key))
            if read in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(read)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
            what = f"a number of {len(node.value)} characters; at most {MAX_NUMBER}, or put it in quotes"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise yaml.MarkedYAMLError(
                problem="half of a surrogate pair, which no text may hold", problem_mark=node.start_mark
            )
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge `<<`: own keys win, then those of the map that is named first.

        PyYAML 6.0.4 tells keys apart by the identity of their text and lets another one win.
        """
        own: list[tuple[yaml.Node, yaml.Node]] = []
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            if key.tag != _MERGE:
                own.append((key, value))
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode):
                    raise yaml.MarkedYAMLError(problem="only maps can be merged", problem_mark=source.start_mark)
                self.flatten_mapping(source)
                merged += source.value
        node.value = own
        taken = {str(self.construct_object(key)) for key, _ in own if isinstance(key, yaml.ScalarNode)}
        for key, value in merged:
            read = str(self.construct_object(key))
            if read not in taken:
                taken.add(read)
                node.value.append((key, value))

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except _WRONG_VALUE as error:
            what = f"{str(node.value)[:MAX_NUMBER]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark) from error

    def _count(self, more: int, event: yaml.NodeEvent) -> None:
        self._nodes += more
        if self._nodes > MAX_NODES:
            raise _refusal(f"more than {MAX_NODES} values, aliases counted as what they stand for", event)


def _refusal(what: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
