"""What tests change in ranks that `ForkServer` forks: functions of the rank, called before the command."""

import gc
from dataclasses import replace
from typing import Any


def forgets_rollbacks(rank: int) -> None:
    """Rank 1 takes the data of a run that went back nowhere."""
    from surefoot.runs import follow

    claimed = follow._folder_state
    follow._folder_state = lambda *given: replace(claimed(*given), rollbacks=())


def waits_for_no_last_words(rank: int) -> None:
    """Rank 0 leaves before the others have said that they are done, as where the only other one was killed."""
    from surefoot.training import session, watchdog

    session.LINGER = watchdog.LINGER = 0.1


def keeps_hand_over(rank: int) -> None:
    """What was told at the first beginning is taken for what is told at the next."""
    from surefoot.training.session import Session

    whole = Session.hand_over

    def once(session: Session, values: Any) -> None:
        if session._start == 0:  # a rank that asks late would find the next one in its place
            whole(session, values)

    Session._key = lambda self, name: name
    Session.hand_over = once


def says_tensors(rank: int) -> None:
    """Prints how many bytes of tensors are in memory whenever steps are about to be taken."""
    import torch

    from surefoot.runs import steps

    train = steps.run_loop

    def told(*arguments: Any) -> Any:
        found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
        print(f"rank {rank}: {sum(storages.values())} bytes in memory")
        return train(*arguments)

    steps.run_loop = told


def keeps_experts_from_learning(rank: int) -> None:
    """Rank 1's gradients of its experts' adapters are zero."""
    if rank == 0:
        return
    from surefoot.models.fast import experts
    from surefoot.runs.parity.experts import _EXPERTS

    proper = experts._matrices

    def constant(*given: Any) -> Any:
        found = proper(*given)
        a, b = found.a, found.b
        if len(found.weight) <= _EXPERTS:  # the comparison before step 1
            return found
        assert a is not None
        assert b is not None
        return replace(found, a=a.detach() + 0 * a, b=b.detach() + 0 * b)

    experts._matrices = constant
