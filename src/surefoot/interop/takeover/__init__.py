"""Take over the training of a script that calls `Trainer.train()`, by running the script.

What Python does to data cannot be read from its syntax. So the user's own Python runs the script, which builds model,
data and trainer as always; `in_script` replaces `train()` and hands over what is there (`Session` is surefoot's side).
`translation_of` turns it into a surefoot config. After the training the script goes on with the trained weights.
"""

from surefoot.interop.takeover.session import Session, Taken, find_script
from surefoot.interop.takeover.settings import check_taken, own_losses, translation_of

__all__ = ["Session", "Taken", "check_taken", "find_script", "own_losses", "translation_of"]
