"""Configs for tests: a valid one with its files, and hypothesis strategies that follow the JSON Schema."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from surefoot.config.keys import config_schema

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
NAME = TEXT.map(lambda text: text.replace(".", "_"))  # the reader refuses dots in keys
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.sampled_from(["auto", "off", "3 epochs", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=4,
)


def write_config(folder: Path, **changes: str) -> Path:
    """Write a valid `run.yaml` whose model and data exist.

    changes: YAML text by top-level key; "" removes the key.
    """
    model = folder / "models" / "llama"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text('{"text": "a"}\n')
    lines = {
        "stage": "sft",
        "model": str(model),
        "adapter": "{kind: lora, rank: 8}",
        "data": f"{{train: {folder / 'train.jsonl'}}}",
        "output": str(folder / "runs" / "a"),
    } | changes
    path = folder / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items() if value), encoding="utf-8")
    return path


def valid_configs() -> st.SearchStrategy[dict[str, Any]]:
    """Every config that the JSON Schema allows, short forms included, as plain data."""
    return _section(config_schema())


def mutated_configs() -> st.SearchStrategy[dict[str, Any]]:
    """Valid configs in which one key of any group has another value, is new, or is missing."""
    return st.builds(_mutate, valid_configs(), st.randoms(use_true_random=False), ANYTHING, NAME)


def _mutate(config: dict[str, Any], random: Any, value: Any, name: str) -> dict[str, Any]:
    groups = [config, *(item for item in config.values() if isinstance(item, dict))]
    group = random.choice(groups)
    key = random.choice([*group, name])
    if random.random() < 0.2:
        group.pop(key, None)
    else:
        group[key] = value
    return config


def _section(fragment: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    required = fragment.get("required", [])
    parts = {name: _value(part) for name, part in fragment["properties"].items()}
    return st.fixed_dictionaries(
        {name: part for name, part in parts.items() if name in required},
        optional={name: part for name, part in parts.items() if name not in required},
    )


def _value(fragment: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in fragment:
        return st.one_of([_value(option) for option in fragment["anyOf"]])
    if "$ref" in fragment:
        return _section(config_schema()["$defs"][fragment["$ref"].rpartition("/")[2]])
    if "enum" in fragment or "const" in fragment:
        return st.sampled_from(fragment.get("enum") or [fragment["const"]])
    match fragment["type"]:
        case "integer":
            most = fragment.get("maximum", fragment.get("exclusiveMaximum", 2**40) - 1)
            return st.integers(fragment["minimum"], most)
        case "number":
            return _number(fragment)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "object":
            return st.dictionaries(NAME, TEXT, max_size=2)
        case "array" if "prefixItems" in fragment:
            return st.tuples(*[_value(item) for item in fragment["prefixItems"]]).map(list)
        case "array":
            return st.lists(_value(fragment["items"]), min_size=fragment.get("minItems", 0), max_size=3)
        case "string" if "steps" in fragment.get("pattern", ""):
            return st.builds(
                "{} {}".format, st.integers(1, 10**6), st.sampled_from(["step", "steps", "epochs", "tokens"])
            )
        case "string" if "pattern" in fragment:
            return st.from_regex(fragment["pattern"], fullmatch=True, alphabet=st.characters(max_codepoint=127))
        case _:
            return TEXT


def _number(fragment: dict[str, Any]) -> st.SearchStrategy[float]:
    low = fragment.get("minimum", fragment.get("exclusiveMinimum"))
    high = fragment.get("maximum", fragment.get("exclusiveMaximum"))
    return st.floats(
        low,
        high,
        exclude_min="exclusiveMinimum" in fragment,
        exclude_max="exclusiveMaximum" in fragment,
        allow_nan=False,
        allow_infinity=False,
    )
