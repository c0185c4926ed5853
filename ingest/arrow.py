"""Arrow schema of every contract struct (contract), made from its msgspec type; tables lose nothing.

Nested structs and lists are typed; what has no fixed shape (dict, Any, a union of several types) is a JSON string.
"""

import types
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pyarrow as pa

T = TypeVar("T", bound=msgspec.Struct)

_SCALARS: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def arrow_schema(kind: type[msgspec.Struct]) -> pa.Schema:
    """Return the schema of a struct, a column per field."""
    return pa.schema(_fields(kind))


def to_table(events: Iterable[msgspec.Struct], kind: type[msgspec.Struct]) -> pa.Table:
    """Return events of one kind as a table, a row each."""
    return pa.Table.from_pylist([to_row(event) for event in events], schema=arrow_schema(kind))


def from_table(table: pa.Table, kind: type[T]) -> list[T]:
    """Return the events of a table made by to_table; columns that are not fields are ignored."""
    names = [name for name in kind.__struct_fields__ if name in table.column_names]
    return [msgspec.convert(_from_arrow(row, kind), kind) for row in table.select(names).to_pylist()]


def to_row(event: msgspec.Struct) -> dict[str, Any]:
    """Return an event as Arrow takes it: builtins, with JSON strings where the type has no fixed shape."""
    return _to_arrow(msgspec.to_builtins(event), type(event))


def _fields(kind: type[msgspec.Struct]) -> list[pa.Field]:
    hints = get_type_hints(kind)
    return [pa.field(name, _arrow_type(hints[name])) for name in kind.__struct_fields__]


def _required(hint: Any) -> Any:
    """Return X of X | None; anything else as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        others = [arg for arg in get_args(hint) if arg is not type(None)]
        return others[0] if len(others) == 1 else hint
    return hint


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _is_json(hint: Any) -> bool:
    origin = get_origin(hint)
    return hint is Any or hint is dict or origin in (dict, Union, types.UnionType)


def _arrow_type(hint: Any) -> pa.DataType:
    hint = _required(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if _is_struct(hint):
        return pa.struct(_fields(hint))
    if get_origin(hint) is list:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    if get_origin(hint) is Literal or _is_json(hint):
        return pa.string()
    raise TypeError(f"no Arrow type for {hint!r}")


def _to_arrow(value: Any, hint: Any) -> Any:
    hint = _required(hint)
    if _is_json(hint):
        return msgspec.json.encode(value).decode()
    if value is None:
        return None
    if _is_struct(hint):
        hints = get_type_hints(hint)
        return {name: _to_arrow(value[name], hints[name]) for name in hint.__struct_fields__}
    if get_origin(hint) is list and not _is_plain(get_args(hint)[0]):
        return [_to_arrow(item, get_args(hint)[0]) for item in value]
    return value


def _from_arrow(value: Any, hint: Any) -> Any:
    hint = _required(hint)
    if value is None:
        return None
    if _is_json(hint):
        return msgspec.json.decode(value)
    if _is_struct(hint):
        hints = get_type_hints(hint)
        return {name: _from_arrow(item, hints[name]) for name, item in value.items()}
    if get_origin(hint) is list and not _is_plain(get_args(hint)[0]):
        return [_from_arrow(item, get_args(hint)[0]) for item in value]
    return value


def _is_plain(hint: Any) -> bool:
    return hint in _SCALARS or get_origin(hint) is Literal
