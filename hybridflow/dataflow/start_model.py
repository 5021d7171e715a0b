"""Models that begin a stage as the policy that it begins with: references and the like.

After a warm start the policy is no longer `model.path`. A KL, or a preference's implicit reward,
is towards the policy from which the stage starts (DPO, Rafailov et al., 2023, arXiv:2305.18290,
section 4: the reference is the supervised model), so roles without a model of their own follow.
"""

from __future__ import annotations

from pathlib import Path

from hybridflow.dataflow.team import Team
from hybridflow.recipe.plan import ACTOR, Plan
from hybridflow.workers.model import ModelWorker


def followers(plan: Plan, index: int) -> list[str]:
    """Roles that begin stage ``index`` with the actor's weights of that moment.

    Language models without a `model` of their own that have not trained yet; and the actor itself
    where it keeps its first output head for the KL over the whole vocabulary. None where the actor
    has not trained before.
    """
    earlier = plan.stages[:index]
    if not any(ACTOR in stage.trained for stage in earlier):
        return []
    kinds, sections = plan.recipe.roles.kinds(), plan.recipe.roles.models()
    moved = {role for stage in earlier for role in stage.trained}
    found = [
        role
        for role in plan.roles
        if kinds[role] == "model"
        and role not in moved
        and getattr(sections[role], "model", None) is None
    ]
    return [ACTOR, *found] if plan.recipe.algorithm.kl.estimator == "full" else found


def begin_as_actor(plan: Plan, index: int, team: Team, folder: Path) -> None:
    """Bring the actor's weights to the followers of stage ``index``, before it begins.

    They go through ``folder``, in HuggingFace format, where a resumed run finds them again.
    """
    roles = followers(plan, index)
    if not roles:
        return
    if ACTOR in plan.stages[index - 1].trained:  # else the folder holds them already
        team.groups[ACTOR].run(ModelWorker.save_pretrained, str(folder))
    _load(roles, team, folder)


def resume_as_actor(plan: Plan, index: int, team: Team, folder: Path) -> None:
    """What ``begin_as_actor`` did, in a run that goes on from within stage ``index``.

    Raises:
        ValueError: ``folder`` is gone.
    """
    roles = followers(plan, index)
    if not roles:
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--resume: {folder} is gone, the policy from which stage "
            f"'{plan.stages[index].name}' started and which {', '.join(roles)} must hold; restore "
            "it, or start a new run"
        )
    _load(roles, team, folder)


def _load(roles: list[str], team: Team, folder: Path) -> None:
    for role in roles:
        team.groups[role].run(ModelWorker.load_pretrained, str(folder))
