"""docs/dialects.md and docs/dialects-settings.md say what the rows say. Run as a program, it prints their tables."""

import pytest

from helpers.doc_pages import ROOT
from surefoot.config.dump import shown
from surefoot.interop import finetune, torchtune, train_sft, trl
from surefoot.interop.axolotl.rows import ROWS as AXOLOTL
from surefoot.interop.deepspeed_chat import TITLES
from surefoot.interop.deepspeed_chat.rows import STEPS
from surefoot.interop.llamafactory.data import NAMES, SAME, writes_bos
from surefoot.interop.llamafactory.rows import GROUPS
from surefoot.interop.llamafactory.v1 import TABLE
from surefoot.interop.settings import Row
from surefoot.interop.swift import rows as swift
from surefoot.interop.trl.methods import METHODS

OTHERS = {
    "The v1 trainer": TABLE,
    "Flags of finetune.py": tuple(finetune.GUIDE.values()),
    "Flags of finetune.py in LLM-Adapters and DoRA, where they differ": tuple(
        row for name, row in finetune.ORIGINAL.items() if row is not finetune.GUIDE[name]
    ),
    "Flags of finetune.py in alpaca-lora": tuple(finetune.ALPACA_LORA.values()),
    "Flags of train_sft.py": tuple(train_sft.ROWS.values()),
    "Settings of TRL": trl.OWN_ROWS,
    **{f"Settings of trl {name}": method.rows for name, method in METHODS.items()},
    **{f"Flags of DeepSpeed-Chat, {title}": tuple(STEPS[step].values()) for step, title in TITLES.items()},
    "Settings of Axolotl": tuple(AXOLOTL.values()),
    "Settings of torchtune": tuple(torchtune.ROWS.values()),
    "Settings of ms-swift": swift.SHARED,
    "Settings of swift rlhf": swift.RLHF,
}
PAGE, TABLES = ROOT / "docs" / "dialects.md", ROOT / "docs" / "dialects-settings.md"


def table(rows: tuple[Row, ...]) -> str:
    lines = ["| setting | its default | here | remark |", "|---|---|---|---|"]
    for row in rows:
        default = f"`{shown(row.default)}`" if row.default is not None else "none"
        keys = ", ".join(f"`{key}`" for key in row.keys)
        here = {"listed": "no counterpart", "refused": "refused"}.get(row.kind, keys or "see the remark")
        remark = "; ".join(part for part in (row.about, row.fix) if part).replace("|", "\\|")
        lines.append(f"| `{row.name}` | {default} | {here} | {remark} |")
    return "\n".join(lines)


def templates() -> str:
    lines = ["| its template | here | begins with BOS |", "|---|---|---|"]
    lines += [f"| `{name}` | `{SAME[name].name}` | {'yes' if writes_bos(name) else 'no'} |" for name in SAME]
    return "\n".join(lines)


@pytest.mark.parametrize("group", [*GROUPS, *OTHERS])
def test_every_group_stands_on_the_page(group):
    page = TABLES.read_text(encoding="utf-8")
    assert f"\n### {group}\n\n{table({**GROUPS, **OTHERS}[group])}\n" in page


def test_templates():
    page = PAGE.read_text(encoding="utf-8")
    assert templates() in page
    assert f"f its {len(NAMES)} names" in page


if __name__ == "__main__":
    print(templates())
    for group, rows in {**GROUPS, **OTHERS}.items():
        print(f"\n### {group}\n\n{table(rows)}")
