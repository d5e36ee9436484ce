"""Templates of Axolotl's that lay a conversation out otherwise than the rows of the same name.

Facts: what Axolotl 0.18 writes for chat_template alpaca and phi_3; chatml, llama3 and gemma are the same here.
"""

from __future__ import annotations

from surefoot.families.template_row import Dialogue

AXOLOTL: tuple[Dialogue, ...] = (
    Dialogue(
        name="axolotl-alpaca",
        about="Axolotl's chat template alpaca: its headings around every turn, and no sentence before them",
        system="{content}\n\n",
        user="### Instruction:\n{content}\n\n",
        between="\n\n",
        opening="### Response:\n",
        close="{eos}",
        tools=None,
    ),
    Dialogue(
        name="axolotl-phi_3",
        about="Axolotl's chat template phi_3: Phi-3's without EOS behind the last turn",
        system="<|system|>\n{content}<|end|>\n",
        user="<|user|>\n{content}<|end|>\n",
        opening="<|assistant|>\n",
        close="<|end|>",
        after="\n",
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        stops=("<|end|>",),
        tools=None,
    ),
)
